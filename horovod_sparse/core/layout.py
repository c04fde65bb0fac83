"""Where parameters lie in a bucket. Arithmetic on names and sizes, the same on every rank; imports no framework."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple


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
    on_device: bool = False
    """Whether its residual is not in the host's memory."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an entry of its residual."""
        return 8 if self.residual_dtype == "float64" else 4


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
    is_dense: bool = False
    """Whether everything is sent in all steps, by allreduce."""

    @classmethod
    def of(cls, members: Sequence[Parameter], *, is_dense: bool = False) -> Layout:
        """Lay out parameters of one residual type."""
        offsets = accumulate((one.numel for one in members[:-1]), initial=0)
        slots = [Slot(one.name, offset, one.numel, one.shape) for one, offset in zip(members, offsets, strict=True)]
        return cls(tuple(slots), members[0].residual_dtype, is_dense)

    @property
    def name(self) -> str:
        """The first parameter's name, which is unique to this bucket."""
        return self.slots[0].name

    @property
    def numel(self) -> int:
        last = self.slots[-1]
        return last.offset + last.numel
