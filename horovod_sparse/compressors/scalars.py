"""Numbers as settings: how they are kept, checked and shown."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """Return a NumPy scalar as a number of Python's, and everything else as it is.

    Settings are compared between ranks by their `repr`, and a NumPy scalar has another one.
    """
    return value.item() if isinstance(value, np.generic) else value


def as_number(value: object) -> float:
    """Return the value as a float, or NaN if it is not a number. NaN fails every range check."""
    value = plain(value)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def check_number(name: str, value: object, expected: str, holds: bool) -> None:
    """Raise ValueError unless the condition on a number holds."""
    if not holds:
        remedy = f", a string; write {name}={value}" if isinstance(value, str) else ""
        raise ValueError(f"{name} must be {expected}, got {value!r}{remedy}")


def check_fraction(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a number in (0, 1]."""
    check_number(name, value, "in (0, 1]", 0.0 < as_number(value) <= 1.0)


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


def check_choice(name: str, value: object, choices: Collection[object]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def shown(name: str, arguments: Mapping[str, object], defaults: Mapping[str, object]) -> str:
    """Return the call of `name` that makes an object, with the arguments that differ from their defaults."""
    given = [
        f"{key}={value!r}"
        for key, value in arguments.items()
        if key not in defaults or repr(value) != repr(defaults[key])
    ]
    return f"{name}({', '.join(given)})"
