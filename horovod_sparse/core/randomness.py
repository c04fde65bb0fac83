"""The global random generators of NumPy and Python, as values that JSON can express. Imports no framework."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, cast

import numpy as np


def random_state() -> dict[str, Any]:
    """Return the states of both generators."""
    name, keys, *rest = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    return {"numpy": [name, keys.tolist(), *rest], "python": list(random.getstate())}


def set_random_state(state: Mapping[str, Any]) -> None:
    """Continue from what `random_state` returned."""
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), *rest))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
