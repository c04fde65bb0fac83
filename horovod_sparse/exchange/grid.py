"""Which workers are on the same host: a grid of hosts and slots. A worker's slot is its number among those of its host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple


class Grid(NamedTuple):
    """This worker's row and column of the grid, as positions among all workers, ascending."""

    neighbours: tuple[int, ...]
    """The workers on this worker's host, itself included: the slots."""
    peers: tuple[int, ...]
    """The workers with this worker's slot, one on each host, itself included."""
    slot: int

    @property
    def hosts(self) -> int:
        return len(self.peers)

    @property
    def slots(self) -> int:
        return len(self.neighbours)

    def lengths(self, members: Sequence[int], each: Sequence[int]) -> list[int]:
        """Return a number for each worker: those of `each` for the members, in their order, and 0 for all others."""
        lengths = [0] * (self.hosts * self.slots)
        for position, length in zip(members, each, strict=True):
            lengths[position] = length
        return lengths


def grid(groups: Sequence[str], position: int) -> Grid:
    """Return the grid as the worker at `position` sees it; `groups` has each worker's host.

    Raise ValueError, on all workers alike, if there is only one host, or if the hosts have different numbers of workers.
    """
    workers = defaultdict[str, list[int]](list)
    for other, name in enumerate(groups):
        workers[name].append(other)
    counts = {name: len(some) for name, some in workers.items()}
    if len(counts) < 2 or len(set(counts.values())) > 1:
        raise ValueError(
            "Hierarchical needs at least two hosts (with a number: groups) with the same number of workers on each, got "
            f"{counts} workers; start as many on every host, or use another exchange"
        )
    neighbours = workers[groups[position]]
    slot = neighbours.index(position)
    return Grid(tuple(neighbours), tuple(sorted(some[slot] for some in workers.values())), slot)
