"""Every Triton kernel, interpreted on the CPU, in lockstep with its twin in NumPy; then a bucket's whole step."""

from __future__ import annotations

import copy
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from horovod_sparse.compressors import DGC, GaussianK, RandomK, RedSync, Threshold, TopK, gaussiank
from horovod_sparse.compressors.base import BucketState, Compressor
from horovod_sparse.compressors.sidco import SIDCo
from horovod_sparse.core.plan import Stage
from horovod_sparse.core.selector import Outcome
from horovod_sparse.estimation import fits
from horovod_sparse.exchange.pairs import Pairs
from horovod_sparse.exchange.wire import DAMAGED, NOT_FINITE, PADDING, tail
from horovod_sparse.kernels.gpu import threshold
from horovod_sparse.kernels.gpu.bucket import MOST_SLOTS, DeviceBucket
from horovod_sparse.kernels.gpu.message import union
from horovod_sparse.kernels.gpu.rules import Request, Rule, rule_of
from horovod_sparse.kernels.gpu.tiles import NUMBERS, RUN
from horovod_sparse.numpy.ops import NumpyOps
from horovod_sparse.ops.protocol import Moved, Moving, Selection
from horovod_sparse.torch import device
from horovod_sparse.torch.ops import TorchOps
from tests.harness.process import python
from tests.harness.table import gradients
from tests.kernels.gpu import tl, triton

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ORACLE = NumpyOps()
BLOCK, CHUNK, GROUPS = 64, 16, 2
COMPRESSORS: dict[str, Callable[..., Compressor]] = {
    "topk": TopK,
    "threshold": lambda ratio, **options: Threshold(2.0, ratio=ratio, **options),
    "exponential": lambda ratio, **options: SIDCo(ratio, warmup=None, **options),
    "gpareto": lambda ratio, **options: SIDCo(ratio, distribution="gpareto", stages=3, warmup=None, **options),
    "one-stage": lambda ratio, **options: SIDCo(ratio, stages=1, warmup=None, **options),
    "normal": lambda ratio, **options: GaussianK(ratio, warmup=None, **options),
    "sample": lambda ratio, **options: DGC(ratio, warmup=None, **options),
    "not-zero": lambda ratio, **options: RedSync(ratio, warmup=None, **options),
}
for_all = pytest.mark.parametrize("make", COMPRESSORS.values(), ids=COMPRESSORS)


def numbers_of(bucket: DeviceBucket) -> dict[str, float]:
    """The numbers of the last step by name."""
    return dict(zip(NUMBERS, bucket.numbers.tolist(), strict=True))


class Worker:
    """One worker with one bucket, beside the oracle's residual."""

    def __init__(self, compressor: Any, sizes: list[int], *, block: int = BLOCK, chunk: int = CHUNK) -> None:
        self.compressor, self.sizes = compressor, sizes = compressor, [size for size in sizes if size]
        self.state = compressor.new_state()
        self.residual = torch.zeros(sum(sizes))
        self.rule, self.k = rule_of(compressor, sum(sizes)), compressor.target_count(sum(sizes))
        assert self.rule is not None
        of_tiles: Any = {"block": block, "chunk": chunk, "groups": GROUPS}
        self.bucket = DeviceBucket(self.rule, self.residual, None, sizes, self.k / sum(sizes), **of_tiles)
        self.capacity = compressor.message_capacity(sum(sizes), self.k, 1)

    def accumulate(self, gradient: np.ndarray) -> np.ndarray:
        """Take in a gradient of all parameters; what is selected from, as the oracle has it."""
        expected = self.residual.numpy().copy()
        ORACLE.accumulate(expected, [(0, gradient)])
        self.bucket.begin(self.state, Stage(range(1), self.k, self.capacity, Pairs(), False, 0.0))
        for offset, end in itertools.pairwise(np.cumsum([0, *self.sizes]).tolist()):
            self.bucket.accumulate([(offset, torch.from_numpy(gradient[offset:end].copy()))], None, 1.0)
        np.testing.assert_array_equal(self.residual.numpy(), expected)
        return expected

    def step(self, gradient: np.ndarray) -> Step:
        """One step, and what always holds."""
        before, request = self.accumulate(gradient), self.rule.request(self.state, self.k, self.capacity)
        factor = getattr(self.state, "factor", 1.0)
        self.bucket.decide(gives_up=False)
        message = self.bucket.message().numpy()
        numbers = numbers_of(self.bucket)
        outcome = self.bucket.finish([*numbers.values()])
        self.state.step += 1
        sent = outcome.sent
        indices, values = message[:sent, 0], message[:sent, 1].copy().view(np.float32)
        assert (message[sent:] == [PADDING, 0]).all()
        assert (np.diff(indices) > 0).all() and (indices >= 0).all()
        restored = self.residual.numpy().copy()
        restored[indices] += values
        np.testing.assert_array_equal(restored, before, err_msg="sent + kept must be gradient + old residual")
        return Step(before, indices, values, numbers, request, factor)


