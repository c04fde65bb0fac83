"""GaussianK, DGC, RedSync, ChunkTopK and Threshold beyond the common laws: against oracles and known figures."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

from horovod_sparse.compressors import DGC, ChunkTopK, GaussianK, RedSync, Threshold, TopK
from horovod_sparse.compressors.checks import check_selection
from horovod_sparse.numpy.ops import NumpyOps
from horovod_sparse.ops.protocol import Selection
from tests.harness.table import BACKENDS, KINDS, WITH_OPERATIONS, Backend, gradients
from tests.harness.workers import make_worker, send, take_step

OPS = NumpyOps()
on_every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=str)


class CountingOps(NumpyOps):
    """Counts the passes over the data that only look for a threshold."""

    def __init__(self) -> None:
        self.passes = 0

    def measure(self, x: Any, threshold: float = 0.0, *, with_log: bool = False) -> Any:
        self.passes += 1
        return super().measure(x, threshold, with_log=with_log)


@on_every_backend
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ratio", [0.3, 0.01, 0.001])
def test_redsync_is_exact_top_k(backend: Backend, kind: str, ratio: float) -> None:
    rng = np.random.default_rng(0)
    trimmed, exact = (
        make_worker(backend, c, {"p": (5000,)}) for c in (RedSync(ratio, warmup=None), TopK(ratio, warmup=None))
    )
    for _ in range(5):
        gradient = gradients(kind, 5000, rng)
        got, expected = send(backend, trimmed, gradient), send(backend, exact, gradient)
        not_zero = expected.values != 0
        np.testing.assert_array_equal(got.indices, expected.indices[not_zero])
        np.testing.assert_array_equal(got.values, expected.values[not_zero])


# --- DGC ---


def test_dgc_without_momentum_is_sampled_top_k_with_feedback() -> None:
    """With a sample of everything the threshold is the exact k-th largest, which is itself not above it."""
    backend, rng = BACKENDS[0], np.random.default_rng(2)
    sampled = make_worker(backend, DGC(0.01, momentum=0.0, sample_ratio=1.0, warmup=None), {"p": (5000,)})
    exact = make_worker(backend, TopK(0.01, warmup=None), {"p": (5000,)})
    for _ in range(8):
        gradient = gradients("laplace", 5000, rng)
        got, expected = send(backend, sampled, gradient), send(backend, exact, gradient)
        left_out = np.setdiff1d(expected.indices, got.indices)
        assert set(got.indices) <= set(expected.indices) and left_out.size == 1
        # The same input again for both.
        exact.buckets[0].buffer[:] = sampled.buckets[0].buffer


def test_dgc_takes_the_exact_top_k_of_too_many() -> None:
    """Half of the entries stand where the sample does not look: it finds too low a threshold."""
    rng = np.random.default_rng(3)
    compressor = DGC(0.01, momentum=0.0, warmup=None)
    found = 0
    for step in range(60):
        x = gradients("two-scales", 20_000, rng)
        state = compressor.new_state()
        state.step = step
        selection = compressor.select(OPS, x, 200, 260, state)
        assert selection.indices.size <= 260
        if selection.indices.size == 200:
            found += 1
            np.testing.assert_array_equal(selection.indices, OPS.select_largest(x, 200).indices)
    assert found > 3


def test_dgc_samples_in_odd_strides_from_changing_starts() -> None:
    """An even stride locks on to the rows of a layer; one start never sees the other entries."""
    seen: list[np.ndarray] = []

    class SpyingOps(NumpyOps):
        def kth_largest(self, x: Any, count: int) -> float:
            seen.append(x.copy())
            return super().kth_largest(x, count)

    x = np.arange(1, 100_001, dtype=np.float32)
    compressor = DGC(0.01, momentum=0.0, warmup=None)
    for step in range(5):
        state = compressor.new_state()
        state.step = step
        compressor.select(SpyingOps(), x, 1000, 1300, state)
    assert len({float(sample[0]) for sample in seen}) > 2
    for sample in seen:
        assert set(np.diff(sample)) == {99.0} and sample.size > 1000


# --- GaussianK ---


def sent_by_the_authors(u: np.ndarray, k: int) -> tuple[np.ndarray, float]:
    """What the authors' loop sends, and the threshold that it was counted at."""
    eta = -NormalDist().inv_cdf(k / u.size / 2) * np.sqrt(np.mean(u.astype(float) ** 2))
    for _ in range(3):
        counted_at, indices = eta, np.flatnonzero(np.abs(u) > np.float32(eta))
        if indices.size < 2 * k / 3:
            eta *= 0.5
        elif indices.size > 4 * k / 3:
            eta *= 1.5
        else:
            break
    return indices, counted_at


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("ratio", [0.1, 0.01])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mostly-zero"])
def test_paper_sends_what_the_authors_loop_counted_last(kind: str, ratio: float, feedback: bool) -> None:
    size, rng = 10_000, np.random.default_rng(6)
    compressor = GaussianK(ratio, refine="paper", warmup=None)
    k, residual = compressor.target_count(size), np.zeros(size, np.float32)
    state, ops = compressor.new_state(), CountingOps()
    for step in range(1, 26):
        residual = residual * feedback + gradients(kind, size, rng)
        expected, eta = sent_by_the_authors(residual, k)
        selection = compressor.select(ops, residual, k, compressor.message_capacity(size, k, 1), state)
        np.testing.assert_array_equal(selection.indices, expected)
        assert state.threshold == pytest.approx(eta, rel=1e-9)
        assert ops.passes <= 3 * step, "one to measure, two to count"
        residual[expected] = 0


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mostly-zero"])
@pytest.mark.parametrize("ratio", [0.1, 0.01])
def test_the_count_is_near_k_on_every_kind(kind: str, ratio: float) -> None:
    """One shot, any tail."""
    x = gradients(kind, 100_000, np.random.default_rng(7))
    compressor = GaussianK(ratio, warmup=None)
    k = compressor.target_count(x.size)
    selection = compressor.select(OPS, x, k, x.size, compressor.new_state())
    assert abs(selection.found / k - 1) <= 0.1


