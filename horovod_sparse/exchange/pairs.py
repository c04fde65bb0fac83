"""Every rank's own entries, as pairs of index and value. Imports no framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from horovod_sparse.exchange import wire
from horovod_sparse.exchange.protocols import Collective, Exchange, Exchanging, Messages, Round, Run, Sender
from horovod_sparse.exchange.received import check_result, rows_of
from horovod_sparse.ops.protocol import Array, Ops

Values = Literal["float32", "bfloat16", "packed"]
"""What the values are in messages."""
_TITLES = {"float32": "pairs", "bfloat16": "compact pairs", "packed": "packed pairs"}


@dataclass(frozen=True)
class Pairs(Exchange):
    """Each worker sends its own entries, by one allgather of (index, value) pairs (`wire`, message 1, 4 or 11).

    Args:
        values: the type of the values: "float32", with 8 bytes per entry, or "bfloat16", with 4 bytes per entry. With "packed",
            an entry takes 14 bits, and 4,096 entries of the bucket take 6 bytes more: values are one of two magnitudes, with
            a sign (`Ops.quantize`). What rounding leaves stays in the residual.

    Raises:
        ValueError: `values` is something else.
    """

    values: Values = "float32"

    def __post_init__(self) -> None:
        if self.values not in get_args(Values):
            raise ValueError(f"values must be 'float32', 'bfloat16' or 'packed', got {self.values!r}")

    @property
    def title(self) -> str:
        return _TITLES[self.values]

    def rounds(self, numel: int, k: int, capacity: int, world: int) -> Sequence[Round]:
        lengths = {
            "float32": 2 * capacity,
            "bfloat16": wire.runs_of(numel) + capacity,
            "packed": wire.packed_length(numel, capacity),
        }
        return [Round("allgather", lengths[self.values])]

    def packed(self, ops: Ops, x: Array, pairs: Array) -> Array:
        """Return what is sent of a message of pairs whose entries were taken out of `x` (`Ops.compact`, `Ops.quantize`)."""
        if self.values == "float32":
            return pairs
        return ops.compact(x, pairs) if self.values == "bfloat16" else ops.quantize(x, pairs)

    def unpacked(self, ops: Ops, gathered: Array, world: int, numel: int) -> Array:
        """Return the messages of pairs that so many messages stand for, for entries of an array of `numel`."""
        if self.values == "float32":
            return gathered
        restore = ops.expand if self.values == "bfloat16" else ops.unquantize
        return restore(gathered, world, numel)

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
