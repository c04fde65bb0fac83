"""Scenarios: updates in place of gradients, with Horovod and with `DistributedDataParallel`."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from driver import ExactLengths
from torch import nn

from horovod_sparse.torch import DGC, SIDCo, TopK

from .common import (
    BUCKET_BYTES,
    DEVICE,
    IN_DDP,
    assert_identical,
    closure_of,
    digest,
    distributed,
    everyone,
    hvd,
    loss_of,
    normals,
    raised,
    selected,
    small_model,
    train,
)
from .ddp.common import Exact
from .scenario import EVERYWHERE, MPI_2, TORCHRUN, scenario

SHAPES = {"first": (40, 50), "second": (3000,), "sample": (30,)}
RATIO = 0.05


def _gradients(step: int, rank: int) -> dict[str, np.ndarray]:
    return {name: normals(shape, step=step, rank=rank, salt=len(name)) for name, shape in SHAPES.items()}


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    first, *others = model.parameters()
    return [{"params": [first], "lr": 3e-3, "weight_decay": 0.1}, {"params": others, "lr": 1e-2}]


def formulas(make: Any) -> None:
    """`e += s (theta - theta_r)`, the largest of e are sent, and theta less the mean of what was sent is the new theta.

    theta_r comes from the optimizer itself, in one process. Parameters that are compressed agree to the last bit: two or four
    workers are added up in their order, and divided by a power of two. Dense ones are added up in another order. `s` is that of
    `Lengths`, summed here with more digits.
    """
    model = Exact(SHAPES)
    theta = {name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()}
    alone = [copy.deepcopy(model) for _ in range(hvd.size())]
    optimizers = [make(_groups(one)) for one in alone]
    compression = TopK(RATIO, granularity="layer", warmup=None, updates=True)
    trained, optimizer = distributed(model, make(_groups(model)), compression)
    residuals = [{name: np.zeros(one.size, np.float32) for name, one in theta.items()} for _ in alone]
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    order = [name_of[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    lengths = ExactLengths([theta[name].size for name in order], hvd.size())
    for step in range(6):
        grows = compression.store.lengths.factor(hvd.size())
        # The mean of what SGD does alone is what SGD does with the mean.
        np.testing.assert_allclose(grows, lengths.factor if "betas" in optimizer.defaults else 1.0, rtol=1e-5)
        moved = []
        optimizer.zero_grad()
        trained(_gradients(step, hvd.rank())).backward()
        optimizer.step()
        total = {name: np.zeros(one.size, np.float32) for name, one in theta.items()}
        for rank, (one, plain, residual) in enumerate(zip(alone, optimizers, residuals, strict=True)):
            given = _gradients(step, rank)
            for name, parameter in one.named_parameters():
                parameter.data.copy_(torch.from_numpy(theta[name]))
                parameter.grad = torch.from_numpy(given[name])
            plain.step()
            after = {name: parameter.detach().numpy() for name, parameter in one.named_parameters()}
            drifts = {name: (theta[name] - after[name]).reshape(-1) for name in after}
            moved.append([drifts[name].copy() for name in order])
            for name, drift in drifts.items():
                drift *= np.float32(grows)
                residual[name] += drift
                sent = drift if name == "sample" else selected(residual[name], int(RATIO * drift.size))
                residual[name] -= sent
                total[name] += sent
        lengths.note(moved)
        for name, parameter in model.named_parameters():
            mean = (total[name] / hvd.size()).reshape(theta[name].shape)
            found = parameter.detach().numpy()
            tolerance = 1e-7 if name == "sample" else 0.0
            np.testing.assert_allclose(found, theta[name] - mean, rtol=0, atol=tolerance, err_msg=f"{name}, {step}")
            np.testing.assert_allclose(parameter.grad.numpy(), mean, rtol=0, atol=tolerance)
            theta[name] = found.copy()


def replicas_are_identical(name: str) -> None:
    """With warm-up, groups of their own, a layer that is frozen for a while, and a step without a gradient on one worker."""
    model = small_model()
    compression = SIDCo(0.02)
    arguments = {"find_unused_parameters": True} if IN_DDP else {}
    trained, optimizer = distributed(model, getattr(torch.optim, name)(_groups(model)), compression, **arguments)
    assert compression.store.updates is not None
    frozen = model[2]
    for step in range(8):
        frozen.requires_grad_(step not in (3, 4))
        before = digest(frozen.parameters())
        # Gradients that stay are zeros, with which the optimizer would move what is frozen.
        optimizer.zero_grad(set_to_none=step < 3)
        loss_of(trained, step).backward()
        if step == 6 and hvd.rank() == 1:
            model[4].weight.grad = None
        optimizer.step()
        assert (digest(frozen.parameters()) == before) == (step in (3, 4))
        assert_identical(model)
    states = everyone(digest(one for state in optimizer.state.values() for one in state.values() if one.dim()))
    assert len(set(states)) == hvd.size()


def resumed_training_continues(make: Any) -> None:
    def made() -> tuple[nn.Module, Any, Any, Any]:
        model, compression = small_model(), SIDCo(0.02, granularity=BUCKET_BYTES, warmup=4.0)
        return model, compression, *distributed(model, make(model.parameters(), lr=1e-2), compression)

    (model, compression, trained, optimizer), (twin, other, twin_trained, twin_optimizer) = made(), made()
    for step in range(4):
        train(trained, optimizer, [step])
    twin.load_state_dict(model.state_dict())
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.load_state_dict(compression.state_dict())
    for step in range(4, 8):
        train(trained, optimizer, [step])
        train(twin_trained, twin_optimizer, [step])
        assert digest(twin.parameters()) == digest(model.parameters())
    if compression.store.updates is None:
        return
    plain = small_model()
    refused = TopK(0.02, warmup=None)
    distributed(plain, torch.optim.SGD(plain.parameters(), lr=0.1), refused)
    state = {**compression.state_dict(), "adaptive": {}}
    state["adaptive"] = {name: refused.new_state().state_dict() for name in state["residuals"]}
    assert "updates=True" in raised(ValueError, lambda: refused.load_state_dict(state))


def an_overflow_concerns_one_worker(unscales: bool, fused: bool) -> None:
    """Nobody waits, and that worker's optimizer leaves out the step: its scale falls, those of the others do not."""
    model = small_model()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    trained, optimizer = distributed(model, adam, TopK(0.02, warmup=None))
    scaler = torch.amp.GradScaler(DEVICE, init_scale=8.0)
    for step in range(6):
        optimizer.zero_grad()
        loss = loss_of(trained, step) * (float("inf") if (step, hvd.rank()) == (2, 1) else 1.0)
        scaler.scale(loss).backward()
        if unscales:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        before = digest(model.parameters())
        scaler.step(optimizer)
        scaler.update()
        assert digest(model.parameters()) != before
        assert_identical(model)
    assert everyone(scaler.get_scale()) == [4.0 if rank == 1 else 8.0 for rank in range(hvd.size())]
    state = optimizer.state[model[0].weight]
    assert int(state["step"]) == (5 if hvd.rank() == 1 else 6)
    # Gradients are unscaled: a moment eight times as large would show.
    assert state["exp_avg"].norm() < 0.1