# --- ChunkTopK ---


@pytest.mark.parametrize("size", [1, 300, 4096, 4 * 4096, 3 * 4096 + 77, 100_000])
@pytest.mark.parametrize("ratio", [1.0, 1 / 64, 0.01, 0.0004, 1e-5])
def test_every_chunk_sends_its_share(size: int, ratio: float) -> None:
    """So it leaves no more than what the chunk that sends the fewest may leave, wherever the large entries are."""
    compressor = ChunkTopK(ratio, warmup=None)
    k = compressor.target_count(size)
    length = next(length for length in 4096 * 2 ** np.arange(9) if length * k >= size)
    first = np.where(np.arange(size) < length, 3.0, 0.1).astype(np.float32)
    for x in (gradients("laplace", size, np.random.default_rng(1)), np.ones(size, np.float32), first):
        indices = compressor.select(OPS, x, k, k, compressor.new_state()).indices
        counts = np.bincount(indices // length, minlength=-(-size // length))
        assert counts.sum() == k and counts.min() > 0 and np.ptp(counts[: size // length] if size >= length else 0) <= 1
        mine = indices[: counts[0]]
        assert np.abs(x[mine]).min() >= np.delete(np.abs(x[:length]), mine).max(initial=0.0)
        left = 1 - np.square(x[indices], dtype=float).sum() / np.square(x, dtype=float).sum()
        assert left <= 1 - length * k // size / length + 1e-6
    assert ratio != 1 / 64 or size % 4096 or set(counts) == {64}, "as SparseLoCo does"


# --- Threshold ---


@on_every_backend
def test_the_residual_stays_within_the_threshold(backend: Backend) -> None:
    worker = make_worker(backend, Threshold(2.5, ratio=0.5), {"p": (5000,)})
    rng = np.random.default_rng(9)
    for _ in range(30):
        sent = send(backend, worker, gradients("laplace", 5000, rng))
        assert np.abs(sent.values).min() > 2.5
        assert np.abs(backend.numpy(worker.buckets[0].buffer)).max() <= 2.5


def test_the_threshold_follows_the_unit_of_the_residual() -> None:
    compressor, x = Threshold(2.0, ratio=0.5), np.array([0.9, -1.1, 2.1, 3.9, -4.1], np.float32)
    state = compressor.new_state()
    for factor, expected in ((1.0, [2, 3, 4]), (2.0, [4]), (0.25, [1, 2, 3, 4])):
        state.rescale(factor)
        assert compressor.select(OPS, x, 2, 5, state).indices.tolist() == expected
        loaded = compressor.new_state()
        loaded.load_state_dict(state.state_dict())
        assert compressor.select(OPS, x, 2, 5, loaded).indices.tolist() == expected


# --- what `select` returns is checked ---


def some(*indices: int, found: Any = 2, dtype: str = "int64") -> Any:
    """Return these indices, as an array of the framework."""

    def select(ops: Any, x: Any) -> Any:
        chosen = ops.indices(np.array(indices, np.int64), x)
        return Selection(chosen if dtype == "int64" else chosen // 1.0, found)

    return select


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "unsorted": (some(3, 1), ValueError, "got indices that do not ascend, or occur twice"),
    "twice": (some(3, 3), ValueError, "got indices that do not ascend, or occur twice"),
    "beyond": (some(3, 8), ValueError, "got indices from 3 to 8"),
    "negative": (some(-1, 3), ValueError, "got indices from -1 to 3"),
    "too many": (some(0, 1, 2, 3, 4, found=5), ValueError, r"got indices of shape \(5,\)"),
    "found too few": (some(1, 3, found=1), ValueError, "got found=1 with 2 indices"),
    "found no int": (some(1, 3, found=2.0), TypeError, "got found=2.0"),
    "floats": (some(1, 3, dtype="float"), TypeError, "got indices of type (torch.)?float.."),
    "a list": (lambda ops, x: Selection([1, 3], 2), TypeError, "got indices of type list for entries of type"),
    "no array": (lambda ops, x: ([1, 3], 2), TypeError, "got an object of type tuple"),
    "indices alone": (lambda ops, x: some(1, 3)(ops, x).indices, TypeError, "got an object of type (ndarray|Tensor)"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("backend", WITH_OPERATIONS, ids=str)
def test_what_is_no_selection_is_refused_by_name(backend: Backend, name: str) -> None:
    select, error, text = WRONG[name]

    class Mine(TopK):
        def select(self, ops: Any, x: Any, *arguments: Any) -> Any:
            return select(ops, x)

    worker = make_worker(backend, Mine(0.5, min_numel=0, warmup=None), {"p": (8,)})
    with pytest.raises(
        error, match=rf"^Mine\.select must return Selection\(indices, found\) with at most 4 .* {text}.*; use"
    ):
        take_step(backend, [worker], [{"p": np.ones(8, np.float32)}])
    worker.abort()
    assert not backend.numpy(worker.residuals.views["p"]).any()


def test_a_device_is_not_waited_for() -> None:
    """Whoever asks what is in an array on the device "meta" gets an error."""
    torch = pytest.importorskip("torch")
    x, indices = torch.empty(8, device="meta"), torch.empty(2, dtype=torch.int64, device="meta")
    check_selection("Mine", Selection(indices, 2), x, 4)
    for wrong, error in (
        (indices.int(), TypeError),
        (indices.reshape(1, 2), ValueError),
        (torch.arange(2), ValueError),
    ):
        with pytest.raises(error, match=r"^Mine.select must return .* got indices o(f|n) "):
            check_selection("Mine", Selection(wrong, 2), x, 4)
