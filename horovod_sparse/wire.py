"""The message on the wire, version 1. Imports no framework.

One rank sends one message per bucket and step: an int32 array of shape `(capacity, 2)`, row-major, in the machine's byte
order.

1. A row is `(index, bits)`: the entry's position in the bucket and the IEEE-754 bits of its float32 value.
2. Rows in use come first. Their indices are unique, ascending, and in `[0, bucket size)`.
3. Every other row is padding: `(-1, 0)`. Its value reads as +0.0.
4. A rank whose gradient holds NaN or infinity sends `(-2, 0)` in the first row and padding in all others. Every rank then
   reduces the whole bucket to NaN, as a dense allreduce would have spread it.
5. `capacity` depends only on the bucket's size and on the compressor's settings, never on the data: the shape is the same
   at every step and on every rank, so that Horovod's response cache holds and NCCL uses one allgather.
6. Entries for which there is no room stay in the residual of their rank and are sent later.
7. Values are not averaged on the wire; the receiver divides.

The gathered array is the ranks' messages one after the other, in rank order.
"""

from __future__ import annotations

PADDING = -1
NOT_FINITE = -2
ROW_BYTES = 8

# Indices are int32, and Horovod's counts of gathered elements are C ints.
MAX_BUCKET = 2**31 - 1
MAX_GATHERED = 2**31 - 1


def message_bytes(capacity: int) -> int:
    """Size in bytes of one rank's message."""
    return capacity * ROW_BYTES


def check_limits(bucket: str, numel: int, capacity: int, world: int) -> None:
    """Raise ValueError when a bucket does not fit into the format or into Horovod's allgather."""
    if numel > MAX_BUCKET:
        raise ValueError(
            f"bucket {bucket!r} has {numel} elements, expected at most {MAX_BUCKET} (indices are int32); "
            "use granularity='bucket' or split the parameter"
        )
    gathered = 2 * capacity * world
    if gathered > MAX_GATHERED:
        raise ValueError(
            f"bucket {bucket!r} gathers {gathered} int32 from {world} workers, expected at most {MAX_GATHERED} "
            "(Horovod counts in C ints); lower ratio, capacity or bucket_bytes"
        )
