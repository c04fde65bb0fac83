"""How scenarios make one compressor of every class. Imports no framework."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from horovod_sparse.compressors import COMPRESSORS

MakeCompression = Callable[..., Any]
"""Makes one compressor; every optimizer and every training loop needs its own."""


def makers(ratio: float, **more: dict[str, Any]) -> dict[str, MakeCompression]:
    """Name of a class -> make(adapter, **settings); `more` are arguments of some classes beside the ratio.

    They have this ratio from the first step on, unless `settings` have a warm-up.
    """

    def make(name: str, adapter: ModuleType, **settings: Any) -> Any:
        arguments = {} if name == "NoOp" else {"ratio": ratio}
        return getattr(adapter, name)(**{"warmup": None, **arguments, **more.get(name, {}), **settings})

    return {cls.__name__: partial(make, cls.__name__) for cls in COMPRESSORS}
