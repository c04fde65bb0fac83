"""Gradient sparsification for stock Horovod.

Import the adapter of your framework: ``horovod_sparse.torch``. This module imports no framework.
"""

from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

__version__ = "0.1.0"

if not TYPE_CHECKING:
    # Type checkers say by themselves that a name is not here.
    def __getattr__(name: str) -> NoReturn:
        """Say where a public name is: in the adapter of the user's framework."""
        # All other names in lower case may be modules, which are looked for here while they are imported.
        if name[:1].isupper():
            public = vars(import_module("horovod_sparse.public"))
            if name in public or name in import_module("horovod_sparse.compressors").__all__:
                raise ImportError(
                    f"{name} must be imported for a framework: from horovod_sparse.torch import {name}, or from "
                    "horovod_sparse.tensorflow or horovod_sparse.numpy"
                )
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
