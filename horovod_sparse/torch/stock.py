"""Stock Horovod's module for PyTorch, if it is there. Whoever trains with `torch.distributed` needs no Horovod."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def _imported() -> tuple[Any, str]:
    """Return `horovod.torch`, or None and why it cannot be imported."""
    try:
        return import_module("horovod.torch"), ""
    except ImportError as error:
        return None, str(error)


module, missing = _imported()


class _Stand:
    """Stands in for Horovod's base class of compressors."""


Compressor: Any = _Stand if module is None else module.compression.Compressor
"""The base class of compressors that Horovod knows."""
