"""Options of commands, as people write them. The `type` of an option is `partial(parse_count, name)`.

Tested by tests/tools/test_plan.py.
"""

from __future__ import annotations

import math
import re
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Mapping
from fractions import Fraction

_Units = Mapping[str, int | Fraction]
_QUANTITY = re.compile(r"(\d+\.?\d*|\.\d+)\s*([A-Za-zµ]*)")
_COUNTS = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9}
_BYTES = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_RATES: _Units = {"bit": Fraction(1, 8), "kbit": 125, "mbit": 125 * 10**3, "gbit": 125 * 10**6, **_BYTES}
_SECONDS = {"us": Fraction(1, 10**6), "µs": Fraction(1, 10**6), "ms": Fraction(1, 10**3), "s": Fraction(1)}


def parse_count(name: str, text: str, least: int = 1) -> int:
    """Return a whole number >= `least`: digits, or a number with k (10^3), M (10^6) or B (10^9), such as "25.6M"."""
    expected = f"a whole number >= {least}, with k, M or B behind it or none, such as 25.6M"
    number = _number(name, text, _COUNTS, expected, Fraction(least))
    if number.denominator != 1:
        raise ArgumentTypeError(f"{name} must be {expected}, got {text!r}")
    return int(number)


def parse_bandwidth(name: str, text: str) -> float:
    """Return bytes per second, at least a bit, of bits as tc writes them ("10gbit"), or of bytes with a capital B ("1.2GB")."""
    # What may mean both, such as 10gb or 10gbps (which tc takes for bytes), is refused.
    expected = "bits per second, such as 100mbit or 10gbit, or bytes per second, such as 1.2GB"
    return float(_number(name, text, _RATES, expected, least=Fraction(1, 8)))


def parse_latency(name: str, text: str) -> float:
    """Return seconds >= 0, from a number with us, ms or s, such as "50us"."""
    return float(_number(name, text, _SECONDS, "a time in us, ms or s, such as 50us"))


def parse_number(name: str, text: str, *, most: float, example: str) -> float:
    """Return a number in (0, most]."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0.0 < number <= most:
        raise ArgumentTypeError(f"{name} must be a number > 0 and <= {most:g}, such as {example}, got {text!r}")
    return number


def add_optimizer(parser: ArgumentParser) -> None:
    """Add the option `--optimizer`."""
    text = "what trains: adamw stands for all that divide by the size of the gradient; default: sgd"
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd", help=text)


def _number(name: str, text: str, units: _Units, expected: str, least: Fraction = Fraction(0)) -> Fraction:
    """Return a number >= `least` with one of these units, exactly. Refuse anything else, and what is too long for a float."""
    found = _QUANTITY.fullmatch(text.strip())
    # Bits have their units in small letters or in capital ones.
    unit = "" if found is None else found[2] if found[2] in units else found[2].lower()
    if found is None or unit not in units or len(text) > 30 or Fraction(found[1]) * units[unit] < least:
        raise ArgumentTypeError(f"{name} must be {expected}, got {text!r}")
    return Fraction(found[1]) * units[unit]
