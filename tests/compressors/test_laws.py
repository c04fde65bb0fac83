"""The laws that every compressor obeys: the oracle is held to them, and every other backend to the oracle (`test_backends`)."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from horovod_sparse.compressors.base import Compressor
from horovod_sparse.compressors.sidco import TRUSTED
from horovod_sparse.core.bucket import Bucket
from horovod_sparse.exchange.pairs import Pairs
from horovod_sparse.exchange.shared import Dense
from tests.harness.stairs import Halving
from tests.harness.table import COMPRESSORS, DEGENERATE, KINDS, ORACLE, SCALES_WITHOUT_SQUARES, Backend, Row, gradients
from tests.harness.worker import Worker
from tests.harness.workers import Sent, make_worker, make_workers, send, take_step

pytestmark = pytest.mark.parametrize("backend", [ORACLE], ids=str)


def for_rows(holds: Callable[[Row], bool]) -> pytest.MarkDecorator:
    """The compressors that a law is for."""
    return pytest.mark.parametrize("row", [row for row in COMPRESSORS if holds(row)], ids=str)


for_all = for_rows(lambda row: True)

FINITE = st.floats(-(2.0**100), 2.0**100, width=32)


def one_bucket(
    backend: Backend, row: Row, size: int, ratio: float, dtype: str = "float32", **options: Any
) -> tuple[Worker, Bucket]:
    worker = make_worker(backend, row.make(ratio, **options), {"p": (size,)}, dtype=dtype)
    return worker, worker.buckets[0]


def on_the_wire(compressor: Compressor, indices: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Float32 values as they are sent."""
    exchange = compressor.exchange
    if not isinstance(exchange, Pairs) or exchange.values == "float32":
        return values
    chunks = indices // 4096
    parts = [with_two_levels(values[chunks == chunk]) for chunk in np.unique(chunks)]
    return np.concatenate([values[:0], *parts])


def with_two_levels(values: np.ndarray) -> np.ndarray:
    """The values of one chunk as `Ops.quantize` rounds them."""
    magnitudes, sent = np.abs(values.astype(np.float64)), np.zeros_like(values)
    small = magnitudes <= magnitudes.mean()
    for half in (small, ~small):
        if half.any():
            level = min(magnitudes[half].mean(), 2 * magnitudes[half].min())
            upper = np.float32(level if magnitudes[half].max() <= 2**15 * level else 0.0).view(np.uint32) >> 16 << 16
            sent[half] = upper.view(np.float32)
    return np.copysign(sent, values)


def check_step(row: Row, worker: Worker, after: np.ndarray, sent: Sent) -> None:
    """What holds after each step, whatever the input."""
    before, indices, values = sent
    compressor = worker.compressor
    # Everything is sent in the residual's own type.
    sent_type = before.dtype if compressor.exchange == Dense() else np.dtype(np.float32)
    assert indices.dtype == np.int64 and values.dtype == sent_type
    assert (np.diff(indices) > 0).all(), "indices must be unique and ascending"
    assert indices.size <= compressor.message_capacity(before.size, compressor.target_count(before.size), 1)
    restored = after.copy()
    restored[indices] += values
    np.testing.assert_array_equal(restored, before, strict=True, err_msg="sent + kept must be gradient + old residual")
    if before.dtype == np.float32:
        np.testing.assert_array_equal(values, on_the_wire(compressor, indices, before[indices]))
        np.testing.assert_array_equal(after[indices], before[indices] - values)
    if not row.follows_scale:
        assert indices.size >= min(1, int(np.count_nonzero(before))), "something must be sent unless all is zero"
    unsent = np.delete(np.abs(before), indices)
    if row.band == (1.0, 1.0) and compressor.target_count(before.size) == before.size:
        assert not unsent.any(), "ratio 1 sends everything"
    if row.largest and np.any(values) and unsent.size:
        assert np.abs(before[indices]).min() >= unsent.max(), "the largest magnitudes are sent"


