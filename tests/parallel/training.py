"""Scenarios: training runs. Replicas stay the same, ratio 1 is dense training, every optimizer works."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import horovod.torch as hvd
import torch

from horovod_sparse.torch import NoOp, TopK

from .common import (
    BUCKET_BYTES,
    COMPRESSORS,
    MakeCompression,
    assert_close,
    assert_identical,
    closure_of,
    digest,
    distributed,
    everyone,
    loss_of,
    small_model,
    train,
    wrap,
)
from .scenario import GLOO_2, MPI, MPI_2, MPI_4, MPI_5, scenario


# Horovod issue 3931 reports failures of asynchronous allgathers with more than four ranks.
@scenario(
    GLOO_2,
    MPI_2,
    MPI_4,
    MPI_5,
    cases={
        name: (make, granularity)
        for (name, make), granularity in zip(COMPRESSORS.items(), cycle(("layer", BUCKET_BYTES, "model")), strict=False)
    },
)
def replicas_stay_identical(make: MakeCompression, granularity: str | int) -> None:
    model = small_model()
    compression = make(granularity=granularity)
    optimizer = wrap(model, compression)
    before = digest(model.parameters())
    train(model, optimizer, range(50))
    assert digest(model.parameters()) != before
    assert_identical(model)
    buckets = {"layer": 4, BUCKET_BYTES: 3, "model": 1}[granularity]
    assert len(compression.stats().last.buckets) == buckets
    residuals = digest(compression.state_dict()["residuals"].values())
    if compression.ratio < 1.0:
        assert len(set(everyone(residuals))) == hvd.size(), "every rank has its own data, so its own residual"


@scenario(
    *MPI,
    cases={
        "average": ({"op": hvd.Average}, 0.05),
        "sum": ({"op": hvd.Sum}, 0.01),
        "predivide": ({"gradient_predivide_factor": 2.0}, 0.05),
    },
)
def ratio_one_is_dense_training(arguments: dict[str, Any], lr: float) -> None:
    dense, sparse = small_model(), small_model()
    train(dense, wrap(dense, hvd.Compression.none, lr=lr, **arguments), range(10))
    train(sparse, wrap(sparse, TopK(1.0, granularity=BUCKET_BYTES, warmup=None), lr=lr, **arguments), range(10))
    assert_close(sparse, dense)
    assert_identical(sparse)


def _closure(model: torch.nn.Module, optimizer: Any, step: int, seen: list[float]) -> Any:
    """Notes the momentum that it sees."""
    evaluate = closure_of(model, optimizer, step)

    def closure() -> torch.Tensor:
        seen.extend(group["momentum"] for group in optimizer.param_groups if "momentum" in group)
        # LBFGS decides on the loss how often it evaluates: it must be the same on all ranks.
        return hvd.allreduce(evaluate().detach(), name="loss")

    return closure


@scenario(
    MPI_2,
    cases={
        "SGD": (lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),),
        "Adam": (lambda parameters: torch.optim.Adam(parameters, lr=1e-3),),
        "LBFGS": (lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=4, history_size=5),),
        "LBFGS-wolfe": (lambda parameters: torch.optim.LBFGS(parameters, max_iter=4, line_search_fn="strong_wolfe"),),
    },
)
def closure_is_reduced(make: Any) -> None:
    # The reference is one process with everybody's data. Stock Horovod reduces before it evaluates the closure.
    reference, model = small_model(dtype=torch.float64), small_model(dtype=torch.float64)
    plain = make(reference.parameters())
    for step in range(5):

        def evaluate(step: int = step) -> torch.Tensor:
            plain.zero_grad()
            loss = torch.stack([loss_of(reference, step, rank) for rank in range(hvd.size())]).mean()
            loss.backward()
            return loss

        plain.step(evaluate)

    _, optimizer = distributed(model, make(model.parameters()), NoOp(min_numel=1))
    seen: list[float] = []
    losses = [optimizer.step(_closure(model, optimizer, step, seen)) for step in range(5)]
    assert all(isinstance(loss, torch.Tensor) for loss in losses), "step returns what the closure returned"
    assert seen in ([], [0.9] * 5), "it is called once, with the momentum in place"
    assert_identical(model)
    assert_close(model, reference, rtol=1e-4, atol=1e-5)
