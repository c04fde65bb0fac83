"""Local updates: workers step alone and exchange how far their parameters have moved. Imports no framework.

SparseLoCo (https://arxiv.org/abs/2508.15706): theta_r are worker r's parameters after H steps from the shared theta.

    Delta_r = theta - theta_r
    e_r     = beta * e_r + Delta_r
    sent_r  = the entries of e_r that the compressor selects
    e_r     = e_r - sent_r
    theta   = theta - alpha * mean(sent_r)

With `outer_momentum` mu, as in DiLoCo (https://arxiv.org/abs/2311.08105): m = mu * m + mean(sent_r), and the last line is
theta = theta - alpha * (mean(sent_r) + mu * m).

Local steps compute their gradients at theta_r - c * e_r, so that what a worker has found and not sent yet is not lost to
it. It is as if it began at theta - c * e_r, and Delta_r were (theta - c * e_r) - theta_r.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_sparse.ops.protocol import Array


@dataclass(frozen=True)
class Outer:
    """The settings of local updates.

    Args:
        every: H, the number of local steps between two exchanges, >= 1.
        residual_decay: beta, in (0, 1].
        outer_lr: alpha, > 0.
        outer_momentum: mu, in [0, 1).
        keep: c, in [0, 1].
    """

    every: int
    residual_decay: float
    outer_lr: float
    outer_momentum: float
    keep: float

    def __post_init__(self) -> None:
        if not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 1:
            raise ValueError(f"every must be a whole number of steps >= 1, got {self.every!r}")
        if not 0.0 < self.residual_decay <= 1.0:
            raise ValueError(f"residual_decay must be in (0, 1], got {self.residual_decay!r}")
        if not 0.0 < self.outer_lr < math.inf:
            raise ValueError(f"outer_lr must be a finite number > 0, got {self.outer_lr!r}")
        if not 0.0 <= self.outer_momentum < 1.0:
            raise ValueError(f"outer_momentum must be in [0, 1), got {self.outer_momentum!r}")
        if not 0.0 <= self.keep <= 1.0:
            raise ValueError(f"keep must be in [0, 1], got {self.keep!r}")

    def step(self, mean: Array, momentum: Array | None) -> None:
        """Turn the mean of what was sent into the step of a shared parameter. `momentum` changes, if there is one."""
        if momentum is not None:
            momentum *= self.outer_momentum
            momentum += mean
            mean += self.outer_momentum * momentum
        mean *= self.outer_lr


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
