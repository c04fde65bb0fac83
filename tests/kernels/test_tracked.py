"""What is known of an array changes how long an answer takes, never the answer."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from horovod_sparse.compressors import DGC, GaussianK, RedSync, SIDCo, TopK
from horovod_sparse.kernels import lib
from horovod_sparse.numpy.ops import NumpyOps
from horovod_sparse.ops.cached import Above, Cached
from horovod_sparse.ops.protocol import EXTENT, SUMS, Hints
from tests.harness.backend import noted
from tests.harness.table import BACKENDS, COMPRESSORS, KINDS, ODD, Backend, Row, gradients
from tests.harness.workers import end_step, exchange, make_worker, send, take_step

OPS = NumpyOps()
COMPILED = [backend for backend in BACKENDS if backend.name in ("numpy-compiled", "torch")]


def above(x: np.ndarray, cut: float, first: int = 0) -> Above:
    indices = np.flatnonzero(np.abs(x) > x.dtype.type(cut))
    return Above(cut, indices + first, x[indices])


@given(
    x=npst.arrays(np.float32, st.integers(1, 60), elements=st.sampled_from((0.0, 0.25, -0.5, 0.75, 1.0, -2.0, 3.0))),
    cut=st.sampled_from((0.1, 0.25, 0.6, 1.0, 5.0)),
    threshold=st.sampled_from((0.0, 0.1, 0.25, 0.5, 0.75, 2.0, 9.0)),
    count=st.integers(1, 60),
)
def test_every_answer_is_that_of_the_whole(x: np.ndarray, cut: float, threshold: float, count: int) -> None:
    known, count = Cached(OPS, x, above(x, cut)), min(count, x.size)
    sums, expected_sums = (one.measure(x, threshold, with_log=True) for one in (known, OPS))
    if expected_sums.count == 0:
        assert sums.largest <= np.abs(x).max()
        sums.largest = expected_sums.largest
    assert repr(sums) == repr(expected_sums)
    for got, expected in (
        (known.select_largest(x, count), OPS.select_largest(x, count)),
        (known.select_above(x, threshold, count), OPS.select_above(x, threshold, count)),
    ):
        assert got.found == expected.found
        np.testing.assert_array_equal(got.indices, expected.indices, strict=True)


@pytest.mark.parametrize("backend", COMPILED, ids=str)
@given(data=st.data())
def test_notes_of_all_parts_are_those_of_the_whole(backend: Backend, data: st.DataObject) -> None:
    """In whatever order the parts come."""
    sizes = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=5))
    order = data.draw(st.permutations(range(len(sizes))))
    left_out = data.draw(st.sampled_from([None, *(part for part in order if sizes[part])]))
    room, sums = data.draw(st.integers(0, 60)), data.draw(st.booleans())
    x = np.random.default_rng(sum(sizes)).choice(np.array([0.0, 0.25, -0.5, 2.0], np.float32), sum(sizes))
    buffer, starts = backend.ops.zeros(x.size, "float32", backend.array(x)), np.cumsum([0, *sizes])
    tracked: Any = backend.ops.tracked(buffer)
    tracked.begin(Hints(0.3, room, SUMS if sums else EXTENT))
    for part in order:
        if part != left_out:
            begin, end = int(starts[part]), int(starts[part + 1])
            assert tracked.add([(begin, backend.array(x[begin:end]))]) == [0]
    expected, extent, measured = above(x, 0.3), tracked.extent(buffer), OPS.measure(backend.numpy(buffer))
    assert (extent.count, extent.largest) == (measured.count, measured.largest)
    known = noted(backend.ops, tracked, "measure", buffer)
    assert known == (OPS.measure(x) if sums and left_out is None else None)
    if left_out is not None or len(expected.indices) > room or room == 0:
        assert tracked.above is None
    if tracked.above is not None:
        np.testing.assert_array_equal(tracked.above.indices, expected.indices)
        np.testing.assert_array_equal(tracked.above.values, expected.values)
    if x.size:
        check_answers(backend, tracked, buffer, data.draw(st.sampled_from([0.1, 0.3, 0.4, 1.0])), x.size)
    tracked.forget()
    assert tracked.above is None
    assert all(noted(backend.ops, tracked, question, buffer) is None for question in ("extent", "measure"))


def check_answers(backend: Backend, tracked: Any, buffer: Any, threshold: float, size: int) -> None:
    """What is noted answers as a pass over the array does."""
    ops = backend.ops
    got, expected = tracked.measure(buffer, threshold), ops.measure(buffer, threshold)
    assert got.count == expected.count
    # The sums have the same terms in another order.
    assert (got.mean, got.variance) == pytest.approx((expected.mean, expected.variance), rel=1e-9, abs=1e-15)
    for count in {1, 1 + size // 2, size}:
        for start, stride in ((0, 1), (0, 3), (2, 3)):
            sampled = (buffer, start, stride, min(count, len(buffer[start::stride])))
            assert not sampled[-1] or tracked.sampled_largest(*sampled) == ops.sampled_largest(*sampled)
        for one, other in (
            (tracked.select_largest(buffer, count), ops.select_largest(buffer, count)),
            (tracked.select_above(buffer, threshold, count), ops.select_above(buffer, threshold, count)),
        ):
            assert one.found == other.found
            np.testing.assert_array_equal(backend.numpy(one.indices), backend.numpy(other.indices), strict=True)


@pytest.mark.parametrize("backend", COMPILED, ids=str)
@pytest.mark.parametrize(
    ("compressor", "steady"),
    [
        *((one, steady) for one in (TopK, SIDCo, RedSync, partial(DGC, sample_ratio=1.0)) for steady in (0.0, 3.0)),
        # While its residual grows it has to count.
        (GaussianK, 0.0),
    ],
)
def test_in_most_steps_the_residual_is_read_once(
    compressor: Any, steady: float, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is selected was noted when the gradient came, also where much of the gradient is the same in all steps."""
    numel = 60_000
    worker = make_worker(backend, compressor(0.01, warmup=None), {"p": (numel,)})
    rng, passes = np.random.default_rng(0), []
    same = gradients("student", numel, rng)
    for operation in ("select_above", "select_largest", "measure"):
        real = getattr(backend.ops, operation)

        def spy(x: Any, *arguments: Any, real: Any = real, **named: Any) -> Any:
            passes.append(len(x) == numel)
            return real(x, *arguments, **named)

        monkeypatch.setattr(backend.ops, operation, spy)
    read = []
    for _ in range(25):
        passes.clear()
        send(backend, worker, np.float32(steady) * same + gradients("laplace", numel, rng))
        read.append(sum(passes))
    assert np.median(read[10:]) == 0, read


