"""Every rank's own entries, as pairs of index and value. Imports no framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from horovod_sparse.exchange import wire
from horovod_sparse.exchange.protocols import Collective, Exchange, Exchanging, Messages, Round, Run, Sender
from horovod_sparse.exchange.received import check_result, rows_of
from horovod_sparse.ops.protocol import Array, Ops

Values = Literal["float32", "bfloat16"]
"""The types of the values in messages."""


@dataclass(frozen=True)
class Pairs(Exchange):
    """Each worker sends its own entries, by one allgather of (index, value) pairs (`wire`, message 1 or 4).

    Args:
        values: the type of the values: "float32", with 8 bytes per entry, or "bfloat16", with 4 bytes per entry. What rounding
            leaves stays in the residual.

    Raises:
        ValueError: `values` is something else.
    """

    values: Values = "float32"

    def __post_init__(self) -> None:
        if self.values not in get_args(Values):
            raise ValueError(f"values must be 'float32' or 'bfloat16', got {self.values!r}")

    @property
    def title(self) -> str:
        return "pairs" if self.values == "float32" else "compact pairs"

    def rounds(self, numel: int, k: int, capacity: int, world: int) -> Sequence[Round]:
        return [Round("allgather", 2 * capacity if self.values == "float32" else wire.runs_of(numel) + capacity)]

    def packed(self, ops: Ops, x: Array, pairs: Array) -> Array:
        """Return what is sent of a message of pairs whose entries were taken out of `x` (`Ops.compact`)."""
        return pairs if self.values == "float32" else ops.compact(x, pairs)

    def unpacked(self, ops: Ops, gathered: Array, world: int, numel: int) -> Array:
        """Return the messages of pairs that so many messages stand for, for entries of an array of `numel`."""
        return gathered if self.values == "float32" else ops.expand(gathered, world, numel)

    def collectives(self, bucket: Sender, run: Run) -> Exchanging:
        message = self.packed(bucket.ops, bucket.buffer, bucket.message())
        bucket.drop_rest()
        gathered = yield Collective("allgather", message)
        # A device may have made the message while the host went on.
        bucket.finish()
        check_result(bucket, gathered, (bucket.world * len(message), *message.shape[1:]), message.dtype)
        gathered = self.unpacked(bucket.ops, gathered, bucket.world, bucket.numel)
        used = rows_of(bucket, gathered, bucket.world)
        return None if used is None else Messages(gathered, used)
