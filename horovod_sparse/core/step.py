"""What a step must be able to undo, and how it ends. Imports no framework.

An exception may come between any two statements (Ctrl-C, a signal handler that raises). So everything is remembered before it
is changed, an ending is decided by one assignment, and whatever carries it out can be done again from its beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from horovod_sparse.core.statistics import Tally
from horovod_sparse.ops.protocol import Array


class Ending(Enum):
    """How a step ends, on all ranks."""

    SENT = auto()
    """What was taken out of the residuals has been sent."""
    FAILED = auto()
    """What was taken returns. Adaptive state and momentum have moved on, because the step counts."""
    UNDONE = auto()
    """The step has never been. Gradients that had arrived stay in the residuals, unless there are copies of these."""


@dataclass(slots=True)
class Before:
    """A bucket as it was before a step."""

    state: dict[str, Any]
    tally: Tally
    copies: Sequence[Array]
    """Copies of the residual and of the velocity; none if gradients that have arrived stay in the residual."""


@dataclass(slots=True)
class Step:
    """A step of a pipeline that has begun."""

    buckets: dict[str, Before] = field(default_factory=dict)
    """The buckets that a gradient of this step has reached."""
    failures: list[str] = field(default_factory=list)
    """What made this step fail: first what this rank knows of its own gradients."""
    failures_elsewhere: list[str] = field(default_factory=list)
    ending: Ending | None = None
    """None until it is decided."""
