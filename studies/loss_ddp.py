"""Run an example of PyTorch's with DistributedDataParallel in place of Horovod's optimizer; under any launcher.

    mpirun -np 2 python studies/loss_ddp.py torch_charlm "PowerSGD 4" --compression none --epochs 1

The second argument is the communication hook, as in `step_contenders.py`. Everything else is the example's own: model, data,
learning rate, evaluation, log, and the check that the workers agree. `bytes_per_step` in its log is not that of DDP.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import around  # noqa: F401  (the examples and the benchmarks can be imported after it)
from step_contenders import ddp
from torch import nn

import horovod_sparse.torch as hvd


def main() -> None:
    _, name, hook, *options = sys.argv
    example: Any = import_module(name)
    make_model = example.make_model

    def make_parallel(*arguments: Any) -> nn.Module:
        parallel, _, _ = ddp(hook, make_model(*arguments), None, {})
        return parallel

    def leave_alone(optimizer: Any, **_: Any) -> Any:
        return optimizer

    example.make_model = make_parallel
    hvd.DistributedOptimizer = leave_alone
    sys.argv = [name, *options]
    example.main()


if __name__ == "__main__":
    main()
