"""A folder for all ranks of a scenario. Imports no framework."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def folder_of(rank: int, everyone: Callable[[Any], list[Any]]) -> Iterator[Path]:
    """A folder that all ranks see, and that is removed when all have left it. `everyone` returns every rank's value."""
    made = tempfile.TemporaryDirectory() if rank == 0 else None
    try:
        yield Path(everyone(made.name if made else "")[0])
        everyone(None)
    finally:
        if made:
            made.cleanup()
