"""Train a little with Horovod imported in one of several ways; each must reach the same extended optimizer.

python -m parallel.imports CASE
"""

# ruff: noqa: I001  The order of the imports is what is tested.

from __future__ import annotations

import sys
from typing import Any

import torch


def _horovod_first() -> tuple[Any, Any, Any]:
    import horovod.torch as hvd
    from horovod_sparse.torch import TopK

    return hvd, hvd.DistributedOptimizer, TopK(0.01, granularity="layer", warmup=None)


def _ours_first() -> tuple[Any, Any, Any]:
    from horovod_sparse.torch import TopK
    import horovod.torch as hvd

    return hvd, hvd.DistributedOptimizer, TopK(0.01, granularity="layer", warmup=None)


def _ours_only() -> tuple[Any, Any, Any]:
    import horovod_sparse.torch as hvd

    return hvd, hvd.DistributedOptimizer, hvd.TopK(0.01, granularity="layer", warmup=None)


def _function_first() -> tuple[Any, Any, Any]:
    from horovod.torch import DistributedOptimizer

    import horovod_sparse.torch as hvd

    return hvd, DistributedOptimizer, hvd.TopK(0.01, granularity="layer", warmup=None)


CASES = {
    "horovod_first": _horovod_first,
    "ours_first": _ours_first,
    "ours_only": _ours_only,
    "function_first": _function_first,
}


def main(case: str) -> None:
    hvd, distributed_optimizer, compression = CASES[case]()
    hvd.init()
    torch.manual_seed(1)
    model = torch.nn.Linear(40, 30)
    optimizer = distributed_optimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression=compression
    )
    for step in range(3):
        optimizer.zero_grad(set_to_none=True)
        torch.manual_seed(100 * step + hvd.rank())
        model(torch.randn(8, 40)).square().mean().backward()
        optimizer.step()
    assert 12 <= int(model.weight.grad.count_nonzero()) <= 12 * hvd.size(), (
        "every rank sends a hundredth of 1200 entries"
    )
    gathered = hvd.allgather(model.weight.detach().view(1, -1))
    assert bool((gathered == gathered[0]).all())
    print(f"{case} works")


if __name__ == "__main__":
    main(sys.argv[1])
