"""Options of commands, as people write them: counts, bandwidths, latencies and numbers. Plain Python, no framework.

The `type` of an option is `partial(parse_count, name)`. What says no such quantity raises an ArgumentTypeError that names it.
"""

from __future__ import annotations

import math
import re
from argparse import ArgumentTypeError
from collections.abc import Mapping
from fractions import Fraction

_QUANTITY = re.compile(r"(\d+\.?\d*|\.\d+)\s*([A-Za-zµ]*)")
_COUNTS = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9}
_BITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}
_BYTES = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SECONDS = {"us": Fraction(1, 10**6), "µs": Fraction(1, 10**6), "ms": Fraction(1, 10**3), "s": Fraction(1)}


def parse_count(name: str, text: str) -> int:
    """Return a whole number >= 1: digits, or a number with k (10^3), M (10^6) or B (10^9), such as "25.6M"."""
    number = _number(text, _COUNTS)
    if number is None or number < 1 or number.denominator != 1:
        raise ArgumentTypeError(
            f"{name} must be a whole number >= 1, with k, M or B behind it or none, such as 25.6M, got {text!r}"
        )
    return int(number)


def parse_bandwidth(name: str, text: str) -> float:
    """Return bytes per second > 0, from bits as tc writes them ("10gbit"), or from bytes with a capital B ("1.2GB").

    Powers of ten: 1gbit is 125MB. What may mean both, such as 10gb or 10gbps (which tc takes for bytes), is refused.
    """
    number = _number(text, _BYTES) or (_number(text.lower(), _BITS) or 0) / Fraction(8)
    if not number:
        raise ArgumentTypeError(
            f"{name} must be bits per second, such as 100mbit or 10gbit, or bytes per second, such as 1.2GB, got {text!r}"
        )
    return float(number)


def parse_latency(name: str, text: str) -> float:
    """Return seconds >= 0, from a number with us, ms or s, such as "50us"."""
    number = _number(text, _SECONDS)
    if number is None:
        raise ArgumentTypeError(f"{name} must be a time in us, ms or s, such as 50us, got {text!r}")
    return float(number)


def parse_number(name: str, text: str, *, least: float, most: float, example: str, whole: bool = False) -> float:
    """Return a number in (least, most], and a whole one if it must be."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not least < number <= most or (whole and not number.is_integer()):
        kind = "a whole number" if whole else "a number"
        raise ArgumentTypeError(f"{name} must be {kind} > {least:g} and <= {most:g}, such as {example}, got {text!r}")
    return number


def _number(text: str, units: Mapping[str, int | Fraction]) -> Fraction | None:
    """Return a number with one of these units, exactly; None if `text` is anything else, or too long for a float."""
    found = _QUANTITY.fullmatch(text.strip())
    if found is None or found[2] not in units or len(text) > 30:
        return None
    return Fraction(found[1]) * units[found[2]]
