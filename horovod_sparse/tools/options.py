"""Options of commands whose values have units. Imports no framework."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def quantity(parse: Callable[[str, str], T], name: str) -> Callable[[str], T]:
    """Return the `type` of an option: `parse(name, text)`, whose error argparse prints as it is."""

    def parsed(text: str) -> T:
        try:
            return parse(name, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed
