"""Whatever happens in whatever order: nothing is lost, all replicas get the same, and a state goes on where it was saved.

A state machine of Hypothesis drives a few workers through steps, failures, states and changes of scale. After every rule each
worker must hold what plain NumPy says (`worlds.Expected`). A twin, made from a saved state or from nothing after a reset, must
go on exactly like the workers it came from. Where the twin's loss is scaled by a power of two, its numbers are too.
"""

from __future__ import annotations

import copy
import functools
import math
import operator
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from horovod_sparse import kernels
from horovod_sparse.core.statistics import Counts
from horovod_sparse.exchange.shared import Dense
from horovod_sparse.kernels.pool import BufferPool
from horovod_sparse.public import Pairs, Union
from tests.harness.cases import (
    GRANULARITIES,
    KINDS,
    MOST_PASSES,
    MOST_SCALE,
    NAMES,
    SHAPES,
    WILD,
    Case,
    Step,
    cases,
    entries,
    places,
    seeds,
    size_of,
    steps,
    worlds,
)
from tests.harness.workers import Reduced, dense_sum
from tests.harness.worlds import Expected, World


def equal(one: np.ndarray, other: np.ndarray) -> bool:
    return np.array_equal(one, other, equal_nan=True)


pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:horovod_sparse. rank .* the gradient of"),
    pytest.mark.filterwarnings("ignore:horovod_sparse. rank .* more entries"),
]


class LendingPool(BufferPool):
    """Knows what it has lent."""

    def __init__(self) -> None:
        super().__init__()
        self._arrays: list[weakref.ref[Any]] = []

    def lend(self, count: int, dtype: str) -> Any:
        array = super().lend(count, dtype)
        self._arrays.append(weakref.ref(array))
        return array

    def lent(self) -> int:
        self._arrays = [array for array in self._arrays if array() is not None]
        return len(self._arrays)


class Settled(NamedTuple):
    """What the machine knows between two steps."""

    expected: list[Expected]
    adaptive: list[Any]
    history: list[list[list[Counts]]]
    steps: int


