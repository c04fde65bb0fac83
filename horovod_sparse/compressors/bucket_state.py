"""What a compressor carries from step to step for one bucket. Imports no framework. Tested by tests/core/test_state.py."""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from typing_extensions import Self

_NEARLY = 0.92
"""The next step's k-th largest magnitude will hardly be below this fraction of the last step's."""


class Place(NamedTuple):
    """The bucket that a selection is made from, and the worker that makes it."""

    bucket: str = ""
    position: int = 0
    """The worker's number."""
    world: int = 1
    """The number of workers."""
    ratio: float | None = None
    """That of the first step that is not dense; None: the final one."""
    numel: int = 0
    """The number of entries to select from; 0 if it is not known."""


_FIXED = (int, float, str, tuple)
"""Types of values that cannot change; a tuple holds nothing else."""
ALONE = Place()
"""A selection outside of any bucket."""


@dataclass
class BucketState:
    """What an algorithm carries from step to step for one bucket. Subclasses add fields."""

    saved: ClassVar[tuple[str, ...]] = ()
    """Names of the fields that the next selection depends on: plain numbers, strings, lists and NumPy's arrays."""
    ranges: ClassVar[dict[str, tuple[float, float]]] = {"step": (0, 2**53)}
    """Least and largest value of saved fields; a state outside these ranges is refused."""

    place: Place = ALONE
    step: int = 0
    """Selections made so far."""
    threshold: float = math.nan
    """Magnitude above which entries were selected in the last step; NaN for algorithms without one."""
    stages: int = 0
    """Fitting stages of the last step; 0 for algorithms without them."""
    cut: float = math.inf
    """Magnitude above which the next selection will most likely choose its entries; infinity if unknown."""
    fingerprint: int = 0
    """31-bit checksum of a choice that must be the same on all ranks."""
    proposal: float = 0.0
    """A number that is sent to all ranks before `observe`, rounded to float32 (exchange `Union`)."""

    def state_dict(self) -> dict[str, object]:
        """Return everything that the next selection depends on, as plain numbers, strings and lists; arrays become lists."""
        found = {name: getattr(self, name) for name in ("step", *self.saved)}
        return {
            name: one.tolist() if isinstance(one, np.ndarray) else copy.deepcopy(one) for name, one in found.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned. Raise ValueError for anything else, and then change nothing."""
        expected = self.state_dict()
        if not isinstance(state, Mapping) or _types(state) != _types(expected):
            raise ValueError(f"adaptive state must be like {expected}, got {state}; another algorithm saved it")
        for name, (least, most) in self.ranges.items():
            if not least <= state[name] <= most:
                raise ValueError(
                    f"adaptive state must have {name} in [{least:g}, {most:g}], got {state[name]!r}; the state is damaged"
                )
        for name in self.saved:
            self._check_array(name, state[name])
        self.adopt(state)

    def _check_array(self, name: str, value: Any) -> None:
        """Raise ValueError if a saved field is an array that the value does not fit. Its length must, if it is the bucket's."""
        mine = getattr(self, name)
        if not isinstance(mine, np.ndarray):
            return
        try:
            shape = np.array(value, mine.dtype).shape
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"adaptive state must have numbers of {mine.dtype} in {name}: {error}; the state is damaged"
            ) from error
        if self.place.numel and mine.shape == (self.place.numel,) != shape:
            raise ValueError(
                f"adaptive state must have {name} of shape {mine.shape}, one for each entry of bucket {self.place.bucket!r}, "
                f"got {shape}; load it with the buckets that it was saved with, or with granularity='layer'"
            )

    def adopt(self, state: Mapping[str, Any]) -> None:
        """Take over the values of a state that has been checked."""
        for name in ("step", *self.saved):
            mine, value = getattr(self, name), state[name]
            setattr(self, name, np.array(value, mine.dtype) if isinstance(mine, np.ndarray) else copy.deepcopy(value))

    def copied(self) -> Self:
        """Return a copy that shares nothing with this one that can change: a step that fails goes back to it."""
        other = copy.copy(self)
        for name, one in vars(self).items():
            if not isinstance(one, _FIXED):
                setattr(other, name, copy.deepcopy(one))
        return other

    def expect(self, smallest: float) -> None:
        """Expect that the next step's k largest entries are hardly smaller than `smallest`, about this step's k-th largest."""
        self.cut = _NEARLY * smallest

    def rescale(self, factor: float) -> None:
        """Multiply whatever is in the unit of the residuals by `factor`, because the residuals were multiplied by it."""
        self.cut *= factor

    def checksum(self) -> int:
        """Return a 31-bit checksum that tells different states apart."""
        return zlib.crc32(repr(self.state_dict()).encode()) >> 1


def _types(state: Mapping[str, Any]) -> dict[str, type]:
    return {name: type(value) for name, value in state.items()}
