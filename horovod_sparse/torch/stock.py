"""Stock Horovod's module for PyTorch, if it is there. Whoever trains with `torch.distributed` needs no Horovod.

Tested by tests/parallel/imports.py.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

module: Any = None
missing = ""
"""Why it cannot be imported."""
try:
    module = import_module("horovod.torch")
except ImportError as error:
    missing = str(error)

Compressor: Any = object if module is None else module.compression.Compressor
"""The base class of compressors that Horovod knows."""