@pytest.mark.parametrize("row", [row for row in COMPRESSORS if "paper" not in row.name], ids=str)
@pytest.mark.parametrize("kind", [*KINDS, *ODD])
def test_on_no_kind_of_gradient_the_residual_is_read_often(kind: str, row: Row) -> None:
    """Beside the pass that adds the gradient. Without luck a search has a pass for each of three digits, and three more."""
    numel, rng, read = 60_000, np.random.default_rng(0), []
    worker = make_worker(COMPILED[0], row.make(row.ratios[-1]), {"p": (numel,)})
    for _ in range(30):
        before = lib.hs_entries_read()
        send(COMPILED[0], worker, gradients(kind, numel, rng))
        read.append((lib.hs_entries_read() - before) / numel)
    usual = 4.0 if kind == "equal" else 2.5
    assert np.median(read[10:]) <= usual and max(read) <= 7.0, np.round(read, 1).tolist()


@pytest.mark.parametrize("backend", COMPILED, ids=str)
def test_a_residual_that_was_rescaled_is_looked_at_again(backend: Backend) -> None:
    """Between the arrival of a bucket's gradients and its selection."""
    rng = np.random.default_rng(1)
    worker = make_worker(backend, TopK(0.01, warmup=None), {"p": (5000,), "q": (5000,)})
    for step in range(4):
        assert worker.arrive("p", backend.array(gradients("laplace", 5000, rng))) is None
        if step == 3:
            worker.rescale(0.01)
        bucket = worker.arrive("q", backend.array(gradients("laplace", 5000, rng)))
        assert bucket is not None
        expected = OPS.select_largest(backend.numpy(bucket.buffer), 100).indices
        parts = exchange(backend, [worker], [bucket])[0]
        end_step(worker)
        sent = [slot.offset + entries[0] for slot in bucket.layout.slots for entries in parts[slot.name] or []]
        assert np.concatenate(sent).tolist() == expected.tolist()


@pytest.mark.parametrize("backend", COMPILED, ids=str)
def test_what_was_noted_of_a_residual_that_was_rescaled_is_forgotten(backend: Backend) -> None:
    rng = np.random.default_rng(3)
    for rescales in (False, True):
        worker = make_worker(backend, SIDCo(0.01, warmup=None), {"p": (5000,), "q": (5000,)})
        worker.arrive("p", backend.array(gradients("laplace", 5000, rng)))
        if rescales:
            worker.rescale(0.01)
        worker.arrive("q", backend.array(gradients("laplace", 5000, rng)))
        (bucket,) = worker.buckets
        assert (noted(backend.ops, bucket.tracked, "extent", bucket.buffer) is None) == rescales


@pytest.mark.parametrize("backend", COMPILED, ids=str)
def test_nothing_is_known_of_a_parameter_without_gradient(backend: Backend) -> None:
    """Not even what the step before found out, when that selected nothing because a gradient was not finite."""
    rng = np.random.default_rng(2)
    settings: dict[str, Any] = {"residual": False, "granularity": "model"}
    worker = make_worker(backend, SIDCo(0.01, warmup=None, **settings), {"a": (5000,), "b": (5000,)})

    def step(a: np.ndarray | None, b: np.ndarray) -> int:
        (parts,) = take_step(backend, [worker], [{"a": a, "b": b}])
        return sum(int(np.count_nonzero(values == 0)) for of_name in parts.values() for _, values in of_name or [])

    def gradient() -> np.ndarray:
        return gradients("laplace", 5000, rng)

    for _ in range(5):
        assert step(gradient(), gradient()) == 0
    poisoned = gradient()
    poisoned[7] = np.inf
    step(poisoned, gradient())
    assert step(None, gradient()) == 0, "zeros were sent"


@pytest.mark.parametrize("backend", COMPILED, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("threshold", [1.0, 1.3])
def test_moments_do_not_depend_on_what_was_noted(backend: Backend, dtype: str, threshold: float) -> None:
    """To the last bit: hooks of different runs may come in different orders, and a resumed run has noted nothing at first."""
    x = np.random.default_rng(0).laplace(size=4000).astype(dtype)
    found = set()
    for order, hints in (((0, 2000), Hints(1.0, 4000)), ((2000, 0), Hints(1.0, 4000)), ((0, 2000), Hints())):
        buffer = backend.ops.zeros(x.size, dtype, backend.array(x))
        tracked: Any = backend.ops.tracked(buffer)
        tracked.begin(hints)
        for begin in order:
            tracked.add([(begin, backend.array(x[begin : begin + 2000]))])
        assert (tracked.above is None) == (hints == Hints())
        found.add(repr(tracked.measure(buffer, threshold)))
    assert len(found) == 1
