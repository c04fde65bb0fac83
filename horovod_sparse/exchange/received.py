"""What is received: checks, which raise errors on every rank, and sums. Imports no framework."""

from __future__ import annotations

from horovod_sparse.exchange.protocols import Collective, Entries, Exchanging, Named, Sender, Told
from horovod_sparse.ops.protocol import Array

OUT_OF_ORDER = "its indices do not ascend within the bucket, with padding after them"


def damaged(bucket: Named, which: str, what: str) -> RuntimeError:
    """Return the error for a message that is not as `wire` requires."""
    return RuntimeError(
        f"rank {bucket.rank}: the {which} for bucket {bucket.name!r} is damaged: {what}. The "
        "ranks run different models or different versions of horovod_sparse"
    )


def disagreement(bucket: Named) -> RuntimeError:
    """Return the error for ranks whose steps, adaptive numbers or random choices differ."""
    return RuntimeError(
        f"rank {bucket.rank}: the ranks disagree on the state of bucket {bucket.name!r} (step, seed or threshold), so "
        "their values would not belong to the same entries. After a restart load the compression state on every "
        "rank or on none, and run the same release of NumPy and horovod_sparse everywhere"
    )


def summed(bucket: Sender, indices: Array | None, length: int, checksum: int) -> Exchanging:
    """Exchange the values at indices that all ranks know (None: all entries), as message 2 with `length` values.

    If the lowest 16 bits of `checksum` >= 0 differ, all ranks raise RuntimeError.
    """
    total = yield Collective("allreduce", bucket.value_message(indices, length, checksum))
    ((bad, *bits),) = yield Told([total[length:]])
    # `bits` holds the sum of each bit of the checksum over the ranks.
    if not {*bits} <= {0.0, float(bucket.world)}:
        raise disagreement(bucket)
    if not 0 <= bad <= bucket.world or bad % 1:
        raise damaged(
            bucket, "sum of the messages", f"{bad} of {bucket.world} workers say that their gradients are not finite"
        )
    return None if bad else Entries(indices, total[: length if indices is None else len(indices)])