class Step(NamedTuple):
    before: np.ndarray
    indices: np.ndarray
    values: np.ndarray
    numbers: Mapping[str, float]
    request: Request
    factor: float
    """GaussianK's, before the step."""


def assert_sums(got: Mapping[str, float], x: np.ndarray, cut: float, floor: float, not_finite: int) -> None:
    magnitudes = np.abs(x)
    assert got["count"] == np.count_nonzero(x) and got["largest"] == magnitudes.max(initial=0.0)
    assert got["candidates"] == np.count_nonzero(magnitudes > x.dtype.type(floor))
    assert got["not_finite"] == not_finite
    excesses = magnitudes[magnitudes > x.dtype.type(cut)].astype(np.float64) - np.float64(x.dtype.type(cut))
    assert got["tail_count"] == excesses.size
    assert got["tail_total"] == pytest.approx(excesses.sum(), rel=1e-12)
    assert got["tail_squares"] == pytest.approx(excesses @ excesses, rel=1e-12)


# --- accumulate ---


class Measuring(Rule):
    """A rule of which only the sums are wanted."""

    measures = True

    def __init__(self, cut: float, floor: float) -> None:
        self.cut, self.least = cut, floor

    def request(self, state: Any, k: int, capacity: int) -> Request:
        return Request("exponential", cut=self.cut)

    def floor(self, state: BucketState, limit: float) -> float:
        return self.least


NO_STATE: Any = None
"""`Measuring` does not look at it."""


def on_host(moved: Moved) -> Moved:
    """The same for the oracle: NumPy has no bfloat16, and the distance between halves is computed in float32."""
    wide = torch.promote_types(moved.now.dtype, torch.float32)
    return moved._replace(now=moved.now.to(wide).numpy(), start=moved.start.to(wide).numpy())


def check_accumulate(
    residual: np.ndarray,
    gradient: torch.Tensor | Moved | None,
    cut: float,
    floor: float,
    velocity: Any = None,
    momentum: float | None = None,
    rate: float = 1.0,
) -> None:
    """The parameter stands between two others, at an offset that no vector is aligned with."""
    buffer = torch.from_numpy(np.pad(residual, (3, 2), constant_values=9))
    given: Any = np.zeros(residual.size, np.float32)
    if isinstance(gradient, Moved):
        given = on_host(gradient)
    elif gradient is not None:
        given = gradient.double().numpy()
    expected, velocity = residual.copy(), np.zeros_like(residual) if velocity is None else velocity.copy()
    moving = None if momentum is None else torch.from_numpy(np.pad(velocity, (3, 2)))
    how = None if momentum is None else Moving(velocity, momentum)
    (not_finite,) = ORACLE.accumulate(expected, [(0, given)], how, rate)
    sizes = [3, residual.size, 2]
    bucket = DeviceBucket(Measuring(cut, floor), buffer, moving, sizes, 0.1, block=BLOCK, chunk=CHUNK)
    # There is room for everything, so that nothing is searched for.
    bucket.begin(NO_STATE, Stage(range(1), sum(sizes), sum(sizes), Pairs(), False, 0.0))
    bucket.accumulate([(3, gradient)], momentum, rate)
    np.testing.assert_array_equal(buffer.numpy(), np.pad(expected, (3, 2), constant_values=9))
    if moving is not None:
        np.testing.assert_array_equal(moving.numpy()[3:-2], velocity)
    bucket.decide(gives_up=False)
    bucket.message()
    numbers = numbers_of(bucket)
    assert [*bucket.finish([*numbers.values()]).not_finite] == ([3] if not_finite else [])
    assert_sums(numbers, expected, cut, floor, not_finite)


