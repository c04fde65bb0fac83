"""How parameters are packed into buckets. This only plans layouts from names and sizes, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from horovod_sparse.compressors.base import Compressor
from horovod_sparse.exchange import wire


class Parameter(NamedTuple):
    """What planning needs to know about a parameter."""

    name: str
    shape: tuple[int, ...]
    residual_dtype: str
    """"float32" or "float64"."""
    kind: Hashable
    """Parameters of different kinds (devices, for instance) never share a bucket."""
    group: int | None = None
    """Number of the group in the user's `groups=` argument; each group gets one bucket."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Slot(NamedTuple):
    """A parameter's named slice of its bucket."""

    name: str
    offset: int
    numel: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """One bucket: its parameters one after the other."""

    slots: tuple[Slot, ...]
    residual_dtype: str

    @classmethod
    def of(cls, members: Sequence[Parameter]) -> Layout:
        """Lay out parameters of one residual type."""
        offsets = accumulate((one.numel for one in members[:-1]), initial=0)
        slots = [Slot(one.name, offset, one.numel, one.shape) for one, offset in zip(members, offsets, strict=True)]
        return cls(tuple(slots), members[0].residual_dtype)

    @property
    def name(self) -> str:
        """The first parameter's name, which is unique to this bucket."""
        return self.slots[0].name

    @property
    def numel(self) -> int:
        last = self.slots[-1]
        return last.offset + last.numel


def layouts_of(parameters: Sequence[Parameter], compressor: Compressor, world: int = 1) -> list[Layout]:
    """Pack `parameters`, given in the order of the model, into buckets for so many workers.

    They are filled from the last parameter to the first, as backward makes gradients, and none is too large for its messages.
    """
    buckets: list[list[Parameter]] = []
    open_buckets: dict[Hashable, tuple[list[Parameter], int]] = {}
    for parameter in reversed(parameters):
        key = (parameter.kind, parameter.residual_dtype, parameter.group)
        members, numel = open_buckets.get(key, ([], 0))
        if not members or not _fits(numel, parameter, compressor, world):
            members, numel = [], 0
            buckets.append(members)
        members.append(parameter)
        open_buckets[key] = members, numel + parameter.numel
    return [Layout.of(members) for members in buckets]


def _fits(numel: int, parameter: Parameter, compressor: Compressor, world: int) -> bool:
    """Return whether a parameter may join a bucket that has `numel` elements."""
    if _excess(numel + parameter.numel, compressor, world) is not None:
        return False
    most = compressor.granularity
    if parameter.group is not None or most == "model":
        return True
    if most == "layer":
        return False
    itemsize = 8 if parameter.residual_dtype == "float64" else 4
    return itemsize * (numel + parameter.numel) <= most


def planned(parameters: Sequence[Parameter], compressor: Compressor, world: int) -> tuple[list[Layout], list[Layout]]:
    """Return the layouts of the buckets of some parameters, and of those that are reduced dense: small ones together."""
    compressed: list[Parameter] = []
    together: dict[Hashable, list[Parameter]] = {}
    for one in parameters:
        if not compressor.leaves_dense(one.name, one.numel):
            compressed.append(one)
            continue
        # With many small parameters, one allreduce for each would cost more time than their entries do.
        key = (one.kind, one.residual_dtype) if one.numel < compressor.min_numel else one.name
        together.setdefault(key, []).append(one)
    return layouts_of(compressed, compressor, world), [Layout.of(members) for members in together.values()]


def check_limits(layouts: Iterable[Layout], compressor: Compressor, world: int) -> None:
    """Raise ValueError when a bucket is too large for its messages."""
    for layout in layouts:
        what = _excess(layout.numel, compressor, world)
        if what is not None:
            raise ValueError(
                f"bucket {layout.name!r} {what}. One parameter is too large: split it into several parameters, lower ratio "
                "or slack if it gathers too much, or exclude it"
            )


def _excess(numel: int, compressor: Compressor, world: int) -> str | None:
    """Return what is too much for messages or for Horovod's collectives in a bucket of `numel`; None if nothing is."""
    if numel > wire.MAX_BUCKET:
        return f"has {numel} elements, expected at most {wire.MAX_BUCKET} (Horovod counts in C ints)"
    rounds = compressor.rounds(numel, compressor.highest_ratio(world), world)
    gathered, most = max(one.gathered(world) for one in rounds), wire.MAX_GATHERED
    if gathered > most:
        return f"gathers {gathered} int32 from {world} workers, expected at most {most} (Horovod counts in C ints)"
    return None
