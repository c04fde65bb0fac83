"""Gives every model in `DistributedDataParallel` a compressor, with its first forward pass, unless it has a hook by then.

A second function lets models of tests that ask for GPUs stay on the CPU.
"""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from horovod_sparse.torch import TopK, register
from suites import outcomes

_SETTLED = "_has_a_hook"


def put_in() -> None:
    forward, builtin = DistributedDataParallel.forward, DistributedDataParallel._register_builtin_comm_hook

    def with_hook(self: DistributedDataParallel, *inputs: Any, **named: Any) -> Any:
        if not self._comm_hooks and not getattr(self, _SETTLED, False):
            setattr(self, _SETTLED, True)
            register(self, TopK(1.0, min_numel=0, warmup=None))
            outcomes.note_use()
        return forward(self, *inputs, **named)

    def with_builtin(self: DistributedDataParallel, kind: Any) -> None:
        setattr(self, _SETTLED, True)
        builtin(self, kind)

    DistributedDataParallel.forward = with_hook  # type: ignore[method-assign]
    DistributedDataParallel._register_builtin_comm_hook = with_builtin  # type: ignore[method-assign]


def leave_out_devices() -> None:
    """Let the models take no notice of the devices that a test names for them."""
    made = DistributedDataParallel.__init__

    def without_devices(self: Any, *given: Any, **settings: Any) -> None:
        settings.pop("device_ids", None)
        settings.pop("output_device", None)
        made(self, *given[:1], **settings)

    DistributedDataParallel.__init__ = without_devices  # type: ignore[method-assign]
