"""A plugin of pytest: lets tests that ask for GPUs, and need none, run on CPUs: every device is the CPU.

This says nothing of GPUs. The tests are about what DDP does with gradients, and ask for GPUs because their authors have them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed

from suites import ddp_models

COUNT = 2
"""How many GPUs tests find."""

_TAKES_DEVICE = (Tensor.to, torch._C._nn._parse_to)
"""What takes a device without its name. Modules ask the second one for it."""


def _names_device(value: object) -> bool:
    number = isinstance(value, int) and not isinstance(value, bool)
    return number or isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("cuda"))


class OnCPU(TorchFunctionMode):
    def __torch_function__(
        self,
        function: Any,
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if function is Tensor.cuda:
            return args[0]
        if _names_device(named.get("device")):
            named["device"] = "cpu"
        if function in _TAKES_DEVICE:
            args = ["cpu" if _names_device(one) else one for one in args]
        return function(*args, **named)


def _pretend() -> None:
    """Let the tests, which are imported after this, find GPUs that are the CPU."""

    def always(*_: Any, **__: Any) -> Callable[[Any], Any]:
        return lambda test: test

    common_distributed.skip_if_lt_x_gpu = always
    common_distributed.skip_if_no_gpu = lambda test: test
    ddp_models.leave_out_devices()
    torch.cuda.device_count = lambda: COUNT
    torch.cuda.current_device = lambda: 0
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.device = lambda device: contextlib.nullcontext()  # type: ignore[assignment,misc,return-value]
    OnCPU().__enter__()


_pretend()
