"""Settings: how they are kept, checked and shown. An error names the argument, what was expected and the value."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from horovod_sparse.compressors.schedules import Schedule
from horovod_sparse.exchange.protocols import Exchange


def plain(value: Any) -> Any:
    """Return a NumPy scalar as a number of Python's, because ranks compare settings by their `repr`."""
    return value.item() if isinstance(value, np.generic) else value


def check_number(name: str, given: object, expected: str, holds: Callable[[float], bool]) -> None:
    """Raise ValueError unless a value is a number for which the condition holds. NaN fails every range."""
    value = plain(given)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and holds(float(value))):
        remedy = f", a string; write {name}={value}" if isinstance(value, str) else ""
        raise ValueError(f"{name} must be {expected}, got {given!r}{remedy}")


def check_fraction(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a number in (0, 1]."""
    check_number(name, value, "in (0, 1]", lambda fraction: 0.0 < fraction <= 1.0)


def check_integer(name: str, value: object, least: int) -> None:
    """Raise unless `value` is an int of at least `least`."""
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int >= {least}, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be >= {least}, got {value!r}")


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


def check_exchange(name: str, value: object) -> None:
    """Raise TypeError unless `value` is an exchange."""
    if not isinstance(value, Exchange):
        raise TypeError(f"{name} must be an Exchange, such as Pairs('packed'), or None, got {value!r}")


def check_granularity(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a number of bytes, "auto", "layer" or "model"."""
    if value not in ("auto", "layer", "model") and (type(value) is not int or value < 1):
        raise ValueError(
            f"{name} must be 'auto', 'layer', 'model' or the bytes of a bucket, an int >= 1, got {value!r}"
        )


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


def check_flag(name: str, value: object) -> None:
    """Raise TypeError unless `value` is True or False."""
    if not isinstance(plain(value), bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def number(expected: str, holds: Callable[[float], bool], *others: object) -> Callable[[str, object], None]:
    """Return a check that raises ValueError unless a value is a number for which the condition holds, or one of `others`."""

    def check(name: str, value: object) -> None:
        if value not in others:
            check_number(name, value, expected, holds)

    return check