@for_all
@given(data=st.data())
def test_sent_plus_kept_is_gradient_plus_residual(backend: Backend, row: Row, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 300))
    ratio = data.draw(st.sampled_from((1.0, 0.5, 0.1, 0.01)))
    dtype = data.draw(st.sampled_from(("float32", "float64")))
    steps = data.draw(st.lists(npst.arrays(np.float32, size, elements=FINITE), min_size=1, max_size=3))
    worker, bucket = one_bucket(backend, row, size, ratio, dtype)
    for gradient in steps:
        expected = backend.numpy(bucket.buffer).copy() + gradient
        sent = send(backend, worker, gradient.astype(dtype))
        if not row.momentum:
            np.testing.assert_array_equal(sent.before, expected)
        check_step(row, worker, backend.numpy(bucket.buffer), sent)


@for_all
@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_gradients_neither_crash_nor_starve(backend: Backend, row: Row, name: str) -> None:
    # With momentum sums become ten times as large; what overflows has a test of its own.
    gradient = DEGENERATE[name] * np.float32(0.05 if name == "huge" and row.momentum else 1.0)
    for ratio in (1.0, 0.3, 0.01):
        worker, bucket = one_bucket(backend, row, gradient.size, ratio)
        for step in range(12):
            scaled = gradient if step == 0 else gradient * np.float32(0.01)
            sent = send(backend, worker, scaled)
            check_step(row, worker, backend.numpy(bucket.buffer), sent)


@for_all
# NumPy says that squares overflow, and the values that leave are float32.
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("scale", SCALES_WITHOUT_SQUARES)
def test_scales_whose_squares_float64_does_not_hold(backend: Backend, row: Row, scale: float) -> None:
    rng = np.random.default_rng(14)
    for ratio in row.ratios:
        worker, bucket = one_bucket(backend, row, 500, ratio, "float64")
        for _ in range(6):
            sent = send(backend, worker, rng.laplace(size=500) * scale)
            after = backend.numpy(bucket.buffer)
            assert np.isfinite(after).all() and np.isfinite(sent.values).all()
            check_step(row, worker, after, sent)


@for_rows(lambda row: not row.momentum)
@pytest.mark.parametrize("warmup", [None, 1.0])
def test_without_residual_a_step_that_failed_leaves_nothing(backend: Backend, row: Row, warmup: float | None) -> None:
    compressor = row.make(0.1, warmup=warmup, residual=False)
    workers = make_workers(backend, compressor, {"p": (400,)}, workers=2)
    gradient = gradients("laplace", 400, np.random.default_rng(0))
    take_step(backend, workers, [{"p": gradient * np.float32(np.nan)}, {"p": gradient}])
    for worker in workers:
        assert not backend.numpy(worker.buckets[0].buffer).any()


@for_all
def test_without_residual_nothing_is_kept(backend: Backend, row: Row) -> None:
    if row.settings.get("momentum"):
        with pytest.raises(ValueError, match="residual must be True with momentum="):
            row.make(0.1, residual=False)
        return
    rng = np.random.default_rng(1)
    worker, bucket = one_bucket(backend, row, 1000, 0.1, residual=False)
    for _ in range(3):
        gradient = gradients("laplace", 1000, rng)
        _, indices, values = send(backend, worker, gradient)
        np.testing.assert_array_equal(values, on_the_wire(worker.compressor, indices, gradient[indices]))
        assert not backend.numpy(bucket.buffer).any()


@for_rows(lambda row: not row.follows_scale)
@pytest.mark.parametrize("scale", [2.0**-40, 2.0**40])
def test_selection_does_not_depend_on_scale_or_sign(backend: Backend, row: Row, scale: float) -> None:
    rng = np.random.default_rng(3)
    for kind in KINDS:
        gradient = gradients(kind, 3000, rng)
        for ratio in row.ratios:
            plain = send(backend, one_bucket(backend, row, 3000, ratio)[0], gradient).indices
            scaled = send(backend, one_bucket(backend, row, 3000, ratio)[0], gradient * np.float32(-scale)).indices
            np.testing.assert_array_equal(plain, scaled)


@for_rows(lambda row: not row.follows_order)
def test_selection_follows_a_permutation(backend: Backend, row: Row) -> None:
    rng = np.random.default_rng(4)
    gradient = gradients("laplace", 3000, rng)
    order = rng.permutation(3000)
    for ratio in row.ratios:
        plain = send(backend, one_bucket(backend, row, 3000, ratio)[0], gradient).indices
        permuted = send(backend, one_bucket(backend, row, 3000, ratio)[0], gradient[order]).indices
        np.testing.assert_array_equal(np.sort(order[permuted]), plain)


