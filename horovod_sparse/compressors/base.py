"""What all compressors share: their settings, checked, and the one method that an algorithm supplies."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, TypedDict

from horovod_sparse.ops import Array, Ops, Selection

Granularity = Literal["layer", "bucket", "model"]
NotFinite = Literal["raise", "propagate"]

BUCKET_BYTES = 25 * 2**20
MIN_NUMEL = 256


class Settings(TypedDict, total=False):
    """The keyword arguments that all compressors share; see `Compressor`."""

    granularity: Granularity
    bucket_bytes: int
    min_numel: int
    residual: bool
    residual_dtype: Literal["float32", "float64"] | None
    capacity: float | None
    not_finite: NotFinite


@dataclass
class BucketState:
    """What an algorithm carries from step to step for one bucket. Subclasses add fields and save them."""

    threshold: float = math.nan
    """Magnitude above which entries were selected in the last step; NaN for algorithms without one."""
    stages: int = 0
    """Fitting stages of the last step; 0 for algorithms without them."""

    def state_dict(self) -> dict[str, object]:
        """Plain numbers, strings and lists: whatever the next selection depends on."""
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Continue from what `state_dict` returned. Raises ValueError for the state of another algorithm."""
        if state:
            raise ValueError(
                f"adaptive state must be empty for this compressor, got {state}; another algorithm saved it"
            )


class Compressor(ABC):
    """Settings common to all sparsifiers; subclasses supply `select`.

    Args:
        ratio: fraction of a bucket's entries to send, in (0, 1]; k = max(1, floor(ratio * numel)).
        granularity: what is selected from at once: "layer" (every parameter by itself), "bucket" (parameters packed
            up to `bucket_bytes`), or "model" (everything).
        bucket_bytes: size of a bucket's residual in bytes, > 0; a larger parameter gets a bucket of its own.
        min_numel: parameters with fewer elements go through Horovod's dense allreduce, >= 0.
        residual: whether what is not sent is kept and added to the next gradient (error feedback).
        residual_dtype: "float32" or "float64"; None takes float64 for float64 gradients, float32 for all others.
            Half precision is refused: it would round away the small gradients that the residual exists to keep.
        capacity: room of the message as a multiple of k, >= 1; None takes the algorithm's own. What does not fit
            stays in the residual.
        not_finite: what a NaN or infinity in a gradient does. "raise": the rank raises FloatingPointError naming the
            parameter. "propagate": the bucket's reduced gradient becomes NaN on every rank, which is what
            `torch.amp.GradScaler` needs to skip the step everywhere. The residual stays finite either way.

    Raises:
        ValueError, TypeError: naming the argument, its value and what was expected.
    """

    default_capacity: float = 1.0

    def __init__(
        self,
        ratio: float,
        *,
        granularity: Granularity = "bucket",
        bucket_bytes: int = BUCKET_BYTES,
        min_numel: int = MIN_NUMEL,
        residual: bool = True,
        residual_dtype: str | None = None,
        capacity: float | None = None,
        not_finite: NotFinite = "raise",
    ) -> None:
        check_number("ratio", ratio, "in (0, 1]", 0.0 < _number(ratio) <= 1.0)
        check_choice("granularity", granularity, ("layer", "bucket", "model"))
        check_integer("bucket_bytes", bucket_bytes, 1)
        check_integer("min_numel", min_numel, 0)
        check_boolean("residual", residual)
        check_choice("residual_dtype", residual_dtype, (None, "float32", "float64"))
        if capacity is not None:
            check_number("capacity", capacity, "a finite multiple of k, >= 1", 1.0 <= _number(capacity) < math.inf)
        check_choice("not_finite", not_finite, ("raise", "propagate"))
        self.ratio = float(ratio)
        self.granularity: Granularity = granularity
        self.bucket_bytes = bucket_bytes
        self.min_numel = min_numel
        self.residual = residual
        self.residual_dtype = residual_dtype
        self.capacity = self.default_capacity if capacity is None else float(capacity)
        self.not_finite: NotFinite = not_finite

    @abstractmethod
    def select(self, ops: Ops, x: Array, k: int, capacity: int, state: BucketState) -> Selection:
        """Choose about k, at most `capacity`, entries of the accumulated gradient `x`, which must not be changed.

        `x` is flat, finite and not empty; 1 <= k <= capacity <= len(x). `state` is this bucket's own.
        """

    def new_state(self) -> BucketState:
        """The state of a bucket before its first step."""
        return BucketState()

    def asked(self, numel: int) -> int:
        """k = max(1, floor(ratio * numel))."""
        return max(1, math.floor(self.ratio * numel))

    def room(self, numel: int) -> int:
        """Rows of the message of a bucket of `numel` entries: ceil(capacity * k), at most numel."""
        return min(numel, math.ceil(self.capacity * self.asked(numel)))

    def settings(self) -> dict[str, object]:
        """Every setting as plain values: what must be equal on all ranks."""
        return {"compressor": type(self).__name__} | {
            name: value for name, value in sorted(vars(self).items()) if not name.startswith("_")
        }

    def __repr__(self) -> str:
        settings = self.settings()
        return f"{settings.pop('compressor')}({', '.join(f'{name}={value!r}' for name, value in settings.items())})"


def check_number(name: str, value: object, expected: str, holds: bool) -> None:
    """Raise ValueError unless the condition on a number holds."""
    if not holds:
        raise ValueError(f"{name} must be {expected}, got {value!r}")


def check_integer(name: str, value: object, least: int) -> None:
    """Raise unless `value` is an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int >= {least}, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be >= {least}, got {value!r}")


def check_boolean(name: str, value: object) -> None:
    """Raise unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_choice(name: str, value: object, choices: Collection[object]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def _number(value: object) -> float:
    """The value as a float; NaN, which fails every range check, when it is not a number."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
