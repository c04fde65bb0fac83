"""Keras adapter: every name of ``horovod.tensorflow.keras``, the compressors, and `LocalUpdates`.

Importing it extends stock Horovod, as `horovod_sparse.tensorflow` does.
"""

import importlib as _importlib
from typing import Any as _Any

import horovod.tensorflow.keras as _stock
from horovod.tensorflow.keras import *

# Type checkers export only names that are imported as themselves, or by a star.
from horovod_sparse.contrib.keras_local import LocalUpdates as LocalUpdates
from horovod_sparse.public import *
from horovod_sparse.tensorflow.compressors import *
from horovod_sparse.tensorflow.names import broadcast_variables as broadcast_variables

# This binds `callbacks` to our module; the star import has bound it to Horovod's.
_importlib.import_module(f"{__name__}.callbacks")
# Horovod's leaves optimizers of Keras 3 as they are, without a word.
del globals()["load_model"]

# Of our own modules only that in the place of one of Horovod's.
__all__ = [
    name
    for name, one in globals().items()
    if name[0] != "_" and (hasattr(_stock, name) or getattr(one, "__package__", "") != __name__)
]


def __getattr__(name: str) -> _Any:
    """Return any other attribute of Horovod's module, private names too."""
    if name == "load_model":
        raise AttributeError(
            "use keras.models.load_model, and make model.optimizer distributed: hvd.DistributedOptimizer"
        )
    return getattr(_stock, name)
