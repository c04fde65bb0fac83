"""How fast this rank computes what the exchanges need, and its network; measured before the first step. No framework."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from horovod_sparse.compressors.base import Compressor, Place
from horovod_sparse.core.bucket import Bucket
from horovod_sparse.core.layout import Layout
from horovod_sparse.core.selector import DeviceSelectorFor
from horovod_sparse.exchange.measure import QUICK, Collectives, agreed, measure
from horovod_sparse.exchange.network import Network
from horovod_sparse.exchange.planner import HALF, PAIRS, Conditions, Costs, Planner
from horovod_sparse.exchange.protocols import Reduced, Sent
from horovod_sparse.exchange.rounds import Way
from horovod_sparse.ops.protocol import Array, Ops

_SAMPLE = 2**20
"""Number of entries of the bucket that is timed. It does not fit into a core's own caches."""
_STEPS = 8
"""The least of so many times counts, because the processors are shared with others."""
_SHARE = 8
"""One entry of so many is in the message that is added up."""


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
    problem, costs = "", Costs(0.0, 0.0, 0.0, 0.0)
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
    """Time a bucket that no other worker sees. What all exchanges need is a part of both `select` and `half`."""
    dtype = compressor.residual_dtype or "float32"
    gradient, target = (ops.zeros(_SAMPLE, dtype, like) for _ in range(2))
    ops.assign(gradient, np.random.default_rng(0).laplace(size=_SAMPLE).astype(dtype))
    row, compact = _row_seconds(ops, gradient, target)
    pairs, half = (_step_seconds(ops, compressor, way, gradient, target, device_selector) for way in (PAIRS, HALF))
    received = compressor.message_capacity(_SAMPLE, compressor.target_count(_SAMPLE, compressor.ratio_at(0)), 1)
    return Costs(max(0.0, pairs - row * received) / _SAMPLE, row, compact, half / _SAMPLE)


def _step_seconds(
    ops: Ops, compressor: Compressor, way: Way, gradient: Array, target: Array, device_selector: DeviceSelectorFor
) -> float:
    """Return how long a step of one worker takes that exchanges in this way."""
    planner = Planner(Conditions(Network(0.0, 1.0)), 1, balances=False)
    planner.ways = [way]
    layout = Layout.of([("sample", (_SAMPLE,))], compressor.residual_dtype or "float32")
    residual = ops.zeros(_SAMPLE, layout.residual_dtype, gradient)
    bucket = Bucket(ops, compressor, layout, Place("sample"), 0, residual, None, device_selector, planner)
    bucket.state.step = compressor.dense_steps
    spent = []
    for _ in range(_STEPS):
        begun = time.perf_counter()
        bucket.begin_step()
        bucket.accumulate([(layout.slots[0], gradient)])
        # One worker gets what it has sent.
        sent = _end_of(bucket, bucket.begin_exchange().message)
        bucket.conclude(sent)
        Reduced(ops, sent, 1.0).write([(0, target)])
        bucket.end(succeeded=True)
        _wait_for(target)
        spent.append(time.perf_counter() - begun)
    # The first step knows nothing of the residual.
    return min(spent[1:])


def _end_of(bucket: Bucket, result: Array) -> Sent:
    try:
        bucket.advance(result)
    except StopIteration as end:
        sent: Sent = end.value
        return sent
    raise RuntimeError("the exchange has more than one round; this is a defect")


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
