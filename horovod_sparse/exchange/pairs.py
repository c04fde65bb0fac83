"""Every rank's own entries, as pairs of index and value. Imports no framework. Tested by tests/exchange/test_wire.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from horovod_sparse.exchange import wire
from horovod_sparse.exchange.protocols import Collective, Exchange, Exchanging, Messages, Round, Sender, Told
from horovod_sparse.exchange.received import OUT_OF_ORDER, damaged

Values = Literal["float32", "packed"]


@dataclass(frozen=True)
class Pairs(Exchange):
    """Each worker sends its own entries, by one allgather of (index, value) pairs (`wire`, message 1 or 4).

    Args:
        values: "float32", with 8 bytes per entry, or "packed": an entry takes 14 bits, and 4,096 entries of the bucket take 6
            bytes more. Packed values are one of two magnitudes, with a sign (`Ops.quantize`). What rounding leaves stays in
            the residual.
    """

    values: Values = "float32"

    def __post_init__(self) -> None:
        if self.values not in get_args(Values):
            raise ValueError(f"values must be 'float32' or 'packed', got {self.values!r}")

    @property
    def title(self) -> str:
        return "packed pairs" if self.values == "packed" else "pairs"

    def rounds(self, numel: int, k: int, capacity: int, world: int) -> Sequence[Round]:
        return [Round("allgather", wire.packed_length(numel, capacity) if self.values == "packed" else 2 * capacity)]

    def collectives(self, bucket: Sender) -> Exchanging:
        message = bucket.message()
        if self.values == "packed":
            message = bucket.ops.quantize(bucket.buffer, message)
        gathered = yield Collective("allgather", message)
        if self.values == "packed":
            gathered = bucket.ops.unquantize(gathered, bucket.world, bucket.numel)
        (used,) = yield Told([bucket.ops.rows_in_use(gathered, bucket.world, bucket.numel)])
        if wire.DAMAGED in used:
            raise damaged(bucket, f"message of worker {used.index(wire.DAMAGED)}", OUT_OF_ORDER)
        if wire.NOT_FINITE in used:
            return None
        return Messages(gathered, used)