def clipped_gradients_are_those_of_the_worker() -> None:
    """Clipping sees local gradients. Here it takes everything, so that nothing moves."""
    model = small_model()
    trained, optimizer = distributed(model, torch.optim.SGD(model.parameters(), lr=0.1), TopK(0.02, updates=True))
    before = digest(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        loss_of(trained, step).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.0)
        optimizer.step()
    assert digest(model.parameters()) == before


class Failing(torch.optim.AdamW):
    """Raises after it has moved parameters, when it is told so."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        if Failing.fails:
            raise KeyError("the optimizer")
        return loss


def training_goes_on_after_a_step_that_raises() -> None:
    model = small_model()
    trained, optimizer = distributed(model, Failing(model.parameters(), lr=1e-2), TopK(0.02, warmup=None))
    for step in range(6):
        before = digest(model.parameters())
        Failing.fails = step == 3 and hvd.rank() == 1
        if Failing.fails:
            raised(KeyError, partial(train, trained, optimizer, [step]))
            Failing.fails = False
            assert digest(model.parameters()) == before
        elif step == 3 and not IN_DDP:
            assert "given up" in raised(RuntimeError, partial(train, trained, optimizer, [step]))
            assert digest(model.parameters()) == before
        if step != 3 or IN_DDP:
            train(trained, optimizer, [step])
            assert_identical(model)


def what_is_not_finite_raises_on_all() -> None:
    """Nothing has moved, and no moment of the optimizer is spoilt: training goes on."""
    model = small_model()
    trained, optimizer = distributed(model, torch.optim.AdamW(model.parameters(), lr=1e-2), SIDCo(0.02))
    for step in range(5):
        before = digest(model.parameters())
        optimizer.zero_grad()
        loss_of(trained, step).backward()
        if step != 2:
            optimizer.step()
        else:
            if hvd.rank() == 1:
                gradient: Any = model.get_parameter("4.weight").grad
                gradient[3, 4] = float("inf")
            text = raised(FloatingPointError, optimizer.step)
            assert digest(model.parameters()) == before
            assert hvd.rank() != 1 or "4.weight" in text, text
        assert_identical(model)
    # The movement itself may be what is not finite.
    optimizer.param_groups[0]["lr"] = float("inf") if hvd.rank() == 0 else 1e-2
    before = digest(model.parameters())
    raised(FloatingPointError, partial(train, trained, optimizer, [5]))
    assert digest(model.parameters()) == before


def a_closure_works() -> None:
    results = []
    for with_closure in (True, False):
        model = small_model()
        trained, optimizer = distributed(model, torch.optim.Adam(model.parameters(), lr=1e-2), TopK(0.02))
        for step in range(4):
            closure = closure_of(trained, optimizer, step)
            if with_closure:
                assert optimizer.step(closure).item() > 0
            else:
                closure()
                optimizer.step()
        results.append(digest(model.parameters()))
    assert results[0] == results[1]


def a_closure_may_find_what_is_not_finite() -> None:
    """The optimizer's state stays good."""
    model = small_model()
    trained, optimizer = distributed(model, torch.optim.AdamW(model.parameters(), lr=1e-2), TopK(0.02))
    for step in range(4):
        closure = closure_of(trained, optimizer, step)

        def spoilt(closure: Any = closure) -> Any:
            loss = closure()
            gradient: Any = model.get_parameter("4.weight").grad
            gradient[3, 4] = float("nan")
            return loss

        if step == 1:
            raised(FloatingPointError, partial(optimizer.step, spoilt if hvd.rank() == 1 else closure))
        else:
            optimizer.step(closure)
        assert_identical(model)


