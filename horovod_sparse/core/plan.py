"""What is decided before a step: which parameters share a bucket, and how much of each bucket is sent, and how.

All of this follows from the compressor, the parameters and the number of workers, the same on every rank. Imports no framework.

Tested by tests/core/test_layout.py and tests/compressors/test_schedules.py.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from horovod_sparse.compressors.base import BUCKET_BYTES, Compressor
from horovod_sparse.compressors.schedules import ByAge
from horovod_sparse.core.layout import Layout, Parameter
from horovod_sparse.exchange import wire
from horovod_sparse.exchange.cost import allreduce_bytes
from horovod_sparse.exchange.protocols import Exchange, Round
from horovod_sparse.exchange.shared import Dense

_DENSE = Dense()
_SHARE_ON_DEVICE, _DEVICE_BUCKET_BYTES = 0.4, 256 * 2**20
"""Fewer buckets on a device take fewer launches; the exchange of the first ones overlaps with the backward pass. With this
share of the model there are three: parameters do not fill them."""
_LARGE = 2**20
"""Entries of a bucket for which warm-up compares exchanges. A bucket of any other size tells the same."""


def rounds_of(compressor: Compressor, numel: int, ratio: float | None, world: int) -> Sequence[Round]:
    """Return the collectives of a bucket at a ratio; None is the final one."""
    k = compressor.target_count(numel, ratio)
    return compressor.exchange.rounds(numel, k, compressor.message_capacity(numel, k, world), world)


def bytes_beside_dense(compressor: Compressor, sizes: Sequence[int], world: int) -> float:
    """Return the bytes that buckets of these sizes send at the final ratio, divided by those of a dense float32 allreduce."""
    rounds = [one for numel in sizes for one in rounds_of(compressor, numel, None, world)]
    dense = allreduce_bytes(4 * sum(sizes), world)
    return sum(one.bytes_sent(world) for one in rounds) / dense if dense else 0.0


def most_workers(compressor: Compressor, sizes: Sequence[int], world: int) -> int:
    """Return the largest number of workers, below `world`, that send no more bytes than a dense float32 allreduce does."""
    workers = range(2, world)
    return 1 + bisect_right(workers, 1.0, key=lambda number: bytes_beside_dense(compressor, sizes, number))


def warmup_steps(compressor: Compressor) -> int:
    """Return the number of steps until the ratio has come down to the end; 0 without a warm-up."""
    return max((stair.stop for stair in compressor.schedule.stairs()), default=0)


def first_sparse_step(compressor: Compressor, world: int) -> int:
    """Return the first step that is not dense. In a warm-up its messages have no more bytes than a dense allreduce."""
    first = 0
    for stair in compressor.schedule.stairs():
        rounds = rounds_of(compressor, _LARGE, compressor.schedule.ratio(stair.start), world)
        if sum(one.bytes_sent(world) for one in rounds) <= allreduce_bytes(4 * _LARGE, world):
            return stair.start
        first = stair.stop
    return first


def highest_ratio(compressor: Compressor, world: int) -> float:
    """Return the largest ratio of any step that is not dense."""
    schedule = compressor.schedule
    return schedule.ratio(first_sparse_step(compressor, world)) if isinstance(schedule, ByAge) else schedule.highest


@dataclass(frozen=True, slots=True)
class Stage:
    """What is sent of a bucket in some steps in a row."""

    steps: range
    """The steps for which this is known."""
    k: int
    """The entries that are wanted: all in dense steps."""
    capacity: int
    """Rows of a worker's message."""
    exchange: Exchange
    is_dense: bool
    bytes_sent: float
    """What a worker sends in each of these steps."""


def stage_of(compressor: Compressor, layout: Layout, world: int, step: int) -> Stage:
    """Return what is sent of a bucket in a step: everything, by allreduce, where that has fewer bytes in a warm-up."""
    numel, first = layout.numel, sys.maxsize if layout.is_dense else first_sparse_step(compressor, world)
    steps, exchange, k, capacity = range(first), compressor.exchange, numel, numel
    if step < first:
        exchange = _DENSE
    else:
        steps = compressor.schedule.steps_like(step)
        k = compressor.target_count(numel, compressor.schedule.ratio(step))
        capacity = compressor.message_capacity(numel, k, world)
    rounds = exchange.rounds(numel, k, capacity, world)
    own = layout.residual_dtype
    sent = sum(one._replace(dtype=one.dtype or own).bytes_sent(world) for one in rounds)
    return Stage(steps, k, capacity, exchange, step < first, sent)


