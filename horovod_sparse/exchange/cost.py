"""When sparse pays: bytes on the wire of dense and sparse exchanges. Plain arithmetic, no framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping


def allreduce_bytes(nbytes: float, world: int) -> float:
    """Bytes that each of `world` workers sends (and receives) in a ring allreduce of an array of `nbytes` bytes."""
    # Reduce-scatter, then allgather.
    return 2.0 * (world - 1) / world * nbytes


BYTES: Mapping[str, Callable[[float, int], float]] = {
    "allgather": lambda nbytes, world: (world - 1) * nbytes,
    "allreduce": allreduce_bytes,
}
"""The bytes that each worker sends in a ring collective, by its kind; `nbytes` is the size of its own message."""
