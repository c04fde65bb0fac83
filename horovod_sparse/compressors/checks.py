"""Checks of arguments: an error names the argument, what was expected and the value."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection


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


def as_number(value: object) -> float:
    """Return the value as a float, or NaN if it is not a number. NaN fails every range check."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def warn_former(former: str, name: str) -> None:
    """Warn the caller of a public function that it uses a former name."""
    warnings.warn(f"horovod_sparse: {former} is called {name} now", FutureWarning, stacklevel=3)


def check_fraction(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a number in (0, 1]."""
    check_number(name, value, "in (0, 1]", 0.0 < as_number(value) <= 1.0)
