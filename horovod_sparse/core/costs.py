"""How fast this rank computes what the exchanges need, and its network; measured before the first step. No framework."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import numpy as np

from horovod_sparse.compressors.base import Compressor, Place
from horovod_sparse.core.bucket import Bucket
from horovod_sparse.core.layout import Layout
from horovod_sparse.core.selector import DeviceSelectorFor
from horovod_sparse.exchange.measure import QUICK, Collectives, agreed, measure
from horovod_sparse.exchange.network import Network
from horovod_sparse.exchange.planner import BALANCED, HALF, PAIRS, Conditions, Costs, Planner, rows_received
from horovod_sparse.exchange.protocols import Reduced, Sent
from horovod_sparse.exchange.rounds import Way
from horovod_sparse.ops.protocol import Array, Ops

_SAMPLE = 2**20
"""Number of entries of the bucket that is timed. It does not fit into a core's own caches."""
_STEPS = 8
"""The least of so many times counts, because the processors are shared with others."""
_SHARE = 8
"""One entry of so many is in the message that is added up."""
_RATIOS = 0.001, 0.1
"""With these the balanced exchange is timed: they tell what it needs for each entry from what it needs for each row."""


def measured_conditions(
    ops: Ops, compressor: Compressor, like: Array, device_selector: DeviceSelectorFor, collectives: Collectives
) -> Conditions:
    """Return the network and the costs, the same on all workers. All workers call this; it blocks for less than a second.

    Args:
        ops: the framework's operations.
        compressor: what selects.
        like: an array on the device where the buckets will be.
        device_selector: see `DeviceSelectorFor`.
        collectives: the workers' collectives.

    Raises:
        RuntimeError: on every worker, if some worker could not measure its costs.
    """
    problem, costs = "", Costs(*[0.0] * 6)
    try:
        costs = measured_costs(ops, compressor, like, device_selector)
    except Exception as error:
        # Whatever it is, the others are told: they would wait.
        problem = f"{type(error).__name__}: {error}"
    problems = collectives.everyone(problem)
    for worker, text in enumerate(problems):
        if text:
            raise RuntimeError(
                f"network='measured': worker {worker} could not measure how long a selection takes, {text}; give a bandwidth "
                "instead, such as network='10gbit'"
            )
    return Conditions(measure(collectives, QUICK), Costs(*(agreed(collectives, cost) for cost in costs)))


def measured_costs(ops: Ops, compressor: Compressor, like: Array, device_selector: DeviceSelectorFor) -> Costs:
    """Time a bucket that no other worker sees. What all exchanges need is a part of `select`, `half` and `balanced`."""
    dtype = compressor.residual_dtype or "float32"
    gradient, target = (ops.zeros(_SAMPLE, dtype, like) for _ in range(2))
    ops.assign(gradient, np.random.default_rng(0).laplace(size=_SAMPLE).astype(dtype))
    row, compact = _row_seconds(ops, gradient, target)

    def step(way: Way, world: int, compressor: Compressor) -> tuple[float, int]:
        k = compressor.target_count(_SAMPLE, compressor.ratio_at(0))
        rows = rows_received(way, k, compressor.message_capacity(_SAMPLE, k, world), world)
        return _step_seconds(ops, compressor, way, world, gradient, target, device_selector), rows

    half, _ = step(HALF, 1, compressor)
    pairs, rows = step(PAIRS, 1, compressor)
    select = max(0.0, pairs - row * rows) / _SAMPLE
    balanced = owned = 0.0
    if compressor.balances:
        # With two workers the region of each is the largest. A single one would send nothing to the regions of others.
        few, many = (step(BALANCED, 2, _with_ratio(compressor, ratio)) for ratio in _RATIOS)
        owned = max(0.0, many[0] - few[0]) / (many[1] - few[1])
        balanced = max(0.0, few[0] - owned * few[1]) / _SAMPLE
    return Costs(select, row, compact, half / _SAMPLE, balanced, owned)


def _with_ratio(compressor: Compressor, ratio: float) -> Compressor:
    changed = copy.copy(compressor)
    changed.ratio = ratio
    return changed


def _step_seconds(
    ops: Ops,
    compressor: Compressor,
    way: Way,
    world: int,
    gradient: Array,
    target: Array,
    device_selector: DeviceSelectorFor,
) -> float:
    """Return how long a step takes that exchanges in this way, if all workers send the same."""
    planner = Planner(Conditions(Network(0.0, 1.0)), world, balances=False)
    planner.ways = [way]
    layout = Layout.of([("sample", (_SAMPLE,))], compressor.residual_dtype or "float32")
    residual = ops.zeros(_SAMPLE, layout.residual_dtype, gradient)
    bucket = Bucket(ops, compressor, layout, Place("sample", world=world), 0, residual, None, device_selector, planner)
    bucket.state.step = compressor.dense_steps
    spent = []
    for _ in range(_STEPS):
        begun = time.perf_counter()
        bucket.begin_step()
        bucket.accumulate([(layout.slots[0], gradient)])
        sent = _exchanged(bucket, world)
        bucket.conclude(sent)
        Reduced(ops, sent, 1.0).write([(0, target)])
        bucket.end(succeeded=True)
        _wait_for(target)
        spent.append(time.perf_counter() - begun)
    # The first step knows nothing of the residual.
    return min(spent[1:])


def _exchanged(bucket: Bucket, world: int) -> Sent:
    """Return what all workers have sent, if all send as this one does; to an owner, what this one sends to other owners."""
    collective = bucket.begin_exchange()
    while True:
        result = collective.message
        if world > 1:
            rows = np.tile(np.arange(len(result)), world)
            if collective.kind == "alltoall":
                rows = np.roll(rows[: len(result)], len(result) // world)
            result = result[bucket.ops.indices(rows, result)]
        try:
            collective = bucket.advance(result)
        except StopIteration as end:
            sent: Sent = end.value
            return sent


def _row_seconds(ops: Ops, values: Array, target: Array) -> tuple[float, float]:
    """Return how long a row of a message of pairs takes: to add it up, and to make it compact and to expand it."""
    rows = _SAMPLE // _SHARE
    x = ops.copy(values)
    message = ops.send(x, ops.indices(np.arange(0, _SAMPLE, _SHARE), values), rows)

    def add_up(used: int) -> None:
        ops.assembler(message[:used], [used], 1.0)([(0, target)])
        _wait_for(target)

    def pass_on() -> None:
        _wait_for(ops.expand(ops.compact(x, message, "bfloat16"), 1, _SAMPLE, "bfloat16")[:, 1])

    added = _least(lambda: add_up(rows)) - _least(lambda: add_up(1))
    return max(0.0, added) / rows, _least(pass_on) / rows


def _least(run: Callable[[], None]) -> float:
    """Return the least time of several runs."""
    times = []
    for _ in range(_STEPS):
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return min(times)


def _wait_for(array: Array) -> None:
    """Wait until a device has computed an array."""
    float(array[-1])
