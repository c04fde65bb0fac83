"""Scenarios: errors on uneven data. What stops one rank stops all of them, soon."""

from __future__ import annotations

from functools import partial
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch import join as stock_join
from torch import nn

from horovod_sparse.torch import Join, SIDCo, TopK

from .common import assert_identical, loss_of, overflowing, raised, small_model, train, wrap
from .scenario import EVERYWHERE, MPI_2, PAIR, scenario
from .uneven import mine


class _BadBatchError(Exception): ...


def _breaks(model: nn.Module, optimizer: Any, where: str) -> None:
    """Steps with data for all ranks but the first, until the last rank raises."""
    last = hvd.size() - 1
    with Join(optimizer):
        for step in range(1 if hvd.rank() == 0 else 9):
            bad = hvd.rank() == last and step == 2
            optimizer.zero_grad()
            if bad and where == "before_backward":
                raise _BadBatchError
            loss_of(model, step).backward()
            if bad and where == "after_backward":
                raise _BadBatchError
            optimizer.step()
            if bad and where == "after_step":
                raise _BadBatchError


@scenario(*EVERYWHERE, cases={where: (where,) for where in ("before_backward", "after_backward", "after_step")})
def an_error_reaches_all_ranks_at_once(where: str) -> None:
    """Those with data and those without. All can go on."""
    model = small_model()
    optimizer = wrap(model, TopK(0.02, warmup=None))
    last = hvd.size() - 1
    if hvd.rank() == last:
        raised(_BadBatchError, lambda: _breaks(model, optimizer, where))
    else:
        message = raised(RuntimeError, lambda: _breaks(model, optimizer, where))
        assert f"rank {hvd.rank()}: ranks [{last}] left Join with an error" in message
    # The rank that had no data left is behind.
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    hvd.broadcast_optimizer_state(optimizer, root_rank=last)
    with Join(optimizer):
        train(model, optimizer, range(mine()))
    train(model, optimizer, range(3))
    assert_identical(model)


@scenario(*PAIR)
def a_failed_step_ends_the_block_on_all_ranks_or_none() -> None:
    model = overflowing()
    optimizer = wrap(model, SIDCo(0.02, warmup=None))

    def epoch(*, catches: bool) -> None:
        with Join(optimizer):
            for step in range(mine()):
                model.overflows = step == 3
                try:
                    train(model, optimizer, [step])
                except FloatingPointError:
                    if not catches:
                        raise

    epoch(catches=True)
    assert_identical(model)
    error = FloatingPointError if mine() > 3 else RuntimeError
    assert ("NaN or infinity" if mine() > 3 else "left Join") in raised(error, lambda: epoch(catches=False))
    model.overflows = False
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train(model, optimizer, range(3))
    assert_identical(model)


@scenario(*PAIR, cases={"one_pass": (1,), "two_passes": (2,)})
def gradients_that_no_step_has_taken_are_an_error(passes: int) -> None:
    model = small_model()
    optimizer = wrap(model, SIDCo(0.02, warmup=None), backward_passes_per_step=passes)

    def epoch() -> None:
        with Join(optimizer):
            for step in range(mine()):
                optimizer.zero_grad()
                for _ in range(passes):
                    loss_of(model, step).backward()
                optimizer.step()
            if hvd.rank() == 1:
                loss_of(model, 9).backward()

    message = raised(RuntimeError, epoch)
    assert ("without optimizer.step()" if hvd.rank() == 1 else "ranks [1] left Join") in message


@scenario(MPI_2)
def ranks_that_reduce_different_optimizers_raise() -> None:
    models = [small_model(), small_model()]
    optimizers = [wrap(model, TopK(0.02, warmup=None)) for model in models]

    def epoch() -> None:
        with Join(*optimizers):
            train(models[hvd.rank()], optimizers[hvd.rank()], [0])

    assert "in the same order" in raised(RuntimeError, epoch)
    for model, optimizer in zip(models, optimizers, strict=True):
        with Join(optimizer):
            train(model, optimizer, range(hvd.rank() + 1))
        assert_identical(model)


@scenario(MPI_2)
def misuse_is_refused() -> None:
    model, compression, scaler = small_model(), TopK(0.02, warmup=None), torch.amp.GradScaler("cpu")
    optimizer = wrap(model, compression)
    train(model, optimizer, range(2))
    assert "at least one" in raised(ValueError, Join)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    assert "compressor of horovod_sparse" in raised(TypeError, lambda: Join(plain))
    with Join(optimizer):
        assert "entered again" in raised(RuntimeError, Join(optimizer).__enter__)
        for call in (compression.reset, partial(compression.rescale, 2.0)):
            assert "within Join some ranks may have no data left" in raised(RuntimeError, call)
        train(model, optimizer, range(hvd.rank() + 1))
    assert_identical(model)
    for join in (hvd.join, stock_join):
        assert "horovod_sparse.torch.Join(optimizer)" in raised(AssertionError, join)
    other_model = small_model()
    other = wrap(other_model, SIDCo(0.02, warmup=None))

    def epoch() -> None:
        with Join(other):
            for step in range(2 * hvd.rank()):
                scaler.scale(loss_of(other_model, step)).backward()
                scaler.step(other)

    assert "scale_with(scaler) before Join" in raised(RuntimeError, epoch)
