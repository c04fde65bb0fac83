"""Checks of arguments: an error names the argument, what was expected and the value."""

from __future__ import annotations

import math
from collections.abc import Collection

from horovod_sparse.compressors.momentum import MomentumCorrection
from horovod_sparse.compressors.scalars import plain
from horovod_sparse.compressors.schedules import Schedule


def check_number(name: str, value: object, expected: str, holds: bool) -> None:
    """Raise ValueError unless the condition on a number holds."""
    if not holds:
        raise ValueError(f"{name} must be {expected}, got {value!r}")


def check_integer(name: str, value: object, least: int) -> None:
    """Raise unless `value` is an int of at least `least`."""
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int >= {least}, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be >= {least}, got {value!r}")


def check_boolean(name: str, value: object) -> None:
    """Raise unless `value` is True or False."""
    if not isinstance(plain(value), bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_groups(name: str, value: object) -> None:
    """Raise unless `value` is True, False, or an int of at least 2."""
    if not isinstance(value, int):
        raise TypeError(f"{name} must be True, False, or a number of workers >= 2, got {value!r}")
    if not isinstance(value, bool) and value < 2:
        raise ValueError(f"{name} must be True, False, or a number of workers >= 2, got {value!r}")


def check_choice(name: str, value: object, choices: Collection[object]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def as_number(value: object) -> float:
    """Return the value as a float, or NaN if it is not a number. NaN fails every range check."""
    value = plain(value)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def check_fraction(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a number in (0, 1]."""
    check_number(name, value, "in (0, 1]", 0.0 < as_number(value) <= 1.0)


def check_ratio(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a ratio, or a schedule of ratios."""
    if isinstance(value, Schedule):
        check_fraction(f"{name}.highest", value.highest)
        check_fraction(f"{name}.final", value.final)
    else:
        check_fraction(name, value)


def check_patterns(name: str, value: Collection[object]) -> None:
    """Raise TypeError unless `value` is a list of patterns."""
    if isinstance(value, str) or not all(isinstance(pattern, str) for pattern in value):
        raise TypeError(f"{name} must be a list of patterns such as ['*.bias'], got {value!r}")


def check_momentum(name: str, value: object) -> None:
    """Raise TypeError unless `value` is a momentum correction or None."""
    if value is not None and not isinstance(value, MomentumCorrection):
        raise TypeError(f"{name} must be a MomentumCorrection or None, got {value!r}")


def check_norm(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a finite norm > 0 or None."""
    check_number(name, value, "a finite norm > 0", value is None or 0.0 < as_number(value) < math.inf)


def check_slack(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a multiple of k that leaves room for k entries."""
    check_number(name, value, "a finite multiple of k, >= 1", 1.0 <= as_number(value) < math.inf)
