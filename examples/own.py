"""A compressor of one's own on the command line, as `module:Class`. Imports no framework."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentTypeError
from importlib import import_module
from typing import Any

from horovod_sparse.compressors.base import Compressor


def own_class(text: str) -> type[Compressor]:
    """The class that `module:Class` names; the module may be in the folder where the command is typed."""
    module, _, name = text.partition(":")
    if os.getcwd() not in sys.path:
        # A script's path begins with the script's folder.
        sys.path.append(os.getcwd())
    expected = "--compression must be module:Class, as mine:RMSThreshold for a class in mine.py"
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ArgumentTypeError(
            f"{expected}, got {text!r}: {error}; run this where the module is, or set PYTHONPATH"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Compressor)):
        raise ArgumentTypeError(
            f"{expected}, got {text!r}, which is no subclass of horovod_sparse.compressors.base.Compressor"
        )
    return found


def bound(cls: type[Compressor], hvd: Any) -> Any:
    """The class as `hvd`, one of the adapters, takes it."""
    adapter = hvd.TopK.__bases__[0]
    return cls if issubclass(cls, adapter) else type(cls.__name__, (adapter, cls), {"__module__": cls.__module__})