def sample(size: int, dtype: Any, seed: int, *, bad: bool = False) -> np.ndarray:
    rng = np.random.default_rng(seed)
    special = [0.0, -0.0, 0.5, -3.0, np.finfo(dtype).tiny, np.finfo(dtype).smallest_subnormal]
    special += [np.nan, np.inf, -np.inf, np.finfo(dtype).max] * bad
    return np.where(rng.uniform(size=size) < 0.6, rng.laplace(size=size), rng.choice(special, size)).astype(dtype)


@pytest.mark.parametrize("size", [1, 64, 131])
def test_accumulate(size: int) -> None:
    for cut, floor in ((0.0, 0.5), (0.7, math.inf), (math.inf, 1e-45), (1e300, 2.0)):
        gradient = torch.from_numpy(sample(size, np.float32, 1, bad=True))
        check_accumulate(sample(size, np.float32, 0), gradient, cut, floor)


@pytest.mark.parametrize(
    ("kind", "momentum", "rate"),
    [
        *((kind, None, 1.0) for kind in (None, torch.bfloat16, torch.float16, torch.float32, torch.float64)),
        *((kind, one, 0.3) for kind in (None, torch.float16) for one in (None, 0.9)),
        (torch.float32, 0.9, 1.0),
    ],
    ids=str,
)
def test_accumulate_takes_gradients_of_every_type(kind: torch.dtype | None, momentum: Any, rate: float) -> None:
    """Without a gradient it measures."""
    gradient = None if kind is None else torch.from_numpy(sample(70, np.float64, 1, bad=True)).to(kind)
    check_accumulate(sample(70, np.float32, 0), gradient, 0.5, 1.0, sample(70, np.float32, 2), momentum, rate)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1, 64, 131])
def test_accumulate_takes_in_what_has_moved(kind: torch.dtype, size: int) -> None:
    now, start = (torch.from_numpy(sample(size, np.float64, seed, bad=True)).to(kind) for seed in (1, 3))
    for growth, pull, rate in ((1.0, 0.0, 1.0), (1.4, 1e-3, 1.0), (1.4, 1e-3, -1.0)):
        check_accumulate(sample(size, np.float32, 0), Moved(now, start, growth, pull), 0.5, 1.0, rate=rate)


def test_parts_that_have_moved_and_others_that_have_not_are_taken_in_together() -> None:
    """Of two types, with their own growths."""
    arrays = [torch.from_numpy(sample(70, np.float32, seed)) for seed in range(4)]
    moved = [Moved(arrays[0], arrays[1], 1.4, 1e-3), None, Moved(arrays[2].half(), arrays[3].half(), 2.0, 0.5)]
    buffer, expected = torch.zeros(210), np.zeros(210, np.float32)
    bucket = DeviceBucket(Measuring(0.5, 1.0), buffer, None, [70, 70, 70], 0.1, block=BLOCK, chunk=CHUNK)
    bucket.begin(NO_STATE, Stage(range(1), 210, 210, Pairs(), False, 0.0))
    bucket.accumulate([(70 * number, one) for number, one in enumerate(moved)], None, 1.0)
    for number, one in enumerate(moved):
        if one is not None:
            ORACLE.accumulate(expected, [(70 * number, on_host(one))])
    np.testing.assert_array_equal(buffer.numpy(), expected)


ANY = st.floats(width=32)
FINITE = st.floats(-(2.0**100), 2.0**100, width=32)
FEW = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e-45, 3.0])


