"""Keeps `torch.compile` out of the reduction of gradients. Never imports Horovod.

The compiler would follow the reduction into the compiled kernels, which it cannot trace. What comes before and after it, such
as the update of the parameters, is still compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def uncompiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return a function that runs as it is, with all that it calls, also where the caller is compiled.

    PyTorch's compiler takes seconds to import. It is imported with the first call, when PyTorch's optimizers have done so too.
    """
    disabled: Callable[Arguments, Result] | None = None

    @functools.wraps(function)
    def called(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        nonlocal disabled
        if disabled is None:
            disabled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return disabled(*args, **kwargs)

    return called
