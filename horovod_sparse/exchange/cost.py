"""When sparse pays: bytes on the wire of dense and sparse exchanges. Plain arithmetic, no framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping


def allreduce_bytes(nbytes: float, world: int) -> float:
    """Bytes that each of `world` workers sends (and receives) in a ring allreduce of an array of `nbytes` bytes.

    `2 (world - 1)/world * nbytes`: reduce-scatter, then allgather.
    """
    return 2.0 * (world - 1) / world * nbytes


def allgather_bytes(nbytes: float, world: int) -> float:
    """Bytes that each of `world` workers sends (and receives) in a ring allgather of `nbytes` bytes from each."""
    return (world - 1) * nbytes


def alltoall_bytes(nbytes: float, world: int) -> float:
    """Bytes that each of `world` workers sends (and receives) in an alltoall of `nbytes` bytes from each, its own part too."""
    return (world - 1) / world * nbytes


BYTES: Mapping[str, Callable[[float, int], float]] = {
    "allgather": allgather_bytes,
    "allreduce": allreduce_bytes,
    "alltoall": alltoall_bytes,
}
"""The function that counts the bytes of a collective, by its kind."""