def layouts_of(parameters: Sequence[Parameter], compressor: Compressor, world: int = 1) -> list[Layout]:
    """Pack `parameters`, given in the order of the model, into buckets for so many workers.

    They are filled from the last parameter to the first, as backward makes gradients.

    Raises:
        ValueError: a parameter alone is too large for its messages.
    """
    buckets: list[list[Parameter]] = []
    most = _most_bytes(parameters, compressor)
    open_buckets: dict[Hashable, tuple[list[Parameter], int]] = {}
    for parameter in reversed(parameters):
        key = (parameter.kind, parameter.residual_dtype, parameter.group)
        members, numel = open_buckets.get(key, ([], 0))
        if not members or not _fits(numel, parameter, compressor, world, most[parameter.on_device]):
            members, numel = [], 0
            buckets.append(members)
        members.append(parameter)
        open_buckets[key] = members, numel + parameter.numel
    layouts = [Layout.of(members) for members in buckets]
    for layout in layouts:
        what = _excess(layout.numel, compressor, world)
        if what is not None:
            raise ValueError(
                f"bucket {layout.name!r} {what}. One parameter is too large: split it into several parameters, lower ratio "
                "or slack if it gathers too much, or exclude it"
            )
    return layouts


def _most_bytes(parameters: Sequence[Parameter], compressor: Compressor) -> tuple[float, float]:
    """Return how many bytes a bucket may have that is filled from several parameters: in the host's memory, on a device."""
    granularity = compressor.granularity
    if granularity == "auto":
        on_device = sum(one.itemsize * one.numel for one in parameters if one.on_device)
        return BUCKET_BYTES, min(max(_SHARE_ON_DEVICE * on_device, BUCKET_BYTES), _DEVICE_BUCKET_BYTES)
    most = {"layer": 0.0, "model": math.inf}[granularity] if isinstance(granularity, str) else float(granularity)
    return most, most


def _fits(numel: int, parameter: Parameter, compressor: Compressor, world: int, most: float) -> bool:
    """Return whether a parameter may join a bucket that has `numel` elements, and may have `most` bytes."""
    if _excess(numel + parameter.numel, compressor, world) is not None:
        return False
    return parameter.group is not None or parameter.itemsize * (numel + parameter.numel) <= most


def planned(parameters: Sequence[Parameter], compressor: Compressor, world: int) -> list[Layout]:
    """Return the layouts of the buckets of some parameters: at last those that are always dense, small ones together."""
    compressed: list[Parameter] = []
    together: dict[Hashable, list[Parameter]] = {}
    for one in parameters:
        if not compressor.leaves_dense(one.name, one.numel):
            compressed.append(one)
            continue
        # With many small parameters, one allreduce for each would cost more time than their entries do.
        key = (one.kind, one.residual_dtype) if one.numel < compressor.min_numel else one.name
        together.setdefault(key, []).append(one)
    dense = [Layout.of(members, is_dense=True) for members in together.values()]
    return [*layouts_of(compressed, compressor, world), *dense]


def _excess(numel: int, compressor: Compressor, world: int) -> str | None:
    """Return what is too much for messages or for Horovod's collectives in a bucket of `numel`; None if nothing is."""
    if numel > wire.MAX_BUCKET:
        return f"has {numel} elements, expected at most {wire.MAX_BUCKET} (Horovod counts in C ints)"
    rounds = rounds_of(compressor, numel, highest_ratio(compressor, world), world)
    gathered, most = max(one.gathered(world) for one in rounds), wire.MAX_GATHERED
    if gathered > most:
        return f"gathers {gathered} int32 from {world} workers, expected at most {most} (Horovod counts in C ints)"
    return None
