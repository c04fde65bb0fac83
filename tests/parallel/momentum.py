"""Scenarios: the momentum of SGD moves before the selection, and training is the same."""

from __future__ import annotations

import copy
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

from horovod_sparse.torch import DGC, MomentumCorrection, NoOp, SIDCo, TopK

from .common import (
    BUCKET_BYTES,
    assert_close,
    assert_identical,
    digest,
    loss_of,
    overflowing,
    raised,
    small_model,
    train,
    wrap,
)
from .scenario import MPI, MPI_2, PAIR, scenario
from .sgd import SETTINGS, Training, buffers_of, groups_of


def _make(model: nn.Module, optimizer: torch.optim.Optimizer, compression: Any) -> tuple[nn.Module, Any]:
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)


@scenario(*PAIR, cases=SETTINGS)
def everything_sent_is_the_stock_optimizer(settings: dict[str, Any]) -> None:
    """With two groups, and a schedule of rates and momenta; some gradients are missing."""
    dense, sparse = (
        Training(model, groups_of(model, **settings), compression, _make)
        for model, compression in (
            (small_model(), hvd.Compression.none),
            (small_model(), NoOp(granularity=BUCKET_BYTES)),
        )
    )
    for step in range(12):
        for one in (dense, sparse):
            called = nn.Sequential(*one.model[:2], *one.model[4:]) if step % 4 == 3 else one.model
            one.step(lambda _, called=called, step=step: loss_of(called, step))
    assert_close(sparse.model, dense.model)
    assert_identical(sparse.model)
    # What the optimizer keeps is the velocity of the weight decay alone.
    assert bool(buffers_of(sparse.optimizer)) == ("weight_decay" in settings)


@scenario(*MPI)
def it_is_momentum_correction_in_units_of_the_update() -> None:
    model, other = small_model(), small_model()
    moved = TopK(0.02, granularity=BUCKET_BYTES)
    explicit = TopK(
        0.02, granularity=BUCKET_BYTES, momentum=MomentumCorrection(0.9, masking=False), lr_in_residual=True
    )
    optimizers = wrap(model, moved, momentum=0.9), wrap(other, explicit, momentum=0.0)
    for step in range(15):
        for one, optimizer in zip((model, other), optimizers, strict=True):
            optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / 20)
            train(one, optimizer, [step])
    assert digest(model.parameters()) == digest(other.parameters())
    assert_identical(model)


@scenario(MPI_2)
def a_checkpoint_with_momentum_in_the_optimizer_goes_on() -> None:
    model, before = small_model(), NoOp(granularity=BUCKET_BYTES, momentum=None)
    dense = wrap(model, before)
    train(model, dense, range(5))
    again, compression = small_model(), NoOp(granularity=BUCKET_BYTES)
    optimizer = wrap(again, compression)
    again.load_state_dict(model.state_dict())
    optimizer.load_state_dict(copy.deepcopy(dense.state_dict()))
    # Its state has no velocities: the optimizer's has them.
    compression.load_state_dict(before.state_dict())
    for one, its in ((model, dense), (again, optimizer)):
        train(one, its, range(5, 12))
    assert_close(again, model)


@scenario(MPI_2)
def its_state_goes_on() -> None:
    def make() -> tuple[nn.Module, Any, Any]:
        model, compression = small_model(), SIDCo(0.02, granularity=BUCKET_BYTES)
        sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)
        return model, _make(model, sgd, compression)[1], compression

    model, optimizer, compression = make()
    train(model, optimizer, range(6))
    again, second, other = make()
    again.load_state_dict(model.state_dict())
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.load_state_dict(compression.state_dict())
    for one, its in ((model, optimizer), (again, second)):
        train(one, its, range(6, 10))
    assert digest(again.parameters()) == digest(model.parameters())


@scenario(MPI_2)
def a_step_that_a_scaler_leaves_out_leaves_no_trace() -> None:
    """On all workers, as in dense training: the velocities of weight decay and gradients stay as they are."""

    def run(compression: Any) -> nn.Module:
        model = overflowing()
        sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
        optimizer = _make(model, sgd, compression)[1]
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        if compression is not hvd.Compression.none:
            compression.scale_with(scaler)
        for step in range(8):
            optimizer.zero_grad()
            model.overflows = step == 4 and hvd.rank() == 1
            scaler.scale(loss_of(model, step)).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
        return model

    assert_close(run(NoOp(granularity=BUCKET_BYTES)), run(hvd.Compression.none))


@scenario(MPI_2)
def a_closure_is_called_once_with_the_momentum_in_place() -> None:
    model, other = small_model(), small_model()
    optimizer, plain = wrap(model, NoOp()), wrap(other, hvd.Compression.none)
    seen = []

    def closure() -> torch.Tensor:
        seen.append(optimizer.param_groups[0]["momentum"])
        optimizer.zero_grad()
        loss = loss_of(model, len(seen))
        loss.backward()
        return loss

    for step in range(1, 5):
        assert optimizer.step(closure).requires_grad
        train(other, plain, [step])
    assert seen == [0.9] * 4
    assert_close(model, other)


@scenario(MPI_2)
def it_stays_in_the_optimizer_where_it_cannot_move() -> None:
    for compression, momentum in (
        (SIDCo(0.1, momentum=None), 0.9),
        (SIDCo(0.1), 0.0),
        (SIDCo(0.1, residual=False), 0.9),
    ):
        wrap(small_model(), compression, momentum=momentum)
        assert compression.momentum_correction is None and not compression.in_updates
    # Embeddings with sparse gradients have no velocity before the selection.
    embedding = nn.Embedding(100, 8, sparse=True)
    sgd, compression = torch.optim.SGD(embedding.parameters(), lr=0.1, momentum=0.9), TopK(0.1)
    optimizer = _make(embedding, sgd, compression)[1]
    embedding(torch.tensor([1, 5])).sum().backward()
    optimizer.step()
    assert compression.momentum_correction is None and buffers_of(optimizer)
    own = DGC(0.1)
    wrap(small_model(), own, momentum=0.8)
    assert own.momentum_correction == MomentumCorrection(0.8, masking=True)


@scenario(MPI_2)
def what_it_cannot_honour_is_refused() -> None:
    def make(compression: Any, **settings: Any) -> None:
        model = small_model()
        _make(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **settings), compression)

    message = raised(ValueError, lambda: make(SIDCo(0.1), dampening=0.5))
    assert message.startswith(
        "dampening must be 0 with momentum='auto', got 0.5; make the compressor with momentum=None"
    )
    assert "optimizer must have momentum=0" in raised(ValueError, lambda: make(SIDCo(0.1, momentum=0.5)))
