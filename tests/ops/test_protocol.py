"""Every operation of every backend in lockstep with the NumPy oracle, and the oracle against plain definitions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from horovod_sparse.ops.protocol import Moved, Moving
from horovod_sparse.torch import ops
from horovod_sparse.torch.compiled import tensor_ops
from tests.harness.table import BACKENDS, WITH_OPERATIONS, Backend

ORACLE = BACKENDS[0].ops
on_every_backend = pytest.mark.parametrize("backend", WITH_OPERATIONS, ids=str)
FINITE = st.floats(-(2.0**100), 2.0**100, width=32)
ARRAYS = npst.arrays(
    st.sampled_from((np.float32, np.float64)), st.integers(0, 200), elements=st.one_of(FINITE, st.integers(-3, 3))
)


@on_every_backend
@given(x=ARRAYS, threshold=st.one_of(st.just(0.0), st.floats(0.0, 4.0)))
def test_moments(backend: Backend, x: np.ndarray, threshold: float) -> None:
    assert backend.ops.measure(backend.array(x)).largest == max(map(abs, x.tolist()), default=0.0)
    assert backend.ops.norm(backend.array(x)) == pytest.approx(math.sqrt(math.fsum(float(v) ** 2 for v in x)))
    got = backend.ops.measure(backend.array(x), threshold, with_log=True)
    limit = float(x.dtype.type(threshold))
    excesses = [abs(float(value)) - limit for value in x if abs(float(value)) > limit]
    assert got.count == len(excesses)
    if not excesses:
        assert (got.mean, got.variance) == (0.0, 0.0)
        return
    assert got.mean == pytest.approx(math.fsum(excesses) / len(excesses), rel=1e-12)
    spread = math.fsum((excess - got.mean) ** 2 for excess in excesses) / len(excesses)
    assert got.variance == pytest.approx(spread, rel=1e-6, abs=1e-12 * got.mean**2)
    assert got.mean_log == pytest.approx(math.fsum(map(math.log, excesses)) / len(excesses), rel=1e-9, abs=1e-9)


def largest(x: np.ndarray, among: Iterable[int], count: int) -> list[int]:
    """The indices of the largest entries among some; of equals the first."""
    return sorted(sorted(among, key=lambda index: (-abs(x[index]), index))[:count])


@on_every_backend
@given(x=ARRAYS.filter(len), threshold=st.floats(0.0, 4.0), data=st.data())
def test_selections(backend: Backend, x: np.ndarray, threshold: float, data: st.DataObject) -> None:
    ops, given, count = backend.ops, backend.array(x), data.draw(st.integers(1, x.size))
    above = np.flatnonzero(np.abs(x) > x.dtype.type(threshold))
    for selection, found, expected in (
        (ops.select_above(given, threshold, count), above.size, largest(x, above, count)),
        (ops.select_largest(given, count), count, largest(x, range(x.size), count)),
    ):
        assert selection.found == found
        np.testing.assert_array_equal(backend.numpy(selection.indices), np.array(expected, np.int64), strict=True)


@on_every_backend
@given(x=npst.arrays(np.float64, 20, elements=st.floats(-1e47, 1e47)), count=st.integers(0, 20))
def test_take_splits_float64_exactly(backend: Backend, x: np.ndarray, count: int) -> None:
    """What float32 cannot carry stays behind, also what is beyond its range. (From 2^157 on the rest has too many digits.)"""
    kept, indices = backend.array(x), np.arange(count)
    values = backend.numpy(backend.ops.take_out(kept, backend.array(indices)))
    assert values.dtype == np.float32 and np.isfinite(values).all()
    restored = backend.numpy(kept).copy()
    restored[indices] += values.astype(np.float64)
    np.testing.assert_array_equal(restored, x)


@on_every_backend
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("transposed", [False, True])
def test_accumulate_and_assign(backend: Backend, dtype: type[np.floating], transposed: bool) -> None:
    gradient = np.random.default_rng(2).normal(size=(6, 5)).astype(dtype)
    given = backend.array(gradient)
    if transposed:
        given, gradient = given.T, gradient.T
    residual = backend.ops.zeros(30, "float32", given)
    for _ in range(2):
        assert backend.ops.accumulate(residual, [(0, given)]) == [0]
    expected = gradient.astype(np.float32).reshape(-1)
    np.testing.assert_allclose(backend.numpy(residual), 2 * expected, rtol=1e-6)
    backend.ops.assign(residual, given)
    np.testing.assert_array_equal(backend.numpy(residual), expected, strict=True)


@on_every_backend
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("transposed", [False, True])
def test_accumulate_takes_in_what_has_moved(backend: Backend, dtype: type[np.floating], transposed: bool) -> None:
    """It is added and taken out again, rounded once where it is wider, and a distance that is not finite adds nothing."""
    rng = np.random.default_rng(4)
    now, start = (rng.normal(size=(6, 5)).astype(dtype) for _ in range(2))
    now[1, 2], start[2, 3], now[4, 4], start[4, 4] = np.nan, np.inf, 65504, -65504
    wide = np.promote_types(dtype, np.float32).type
    wide_now, wide_start = now.astype(wide), start.astype(wide)
    with np.errstate(invalid="ignore"):
        distance = (wide_now - wide_start) * wide(1.4) + wide_start * wide(0.01)
    if transposed:
        distance = distance.T
    expected = np.where(np.isfinite(distance), distance, 0).reshape(-1).astype(np.float32)
    given, begun = (backend.array(one).T if transposed else backend.array(one) for one in (now, start))
    residual = backend.ops.zeros(31, "float32", given)
    moved = Moved(given, begun, 1.4, 0.01)
    assert backend.ops.accumulate(residual, [(1, moved)]) == [2]
    np.testing.assert_array_equal(backend.numpy(residual), [0, *expected])
    assert backend.ops.accumulate(residual, [(1, moved)], rate=-1.0) == [2]
    np.testing.assert_array_equal(backend.numpy(residual), np.zeros(31))
    velocity = backend.array(np.ones(31, np.float32))
    assert backend.ops.accumulate(residual, [(1, moved)], Moving(velocity, 0.5)) == [2]
    np.testing.assert_array_equal(backend.numpy(velocity), [1, *(np.float32(0.5) + expected)])


@on_every_backend
@pytest.mark.parametrize("left_out", [(), (1,), (0, 3)])
def test_parts_get_copies_of_their_entries(backend: Backend, left_out: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    flat = [rng.normal(size=size).astype(np.float32) for size in (20, 1, 0, 7)]
    array = backend.array(np.concatenate(flat))
    begins = np.cumsum([0, *map(len, flat)]).tolist()
    parts = [(begins[n], backend.array(np.zeros_like(one))) for n, one in enumerate(flat) if n not in left_out]
    backend.ops.copy_parts(array, parts, 4.0)
    for (_, part), one in zip(parts, [one for n, one in enumerate(flat) if n not in left_out], strict=True):
        np.testing.assert_array_equal(backend.numpy(part), one / np.float32(4.0))


@on_every_backend
def test_all_finite(backend: Backend) -> None:
    # A sum that overflows is no infinity.
    assert backend.ops.all_finite(backend.array(np.full((3, 4), 3e38, np.float32)))
    for bad in (np.nan, np.inf, -np.inf):
        array = np.zeros((3, 4), np.float32)
        array[2, 3] = bad
        assert not backend.ops.all_finite(backend.array(array))
    assert not backend.ops.all_finite(backend.array(np.array([np.inf, -np.inf], np.float32)))


def gathered(backend: Backend, entries: list[tuple[np.ndarray, np.ndarray]]) -> tuple[Any, list[int]]:
    """Messages of pairs one after the other, and how many rows of each are in use."""
    used = [indices.size for indices, _ in entries]
    messages = [
        backend.ops.pack(backend.array(indices), backend.array(values), max(used) + 1) for indices, values in entries
    ]
    return backend.array(np.concatenate([backend.numpy(message) for message in messages])), used


@on_every_backend
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
# The largest are written in several stretches.
@pytest.mark.parametrize("sizes", [[0], [1], [2**14], [2**14 + 1], [1, 5, 0, 1000, 40_000, 2**20 + 77, 3]], ids=str)
def test_messages_are_added_up_in_their_order(backend: Backend, dtype: type[np.floating], sizes: list[int]) -> None:
    """Every target takes its own entries out of them."""
    bounds = np.cumsum([0, *sizes]).tolist()
    numel, rng = bounds[-1], np.random.default_rng(bounds[-1])
    # Sums of these depend on the order.
    parts = [(np.flatnonzero(rng.random(numel) < part), 10.0 ** rng.integers(-9, 9)) for part in (0.5, 0.01, 0.9, 0.0)]
    entries = [(indices, (scale * rng.normal(size=indices.size)).astype(np.float32)) for indices, scale in parts]
    messages, used = gathered(backend, entries)
    for divisor in (1.0, 3.0):
        whole = np.zeros(numel, dtype)
        for indices, values in entries:
            whole[indices] += values / np.float32(divisor)
        for skipped in range(3):
            memory = np.full(numel + 3, np.nan, dtype)
            of_all = backend.ops.copy(backend.array(memory))
            places = [(begin, of_all[skipped + begin : skipped + end]) for begin, end in itertools.pairwise(bounds)]
            backend.ops.assemble(places, messages, used, divisor)
            memory[skipped : skipped + numel] = whole
            np.testing.assert_array_equal(backend.numpy(of_all), memory, strict=True)


@on_every_backend
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_accumulate_leaves_out_what_is_not_finite_in_the_residual(backend: Backend, dtype: type[np.floating]) -> None:
    gradient = backend.array(np.array([1.0, 1e150, np.nan, -np.inf, 1 + 2.0**-30]))
    kept = np.array([1.0, 1e150, 0.0, 0.0, 1 + 2.0**-30]) if dtype == np.float64 else np.array([1.0, 0, 0, 0, 1.0])
    residual, velocity = backend.array(np.zeros(5, dtype)), backend.array(np.zeros(5, dtype))
    assert backend.ops.accumulate(residual, [(0, gradient)]) == [5 - np.count_nonzero(kept)]
    np.testing.assert_array_equal(backend.numpy(residual), kept.astype(dtype), strict=True)
    moving = Moving(velocity, 0.5)
    assert backend.ops.accumulate(residual, [(0, gradient)], moving=moving) == [5 - np.count_nonzero(kept)]
    np.testing.assert_array_equal(backend.numpy(velocity), kept.astype(dtype), strict=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("momentum", [None, 0.9])
def test_accumulate_waits_for_a_device_once(
    dtype: torch.dtype, momentum: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And does as on the host, with numbers that are not finite, sums that overflow, and without."""
    largest, waits, read = torch.finfo(torch.float32).max, list[int](), torch.Tensor.tolist

    def waiting(tensor: torch.Tensor) -> Any:
        waits.append(1)
        return read(tensor)

    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(50, generator=generator).to(dtype) for _ in range(4)]
    gradients[1][[3, 7]], gradients[2][5] = torch.tensor([torch.nan, -torch.inf], dtype=dtype), 3.0
    results = []
    for on_host in (True, False):
        buffer, velocity = torch.full((200,), -0.0), torch.zeros(200)
        buffer[105], velocity[108] = largest, largest
        monkeypatch.setattr(ops, "on_host", lambda tensor, on_host=on_host: on_host)
        if not on_host:
            for name in ("item", "__bool__", "__int__", "__float__"):
                monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("the host waits for a number"))
            monkeypatch.setattr(torch.Tensor, "tolist", waiting)
        moving = None if momentum is None else Moving(velocity, momentum)
        parts = [(50 * number, gradient) for number, gradient in enumerate(gradients)]
        results.append((ops.TorchOps().accumulate(buffer, parts, moving, 1e38), buffer, velocity))
    monkeypatch.undo()
    (counts, *arrays), (told, *others) = results
    assert counts == told and waits == [1] and counts[1] >= 2 and counts[2] >= 1
    for one, other in zip(arrays, others, strict=True):
        assert one.numpy().tobytes() == other.numpy().tobytes()


def test_the_kernels_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_SPARSE_KERNELS", "0")
    assert type(tensor_ops()) is ops.TorchOps
