"""Options of commands whose values have units. Imports no framework."""

from __future__ import annotations

from argparse import ArgumentTypeError as Refusal
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def quantity(parse: Callable[[str, str], T], name: str) -> Callable[[str], T]:
    """Return the `type` of an option: `parse(name, text)`. argparse prints the message of its ValueError as it is."""

    def parsed(text: str) -> T:
        try:
            return parse(name, text)
        except ValueError as error:
            raise Refusal(str(error)) from error

    return parsed