def sparse_gradients_move_densely() -> None:
    model = nn.Sequential(nn.EmbeddingBag(200, 16, mode="sum", sparse=True))
    nn.init.ones_(model.get_parameter("0.weight"))
    compression = TopK(0.1, warmup=None)
    trained, optimizer = distributed(model, torch.optim.SparseAdam(model.parameters(), lr=1e-2), compression)
    for step in range(4):
        optimizer.zero_grad()
        trained(torch.tensor([[hvd.rank(), 7, 30 * hvd.rank() + step]])).square().sum().backward()
        optimizer.step()
        assert_identical(model)
    assert not model.get_parameter("0.weight").grad.is_sparse
    assert compression.residual_bytes == 4 * 200 * 16


def settings_without_meaning_are_refused() -> None:
    for make, text in (
        (partial(DGC, 0.1, momentum=0.9), "must have momentum=None"),
        (partial(TopK, 0.1, clip=1.0), "clip gradients before"),
        (partial(TopK, 0.1, lr_in_residual=True), "units of the parameters already"),
        (partial(TopK, 0.1, not_finite="propagate"), "must have not_finite='raise'"),
    ):
        model = small_model()
        adam = torch.optim.AdamW(model.parameters())
        found = raised(ValueError, lambda make=make, model=model, adam=adam: distributed(model, adam, make()))
        assert text in found and "updates=False" in found, found


