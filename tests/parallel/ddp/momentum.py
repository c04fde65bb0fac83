"""Scenarios: `register` moves the momentum of SGD before the selection, and training is the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from horovod_sparse.torch import MomentumCorrection, NoOp, TopK, register

from ..common import BUCKET_BYTES, assert_close, digest, small_model
from ..scenario import TORCHRUN, TORCHRUN_2, scenario
from ..sgd import SETTINGS, Training, buffers_of, groups_of
from .common import BUCKET_MIB, assert_identical, everyone_raises, loss_of, train


def _make(model: nn.Module, optimizer: torch.optim.Optimizer, compression: Any) -> tuple[nn.Module, Any]:
    wrapped = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MIB)
    if compression is not None:
        register(wrapped, compression, optimizer)
    return wrapped, optimizer


@scenario(TORCHRUN_2, cases=SETTINGS)
def everything_sent_is_the_stock_optimizer(settings: dict[str, Any]) -> None:
    dense, sparse = (
        Training(model, groups_of(model, **settings), compression, _make)
        for model, compression in ((small_model(), None), (small_model(), NoOp(granularity=BUCKET_BYTES)))
    )
    for step in range(12):
        for one in (dense, sparse):
            one.step(lambda called, step=step: loss_of(called, step))
    assert_close(sparse.model, dense.model)
    assert_identical(sparse.model)
    assert bool(buffers_of(sparse.optimizer)) == ("weight_decay" in settings)


@scenario(*TORCHRUN)
def it_is_momentum_correction_in_units_of_the_update() -> None:
    models, correction = (small_model(), small_model()), MomentumCorrection(0.9, masking=False)
    made = []
    for model, momentum in zip(models, (0.9, 0.0), strict=True):
        explicit = {} if momentum else {"momentum": correction, "lr_in_residual": True}
        sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
        made.append(_make(model, sgd, TopK(0.02, granularity=BUCKET_BYTES, **explicit)))
    for step in range(15):
        for called, optimizer in made:
            optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / 20)
            train(called, optimizer, [step])
    assert digest(models[0].parameters()) == digest(models[1].parameters())
    assert_identical(models[0])


@scenario(TORCHRUN_2)
def a_step_that_raises_leaves_the_momentum_in_place() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    called, _ = _make(model, optimizer, TopK(0.02))

    def interrupt(*ignored: Any) -> None:
        raise RuntimeError("interrupted")

    train(called, optimizer, range(2))
    handle = optimizer.register_step_pre_hook(interrupt)
    everyone_raises(RuntimeError, lambda: train(called, optimizer, [2]))
    handle.remove()
    assert optimizer.param_groups[0]["momentum"] == 0.9 and optimizer.param_groups[0]["weight_decay"] == 0.1
    train(called, optimizer, range(3, 5))
    assert_identical(model)
