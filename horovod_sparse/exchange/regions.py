"""The regions of the balanced exchange: `world + 1` bounds, from 0 to the bucket's size, the same on all ranks."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

SPARE = 1.5
"""How many times as many entries a region has room for as if all got as many. Settled ones still differ by a third."""
_LEAST_GAIN = 0.02


def room(k: int, capacity: int, world: int) -> int:
    """Return how many entries a rank can send to each region, of about k in all. Larger capacities make more room."""
    return min(capacity, math.ceil(max(SPARE * k, capacity) / world))


def forwarded(k: int, world: int) -> int:
    """Return how many entries of its region each rank forwards to all ranks: ceil(k / world)."""
    return -(-k // world)


def uniform(numel: int, world: int) -> tuple[int, ...]:
    """Return the bounds of regions of the same size."""
    return tuple(numel * rank // world for rank in range(world + 1))


def fitting(bounds: tuple[int, ...], numel: int, world: int) -> tuple[int, ...]:
    """Return `bounds` if they divide a bucket of `numel` among `world` ranks, else the bounds of regions of the same size."""
    fits = len(bounds) == world + 1 and bounds[-1] == numel
    return bounds if fits else uniform(numel, world)


def gain(step: int) -> float:
    """Return how far the bounds move in a step, counted from 0, as a fraction of the way to where they were balanced."""
    # Fast at first, and then hardly: what a region's owner has kept of a part that it loses must be sent again.
    return max(4 / (8 + step), _LEAST_GAIN)


def balanced(bounds: tuple[int, ...], counts: Sequence[int], gain: float) -> tuple[int, ...]:
    """Return new bounds, moved towards those with which regions that received `counts` entries would have received as many."""
    # Within a region, entries are taken to be spread evenly.
    before = [0, *accumulate(counts)]
    total, world = before[-1], len(counts)
    if not total:
        return bounds
    moved, region = [bounds[0]], 0
    for rank in range(1, world):
        aim = total * rank / world
        while before[region + 1] < aim:
            region += 1
        share = (aim - before[region]) / counts[region]
        place = bounds[region] + share * (bounds[region + 1] - bounds[region])
        moved.append(round(bounds[rank] + gain * (place - bounds[rank])))
    return *moved, bounds[-1]


def are_bounds(value: Any) -> bool:
    """Return whether `value` is a list of bounds: positions that never descend, the first of which is 0."""
    are_integers = isinstance(value, list) and all(type(place) is int for place in value)
    return are_integers and value == sorted(value) and value[:1] == [0]


def checksum(bounds: Sequence[int]) -> int:
    """Return a 31-bit checksum that tells different bounds apart."""
    return zlib.crc32(repr([*bounds]).encode()) >> 1