LAWS: dict[str, tuple[Any, ...]] = {
    "AdamW": (formulas, torch.optim.AdamW),
    "SGD": (formulas, partial(torch.optim.SGD, momentum=0.9)),
    "AdamW-identical": (replicas_are_identical, "AdamW"),
    "RMSprop-identical": (replicas_are_identical, "RMSprop"),
    "Adagrad-identical": (replicas_are_identical, "Adagrad"),
    "resumed": (resumed_training_continues, torch.optim.AdamW),
    "resumed-momentum": (
        resumed_training_continues,
        partial(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.01),
    ),
    "overflow": (an_overflow_concerns_one_worker, False, False),
    "overflow-unscaled": (an_overflow_concerns_one_worker, True, False),
    "overflow-fused": (an_overflow_concerns_one_worker, False, True),
    "clipped": (clipped_gradients_are_those_of_the_worker,),
    "raises": (training_goes_on_after_a_step_that_raises,),
    "not-finite": (what_is_not_finite_raises_on_all,),
    "closure": (a_closure_works,),
    "closure, not finite": (a_closure_may_find_what_is_not_finite,),
    "sparse": (sparse_gradients_move_densely,),
    "refused": (settings_without_meaning_are_refused,),
}


@scenario(*EVERYWHERE, *TORCHRUN, cases=LAWS)
def updates_in_place_of_gradients(law: Any, *arguments: Any) -> None:
    law(*arguments)


# Under DDP the exchanges come at other times.
@scenario(*EVERYWHERE)
def workers_with_other_optimizers_are_refused() -> None:
    model = small_model()
    make = torch.optim.AdamW if hvd.rank() == 0 else torch.optim.SGD
    trained, optimizer = distributed(model, make(model.parameters(), lr=1e-2), TopK(0.1, warmup=None))
    loss = loss_of(trained, 0)
    assert "updates" in raised(ValueError, lambda: (loss.backward(), optimizer.step()))


@scenario(MPI_2)
def what_a_worker_has_not_used_has_a_state() -> None:
    """As with stock Horovod, so that all workers broadcast the same."""
    model = small_model()
    branch = nn.Linear(32, 40)
    both = nn.ModuleList([model, branch])
    _, optimizer = distributed(both, torch.optim.AdamW(both.parameters(), lr=1e-2), TopK(0.02))
    for step in range(2):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        (loss + branch(torch.ones(32)).sum() if hvd.rank() == 0 else loss).backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert everyone(len(optimizer.state)) == [10, 10]
    assert_identical(both)


@scenario(MPI_2)
def stock_habits_make_no_difference_to_updates() -> None:
    """A sum is an average too; synchronize only says that gradients are there; passes are added up; groups may be added."""
    digests = []
    for arguments in ({}, {"op": hvd.Sum}, {"gradient_predivide_factor": 2.0}, {"backward_passes_per_step": 2}):
        model = small_model()
        first, *others = model
        adam = torch.optim.AdamW(nn.Sequential(*others).parameters(), lr=1e-2)
        _, optimizer = distributed(model, adam, TopK(0.02, warmup=None), **arguments)
        optimizer.add_param_group({"params": [*first.parameters()]})
        passes = int(arguments.get("backward_passes_per_step", 1))
        for step in range(4):
            optimizer.zero_grad()
            for _ in range(passes):
                (loss_of(model, step) / passes).backward()
            if arguments:
                optimizer.synchronize()
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        assert_identical(model)
        digests.append(digest(model.parameters()))
    assert len(set(digests)) == 1
    optimizer.zero_grad()
    for _ in range(2):
        loss_of(model, 4).backward()
    assert "before loss.backward()" in raised(AssertionError, optimizer.zero_grad)
    optimizer.step()


@scenario(MPI_2)
def a_rank_that_raises_before_its_update_is_exchanged_tells_the_others() -> None:
    model = small_model()
    trained, optimizer = distributed(model, torch.optim.AdamW(model.parameters(), lr=1e-2), TopK(0.02, warmup=None))
    train(trained, optimizer, range(3))
    if hvd.rank() == 1:
        with patch("horovod_sparse.torch.reducer.Reducer._adopt", side_effect=KeyboardInterrupt):
            raised(KeyboardInterrupt, partial(train, trained, optimizer, [3]))
    else:
        assert "another rank has given up a step" in raised(RuntimeError, partial(train, trained, optimizer, [3]))
    train(trained, optimizer, [4])
    assert_identical(model)
