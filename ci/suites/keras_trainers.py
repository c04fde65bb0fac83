"""A plugin of pytest for Keras' tests of `fit`: every optimizer is distributed, and XLA is off.

XLA cannot compile Horovod's collectives, so users turn it off, too.
"""

from __future__ import annotations

import functools
from typing import Any

import keras

from suites import keras_optimizers  # noqa: F401  (it makes the optimizers distributed)

_TRAINER: Any = next(kind for kind in keras.Model.__mro__ if "compile" in vars(kind))
_compile = _TRAINER.compile


@functools.wraps(_compile)
def _without_xla(self: Any, *given: Any, **named: Any) -> None:
    _compile(self, *given, **{**named, "jit_compile": False})


_TRAINER.compile = _without_xla