class Machine(RuleBasedStateMachine):
    @initialize(
        case=cases(),
        world=worlds,
        granularity=st.sampled_from(GRANULARITIES),
        wild=st.booleans(),
        first=steps,
        scale=st.sampled_from((1.0, 0.5, 4.0)),
    )
    def begin(self, case: Case, world: int, granularity: str | int, wild: bool, first: list[int], scale: float) -> None:
        self.case, self.wild = case, wild
        self.pools = kernels.pool, LendingPool()
        kernels.pool = self.pools[1]
        self.rates = dict.fromkeys(NAMES, 0.5)
        self.twin: World | None = None
        self.scale = scale if self.scales else 1.0
        """The scale of the twin's loss."""
        self.saved: tuple[list[Any], list[Any], Settled] | None = None
        """States, copies of them, and what was known when they were saved."""
        self.local: list[dict[str, np.ndarray]] = [{} for _ in range(3)]
        """What the backward passes since the last reduction have added up on every rank."""
        self.passes = 0
        self.frozen: set[str] = set()
        self.start(World(case, world, granularity))
        self.go_on(first)
        self.make_twin(self.main.state_dicts())

    @property
    def scales(self) -> bool:
        """Whether the twin's loss can be scaled."""
        return not (self.wild or self.case.row.follows_scale)

    def make_twin(self, states: list[Any] | None) -> None:
        """Make fresh workers that are like those in use, which have these states; None if they hold nothing."""
        self.twin = World(self.case, self.main.world, self.main.granularity)
        if states is not None:
            self.twin.load(states)
        assert self.adaptive() == [state["adaptive"] for state in self.twin.state_dicts()]
        if self.scale != 1.0:
            self.twin.change_scale(self.scale)

    def go_on(self, seeds: list[int]) -> None:
        """Take some ordinary steps."""
        for seed in seeds:
            self.add_pass(seed, "laplace", [], None)
            self.reduce(self.step_of(seed, together=seed % 2 == 0, eager=seed % 3 == 0))

    def start(self, world: World) -> None:
        """Use workers that hold nothing yet."""
        self.main = world
        self.expected = [Expected(world.compressor, self.case.residual_dtype) for _ in world.workers]
        self.history: list[list[list[Counts]]] = []
        """What every bucket of every rank has sent in the steps that succeeded."""
        self.steps = 0

    def teardown(self) -> None:
        if hasattr(self, "pools"):
            kernels.pool = self.pools[0]

    @property
    def all(self) -> list[World]:
        return [self.main] if self.twin is None else [self.main, self.twin]

    def settled(self) -> Settled:
        return Settled(copy.deepcopy(self.expected), self.adaptive(), list(self.history), self.steps)

    def adaptive(self) -> list[Any]:
        return [state["adaptive"] for state in self.main.state_dicts()]

    def go_back(self, settled: Settled) -> None:
        self.expected, _, self.history, self.steps = copy.deepcopy(settled)

    # --- gradients ---

    def add_pass(self, seed: int, kind: str, missing: Sequence[tuple[int, str]], poison: Any) -> None:
        """One backward pass on every rank. The framework adds its gradients to those of the passes before."""
        rng = np.random.default_rng(seed)
        kind = "laplace" if kind in WILD and not self.wild else kind
        for rank, sums in enumerate(self.local):
            for name in NAMES:
                shape = SHAPES.get(name, (size_of(name),))
                gradient = entries(kind, size_of(name), self.case.dtype, rng).reshape(shape)
                if poison is not None and poison[0] == (rank, name):
                    gradient.reshape(-1)[seed % gradient.size] = poison[1]
                if (rank, name) not in missing:
                    sums[name] = sums[name] + gradient if name in sums else gradient
        self.passes += 1

    def step_of(self, seed: int, *, together: bool, eager: bool) -> Step:
        rng = np.random.default_rng(seed)
        order = rng.permutation(len(SHAPES)).tolist()
        names = rng.permutation(list(SHAPES)).tolist()
        given: list[dict[str, Any]] = [
            {name: None if name in self.frozen else sums.get(name) for name in NAMES} for sums in self.local
        ]
        self.local, self.passes = [{} for _ in range(3)], 0
        return Step(given[: self.main.world], dict(self.rates), order, names, together, eager)

    @precondition(lambda self: self.passes < MOST_PASSES - 1)
    @rule(seed=seeds, kind=st.sampled_from(KINDS), missing=st.lists(places, max_size=4))
    def backward(self, seed: int, kind: str, missing: list[tuple[int, str]]) -> None:
        self.add_pass(seed, kind, missing, None)

    # --- steps ---

    @rule(
        seed=seeds,
        kind=st.sampled_from(KINDS),
        missing=st.lists(places, max_size=4),
        together=st.booleans(),
        eager=st.booleans(),
    )
    def step(self, seed: int, kind: str, missing: list[tuple[int, str]], together: bool, eager: bool) -> None:
        self.add_pass(seed, kind, missing, None)
        self.reduce(self.step_of(seed, together=together, eager=eager))

    @rule(seed=seeds, poison=st.tuples(places, st.sampled_from((np.nan, np.inf, -np.inf))), more=st.none() | places)
    def poisoned_step(self, seed: int, poison: Any, more: tuple[int, str] | None) -> None:
        self.add_pass(seed, "laplace", [] if more is None or more == poison[0] else [more], poison)
        self.reduce(self.step_of(seed, together=False, eager=False))

    def reduce(self, step: Step) -> None:
        before = self.settled()
        results = [world.run(step) for world in self.all]
        bad = self.take_in(step, [list(NAMES)] * self.main.world)
        for bucket in self.main.workers[0].buckets:
            lost = not bad.isdisjoint(bucket.slots)
            assert all((mine[name] is None) == lost for mine in results[0] for name in bucket.slots)
        check_replicas(results[0])
        if bad:
            self.check_never_been(before)
        else:
            counts = [self.settle(number, results[0]) for number in range(len(self.main.workers[0].buckets))]
            self.history.append([[one[rank] for one in counts] for rank in range(self.main.world)])
            self.steps += 1
            for expected in self.expected:
                expected.end()
        for theirs in results[1:]:
            self.compare_results(results[0][0], theirs[0])

    def check_never_been(self, before: Settled) -> None:
        """Gradients are out again, and nothing was learned. The invariants compare the rest."""
        for expected, was in zip(self.expected, before.expected, strict=True):
            sizes = {name: np.abs(added * rate) for name, added, rate in expected.taken}
            expected.undo()
            for name, residual in was.waiting.items():
                most = np.abs(residual) + sizes.get(name, 0.0)
                precision = np.finfo(residual.dtype)
                if np.isfinite(most).all():
                    near = 2 * precision.eps * most + precision.smallest_subnormal
                    assert (np.abs(expected.waiting[name] - residual) <= near).all(), "to rounding"
        assert self.adaptive() == before.adaptive, "nothing is learned from a step that has never been"

    def take_in(self, step: Step, reached: Sequence[Sequence[str]]) -> set[str]:
        """Let the gradients that have arrived into what is expected; return the parameters that are not finite on some rank."""
        bad = set()
        for rank, (expected, names) in enumerate(zip(self.expected, reached, strict=True)):
            for name in names:
                if not expected.take_in(name, self.main.scaled(step.gradients[rank][name]), step.rates[name]):
                    bad.add(name)
        return bad

    def settle(self, number: int, result: list[Reduced]) -> list[Counts]:
        """Check what was sent of a bucket, and take it out of what is expected. Return every rank's counts."""
        world, compressor = self.main, self.main.compressor
        buckets = [worker.buckets[number] for worker in world.workers]
        exchange = world.exchange_of(buckets[0], self.steps)
        pairs = isinstance(exchange, Pairs)
        values = exchange.values if isinstance(exchange, Pairs) else "float32"
        sent = [np.zeros(buckets[0].numel, bool) for _ in buckets]
        befores = [np.zeros(buckets[0].numel) for _ in buckets]
        for slot in buckets[0].layout.slots:
            parts = result[0][slot.name]
            assert parts is not None and len(parts) == (world.world if pairs else 1)
            inside = slice(slot.offset, slot.offset + slot.numel)
            shares = []
            for rank, (expected, bucket) in enumerate(zip(self.expected, buckets, strict=True)):
                before, after = expected.residuals[slot.name].reshape(-1), bucket.buffer[inside]
                indices = parts[rank if pairs else 0][0]
                shares.append(share_of(before, after, indices, parts[0][1].dtype, packed=values == "packed"))
                sent[rank][slot.offset + indices], befores[rank][inside] = True, before
                # A level of packed values is at most twice the smallest magnitude that it stands for.
                rounded = np.abs(before[indices]) if values == "packed" else 0.0
                left = np.abs(after[indices])
                assert before.dtype == "float64" or (left <= rounded).all(), "what is sent leaves the residual"
                masks = compressor.momentum_correction is not None and compressor.momentum_correction.masking
                if masks and not world.is_dense(buckets[0], self.steps):
                    expected.velocities[slot.name].reshape(-1)[indices] = 0
                expected.residuals[slot.name] = after.copy().reshape(slot.shape)
            self.check_conserved(slot.name, shares, parts, pairs=pairs)
        self.check_selected(sent, befores, pairs=pairs)
        return [self.counts_of(number, int(np.count_nonzero(mine)), rank) for rank, mine in enumerate(sent)]

    def check_conserved(self, name: str, shares: list[Any], parts: Any, *, pairs: bool) -> None:
        """What has left the residuals is what was reduced, to the last bit."""
        shares = [share.astype(parts[0][1].dtype) for share in shares]
        if not pairs:
            # Python's sum would begin with 0.
            shares = [functools.reduce(operator.add, shares)]
        for share, (indices, values) in zip(shares, parts, strict=True):
            arrived = np.zeros_like(share)
            arrived[indices] = values
            rate = self.rates[name] if self.main.compressor.lr_in_residual else 1.0
            divisor = share.dtype.type(self.main.divisor * (rate or math.inf))
            assert equal(arrived, share / divisor), f"{name}: sent + kept"

    def check_selected(self, sent: list[np.ndarray], befores: list[np.ndarray], *, pairs: bool) -> None:
        row = self.case.row
        for mine, before in zip(sent, befores, strict=True):
            if not row.follows_scale and row.largest:
                assert mine.any() or not before.any(), "something must be sent unless all is zero"
            if pairs and row.largest and mine.any() and before[mine].any() and not mine.all():
                assert np.abs(before[mine]).min() >= np.abs(before[~mine]).max(), "the largest magnitudes are sent"

    def counts_of(self, number: int, sent: int, rank: int) -> Counts:
        """Check one bucket's counts of the step, and return them."""
        world, compressor = self.main, self.main.compressor
        bucket = world.workers[rank].buckets[number]
        k = compressor.target_count(bucket.numel, compressor.schedule.ratio(self.steps))
        room, everything = compressor.message_capacity(bucket.numel, k, world.world), bucket.numel
        exchange, counts = world.exchange_of(bucket, self.steps), bucket.last
        if isinstance(exchange, Dense):
            k = room = everything
        elif isinstance(exchange, Union):
            room = min(room * world.world, everything)
        assert counts.sent == sent <= room, "a message holds no more than its capacity"
        assert counts.target == k and counts.truncated >= 0
        assert counts.truncated == 0 or isinstance(exchange, Union) or sent == room, "nothing is truncated for nothing"
        return counts

    # --- steps that do not end, or do not count ---

    @rule(
        seed=seeds,
        kind=st.sampled_from(KINDS),
        missing=st.lists(places, max_size=2),
        arrived=st.lists(st.integers(0, len(SHAPES)), min_size=1, max_size=3),
        exchanged=st.integers(0, len(SHAPES)),
        begun=st.booleans(),
        together=st.booleans(),
        then=steps,
    )
    def step_aborted(
        self,
        seed: int,
        kind: str,
        missing: list[tuple[int, str]],
        arrived: list[int],
        exchanged: int,
        begun: bool,
        together: bool,
        then: list[int],
    ) -> None:
        self.add_pass(seed, kind, missing, None)
        step = self.step_of(seed, together=together, eager=False)
        before = self.settled()
        for world in self.all:
            reached = world.run_in_part(step, arrived, exchanged, begun=begun)
            for worker in world.workers:
                worker.abort()
        self.take_in(step, reached)
        self.check_never_been(before)
        self.go_on(then)

    @rule(
        seed=seeds,
        kind=st.sampled_from(KINDS),
        missing=st.lists(places, max_size=2),
        gone=st.integers(0, 2),
        arrived=st.integers(0, len(SHAPES)),
        then=steps,
    )
    def step_given_up(
        self, seed: int, kind: str, missing: list[tuple[int, str]], gone: int, arrived: int, then: list[int]
    ) -> None:
        """By one rank, which tells the others."""
        self.add_pass(seed, kind, missing, None)
        step, gone = self.step_of(seed, together=False, eager=False), gone % self.main.world
        before = self.settled()
        for world in self.all:
            reached = world.run_given_up(step, gone, arrived)
            for rank in range(world.world):
                if rank == gone:
                    assert world.end(rank, gone) == {}, "nothing is written"
                else:
                    with pytest.raises(RuntimeError, match=f"^rank {rank}: rank {gone} "):
                        world.end(rank, gone)
        self.take_in(step, reached)
        self.check_never_been(before)
        self.go_on(then)

    # --- states ---

    @rule()
    def save(self) -> None:
        states = self.main.state_dicts()
        self.saved = states, copy.deepcopy(states), self.settled()

    @rule(granularity=st.none() | st.sampled_from(GRANULARITIES), world=st.none() | worlds, then=steps)
    def restore(self, granularity: str | int | None, world: int | None, then: list[int]) -> None:
        """Go on from what was saved, or from now: the workers in use, and fresh ones; perhaps others than saved it."""
        states, copies, settled = self.saved or (self.main.state_dicts(), None, self.settled())
        assert copies is None or repr(states) == repr(copies), "a saved state is a copy"
        history = self.history
        if granularity is None and world is None and len(states) == self.main.world:
            self.main.load(states)
        else:
            others = len(states) if world is None else world
            self.main, history = World(self.case, others, granularity or self.main.granularity), []
            self.main.load(states)
        self.make_twin(states)
        self.go_back(settled)
        self.expected = [copy.deepcopy(self.expected[rank % len(states)]) for rank in range(self.main.world)]
        for expected in self.expected:
            expected.load()
        # A state has no statistics.
        self.history = history
        self.go_on(then)

    @rule(then=steps)
    def reset(self, then: list[int]) -> None:
        """Workers that are reset go on like fresh ones."""
        for worker in self.main.workers:
            worker.reset()
        self.start(self.main)
        self.make_twin(None)
        self.go_on(then)

    # --- units ---

    @rule(factor=st.sampled_from((2.0, 0.5, 3.0, 2.0**-10, 65536.0)), then=steps)
    def rescale(self, factor: float, then: list[int]) -> None:
        for world in self.all:
            for worker in world.workers:
                worker.rescale(factor)
        for expected in self.expected:
            expected.rescale(factor)
        self.go_on(then)

    @precondition(lambda self: self.scales)
    @rule(factor=st.sampled_from((2.0, 0.5, 2.0**10, 2.0**-10)), then=steps)
    def scale_of_loss(self, factor: float, then: list[int]) -> None:
        """The twin's loss is scaled by a power of two from now on, and its residuals are rescaled once."""
        most = MOST_SCALE[self.case.dtype]
        if 1.0 / most <= self.scale * factor <= most:
            self.scale *= factor
            self.make_twin(self.main.state_dicts())
        self.go_on(then)

    @rule(
        names=st.lists(st.sampled_from(NAMES), max_size=2), rate=st.sampled_from((0.5, 0.05, 0.3, 1.0, 0.0)), then=steps
    )
    def learning_rate(self, names: list[str], rate: float, then: list[int]) -> None:
        """Of some parameters; of all if none is named."""
        self.rates.update(dict.fromkeys(names or NAMES, rate))
        self.go_on(then)

    @rule(name=st.sampled_from(NAMES), then=steps)
    def freeze(self, name: str, then: list[int]) -> None:
        """No rank has a gradient of it until it is trained again."""
        self.frozen ^= {name}
        self.go_on(then)

    # --- what holds after every rule ---

    def compare_results(self, mine: Reduced, theirs: Reduced) -> None:
        for name, parts in mine.items():
            assert (parts is None) == (theirs[name] is None)
            for (indices, values), (at, same) in zip(parts or (), theirs[name] or (), strict=True):
                assert equal(indices, at) and equal(values * values.dtype.type(self.scale), same), name

    @invariant()
    def every_worker_holds_what_is_expected(self) -> None:
        for worker, expected in zip(self.main.workers, self.expected, strict=True):
            state = worker.state_dict()
            for part, arrays in (("residuals", expected.waiting), ("velocities", expected.velocities)):
                assert state[part].keys() == arrays.keys()
                for name, array in arrays.items():
                    assert np.isfinite(state[part][name]).all(), (part, name)
                    assert equal(state[part][name], array), (part, name)
            assert state["lr_in_residual"] is self.main.compressor.lr_in_residual

    @invariant()
    def no_step_is_open(self) -> None:
        for worker in (worker for world in self.all for worker in world.workers):
            assert worker.step is None
            for bucket in worker.buckets:
                assert bucket.state.step == self.steps, "every step counts once"

    @invariant()
    def memory_has_come_back(self) -> None:
        """All but what every bucket holds for the entries that it will note, and for their indices."""
        buckets = sum(len(worker.buckets) for world in self.all for worker in world.workers)
        assert self.pools[1].lent() <= 2 * buckets

    @invariant()
    def the_twin_is_alike(self) -> None:
        if self.twin is None:
            return
        factor = self.scale
        for mine, theirs in zip(self.main.state_dicts(), self.twin.state_dicts(), strict=True):
            for part in ("residuals", "velocities"):
                for name, array in mine[part].items():
                    assert equal(array * array.dtype.type(factor), theirs[part][name]), (part, name)
            assert factor != 1.0 or mine["adaptive"] == theirs["adaptive"]

    @invariant()
    def statistics_are_sums_of_steps(self) -> None:
        for rank, worker in enumerate(self.main.workers):
            stats = worker.stats()
            assert stats.steps == len(self.history)
            for number, bucket in enumerate(worker.buckets):
                counts = [step[rank][number] for step in self.history]
                assert bucket.last == (counts[-1] if counts else Counts())
                if not bucket.layout.is_dense:
                    assert stats.mean.buckets[number].count == sum(one.sent for one in counts) / max(len(counts), 1)


def share_of(before: Any, after: Any, indices: Any, dtype: Any, *, packed: bool) -> Any:
    """What has left a residual. Of an entry beyond the message's range the most of it leaves, and float64 rounds the rest."""
    share, most = before - after, float(np.finfo(dtype).max)
    beyond = indices[np.abs(before[indices]) > most]
    due = np.copysign(most, before[beyond])
    if packed:
        # What is sent is a bfloat16: the upper half of a float32.
        due = ((share[beyond].astype(np.float32).view(np.int32) + 0x8000) & ~0xFFFF).view(np.float32)
    assert (np.abs(share[beyond] - due) <= np.spacing(np.abs(before[beyond]))).all()
    share[beyond] = due
    return share


def check_replicas(result: list[Reduced]) -> None:
    for name, parts in result[0].items():
        if parts is not None:
            sums = [dense_sum(mine[name], size_of(name)).tobytes() for mine in result]
            assert len(set(sums)) == 1, "replicas must not drift apart"


TestMachine = Machine.TestCase
examples = 600 if settings.get_current_profile_name() == "full" else 140
TestMachine.settings = settings(max_examples=examples, stateful_step_count=10)
