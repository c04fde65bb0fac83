"""The message, byte for byte, and what is refused."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from table import BACKENDS, Backend

from horovod_sparse import wire

on_every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=str)


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
    assert len(expected) == 5 * 8


@on_every_backend
def test_not_finite_bytes(backend: Backend) -> None:
    message = backend.ops.pack_not_finite(backend.array(np.zeros(3, np.float32)), 2)
    assert backend.numpy(message).tobytes() == bytes.fromhex("feffffff 00000000 ffffffff 00000000")
    assert backend.ops.is_not_finite(message)
    assert [part.shape[0] for part in backend.ops.unpack(message)] == [0, 0]


@on_every_backend
@given(data=st.data())
def test_round_trip(backend: Backend, data: st.DataObject) -> None:
    values = data.draw(npst.arrays(np.float32, st.integers(0, 20), elements=st.floats(width=32)))
    indices = np.sort(data.draw(st.permutations(range(40)))[: values.size]).astype(np.int64)
    room = values.size + data.draw(st.integers(0, 5))
    message = backend.ops.pack(backend.array(indices), backend.array(values), max(room, 1))
    assert not backend.ops.is_not_finite(message)
    got_indices, got_values = backend.ops.unpack(message)
    np.testing.assert_array_equal(backend.numpy(got_indices), indices, strict=True)
    assert backend.numpy(got_values).tobytes() == values.tobytes()


@on_every_backend
def test_gathered_messages_split_in_rank_order(backend: Backend) -> None:
    gathered = backend.array(np.arange(24, dtype=np.int32).reshape(12, 2))
    parts = backend.ops.split(gathered, 3)
    np.testing.assert_array_equal([backend.numpy(part)[0, 0] for part in parts], [0, 8, 16])


def test_limits() -> None:
    wire.check_limits("b", 2**31 - 1, 10, 4)
    with pytest.raises(ValueError, match="bucket 'b' has 2147483648 elements, expected at most 2147483647"):
        wire.check_limits("b", 2**31, 10, 4)
    with pytest.raises(ValueError, match="gathers 2147483648 int32 from 64 workers"):
        wire.check_limits("b", 2**30, 2**24, 64)
