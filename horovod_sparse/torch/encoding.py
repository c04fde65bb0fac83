"""States as bytes that `torch.load(weights_only=True)` reads: it runs no code from them. Refuses what it would not read."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import torch
from torch import Tensor

_READABLE = (type(None), bool, int, float, complex, str, bytes)


def encode(state: Any) -> bytes:
    """Return what `decode` reads; NumPy's numbers become Python's. Raise ValueError for a type that `decode` refuses."""
    return _saved(_readable(state))


def decode(content: bytes) -> Any:
    """Return what was encoded. Its tensors are on the CPU."""
    return torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")


def _saved(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _readable(value: Any, name: str = "") -> Any:
    """Return a copy of a state whose values, and dictionaries of other classes while they are empty, are `_checked`."""
    if isinstance(value, dict):
        # A model's state has attributes, which a shallow copy keeps.
        made = copy.copy(value)
        made.clear()
        if type(value) is not dict:
            made = _checked(made, name)
        for key, one in value.items():
            made[_checked(key, name)] = _readable(one, f"{name}[{key!r}]" if name else str(key))
        return made
    if type(value) in (list, tuple):
        return type(value)(_readable(one, f"{name}[{number}]") for number, one in enumerate(value))
    return _checked(value, name)


def _checked(value: Any, name: str) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) not in _READABLE and not isinstance(value, Tensor):
        try:
            decode(_saved(value))
        except Exception as error:
            raise ValueError(
                f"{name} must be what torch.load(weights_only=True) reads, got {type(value).__name__}; convert it to numbers, "
                "text, tensors, or lists and dicts of these, such as with str(...), dict(...) or torch.from_numpy(...)"
            ) from error
    return value