@given(data=st.data())
@settings(max_examples=settings.default.max_examples // 4)
def test_accumulate_whatever_the_gradient(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 80))
    residual = data.draw(npst.arrays(np.float32, size, elements=FINITE))
    gradient = data.draw(npst.arrays(np.float32, size, elements=st.one_of(FINITE, ANY)))
    check_accumulate(residual, torch.from_numpy(gradient), data.draw(st.sampled_from([0.0, 1.0, math.inf])), 1.5)


# --- the scalar algebra ---


@triton.jit
def _fits(moments, out, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    lanes = tl.arange(0, SIZE)
    mean, variance = tl.load(moments + lanes), tl.load(moments + SIZE + lanes)
    ratio = tl.load(moments + 2 * SIZE + lanes)
    tl.store(out + lanes, threshold.exponential(mean, ratio))
    tl.store(out + SIZE + lanes, threshold.generalized_pareto(mean, variance, ratio))


POSITIVE = st.floats(1e-30, 1e30)


@given(st.lists(st.tuples(POSITIVE, st.floats(0.0, 1e4), st.floats(1e-9, 1.0)), min_size=8, max_size=8))
def test_fits(rows: list[tuple[float, float, float]]) -> None:
    moments = [(mean, mean * mean * spread, ratio) for mean, spread, ratio in [*rows, (0.0, 0.0, 0.5), (1.0, 1.0, 0.1)]]
    # Variances that float64 does not hold.
    moments += [(1e-170, 0.0, 0.1), (1e160, math.inf, 0.1), (1e160, math.nan, 0.1), (1e160, 0.0, 0.1)]
    moments += [(1.0, math.inf, 0.1), (1e-160, 1e-300, 0.1)]
    out = torch.zeros(2, 16, dtype=torch.float64)
    _fits[(1,)](torch.tensor(moments, dtype=torch.float64).t().contiguous(), out, SIZE=16)
    for (mean, variance, ratio), exponential, pareto in zip(moments, *out.tolist(), strict=True):
        assert exponential == pytest.approx(fits.exponential(mean, ratio), rel=1e-12)
        # exp(x) - 1 loses up to four digits near zero.
        assert pareto == pytest.approx(fits.generalized_pareto(mean, variance, ratio), rel=1e-10)


# --- a bucket's step ---


def exceeding(x: np.ndarray, threshold: float, capacity: int, found: float) -> Selection:
    """What exceeds a threshold. Sums in another order move it by its last digits, beyond entries that are next to it."""
    near = [ORACLE.select_above(x, threshold * (1 + by), capacity) for by in (-1e-12, 0.0, 1e-12)]
    return min(near, key=lambda one: abs(one.found - found))


def check_choice(worker: Worker, step: Step) -> None:
    """The entries that the oracle would have chosen."""
    x, k, capacity = step.before, worker.k, worker.capacity
    numbers, request = step.numbers, step.request
    if worker.rule.measures and np.count_nonzero(x) <= k:
        chosen = ORACLE.select_above(x, 0.0, capacity)
    elif request.rule == "largest":
        chosen = ORACLE.select_largest(x, k)
    elif request.rule in ("normal", "given"):
        sums = ORACLE.measure(x)
        if request.sample is not None:
            threshold = ORACLE.sampled_largest(x, *request.sample)
        else:
            threshold = gaussiank.fit(sums, k, len(x)) * step.factor
        chosen = exceeding(x, fits.below_largest(sums.largest, threshold), capacity, numbers["found"])
        assert numbers["found"] == chosen.found
        if not request.trust[0] <= chosen.found <= request.trust[1]:
            chosen = ORACLE.select_largest(x, k)
    elif request.rule == "above":
        chosen = ORACLE.select_above(x, worker.compressor.threshold, capacity)
        assert numbers["found"] == chosen.found
    else:
        sums, tail = ORACLE.measure(x), ORACLE.measure(x, request.cut)
        aim = min(request.aim, sums.count - 1)
        usable = aim < tail.count <= request.most_tail * sums.count
        assert bool(numbers["estimated"]) == usable
        chosen = ORACLE.select_largest(x, k)
        if usable:
            # The number of stages is about the next cut alone.
            fitted_to = request.cut, tail, sums.count, sums.largest, aim, 2
            threshold = fits.below_largest(sums.largest, worker.compressor.last_stage(*fitted_to)[0])
            fitted = exceeding(x, threshold, capacity, numbers["found"])
            assert numbers["found"] == fitted.found
            if request.trust[0] <= fitted.found <= request.trust[1]:
                chosen = fitted
                if fitted.found <= capacity:
                    assert numbers["limit"] == pytest.approx(float(x.dtype.type(threshold)), rel=1e-6)
    np.testing.assert_array_equal(step.indices, chosen.indices)
    np.testing.assert_array_equal(step.values, x[step.indices])


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=[pytest.mark.full] if name == "one-stage" else [])
        for name, make in COMPRESSORS.items()
    ],
)
def test_steps(make: Any) -> None:
    """Cold, warm, with candidates that do not suffice, and with tiles that hold more of them than slots."""
    worker, rng = Worker(make(0.1), [70, 1, 90, 66]), np.random.default_rng(0)
    tiles = sum(-(-size // BLOCK) for size in worker.sizes)
    assert tiles > GROUPS
    exact, candidates = list[float](), list[float]()
    for number in range(6):
        scale = {2: 1e-3, 4: 100.0}.get(number, 1.0)
        gradient = gradients("laplace", 227, rng) * np.float32(scale)
        step = worker.step(gradient)
        check_choice(worker, step)
        exact.append(step.numbers["exact"])
        candidates.append(step.numbers["candidates"])
    assert max(candidates) > tiles * (BLOCK // MOST_SLOTS) * RUN
    if make is COMPRESSORS["exponential"]:
        assert 0.0 in exact and 1.0 in exact


@for_all
@given(data=st.data())
@settings(max_examples=settings.default.max_examples // 20)
def test_steps_whatever_the_gradient(make: Any, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 150))
    first = data.draw(st.integers(0, size))
    worker = Worker(make(data.draw(st.sampled_from([1.0, 0.3, 0.02]))), [first, size - first])
    for _ in range(2):
        check_choice(worker, worker.step(data.draw(npst.arrays(np.float32, size, elements=st.one_of(FEW, FINITE)))))


@for_all
@pytest.mark.parametrize("size", [1, 65])
def test_what_there_is_room_for_is_sent_and_counted(make: Any, size: int) -> None:
    worker = Worker(make(1.0), [size])
    for _ in range(2):
        check_choice(worker, worker.step(np.ones(size, np.float32)))


def test_candidates_that_are_too_few_by_some_are_not_enough() -> None:
    worker = Worker(TopK(0.25, warmup=None), [128])
    assert worker.step(np.arange(1, 129, dtype=np.float32)).numbers["limit"] == 97.0
    # Of 32 entries 24 are above the floor, in no more runs than there are slots.
    wanted = np.arange(128, dtype=np.float32) / 4
    wanted[:12] = wanted[64:76] = 100.0
    step = worker.step(wanted - worker.residual.numpy())
    assert step.numbers["candidates"] == 24
    assert step.numbers["collected"] == 128
    check_choice(worker, step)


@pytest.mark.full
@pytest.mark.parametrize("make", [TopK, COMPRESSORS["gpareto"]])
def test_a_sample_finds_few_candidates_and_enough_of_them(make: Any) -> None:
    """What was seen before is of no use: first there was nothing, then entries are a thousand times smaller."""
    numel = 20_000
    worker, rng = Worker(make(0.01), [numel - 7_500, 7_500], block=256, chunk=256), np.random.default_rng(4)
    for scale in (1.0, 1e-3):
        worker.residual.zero_()
        step = worker.step(gradients("laplace", numel, rng) * np.float32(scale))
        check_choice(worker, step)
        if step.numbers["exact"]:
            assert worker.k <= step.numbers["collected"] < 6 * worker.k
            assert make is TopK or step.numbers["low"] > 0.0
    assert step.numbers["exact"]


def test_a_sample_that_misleads_costs_time_alone() -> None:
    """The few entries that are looked at are the largest, so that too few others exceed what they tell."""
    tiles, each = 8, BLOCK // RUN
    worker, wanted = Worker(TopK(0.2, warmup=None), [tiles * BLOCK]), np.arange(tiles * BLOCK, dtype=np.float32) / 1e4
    for tile in range(tiles):
        first = tile * BLOCK + (tile * 40503 >> 4) % each * RUN
        wanted[first : first + RUN] = 100.0
    step = worker.step(wanted)
    assert step.numbers["collected"] == tiles * RUN < worker.k
    check_choice(worker, step)


@pytest.mark.parametrize(("outliers", "found"), [(0, 38), (2, 2)])
def test_an_estimate_that_is_far_off_is_replaced(outliers: int, found: int) -> None:
    """Equal magnitudes above the cut are all above the fitted threshold; with a few enormous ones nothing else is."""
    worker = Worker(SIDCo(0.05, warmup=None), [300])
    worker.step(gradients("laplace", 300, np.random.default_rng(6)))
    wanted = np.full(300, 0.1, np.float32)
    wanted[5:195:5] = 100.0
    wanted[200 : 200 + outliers] = 1e7
    step = worker.step(wanted - worker.residual.numpy())
    assert (step.numbers["found"], step.numbers["sent"], step.numbers["exact"]) == (found, worker.k, 1.0)
    check_choice(worker, step)


@for_all
def test_a_gradient_that_is_not_finite_sends_nothing(make: Any) -> None:
    worker, rng = Worker(make(0.1), [100, 60]), np.random.default_rng(2)
    worker.step(gradients("laplace", 160, rng))
    state, gradient = worker.state.state_dict(), gradients("laplace", 160, rng)
    gradient[[7, 130]] = np.nan, -np.inf
    before = worker.accumulate(gradient)
    worker.bucket.decide(gives_up=False)
    message = worker.bucket.message()
    numbers = numbers_of(worker.bucket)
    assert worker.bucket.finish([*numbers.values()]) == Outcome(not_finite=[0, 100])
    assert numbers["not_finite"] == 2
    assert message[0].tolist() == [NOT_FINITE, 0] and (message[1:] == torch.tensor([PADDING, 0])).all()
    np.testing.assert_array_equal(worker.residual.numpy(), before)
    assert worker.state.state_dict() == state
    assert TorchOps().rows_in_use(message, 1, 160).tolist() == [NOT_FINITE]
    check_choice(worker, worker.step(gradients("laplace", 160, rng)))


@pytest.mark.parametrize("name", ["exponential", "gpareto"])
def test_sidco_learns_what_it_does_elsewhere(name: str) -> None:
    worker, rng = Worker(COMPRESSORS[name](0.05), [300]), np.random.default_rng(3)
    worker.step(gradients("laplace", 300, rng))
    assert 0.0 < worker.state.cut < math.inf, "the first search tells where to cut"
    for _ in range(4):
        before, stages = copy.copy(worker.state), worker.state.controller.stages
        step = worker.step(gradients("laplace", 300, rng))
        assert step.numbers["estimated"]
        sums, tail = ORACLE.measure(step.before), ORACLE.measure(step.before, step.request.cut)
        found, asked = step.numbers["found"], min(step.request.aim, sums.count - 1)
        _, cut = worker.compressor.last_stage(step.request.cut, tail, sums.count, sums.largest, asked, stages)
        if step.request.trust[0] <= found <= step.request.trust[1]:
            assert worker.state.cut == pytest.approx(cut, rel=1e-9)
            worker.compressor.learn(before, worker.k, 300, asked, int(found))
            assert worker.state.aim == before.aim
        assert worker.state.stages == stages


@pytest.mark.parametrize("momentum", [None, 0.5])
def test_sums_that_overflow_stay_at_the_largest_number(momentum: float | None) -> None:
    largest = float(np.finfo(np.float32).max)
    residual, gradient, velocity = np.ones(150, np.float32), np.zeros(150, np.float32), np.zeros(150, np.float32)
    residual[[5, 70]] = gradient[[5, 70]] = largest, -largest
    velocity[[5, 149]] = gradient[149] = largest
    check_accumulate(residual, torch.from_numpy(gradient), 0.5, 0.7, velocity, momentum)


# --- receive ---


def test_parts_of_a_bucket_are_written_as_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some in float64, in any order, and not all of the bucket."""
    rng, used = np.random.default_rng(6), [30, 0, 25]
    messages = [
        ORACLE.pack(np.sort(rng.choice(90, count, replace=False)), rng.normal(size=count).astype(np.float32), 30)
        for count in used
    ]
    gathered = torch.from_numpy(np.concatenate(messages))
    written = []
    for on_device in (False, True):
        monkeypatch.setattr(device, "has_kernels", lambda where, there=on_device: there)
        parts = [(40, torch.ones(20)), (0, torch.ones(25)), (60, torch.ones(30, dtype=torch.float64))]
        TorchOps().assemble(parts, gathered, used, 3.0)
        written.append([target for _, target in parts])
    assert all(torch.equal(one, other) for one, other in zip(*written, strict=True))
    assert all(one.any() for one in written[0])


@given(
    messages=st.lists(st.sets(st.integers(0, 39), max_size=6), min_size=1, max_size=9),
    numel_stride=st.sampled_from([(40, 1), (4_000, 101)]),
)
@settings(max_examples=settings.default.max_examples // 2)
def test_a_union_is_found_as_on_the_host(messages: list[set[int]], numel_stride: tuple[int, int]) -> None:
    """Of one group of marks, and of several."""
    numel, stride = numel_stride
    rows = [[-2, 7, *(stride * one for one in sorted(some)), *[PADDING] * (6 - len(some))] for some in messages]
    gathered = np.array(rows, np.int32).reshape(-1)
    indices, numbers = union(torch.from_numpy(gathered), len(messages), numel)
    expected = ORACLE.union(gathered, len(messages), 2, numel)
    assert expected is not None
    headers = [-2, 7] * len(messages)
    assert len(indices) == min(6 * len(messages), numel) and numbers.tolist() == [len(expected), *headers]
    np.testing.assert_array_equal(indices[: len(expected)].numpy(), expected)
    assert (indices[len(expected) :] >= numel).all(), "what is no index"
    for flawed in (numel, -2):
        gathered[-6] = flawed
        assert union(torch.from_numpy(gathered), len(messages), numel)[1].tolist() == [DAMAGED, *headers]


@pytest.mark.parametrize("used", [0, 3, 5])
def test_pairs_are_written_as_on_the_host(monkeypatch: pytest.MonkeyPatch, used: int) -> None:
    monkeypatch.setattr(device, "has_kernels", lambda where: True)
    indices, values = np.array([2, 3, 5, 8, 9])[:used], np.array([1.0, -0.0, 2.0, 3.0, 4.0], np.float32)[:used]
    expected = ORACLE.pack(indices, values, 5)
    at, numbers = torch.from_numpy(indices), torch.from_numpy(values)
    np.testing.assert_array_equal(TorchOps().pack(at, numbers, 5).numpy(), expected)
    strided = TorchOps().pack(at.repeat_interleave(2)[::2], numbers.repeat_interleave(2)[::2], 5)
    np.testing.assert_array_equal(strided.numpy(), expected)
    if used:
        with pytest.raises(ValueError, match="up to 2 indices, got"):
            TorchOps().pack(at, numbers, 2)


def test_messages_of_values_have_the_residuals_type() -> None:
    """A script may have set another default."""
    worker = Worker(RandomK(0.5, warmup=None), [40, 30])
    before = worker.accumulate(gradients("laplace", 70, np.random.default_rng(8)))
    worker.bucket.decide(gives_up=False)
    torch.set_default_dtype(torch.bfloat16)
    try:
        whole = worker.bucket.whole(0)
        _, taken = worker.bucket.take_out(torch.tensor([3, 5]), 2, None)
    finally:
        torch.set_default_dtype(torch.float32)
    np.testing.assert_array_equal(whole.numpy()[:70], before)
    np.testing.assert_array_equal(taken.numpy(), before[[3, 5]])


@pytest.mark.parametrize("gives_up", [False, True])
@pytest.mark.parametrize("is_bad", [False, True])
def test_messages_of_values_are_written_as_on_the_host(is_bad: bool, gives_up: bool) -> None:
    """Those of some indices, and those of all entries. Nothing is taken of a step that fails or is given up."""
    worker, checksum = Worker(RandomK(0.5, warmup=None), [40, 30]), 0b1010_0000_0000_0110
    gradient = gradients("laplace", 70, np.random.default_rng(8))
    before = worker.accumulate(gradient)
    if is_bad:
        gradient[3] = np.nan
        before = worker.accumulate(gradient)
    fails = is_bad or gives_up
    worker.bucket.decide(gives_up=gives_up)
    end = tail(checksum, is_bad=fails)
    assert worker.bucket.whole(checksum).tolist() == [*before, *end]
    np.testing.assert_array_equal(worker.residual.numpy(), before)
    indices = np.array([3, 5, 69])
    pairs, message = worker.bucket.take_out(torch.from_numpy(indices), 5, checksum)
    values = np.zeros(3, np.float32) if fails else before[indices]
    assert message.tolist() == [*values, 0.0, 0.0, *end]
    assert pairs[:, 0].tolist() == ([NOT_FINITE, PADDING, PADDING] if fails else indices.tolist())
    before[indices] -= values
    np.testing.assert_array_equal(worker.residual.numpy(), before)


def test_what_is_no_index_takes_nothing() -> None:
    worker = Worker(RandomK(0.5, warmup=None), [40, 30])
    before = worker.accumulate(gradients("laplace", 70, np.random.default_rng(8)))
    worker.bucket.decide(gives_up=False)
    pairs, message = worker.bucket.take_out(torch.tensor([3, 69, 70, 2**31 - 18]), 5, None)
    assert pairs[:, 0].tolist() == [3, 69, PADDING, PADDING]
    assert message.tolist() == [before[3], before[69], 0.0, 0.0, 0.0]
    before[[3, 69]] = 0.0
    np.testing.assert_array_equal(worker.residual.numpy(), before)


# --- what it is for ---


def test_what_does_not_select_on_the_device() -> None:
    for other in (
        GaussianK(0.1, refine="paper", warmup=None),
        TopK(0.1, clip=1.0, warmup=None),
        SIDCo(0.1, adapt="paper", warmup=None),
    ):
        assert rule_of(other, 100) is None


def run(*arguments: object, **environment: Any) -> subprocess.CompletedProcess[str]:
    # Where Triton is, and this package.
    path = os.pathsep.join(sys.path)
    return python(*arguments, limit=300, PYTHONPATH=path, HOROVOD_SPARSE_KERNELS="1", **environment)


@pytest.mark.full
def test_every_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    """The interpreter runs what the compiler refuses."""
    done = run("ci/compile_triton.py", 90, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    names = {line.split()[0] for line in done.stdout.splitlines()}
    assert names == {
        "accumulate",
        "fit",
        "sample",
        "collect",
        "count",
        "histogram",
        "write",
        "write_indices",
        "count_marks",
        "list_marks",
        "take",
        "write_all",
        "pair",
        "check",
        "add_up",
        "level",
        "join",
        "part",
    }


@pytest.mark.full
def test_the_check_of_a_gpu_works_interpreted() -> None:
    """It compares, and times, all that it does on a GPU."""
    options = ("--interpret", "--sizes", 500, "--ratios", 0.01, "--repetitions", 1)
    done = run("benchmarks/gpu_check.py", *options)
    assert done.returncode == 0, done.stderr
    assert "CPU, interpreted: no measurement" in done.stdout and "TopK, cold" in done.stdout
