"""Tells whether a gradient is still what backward has handed over. Imports torch alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor


class Handed(NamedTuple):
    """A gradient as backward has handed it over."""

    gradient: Tensor
    version: int
    """The tensor's version, which most changes in place raise. That of a view counts changes of its base too."""

    @classmethod
    def of(cls, gradient: Tensor) -> Handed:
        return cls(gradient, gradient._version)

    def is_changed(self, now: Tensor | None) -> bool:
        """Return whether `now`, which the parameter has in its place, is another tensor or was changed."""
        return now is not self.gradient or now._version != self.version


def first_changed(handed: Mapping[Tensor, Handed]) -> Tensor | None:
    """Return a parameter whose gradient is not what was handed over, or None."""
    return next((parameter for parameter, was in handed.items() if was.is_changed(parameter.grad)), None)
