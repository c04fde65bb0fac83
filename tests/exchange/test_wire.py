"""The message, byte for byte, and what is refused."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_sparse.compressors import RandomK, TopK
from horovod_sparse.compressors.base import Compressor
from horovod_sparse.exchange import wire
from horovod_sparse.exchange.pairs import Pairs
from horovod_sparse.exchange.union import Union
from tests.harness.table import ORACLE, Backend, on_every_backend
from tests.harness.workers import end_step, make_worker, make_workers


@on_every_backend
def test_bytes(backend: Backend) -> None:
    indices = backend.array(np.array([0, 258, 65536]))
    values = backend.array(np.array([1.0, -2.5, 1e-45], np.float32))
    message = backend.numpy(backend.ops.pack(indices, values, 5))
    assert message.dtype == np.int32 and message.shape == (5, 2)
    expected = bytes.fromhex(
        "00000000 0000803f"  # 0, 1.0
        "02010000 000020c0"  # 258, -2.5
        "00000100 01000000"  # 65536, the smallest denormal
        "ffffffff 00000000"  # padding
        "ffffffff 00000000"
    )
    assert sys.byteorder == "little"
    assert message.tobytes() == expected


@on_every_backend
@pytest.mark.parametrize(
    ("exchange", "expected"),
    [
        (Pairs(), "feffffff 00000000 ffffffff 00000000"),
        (Pairs("packed"), "feff 0000 0000 0000" + 28 * "00"),
    ],
    ids=repr,
)
def test_not_finite_bytes(backend: Backend, exchange: Pairs, expected: str) -> None:
    compressor = TopK(0.5, min_numel=0, slack=1.0, exchange=exchange, warmup=None)
    worker = make_worker(backend, compressor, {"p": (4,)})
    bucket = worker.arrive("p", backend.array(np.array([1.0, np.nan, 2.0, 3.0], np.float32)))
    assert bucket is not None
    message = bucket.begin().message
    assert backend.numpy(message).tobytes() == bytes.fromhex(expected)
    assert worker.advance(bucket, message) is None
    with pytest.warns(UserWarning, match="'p' on rank 0"):
        end_step(worker)
    assert not backend.numpy(bucket.buffer).any()


def first_messages(backend: Backend, compressor: Compressor) -> list[np.ndarray]:
    """The first message of each of two workers."""
    gradients = [[0.0, 3.0, 0.0, -1.0, 0.0, 0.5, 0.0, 0.0], [0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.5, -4.0]]
    messages = []
    for worker, gradient in zip(make_workers(backend, compressor, {"p": (8,)}, 2), gradients, strict=True):
        bucket = worker.arrive("p", backend.array(np.array(gradient, np.float32)))
        assert bucket is not None
        messages.append(backend.numpy(bucket.begin().message))
    return messages


@on_every_backend
def test_bytes_of_indices(backend: Backend) -> None:
    mine, theirs = first_messages(backend, TopK(0.25, min_numel=0, slack=1.5, exchange=Union(), warmup=None))
    assert mine[0] == theirs[0] >= 0, "the checksum"
    assert mine[1:].tobytes() == bytes.fromhex("00000000 01000000 03000000 ffffffff")
    assert theirs[1:].tobytes() == bytes.fromhex("00000000 03000000 07000000 ffffffff")


@on_every_backend
def test_values_at_indices_that_all_know(backend: Backend) -> None:
    mine, theirs = first_messages(backend, RandomK(0.25, min_numel=0, warmup=None))
    assert mine.shape == (2 + 17,) and mine.dtype == np.float32
    total = mine + theirs
    assert total[2] == 0.0, "no gradient held NaN"
    assert set(total[3:]) <= {0.0, 2.0}, "the checksums agree"


@on_every_backend
def test_packed_bytes(backend: Backend) -> None:
    x = backend.ops.zeros(8193, "float32", backend.array(np.zeros(1, np.float32)))
    indices = backend.array(np.array([0, 258, 4095, 8192]))
    values = np.array([1.0, -3.0, 1.5, -2.5], np.float32)
    pairs = backend.ops.pack(indices, backend.array(values), 5)
    message = backend.numpy(backend.ops.quantize(x, pairs))
    assert message.dtype == np.int32 and message.shape == (5 + 7,)
    assert message.tobytes() == bytes.fromhex(
        "0300 0000 0100"  # entries per chunk
        "a03f 0000 2040"  # 1.25, none, 2.5
        "4040 0000 0000 0000"  # 3.0, none, none; up to a multiple of 4 bytes
        "00 02 ff 00 000000000000000000000000"  # lower bits of positions
        "10 0f 000000000000"  # upper bits
        "4c 000000"  # 1.25, -3.0, 1.25, -2.5
    )
    sent = np.array([1.25, -3.0, 1.25, -2.5], np.float32)
    got, rounded = backend.ops.unpack(pairs, 4)
    np.testing.assert_array_equal(backend.numpy(rounded), sent, strict=True)
    np.testing.assert_array_equal(backend.numpy(x)[backend.numpy(got)], values - sent)
    unpacked = backend.numpy(backend.ops.unquantize(backend.array(np.concatenate([message, message])), 2, 8193))
    np.testing.assert_array_equal(unpacked.reshape(2, 16, 2)[:, :5], [backend.numpy(pairs)] * 2)
    assert (unpacked.reshape(2, 16, 2)[:, 5:] == [wire.PADDING, 0]).all()


COUNTS = {
    "right": ([1, 2], [7, 4096 + 8, 4096 + 9]),
    "negative": ([-1, 3], [wire.BAD_COUNTS, -1, -1]),
    "negative last": ([1, -2], [wire.BAD_COUNTS, -1, -1]),
    "too many": ([9, 8], [wire.BAD_COUNTS, -1, -1]),
    "beyond int16 together": ([2**15 - 1, 2**15 - 1], [wire.BAD_COUNTS, -1, -1]),
    "not finite": ([wire.NOT_FINITE, 5], [wire.NOT_FINITE, -1, -1]),
}
"""Counts of two chunks in a packed message for a bucket of 8,000, and the first indices that the pairs get."""


@pytest.mark.parametrize(("counts", "indices"), COUNTS.values(), ids=COUNTS)
@on_every_backend
def test_packed_messages_become_pairs(backend: Backend, counts: list[int], indices: list[int]) -> None:
    header = np.array([*counts, 0x3F80, 0x4000, 0, 0], np.int16).view(np.uint8)
    entries = np.array([7, 8, 9, *[0] * 25], np.uint8)
    message = np.concatenate([header, entries]).view(np.int32)
    pairs = backend.numpy(backend.ops.unquantize(backend.array(message), 1, 8000))
    assert pairs[:3, 0].tolist() == indices and (pairs[3:] == [wire.PADDING, 0]).all()
    expected = [1.0, 2.0, 2.0] if indices[0] >= 0 else [0.0] * 3
    assert pairs[:3, 1].copy().view(np.float32).tolist() == expected


@on_every_backend
def test_packed_values_of_all_magnitudes_have_the_bits_of_the_oracle(backend: Backend) -> None:
    """What is left of them is exact."""
    bits = np.random.default_rng(0).integers(0, 0x7F800000, 3000) | np.arange(3000) % 2 << 31
    values, made = bits.astype(np.uint32).view(np.float32), []
    for one in (ORACLE, backend):
        x = one.ops.zeros(9000, "float32", one.array(np.zeros(1, np.float32)))
        pairs = one.ops.pack(one.array(3 * np.arange(3000)), one.array(values), 3000)
        made.append((one.numpy(one.ops.quantize(x, pairs)).tobytes(), one.numpy(x).tobytes()))
        sent = one.numpy(one.ops.unpack(pairs, 3000)[1])
        assert (sent.astype(np.float64) + one.numpy(x)[::3] == values).all()
    assert made[0] == made[1]


@on_every_backend
@given(indices=st.lists(st.one_of(st.integers(-3, 9), st.just(-1), st.just(2**31 - 1)), min_size=1, max_size=8))
def test_the_same_is_refused_everywhere(backend: Backend, indices: list[int]) -> None:
    (used,) = backend.ops.rows_in_use(backend.array(np.array(indices, np.int32)), 1, 8)
    if indices[0] == wire.NOT_FINITE:
        # Only the first row says so, whatever follows.
        assert used == wire.NOT_FINITE
        return
    rows = [index for index in indices if index != wire.PADDING]
    right = rows == sorted(set(rows)) and all(0 <= index < 8 for index in rows) and indices[: len(rows)] == rows
    assert used == (len(rows) if right else wire.DAMAGED)


@on_every_backend
@given(messages=st.lists(st.sets(st.integers(0, 39), max_size=6), min_size=1, max_size=9))
def test_a_union_has_every_index_once(backend: Backend, messages: list[set[int]]) -> None:
    rows = [[-2, 7, *sorted(indices), *[-1] * (6 - len(indices))] for indices in messages]
    gathered = np.array(rows, np.int32).reshape(-1)
    union = backend.ops.union(backend.array(gathered), len(messages), 2, 40)
    expected = np.array(sorted(set().union(*messages)), np.int64)
    np.testing.assert_array_equal(backend.numpy(union), expected, strict=True)
    for flawed in (40, -2):
        gathered[-6] = flawed
        assert backend.ops.union(backend.array(gathered), len(messages), 2, 40) is None


def test_limits() -> None:
    # All values of a bucket and the 17 numbers after them are one message, whose elements are counted in C ints.
    assert wire.MAX_BUCKET + len(wire.tail(0)) == wire.MAX_GATHERED == 2**31 - 1
