"""Run an example of PyTorch's with DistributedDataParallel or `fully_shard` in place of Horovod; under any launcher.

    mpirun -np 2 python studies/loss_ddp.py torch_charlm "PowerSGD 4" --compression none --epochs 1
    mpirun -np 4 python studies/loss_ddp.py torch_charlm HSDP --compression sidco --epochs 1
    mpirun -np 2 python studies/loss_ddp.py torch_charlm "DiLoCo 0.7 0.9" --compression none --ahead 0 --every 15

The second argument is DDP's communication hook, as in `step_contenders.py`, or HSDP, or "HSDP bfloat16" to reduce in that type:
then each half of the workers holds a replica of `torch_charlm`'s model, which `fully_shard` has sharded. With `--compression
none` FSDP exchanges between the replicas. "DiLoCo ALPHA MU" puts `diloco.py` over Horovod in the place of local updates. All
else is the example's own, also the check that the workers agree.
`bytes_per_step` in its log is neither that of DDP nor that of FSDP.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from typing import Any

import around  # noqa: F401  (the examples and the benchmarks can be imported after it)
import torch
from diloco import DiLoCo, over_horovod
from step_contenders import ddp, mesh_of
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import horovod_sparse.torch as hvd


def leave_alone(optimizer: Any, **_: Any) -> Any:
    return optimizer


def shard(hook: str, model: Any, compression: str) -> nn.Module:
    """Shard a model whose parameters are the same on all workers."""
    mesh, dense = mesh_of(2), compression == "none"
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if "bfloat16" in hook else None)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh if dense else mesh["shard"], mp_policy=policy)

    def register(optimizer: Any, compression: Any, **_: Any) -> Any:
        hvd.register(model, compression, optimizer, replicate=mesh["replicate"])
        return optimizer

    adapter: Any = hvd
    if not dense:
        adapter.DistributedOptimizer = register
    adapter.LocalUpdates = partial(hvd.LocalUpdates, group=mesh["replicate"])
    # Horovod would take a shard for the whole.
    adapter.broadcast_parameters = adapter.broadcast_optimizer_state = leave_alone
    return model


def main() -> None:
    _, name, hook, *options = sys.argv
    example: Any = import_module(name)
    if hook.startswith("DiLoCo"):
        _, outer_lr, outer_momentum = hook.split()
        settings = {"outer_lr": float(outer_lr), "outer_momentum": float(outer_momentum)}
        adapter: Any = hvd

        def make(optimizer: Any, model: nn.Module, _: object, every: int) -> Any:
            outer: Any = DiLoCo(optimizer, model, every=every, average=over_horovod, **settings)
            # The example's log asks what is sent.
            outer.compression = hvd.Compression.none
            return outer

        adapter.LocalUpdates = make
        sys.argv = [name, *options]
        return example.main()
    make_model = example.make_model

    def make_parallel(*arguments: Any) -> nn.Module:
        model = make_model(*arguments)
        return shard(hook, model, arguments[0].compression) if "HSDP" in hook else ddp(hook, model, None, {})[0]

    example.make_model = make_parallel
    hvd.DistributedOptimizer = leave_alone
    sys.argv = [name, *options]
    example.main()


if __name__ == "__main__":
    main()
