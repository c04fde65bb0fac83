"""When sparse pays: bytes on the wire of dense and sparse exchanges. Plain arithmetic, no framework."""

from __future__ import annotations


def allreduce_bytes(nbytes: float, world: int) -> float:
    """Bytes that each of `world` workers sends (and receives) in a ring allreduce of an array of `nbytes` bytes."""
    # Reduce-scatter, then allgather.
    return 2.0 * (world - 1) / world * nbytes
