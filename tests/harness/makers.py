"""How scenarios make one compressor of every class. Imports no framework."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from horovod_sparse.compressors import COMPRESSORS

MakeCompression = Callable[..., Any]
"""Makes one compressor; every optimizer and every training loop needs its own."""


VARIANTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "SIDCo-gamma": lambda adapter: {"distribution": "gamma"},
    "SIDCo-gpareto": lambda adapter: {"distribution": "gpareto"},
    "RandomK-own": lambda adapter: {"exchange": adapter.Pairs()},
    "RandomBlock-own": lambda adapter: {"exchange": adapter.Pairs()},
    "TopK-union": lambda adapter: {"exchange": adapter.Union()},
    "SIDCo-packed": lambda adapter: {"exchange": adapter.Pairs("packed")},
}
"""Classes with other settings than the defaults."""


def makers(ratio: float, **more: dict[str, Any]) -> dict[str, MakeCompression]:
    """Name of a class or variant -> make(adapter, **settings); `more` are arguments of some classes beside the ratio.

    They have this ratio from the first step on, unless `settings` have a warm-up.
    """

    def make(name: str, adapter: ModuleType, **settings: Any) -> Any:
        cls = name.partition("-")[0]
        arguments = {} if cls == "NoOp" else {"ratio": ratio}
        own = VARIANTS[name](adapter) if name in VARIANTS else more.get(cls, {})
        return getattr(adapter, cls)(**{"warmup": None, **arguments, **own, **settings})

    return {name: partial(make, name) for name in (*(cls.__name__ for cls in COMPRESSORS), *VARIANTS)}
