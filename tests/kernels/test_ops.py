"""Every compiled kernel in lockstep with its twin in NumPy: the same bits, but for sums, which are added in another order."""

from __future__ import annotations

import ctypes
import ctypes.util
import itertools
import math
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest

from horovod_sparse import kernels
from horovod_sparse.kernels.memory import TYPES, Memory
from horovod_sparse.numpy.compiled import CompiledOps
from horovod_sparse.numpy.ops import NumpyOps
from horovod_sparse.ops.cached import Above
from horovod_sparse.ops.protocol import EXTENT, SUMS, Hints, Moved, Moving, Sums
from tests.harness.backend import noted

pytestmark = [
    pytest.mark.skipif(not kernels.available(), reason="the kernels are not compiled, or turned off"),
    # Of the oracle, on infinities.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@pytest.fixture(
    autouse=True,
    params=[
        pytest.param(name, marks=[pytest.mark.full] if number else []) for number, name in enumerate(kernels.variants())
    ],
)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every one that this processor runs, the fastest first."""
    monkeypatch.setenv(kernels.VARIABLE, request.param)
    assert kernels.available() and kernels.variant() == request.param
    yield request.param
    monkeypatch.undo()
    kernels.available()


ORACLE = NumpyOps()
ONE = CompiledOps(1)
# Around vectors, groups of vectors and blocks; several blocks.
SIZES = (0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 4095, 4096, 4097, 3 * 4096 + 77)
# Three threads start, and the last one has a part of a block.
LARGE = 3 * 2**18 + 4096 + 5
THREADS = (1, 2, 3, 100)
THRESHOLDS = [0.0, -0.0, -1.0, -math.inf, 5e-324, 1e-45, 0.5, 0.7, 1.0, 3.0]
THRESHOLDS += [3.4028234663852886e38, 3.4028235e38, 3.5e38, 1e300, math.inf, math.nan]
of_either_width = pytest.mark.parametrize("dtype", [np.float32, np.float64])


def sample(size: int, dtype: Any, seed: int = 0, *, infinite: bool = False, nan: bool = False) -> np.ndarray:
    """Numbers of every kind, half of them from a few values so that there are ties, where no vector is aligned. A copy is."""
    rng = np.random.default_rng(seed)
    info = np.finfo(dtype)
    special = [0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 3.0, info.smallest_subnormal, -info.smallest_subnormal, info.tiny]
    special += [info.max, np.inf, -np.inf] * infinite + [np.nan, -np.nan] * nan
    x = np.empty(size + 1, dtype)[1:]
    x[:] = np.where(rng.uniform(size=size) < 0.5, rng.laplace(size=size), rng.choice(np.array(special), size=size))
    return x


def assert_same(got: np.ndarray, expected: np.ndarray) -> None:
    """Equal, with the same signs of zeros."""
    np.testing.assert_array_equal(got, expected, strict=True)
    np.testing.assert_array_equal(np.signbit(got[got == 0]), np.signbit(expected[expected == 0]))


def assert_sums(got: Sums, expected: Sums) -> None:
    assert (got.count, got.largest) == (expected.count, expected.largest)
    assert (got.total, got.squares, got.logs) == pytest.approx(
        (expected.total, expected.squares, expected.logs), rel=1e-12, nan_ok=True
    )


NOTHING = Hints()


class Taken(NamedTuple):
    """What came of a gradient."""

    not_finite: int
    sums: Sums | None = None
    above: Above | None = None
    extent: tuple[int, float] = (0, 0.0)


def accumulate(
    ops: CompiledOps,
    residual: np.ndarray,
    gradient: np.ndarray | Moved,
    hints: Hints = NOTHING,
    moving: Moving | None = None,
    rate: float = 1.0,
) -> Taken:
    tracked: Any = ops.tracked(residual)
    tracked.begin(hints)
    (not_finite,) = tracked.add([(0, gradient)], moving, rate)
    extent = tracked.extent(residual)
    sums = noted(ops, tracked, "measure", residual)
    return Taken(not_finite, sums, tracked.above, (extent.count, extent.largest))


def assert_found(got: Taken, x: np.ndarray, hints: Hints) -> None:
    """What was found out about x on the way is what its own passes find."""
    assert (got.sums is not None) == (hints.asks == SUMS)
    measured = ORACLE.measure(x)
    assert got.extent == (measured.count, measured.largest)
    if got.sums is not None:
        assert_sums(got.sums, measured)
    expected = ORACLE.select_above(x, hints.cut, x.size + 1)
    if not hints.cut < math.inf or hints.room < expected.found:
        assert got.above is None
    if got.above is not None:
        assert got.above.cut == hints.cut
        np.testing.assert_array_equal(got.above.indices, expected.indices)
        assert_same(got.above.values, x[expected.indices])


HINTS = [NOTHING, *(Hints(cut, 10**6) for cut in (0.0, 0.5, 3.0, 1e300, math.inf))]
HINTS += [Hints(0.5, room) for room in (0, 1, 5, 100, 2000)]
HINTS = [hints._replace(asks=number % 3) for number, hints in enumerate(HINTS)]


def assert_accumulated(ops: CompiledOps, residual: np.ndarray, gradient: np.ndarray | Moved, hints: Hints) -> Taken:
    mine, expected = residual.copy(), residual.copy()
    taken = accumulate(ops, mine, gradient, hints)
    assert [taken.not_finite] == ORACLE.accumulate(expected, [(0, gradient)])
    assert_same(mine, expected)
    assert_found(taken, mine, hints)
    return taken


@of_either_width
@pytest.mark.parametrize("gradient_type", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("size", SIZES)
def test_accumulate(size: int, dtype: type[np.floating], gradient_type: type) -> None:
    gradient = sample(size, gradient_type, 1, infinite=True, nan=True)
    for hints in HINTS:
        residual = sample(size, dtype)
        taken = assert_accumulated(ONE, residual, gradient, hints)
        ONE.accumulate(residual, [(0, gradient)])
        # One thread has all the room there is.
        found = ORACLE.measure(residual, hints.cut).count
        wanted_of_these = hints.cut < math.inf and min(hints.room, size) > 0
        assert (taken.above is not None) == (wanted_of_these and found <= hints.room)


@of_either_width
@pytest.mark.parametrize("gradient_type", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("size", SIZES)
def test_accumulate_takes_in_what_has_moved(size: int, dtype: type[np.floating], gradient_type: type) -> None:
    now, start = (sample(size, gradient_type, seed, infinite=True, nan=True) for seed in (1, 2))
    for number, hints in enumerate(HINTS):
        moved = Moved(now, start, *[(1.0, 0.0), (1.4, 1e-3), (1e30, 0.3)][number % 3])
        if np.dtype(gradient_type).itemsize <= np.dtype(dtype).itemsize:
            assert_accumulated(ONE, sample(size, dtype), moved, hints)
            continue
        mine, expected = sample(size, dtype), sample(size, dtype)
        assert ONE.accumulate(mine, [(0, moved)]) == ORACLE.accumulate(expected, [(0, moved)])
        assert_same(mine, expected)


@of_either_width
@pytest.mark.parametrize("number", [999, 1000])
def test_a_thread_stays_within_its_share_of_the_room(dtype: type[np.floating], number: int) -> None:
    """The first thread fills its share late, and then finds nothing more; the second one begins with its own at once."""
    numel, share = 2**19, 1000
    x, half = np.zeros(numel, dtype), numel // 2
    x[half - 40 - number : half - 40] = x[half : half + share] = 1.0
    residual = np.zeros(numel, dtype)
    taken = assert_accumulated(CompiledOps(2), residual, x, Hints(0.5, 2 * share))
    assert taken.above is not None


@of_either_width
@pytest.mark.parametrize("momentum", [None, 0.9])
@pytest.mark.parametrize("gradient_type", [np.float16, np.float32, np.float64])
# Threads do not care for the rate.
@pytest.mark.parametrize(
    ("size", "rate"), [*itertools.product((0, 1, 63, 64, 65, 4097), (1.0, 0.3, 1e30)), (LARGE, 0.3)]
)
def test_accumulate_at_a_rate(
    size: int, rate: float, dtype: type[np.floating], gradient_type: type, momentum: float | None
) -> None:
    def moving(velocity: np.ndarray) -> Moving | None:
        return None if momentum is None else Moving(velocity, momentum)

    found, gradient = set(), sample(size, gradient_type, 2, infinite=True, nan=True)
    expected = sample(size, dtype), sample(size, dtype, 1)
    hints = Hints(0.7, size, EXTENT if rate == 1.0 else SUMS)
    (not_finite,) = ORACLE.accumulate(expected[0], [(0, gradient)], moving(expected[1]), rate)
    for threads in THREADS if size == LARGE else (1,):
        ops, residual, velocity = CompiledOps(threads), sample(size, dtype), sample(size, dtype, 1)
        assert ops.accumulate(residual, [(0, gradient)], moving(velocity), rate) == [not_finite]
        assert_same(residual, expected[0])
        residual, velocity = sample(size, dtype), sample(size, dtype, 1)
        taken = accumulate(ops, residual, gradient, hints, moving(velocity), rate)
        assert_same(velocity, expected[1])
        assert_same(residual, expected[0])
        assert taken.not_finite == not_finite
        with np.errstate(over="ignore"):
            overflowed = not_finite > np.count_nonzero(~np.isfinite(gradient.astype(dtype)))
        if overflowed:
            assert taken[:3] == (not_finite, None, None)
        else:
            assert_found(taken, residual, hints)
            assert size == 0 or taken.above is not None, "there was room"
        found.add(repr(taken.sums))
    assert len(found) == 1, "the same bits with any number of threads"


@of_either_width
@pytest.mark.parametrize("size", [1, 63, 65, 4097, LARGE])
def test_nothing_is_told_of_a_pass_that_overflowed(size: int, dtype: type[np.floating]) -> None:
    """Its sums and what it found above the cut are of numbers that are no longer there."""
    largest = np.finfo(dtype).max
    for threads in THREADS if size == LARGE else (1,):
        ops = CompiledOps(threads)
        for position, sign in itertools.product({0, size // 2, size - 1}, (1, -1)):
            expected, gradient = np.ones(size, dtype), np.zeros(size, dtype)
            expected[position] = gradient[position] = sign * largest
            for moving in (None, Moving(np.zeros(size, dtype), 0.5)):
                residual = expected.copy()
                taken = accumulate(ops, residual, gradient, Hints(0.5, size, EXTENT), moving)
                assert taken == Taken(1, extent=(size, float(largest)))
                assert_same(residual, expected)


class HalfOps(CompiledOps):
    """Takes int16 for the bits of a type that NumPy may not have."""

    def __init__(self, dtype: str) -> None:
        super().__init__(1)
        self._number = TYPES.index(dtype)

    def memory(self, array: np.ndarray) -> Memory | None:
        if array.dtype != np.int16:
            return super().memory(array)
        at = super().memory(array.view(np.float16))
        return at and at._replace(type=self._number)


def every_half(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """The bits of all numbers of the type, and their values."""
    patterns = np.arange(2**16, dtype=np.uint16)
    if dtype == "float16":
        return patterns.view(np.int16), patterns.view(np.float16).astype(np.float32)
    return patterns.view(np.int16), (patterns.astype(np.uint32) << 16).view(np.float32)


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """As TensorFlow sets its threads: denormal numbers are zeros to the processor."""
    library = ctypes.CDLL(ctypes.util.find_library("m"))
    old = (ctypes.c_uint32 * 8)()
    library.fegetenv(old)
    new = (ctypes.c_uint32 * 8)(*old)
    new[7] |= 0x8040
    library.fesetenv(new)
    try:
        yield
    finally:
        library.fesetenv(old)


@of_either_width
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_every_half_precision_number(dtype: type[np.floating], half: str) -> None:
    ops, (bits, values) = HalfOps(half), every_half(half)
    finite = np.isfinite(values)
    residual = np.full(values.size, -0.0, dtype)
    assert ops.accumulate(residual, [(0, bits)]) == [np.count_nonzero(~finite)]
    assert_same(residual[finite], values[finite].astype(dtype))
    assert_same(residual[~finite], np.zeros(np.count_nonzero(~finite), dtype))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="sets a register of x86-64")
def test_flushed_denormals_lose_nothing_that_is_none() -> None:
    bits, values = every_half("float16")
    residual, denormal = np.zeros(values.size, np.float32), np.full(100, 1e-45, np.float32)
    with flushed_denormals():
        ONE.accumulate(residual, [(0, bits.view(np.float16))])
        selection = ONE.select_above(denormal, 0.0, 100)
        count = ONE.measure(denormal, 0.0).count
    np.testing.assert_array_equal(residual, np.where(np.isfinite(values), values, 0))
    assert (selection.found, count) == (100, 100), "magnitudes are compared by their bits"


@of_either_width
@pytest.mark.parametrize("size", [*SIZES, LARGE])
def test_measure(size: int, dtype: type[np.floating]) -> None:
    for x in (sample(size, dtype), sample(size, dtype, infinite=True).copy()):
        assert_sums(ONE.measure(x), ORACLE.measure(x))
    # Squares of the largest float64 are infinite.
    x = sample(size, dtype).clip(-1e30, 1e30)
    # `test_variants` compares the bits that several threads find.
    for cut in [threshold for threshold in THRESHOLDS if not threshold < 0] if size != LARGE else [0.7]:
        expected = ORACLE.measure(x, cut, with_log=True)
        if not cut <= np.finfo(dtype).max:
            # Nothing exceeds it, so that a kernel does not look.
            expected.largest = 0.0
        assert_sums(ONE.measure(x, cut, with_log=True), expected)


@of_either_width
@pytest.mark.parametrize("size", [*SIZES, LARGE])
def test_counts_and_selections(size: int, dtype: type[np.floating]) -> None:
    ops = CompiledOps(3)
    for x in (sample(size, dtype), sample(size, dtype, infinite=True).copy()):
        # Threads do not care for the threshold.
        for threshold in THRESHOLDS if size != LARGE else (0.5,):
            count = ORACLE.measure(x, threshold).count
            # With less room for indices than there are entries above the threshold, a second pass is made.
            capacities = {max(count // 17, 1), max(count // 16, 1), count + 1}
            if size != LARGE:
                capacities |= {1, 5, max(count - 1, 1), size + 1}
            for capacity in capacities:
                selection, same = (o.select_above(x, threshold, capacity) for o in (ops, ORACLE))
                assert selection.found == count
                np.testing.assert_array_equal(selection.indices, same.indices, strict=True)


@of_either_width
def test_nan_is_above_every_threshold(dtype: type[np.floating]) -> None:
    """A residual has NaN after infinities of both signs: it is sent, so that it shows, and does not stay for ever."""
    x = np.array([1.0, np.nan, 0.0, -np.nan], dtype)
    for threshold in (0.0, 2.0, math.inf):
        selection = ONE.select_above(x, threshold, 4)
        assert {1, 3} <= set(selection.indices.tolist()) <= {0, 1, 3}
    assert np.isnan(ONE.take_out(x, np.array([1]))).all()


@of_either_width
@pytest.mark.parametrize("size", [0, 1, 100])
def test_take_out(size: int, dtype: type[np.floating]) -> None:
    x = sample(size + 10, dtype, infinite=True)
    x[:5] = np.array([1e300, -1e300, 1 + 2.0**-30, 3.4028235e38, -3.5e38]).astype(dtype)
    expected = x.copy()
    # Every second one: not contiguous.
    indices = np.random.default_rng(0).permutation(x.size)[: 2 * size : 2]
    values = ONE.take_out(x, indices)
    assert_same(values, ORACLE.take_out(expected, indices))
    assert_same(x, expected)


@of_either_width
@pytest.mark.parametrize("outside", [-1, 3, -(2**63), 2**63 - 1])
def test_indices_out_of_range_change_nothing(dtype: type[np.floating], outside: int) -> None:
    target = np.ones(3, dtype)
    with pytest.raises(IndexError, match=r"indices must be in \[0, 3\)"):
        ONE.take_out(target, np.array([0, outside]))
    assert target.tolist() == [1, 1, 1]


@of_either_width
def test_messages_whose_indices_do_not_ascend_change_nothing(dtype: type[np.floating]) -> None:
    target = np.ones(9, dtype)
    for wrong in ([3, 2], [3, 3], [0, 1, 8, 7]):
        messages = np.full((8, 2), 1, np.int32)
        messages[4 : 4 + len(wrong), 0] = wrong
        with pytest.raises(IndexError, match="indices must be ascending"):
            ONE.assemble([(0, target)], messages, [1, len(wrong)], 1.0)
    with pytest.raises(ValueError, match=r"used must be within \[0, 4\], got \[1, 5\]"):
        ONE.assemble([(0, target)], messages, [1, 5], 1.0)
    with pytest.raises(ValueError, match=r"messages must be 3 .*, got "):
        ONE.assemble([(0, target)], messages, [1, 1, 1], 1.0)
    with pytest.raises(ValueError, match=r"messages must be 3 .*, got "):
        ONE.rows_in_use(messages, 3, 9)
    assert target.tolist() == [1] * 9


def test_arrays_that_do_not_lie_as_the_kernels_want_it() -> None:
    """Strided and misaligned ones are copied, types that no kernel knows are left to NumPy."""
    x = sample(5001, np.float32)
    assert_sums(ONE.measure(x[::2]), ORACLE.measure(x[::2]))
    misaligned = np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(np.float32)
    assert not misaligned.flags.aligned
    for gradient in (x[::2], x[:2502:][::-1][:2501], misaligned[:2501]):
        assert_accumulated(ONE, np.zeros(2501, np.float32), gradient, NOTHING)
    for unknown in (x[:2501].astype(">f4"), np.arange(2501)):
        residual = np.zeros(2501, np.float32)
        assert accumulate(ONE, residual, unknown, Hints(0.5, 2501))[:3] == (0, None, None)
        np.testing.assert_array_equal(residual, unknown.astype(np.float32))


def test_what_would_reach_beyond_an_array_is_refused() -> None:
    short, long = np.zeros(3, np.float32), np.zeros(4, np.float32)
    for first, gradient in ((0, long), (1, short), (-1, short), (2**62, short)):
        with pytest.raises(ValueError, match="gradients must be within the residual's 3 elements"):
            ONE.accumulate(short, [(0, short[:1]), (first, gradient)])
    one, two, half, how = np.ones(1, np.float32), np.ones(2, np.float32), np.zeros(3, np.float16), 0.9
    message = ONE.pack(np.array([0]), one, 1)
    for refused, text in (
        (lambda: ONE.accumulate(long, [(0, long)], Moving(short, how)), "velocity must be like the residual"),
        (lambda: ONE.accumulate(long[:3:2], [(0, two)]), "must be contiguous, aligned and writable, got one of 2"),
        (lambda: ONE.take_out(long, np.array([0, 1], np.int32)), "indices must be of int64, got int32"),
        (lambda: ONE.assemble([(0, half)], message, [1], 1.0), "a part must be of float32 or float64 .*, got float16"),
        (lambda: ONE.take_pairs_out(two, np.array([0, 1]), 1), "there must be up to 1 indices, got 2"),
        (lambda: ONE.rows_in_use(message.astype(np.int64), 1, 3), "messages must be of int32, got int64"),
    ):
        with pytest.raises(ValueError, match=text):
            refused()


def test_a_read_only_array_is_not_written_to() -> None:
    target, other, some, values = np.ones(3), np.ones(3), np.array([0, 2]), np.ones(2, np.float32)
    target.flags.writeable = False
    for write in (
        lambda: ONE.accumulate(target, [(0, other)]),
        lambda: ONE.accumulate(target, [(0, other)], moving=Moving(other, 0.9)),
        lambda: ONE.accumulate(other, [(0, other)], moving=Moving(target, 0.9)),
        lambda: ONE.take_out(target, some),
        lambda: ONE.assemble([(0, target)], ONE.pack(some, values, 2), [2], 1.0),
    ):
        with pytest.raises(ValueError, match="must be contiguous, aligned and writable, got one of 3"):
            write()
    assert (target == 1).all() and (other == 1).all()
    assert ONE.accumulate(other, [(0, target)]) == [0], "a gradient is only read"
