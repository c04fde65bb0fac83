"""Local updates: workers step alone and exchange how far their parameters have moved. Imports no framework.

SparseLoCo (https://arxiv.org/abs/2508.15706): theta_r are worker r's parameters after H steps from the shared theta.

    Delta_r = theta - theta_r
    e_r     = beta * e_r + Delta_r
    sent_r  = the entries of e_r that the compressor selects
    e_r     = e_r - sent_r
    theta   = theta - alpha * mean(sent_r)

With `outer_momentum` mu, as in DiLoCo (https://arxiv.org/abs/2311.08105): m = mu * m + mean(sent_r), and the last line is
theta = theta - alpha * (mean(sent_r) + mu * m).
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_sparse.compressors.base import Compressor
from horovod_sparse.ops.protocol import Array

_NEEDED = (
    ("momentum_correction", None, "leave momentum out, and use outer_momentum, or momentum in the optimizer"),
    ("clip_norm", None, "movement that is clipped off would be lost; clip gradients before the optimizer's step"),
    ("not_finite", "raise", "the shared parameters would stay NaN"),
    ("lr_in_residual", False, "residuals are in units of the parameters already"),
)
"""Settings of a compressor, what they must be, and why."""


@dataclass(frozen=True)
class Outer:
    """The settings of local updates.

    Args:
        every: H, the number of local steps between two exchanges, >= 1.
        residual_decay: beta, in (0, 1].
        outer_lr: alpha, > 0.
        outer_momentum: mu, in [0, 1).
    """

    every: int
    residual_decay: float
    outer_lr: float
    outer_momentum: float

    def __post_init__(self) -> None:
        if not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 1:
            raise ValueError(f"every must be a whole number of steps >= 1, got {self.every!r}")
        if not 0.0 < self.residual_decay <= 1.0:
            raise ValueError(f"residual_decay must be in (0, 1], got {self.residual_decay!r}")
        if not 0.0 < self.outer_lr < math.inf:
            raise ValueError(f"outer_lr must be a finite number > 0, got {self.outer_lr!r}")
        if not 0.0 <= self.outer_momentum < 1.0:
            raise ValueError(f"outer_momentum must be in [0, 1), got {self.outer_momentum!r}")

    def check(self, compressor: Compressor) -> None:
        """Raise ValueError if a compressor does what has no meaning here."""
        if compressor.momentum == "auto":
            compressor.move_momentum(0.0, nesterov=False)
        for name, needed, why in _NEEDED:
            if getattr(compressor, name) not in ("auto", needed):
                raise ValueError(
                    f"compression must have {name}={needed!r} with local updates, got {getattr(compressor, name)!r}: {why}"
                )

    def update(self, shared: Array, mean: Array, momentum: Array | None) -> None:
        """Move a shared parameter by the mean of what was sent. `mean` is changed, and `momentum` if there is one."""
        if momentum is not None:
            momentum *= self.outer_momentum
            momentum += mean
            mean += self.outer_momentum * momentum
        mean *= self.outer_lr
        shared -= mean


_made = itertools.count()
_agreed = 0
"""The number of the next `LocalUpdates` that agrees with those of other workers. One that only one worker has made has none."""
_newest = -1
"""Of those that have agreed, the one that this worker made last."""


class Local(ABC):
    """What the `LocalUpdates` of all frameworks share.

    Args:
        outer: the settings.
        parameters: the arrays that local steps change.
        shared: copies of them in a type that is wide enough. All workers begin with the same.
        reducer: averages over the workers: it has a pipeline, `state_dict` and `discard_step`.
    """

    def __init__(
        self, outer: Outer, parameters: Mapping[str, Array], shared: Mapping[str, Array], reducer: Any
    ) -> None:
        self.outer = outer
        self._parameters, self._shared, self._reducer = dict(parameters), dict(shared), reducer
        self._momentum = copy.deepcopy(self._shared) if outer.outer_momentum else {}
        for momentum in self._momentum.values():
            momentum[...] = 0
        self._steps = 0
        self._made = next(_made)
        self._number: int | None = None
        """The same on all workers; None before the first exchange."""
        self._unchecked = True
        """Whether the shared parameters are still to be compared with those of the other workers."""

    def _count(self) -> bool:
        """Count a local step. Return whether it is time for an exchange."""
        self._steps += 1
        return self._steps >= self.outer.every

    def synchronize(self) -> None:
        """Exchange now. All workers then have the same parameters. Call this on all of them, for instance at the end.

        Raises:
            FloatingPointError: on every worker, if a parameter of any worker holds NaN or infinity. All workers then have
                the parameters of the last exchange again, and training can go on.
            ValueError: on every worker, if they differ in settings or in the parameters with which they begin.
            RuntimeError: PyTorch with Horovod: on all other workers, if the exchange has raised on one, for instance because
                of an interrupt. Nothing has changed, and training can go on.
        """
        try:
            means = self._exchange()
        except FloatingPointError:
            self._reducer.discard_step()
            self._spread()
            raise
        for name, mean in means.items():
            self.outer.update(self._shared[name], mean, self._momentum.get(name))
        self._spread()
        if self._reducer.pipeline is not None:
            self._reducer.pipeline.decay(self.outer.residual_decay)
        self._unchecked = False

    @abstractmethod
    def _exchange(self) -> Mapping[str, Array]:
        """Agree with the other workers, and return the means of all drifts. An exchange that raises leaves no trace."""

    def _described(self) -> dict[str, str]:
        """Return what must be the same on all workers."""
        number = str(self._number)
        if self._number is None:
            # Two that begin alike may have been taken in another order elsewhere. It shows at the second.
            number = "made before another one that has exchanged already" if self._made < _newest else "new"
        # All workers say so whenever one has loaded a state, so that nobody waits.
        shared = digest(self._shared) if self._unchecked else "as they were"
        return {"local updates": f"{number}, {self.outer}", "shared parameters": shared}

    def _agree(self, numbers: Iterable[int]) -> None:
        """Begin an exchange. `numbers` are what `next_number` returns on each worker."""
        global _agreed, _newest
        if self._number is None:
            self._number = max(numbers)
            _agreed, _newest = self._number + 1, max(_newest, self._made)
        self._steps = 0
        # If this worker alone fails from here on, the others' shared parameters will be others.
        self._unchecked = True

    def _spread(self) -> None:
        for name, parameter in self._parameters.items():
            parameter[...] = self._shared[name]

    def state_dict(self) -> dict[str, Any]:
        """Return what this worker keeps beside its parameters and its optimizer: save all three on every worker."""
        parts = {"shared": self._shared, "momentum": self._momentum}
        return {"steps": self._steps, **copy.deepcopy(parts), "compression": self._reducer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, with the same parameters and settings.

        PyTorch: before the first exchange, the state of the compression is checked in that exchange, and all workers raise.

        Raises:
            ValueError: the state belongs to other parameters, or is none of `LocalUpdates`; nothing was changed.
        """
        check_parts(state, {"shared": self._shared, "momentum": self._momentum})
        self._load(state["compression"])
        for part, mine in (("shared", self._shared), ("momentum", self._momentum)):
            for name, array in mine.items():
                array[...] = state[part][name]
        self._unchecked = True
        self._steps = int(state["steps"])

    @abstractmethod
    def _load(self, state: Mapping[str, Any]) -> None:
        """Load the state of the compression."""


def next_number() -> int:
    """Return the number that this worker would give to `LocalUpdates` that are new."""
    return _agreed


def digest(arrays: Mapping[str, Array]) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of the names and values of arrays, or of PyTorch's tensors."""
    sha = hashlib.sha256()
    for name, array in arrays.items():
        sha.update(name.encode())
        sha.update(np.asarray(array.cpu() if hasattr(array, "cpu") else array).tobytes())
    return sha.hexdigest()[:16]


def check_parts(state: Mapping[str, Any], mine: Mapping[str, Mapping[str, Array]]) -> None:
    """Raise ValueError if a state is none of local updates, or if the arrays in a part have other shapes than `mine`."""
    absent = [part for part in ("steps", "compression", *mine) if part not in state]
    if absent:
        raise ValueError(f"state must be what LocalUpdates.state_dict() returned, but it has no {absent}")
    for part, arrays in mine.items():
        shapes, theirs = ({name: tuple(one.shape) for name, one in some.items()} for some in (arrays, state[part]))
        if shapes != theirs:
            raise ValueError(f"the state's {part!r} must have the shapes {shapes}, got {theirs}; it is another model's")