@for_all
@pytest.mark.parametrize("saved_after", [0, 1, 7, 13])
def test_a_saved_state_continues_identically(backend: Backend, row: Row, saved_after: int) -> None:
    rng = np.random.default_rng(7)
    steps = [gradients("pareto", 2000, rng) for _ in range(26)]
    original, _ = one_bucket(backend, row, 2000, 0.01)
    for gradient in steps[:saved_after]:
        send(backend, original, gradient)
    saved = copy.deepcopy(original.state_dict())
    json.dumps(saved["adaptive"])  # Plain values only.
    resumed, _ = one_bucket(backend, row, 2000, 0.01)
    resumed.load_state_dict(saved)
    for gradient in steps[saved_after:]:
        expected, got = send(backend, original, gradient), send(backend, resumed, gradient)
        np.testing.assert_array_equal(got.indices, expected.indices)
        np.testing.assert_array_equal(got.values, expected.values)


@for_all
def test_achieved_count_with_error_feedback(backend: Backend, row: Row) -> None:
    rng = np.random.default_rng(8)
    size = 20_000
    for ratio in row.ratios:
        worker, _ = one_bucket(backend, row, size, ratio)
        counts = [send(backend, worker, gradients("laplace", size, rng)).indices.size for _ in range(60)]
        achieved = np.mean(counts[20:]) / worker.compressor.target_count(size)
        assert row.band[0] <= achieved <= row.band[1], f"ratio {ratio}: achieved/asked is {achieved:.3f}"


@for_rows(lambda row: row.largest and row.robust and not row.follows_scale)
def test_a_huge_entry_in_every_step_leaves_the_count_in_its_band(backend: Backend, row: Row) -> None:
    """The published estimators, which have no safeguards, do starve."""
    size = 3000
    # Only SIDCo's default corrects an estimate that is less than a factor 2 off.
    least, most = (1 / TRUSTED, TRUSTED) if row.name == "sidco-one-stage" else row.band
    for factor in (1e2, 1e6, 1e30):
        for ratio in row.ratios:
            rng, counts = np.random.default_rng(14), []
            worker, _ = one_bucket(backend, row, size, ratio)
            for _ in range(60):
                gradient = gradients("laplace", size, rng)
                gradient[rng.integers(size)] = factor
                counts.append(send(backend, worker, gradient).indices.size)
            achieved = np.mean(counts[20:]) / worker.compressor.target_count(size)
            assert least - 0.05 <= achieved <= most + 0.05, f"factor {factor}, ratio {ratio}: {achieved:.3f}"


@for_rows(lambda row: not row.workers_differ and not row.momentum)
def test_a_huge_entry_leaves_the_residual(backend: Backend, row: Row) -> None:
    """In one step, or with packed values in three: one has a third of a float32's significant bits."""
    for spike in (7e4, -1e12, 2e30, -3.4e38):
        worker, bucket = one_bucket(backend, row, 300, row.ratios[0])
        gradient = np.zeros(300, np.float32)
        gradient[7], total = spike, 0.0
        for _ in range(3 if row.largest else 400):
            total += float(send(backend, worker, gradient).values.astype(np.float64).sum())
            gradient[7] = 0.0
        assert not backend.numpy(bucket.buffer).any() and total == np.float32(spike)


@for_rows(lambda row: row.name != "noop" and not row.follows_scale)
def test_every_compressor_follows_a_schedule(backend: Backend, row: Row) -> None:
    """Down from 0.4 to 0.1, resumed on the way."""
    size, rng = 4000, np.random.default_rng(13)

    def make() -> Worker:
        return make_worker(backend, row.make(Halving(0.4, 0.1, 5)), {"p": (size,)})

    worker, counts = make(), []
    for step in range(60):
        if step == 7:
            state, worker = worker.state_dict(), make()
            worker.load_state_dict(state)
        counts.append(send(backend, worker, gradients("laplace", size, rng)).indices.size)
    least, most = row.band
    assert 0.9 * least <= np.mean(counts[30:]) / 400 <= 1.1 * most
