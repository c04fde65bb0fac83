"""What all compressors share: their settings with checks, and the one method that each algorithm supplies.

Tested by tests/compressors/test_checks.py and test_laws.py.
"""

from __future__ import annotations

import fnmatch
import inspect
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

from horovod_sparse.compressors.bucket_state import ALONE as ALONE
from horovod_sparse.compressors.bucket_state import BucketState as BucketState
from horovod_sparse.compressors.bucket_state import Place as Place
from horovod_sparse.compressors.checks import (
    check_exchange,
    check_flag,
    check_granularity,
    check_integer,
    check_patterns,
    check_ratio,
    number,
    plain,
    shown,
)
from horovod_sparse.compressors.momentum import MomentumCorrection, check_momentum
from horovod_sparse.compressors.schedules import ByAge, Schedule
from horovod_sparse.exchange.pairs import Pairs
from horovod_sparse.exchange.protocols import Choice, Exchange
from horovod_sparse.ops.protocol import NOTHING, SUMS, Array, Hints, Ops, Selection

BUCKET_BYTES = 25 * 2**20
POSITIVE = (5e-324, sys.float_info.max)
"""The range of finite numbers above zero."""


@dataclass(eq=False, repr=False, kw_only=True)
class Compressor(ABC):
    """Settings common to all sparsifiers; subclasses supply `select`.

    Args:
        ratio: fraction of a bucket's entries to send when training has begun, in (0, 1], or a `Schedule` of it (see
            `schedules.Schedule`); k = max(1, floor(ratio * numel)).
        granularity: what one selection is made from: a bucket, whose residual has at most this number of bytes, >= 1 (a
            larger parameter gets one of its own), "layer" (every parameter by itself), or "model" (everything). With
            "auto" it has up to 25 MiB in the host's memory. On a device it has two fifths of the model, from 25 to 256
            MiB, since the time to launch kernels grows with the number of buckets.
        min_numel: parameters with fewer elements are reduced dense, >= 0.
        exclude: shell-style patterns (`"*.bias"`, `"embedding*"`) of the names of parameters that are reduced dense.
        warmup: c, finite, > 0. The ratio of step t is `max(ratio, c/(t+1))`, in stairs of a factor sqrt(2). While the messages
            would have more bytes than a dense allreduce of float32, everything is sent, by allreduce. None takes `ratio` from
            the first step on. "auto" is 16 for a number as ratio, and None for a schedule and for Threshold.
        residual: whether what is not sent is kept and added to the next gradient (error feedback). Residuals of float64
            gradients are float64, all others float32.
        lr_in_residual: whether the residual is kept in units of the update (https://arxiv.org/abs/1809.07599): what is added
            and sent is eta times the gradient, and the reduced gradient is what was sent, divided by eta; zero if eta is 0.
            Rates must be 0, or > 0 as float32 too. The rate is the optimizer's where the adapter is given one.
        momentum: momentum before the selection, m in [0, 1) or a `MomentumCorrection`; the optimizer must then have none. None
            leaves momentum where it is. Parameters that are reduced dense get the same momentum after the reduction.
            Embeddings with sparse gradients are refused.
        clip: about the largest norm of a parameter's reduced gradient if the workers' gradients are independent, > 0, in
            the unit of the gradients (scaled ones with a loss scaler that is not announced by `scale_with`). Each worker scales
            its gradient of the parameter down before anything else (Deep Gradient Compression, section 3.2,
            https://arxiv.org/abs/1712.01887). None does not clip. Embeddings with sparse gradients are not clipped.
        slack: capacity of a message as a multiple of k, >= 1; None takes the algorithm's own. What does not fit waits.
        exchange: how the selections of all workers become one gradient: `Pairs`, `Union`, `SharedIndices`, or an `Exchange` of
            one's own, if the algorithm can use it. None: its own, for most `Pairs()`.
    """

    ratio: float | Schedule = field(kw_only=False)
    granularity: int | Literal["auto", "layer", "model"] = "auto"
    min_numel: int = 256
    exclude: Sequence[str] = ()
    warmup: float | Literal["auto"] | None = "auto"
    residual: bool = True
    lr_in_residual: bool = False
    momentum: float | MomentumCorrection | None = None
    clip: float | None = None
    # None stands for what the algorithm takes by default, and is never there afterwards.
    slack: float = None  # type: ignore[assignment]
    exchange: Exchange = None  # type: ignore[assignment]

    default_slack: ClassVar[float] = 1.0
    needs_sums: ClassVar[bool] = False
    """Whether `select` calls `ops.measure`. If so, its sums are computed while gradients are accumulated."""
    default_warmup: ClassVar[float | None] = 16.0
    """c of `warmup="auto"`."""
    default_exchange: ClassVar[Exchange] = Pairs()
    chooses: ClassVar[tuple[Choice, ...]] = ("own",)
    """What `select` can choose for an exchange other than the default, which is refused if it needs something else."""

    def __post_init__(self) -> None:
        """Check the arguments. A class with arguments of its own, a dataclass too, checks them first, and then calls this."""
        given: Any = self.exchange
        if given is None:
            self.exchange = self.default_exchange
        self.take_slack(self.default_slack)
        if not isinstance(self.exclude, str):
            self.exclude = tuple(self.exclude)
        for name, check in _CHECKS.items():
            check(name, getattr(self, name))
        if isinstance(self.momentum, (int, float)):
            self.momentum = MomentumCorrection(self.momentum) if self.momentum else None
        self._check_together()
        self.ratio = self.ratio if isinstance(self.ratio, Schedule) else float(self.ratio)
        self.slack = float(self.slack)
        if self.clip is not None:
            self.clip = float(self.clip)

    def take_slack(self, slack: float) -> None:
        """Set the slack, unless the user has set it."""
        given: Any = self.slack
        if given is None:
            self.slack = slack

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, plain(value))

    def _check_together(self) -> None:
        """Raise ValueError if arguments that are right alone do not fit together."""
        if isinstance(self.ratio, Schedule) and self.warmup not in ("auto", None):
            raise ValueError(
                f"warmup must be None or 'auto' with ratio={self.ratio!r}, which changes by itself, got {self.warmup!r}; "
                "put it into the schedule, or give a number as ratio"
            )
        if self.momentum is not None and not self.residual:
            raise ValueError(
                f"residual must be True with momentum={self.momentum!r}, got False: velocities are kept in it"
            )
        if self.exchange != self.default_exchange and self.exchange.needs not in self.chooses:
            raise ValueError(
                f"exchange must be one that {type(self).__name__} can use, such as {self.default_exchange!r}, got "
                f"{self.exchange!r}; leave exchange out, or use another compressor"
            )

    @property
    def schedule(self) -> Schedule:
        """The ratio of each step."""
        if isinstance(self.ratio, Schedule):
            return self.ratio
        warmup = self.default_warmup if self.warmup == "auto" else self.warmup
        return ByAge(self.ratio, warmup or 0.0)

    @abstractmethod
    def select(self, ops: Ops, x: Array, k: int, capacity: int, state: BucketState) -> Selection:
        """Choose about k entries, at most `capacity`, of the accumulated gradient `x`, which must not be changed.

        `x` is flat, finite and not empty. 1 <= k <= capacity <= len(x); where `message_capacity` divides the entries among
        the workers, this holds for all workers together. `state` is this bucket's own.
        """

    @property
    def momentum_correction(self) -> MomentumCorrection | None:
        """The momentum before the selection; None if there is none."""
        return self.momentum if isinstance(self.momentum, MomentumCorrection) else None

    def hints(self, state: BucketState, room: int) -> Hints:
        """Return what the next selection is expected to ask. Up to `room` entries above a cut can be noted."""
        return Hints(state.cut, room, SUMS if self.needs_sums else NOTHING)

    def new_state(self, place: Place = ALONE) -> BucketState:
        """Return the state of a bucket before its first step."""
        return BucketState(place)

    def observe(self, state: BucketState, count: int, k: int, proposed: list[float]) -> None:
        """Learn how many entries all ranks selected together, and what each rank proposed (exchange `Union`)."""
        return

    def target_count(self, numel: int, ratio: float | None = None) -> int:
        """Return k = max(1, floor(ratio * numel)); `ratio` is the final ratio by default."""
        if ratio is None:
            ratio = self.schedule.final
        # Round first: 0.29 * 100 is 28.999999999999996, but 29 is meant.
        return max(1, math.floor(round(ratio * numel, 6)))

    def message_capacity(self, numel: int, k: int, world: int) -> int:
        """Return the capacity of one rank's message in entries, for a bucket of `numel`: ceil(slack * k), at most numel."""
        return min(numel, math.ceil(self.slack * k))

    def residual_dtype_of(self, gradient: Array) -> str:
        """Return the residual's type for gradients like this one."""
        return "float64" if "float64" in str(gradient.dtype) else "float32"

    def leaves_dense(self, name: str, numel: int) -> bool:
        """Return whether a parameter is reduced dense."""
        return numel < max(self.min_numel, 1) or any(fnmatch.fnmatchcase(name, pattern) for pattern in self.exclude)

    def __repr__(self) -> str:
        """Show every setting that is not the default: these must be equal on all ranks."""
        known, settings = inspect.signature(type(self)).parameters, vars(self)
        # What is no argument, but an attribute of `Compressor`, follows from the arguments.
        more = sorted(name for name in settings if name not in {*known, *_CHECKS} and name[0] != "_")
        names = [name for name in (*known, *more) if name in settings]
        defaults = {name: one.default for name, one in known.items()}
        defaults |= {"slack": self.default_slack, "exchange": self.default_exchange}
        return shown(type(self).__name__, {name: settings[name] for name in names}, defaults)


_CHECKS: dict[str, Callable[[str, Any], None]] = {
    "ratio": check_ratio,
    "granularity": check_granularity,
    "min_numel": partial(check_integer, least=0),
    "exclude": check_patterns,
    "warmup": number("a finite number > 0, 'auto' or None", lambda c: 0.0 < c < math.inf, "auto", None),
    "residual": check_flag,
    "lr_in_residual": check_flag,
    "momentum": check_momentum,
    "clip": number("a finite norm > 0 or None", lambda norm: 0.0 < norm < math.inf, None),
    "slack": number("a finite multiple of k, >= 1", lambda slack: 1.0 <= slack < math.inf),
    "exchange": check_exchange,
}
