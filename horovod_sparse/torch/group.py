"""The collectives of a process group of `torch.distributed`. All its ranks must start them in the same order.

Tested by tests/parallel/ddp/hook.py.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

# Its functions have the default group for a default argument. If DDP imported it later, they would keep Gloo's threads
# after `destroy_process_group`, and one that outlives Python aborts.
import torch.distributed.nn.functional
from torch import Tensor

from horovod_sparse.core.step import Wait
from horovod_sparse.exchange.protocols import Collective, Named

# PyTorch has renamed them.
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


class Group:
    """A process group of `torch.distributed`, as a `Transport`.

    Args:
        group: the process group; None for the default one.
        device: where the tensors are that are exchanged.

    Raises:
        ValueError: there is no process group, or this rank is not in it.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        if not dist.is_initialized():
            raise ValueError("there is no process group; call torch.distributed.init_process_group first")
        self.position = dist.get_rank(group)
        self.rank = dist.get_rank()
        if self.position < 0:
            raise ValueError(f"rank {self.rank} is not in the process group {group}; use a group that this rank is in")
        self.world = dist.get_world_size(group)
        self.group = group
        self.device = device

    def start(self, collective: Collective, name: str = "", bucket: Named | None = None) -> Wait:
        message: Tensor = collective.message.contiguous()
        where: dict[str, Any] = {"group": self.group, "async_op": True}
        if collective.kind == "allgather":
            result = message.new_empty((self.world * len(message), *message.shape[1:]))
            work = _all_gather(result, message, **where)
        else:
            result = message
            work = dist.all_reduce(message, **where)

        def wait() -> Tensor:
            work.wait()
            return result

        return wait

    def scatter(self, message: Tensor) -> Wait:
        """Start to add up flat arrays, and return what waits for this rank's part of the sum: there is one for each rank."""
        result = message.new_empty(len(message) // self.world)
        work = _reduce_scatter(result, message, group=self.group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return result

        return wait

    def everyone(self, value: Any) -> list[Any]:
        line = json.dumps(value).encode("ascii")
        longest = int(self._gathered(torch.tensor([len(line)])).max())
        lines = self._gathered(torch.frombuffer(bytearray(line.ljust(longest)), dtype=torch.uint8))
        return [json.loads(one.numpy().tobytes()) for one in lines.view(self.world, longest)]

    def _gathered(self, message: Tensor) -> Tensor:
        gathered: Tensor = self.start(Collective("allgather", message.to(self.device)))()
        return gathered.cpu()
