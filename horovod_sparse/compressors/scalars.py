"""NumPy scalars as settings."""

from __future__ import annotations

from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """Return a NumPy scalar as a number of Python's, and everything else as it is.

    Settings are compared between ranks by their `repr`, and a NumPy scalar has another one.
    """
    return value.item() if isinstance(value, np.generic) else value
