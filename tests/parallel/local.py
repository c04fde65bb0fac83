"""Scenarios: local updates over Horovod and `torch.distributed`: the formulas, states, and what is refused."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import horovod_sparse.torch as sparse
from horovod_sparse.compressors import TopK
from horovod_sparse.contrib.lengths import Lengths
from horovod_sparse.contrib.torch_movement import Movement
from horovod_sparse.torch.group import Group
from tests.harness.workers import ExactLengths

from .common import DEVICE, Oracle, assert_identical, everyone, hvd, normals, raised, small_model, wrap
from .ddp.common import Exact
from .scenario import EVERYWHERE, MPI_2, TORCHRUN, TORCHRUN_2, scenario

SHAPES: dict[str, Sequence[int]] = {"small": (30,), "first": (40, 50), "second": (3000,)}
EVERY = 3

Moved = Mapping[str, np.ndarray]
Tensors = dict[str, torch.Tensor]


class Given(torch.optim.Optimizer):
    """Moves every parameter by what its gradient is, and by its decay. With `eps` it is taken for one that divides."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                parameter += parameter.grad


def make(
    compression: Any, *, divides: bool = True, decay: float = 0.0, **settings: Any
) -> tuple[Tensors, Callable[[Moved], None], Any]:
    """Return parameters, what moves them by arrays, and local updates."""
    model = Exact(SHAPES)
    defaults = {"lr": 0.5, "weight_decay": decay, "decoupled_weight_decay": True, **({"eps": 0.0} if divides else {})}
    local = sparse.LocalUpdates(Given(model.parameters(), defaults), model, compression, **settings)

    def move(by: Moved) -> None:
        for name, one in by.items():
            getattr(model, name).grad = torch.from_numpy(one).clone()
        local.step()

    return {name: parameter.detach() for name, parameter in model.named_parameters()}, move, local


def moves(step: int, rank: int | None = None) -> dict[str, np.ndarray]:
    """How a worker's parameters move in a local step: this one's, or another one's."""
    rank = hvd.rank() if rank is None else rank
    return {name: 0.01 * normals(shape, step=step, rank=rank) for name, shape in SHAPES.items()}


FORMULAS: dict[str, tuple[Any, ...]] = {
    "every step": (1, True),
    "every third": (EVERY, True),
    "not grown": (EVERY, False),
    "every step, with decay": (1, True, 0.02),
}


@scenario(*EVERYWHERE, *TORCHRUN, cases=FORMULAS)
def local_updates_follow_the_formulas(every: int, divides: bool, decay: float = 0.0) -> None:
    """Every exchange is what they give with NumPy workers of all ranks. Decay moves no more than in dense training."""
    compressed = [name for name in SHAPES if name != "small"]
    arguments: dict[str, Any] = {"ratio": 0.05, "granularity": 16_000, "warmup": 1.0}
    parameters, move, _ = make(sparse.TopK(**arguments), divides=divides, decay=decay, every=every)
    lengths = ExactLengths([math.prod(shape) for shape in SHAPES.values()], hvd.size())
    oracle = Oracle(TopK(**arguments), {name: SHAPES[name] for name in compressed}, hvd.size())
    shared = {name: one.numpy().copy() for name, one in parameters.items()}
    for outer in range(7):
        for step in range(every):
            move(moves(every * outer + step))
        drifts = []
        for rank in range(hvd.size()):
            made = [moves(every * outer + step, rank) for step in range(every)]
            drifts.append({name: np.sum([one[name] for one in made], axis=0) for name in SHAPES})
        factor = np.float32(lengths.factor if divides else 1.0)
        lengths.note([[one.ravel() for one in drift.values()] for drift in drifts])
        drifts = [
            {name: factor * one - np.float32(0.5 * decay) * shared[name] for name, one in drift.items()}
            for drift in drifts
        ]
        means = oracle.reduce([{name: drift[name] for name in compressed} for drift in drifts])
        means["small"] = np.stack([one["small"] for one in drifts]).mean(axis=0, dtype=np.float32)
        for name, mean in means.items():
            shared[name] = shared[name] + mean
            found = parameters[name].numpy().copy()
            np.testing.assert_allclose(found, shared[name], rtol=1e-5, atol=1e-6, err_msg=f"{name}, {outer}")
            # Rounding must not choose other entries in later steps.
            shared[name] = found
        assert_identical(parameters.values())
    assert factor > 1.0 if divides else factor == 1.0


PULLED: dict[str, Sequence[int]] = {"first": (40, 50), "second": (3000,)}


class Pulled(nn.Module):
    """Half the squared distance of its parameters from points: gradients are what the forward pass sees, less the points."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(*shape)) for shape in PULLED.values())
        self.seen: Tensors = {}

    def forward(self, points: Tensors) -> torch.Tensor:
        self.seen = self.values()
        return torch.stack([(one - points[name]).square().sum() / 2 for name, one in self.named_parameters()]).sum()

    def values(self) -> Tensors:
        return {name: one.detach().clone() for name, one in self.named_parameters()}


def pulled(optimizer: Any = torch.optim.SGD, lr: float = 0.1, **settings: Any) -> tuple[Pulled, Any]:
    """Return a model and its local updates."""
    torch.manual_seed(0)
    model = Pulled()
    compression = sparse.TopK(0.05, granularity=4000, warmup=None)
    return model, sparse.LocalUpdates(optimizer(model.parameters(), lr=lr), model, compression, **settings)


def pull(model: Pulled, local: Any, step: int, coefficient: float = 0.0) -> None:
    """Make a local step."""
    points = {
        name: torch.from_numpy(normals(one.shape, step=step, rank=hvd.rank())) for name, one in model.values().items()
    }
    local.zero_grad()
    with local.ahead(coefficient):
        model(points).backward()
    local.step()


def same(ours: Tensors, theirs: Tensors) -> bool:
    """Whether two models hold the same bits."""
    return all(torch.equal(one, theirs[name]) for name, one in ours.items())


@scenario(*EVERYWHERE, *TORCHRUN, cases={"every step": (1,), "every third": (EVERY,)})
def nothing_of_local_updates_is_lost(every: int) -> None:
    """What all workers have sent and what waits are what their optimizers have moved, to rounding."""
    model, local = pulled(every=every)
    moved = {name: torch.zeros_like(one, dtype=torch.float64) for name, one in model.named_parameters()}
    for step in range(4 * every):
        before = model.values()
        gradients = {
            name: before[name] - torch.from_numpy(normals(one.shape, step=step, rank=hvd.rank()))
            for name, one in before.items()
        }
        pull(model, local, step)
        for name, gradient in gradients.items():
            moved[name] -= 0.1 * gradient.double()
    waits = local.compression.state_dict()["residuals"]
    for name, one in model.named_parameters():
        here = [moved[name].tolist(), waits[name].tolist()]
        theirs = everyone(here)
        total = np.mean([np.array(mine, dtype=np.float64) for mine, _ in theirs], axis=0)
        waiting = np.mean([np.array(mine, dtype=np.float64) for _, mine in theirs], axis=0)
        np.testing.assert_allclose(one.detach().numpy() + waiting.reshape(one.shape), total, rtol=1e-4, atol=1e-5)
        assert np.abs(waiting).max() > 0.01
    assert_identical(model)


@scenario(MPI_2, TORCHRUN_2, cases={"every step": (1,), "every third": (EVERY,)})
def gradients_ahead_know_of_what_waits(every: int) -> None:
    """They are those at theta_r + c e_r / s. The parameters are what they were when the block ends."""
    model, local = pulled(torch.optim.Adam, every=every)
    for step in range(2 * every + 1):
        pull(model, local, step)
    before, waits = model.values(), local.compression.state_dict()["residuals"]
    lengths = Lengths()
    lengths.load(local.state_dict()["lengths"])
    s = lengths.factor(hvd.size())
    with local.ahead(0.5):
        model({name: torch.zeros_like(one) for name, one in before.items()}).backward()
        inside = model.seen
    for name, one in before.items():
        torch.testing.assert_close(inside[name], one + 0.5 / s * waits[name].view(one.shape))
        assert not torch.equal(inside[name], one)
    assert same(before, model.values()) and s > 1.0


@scenario(MPI_2, TORCHRUN_2, cases={"every step": (1,), "every third": (EVERY,), "a part is frozen": (1, True)})
def local_updates_go_on_from_their_state(every: int, freezes: bool = False) -> None:
    """Bit for bit, also between two exchanges, and before the first exchange of the process."""
    decaying = partial(torch.optim.AdamW, weight_decay=0.5)
    for steps in (2 * every, 2 * every + 1):
        model, local = pulled(decaying, every=every)
        for step in range(steps):
            pull(model, local, step, 0.5)
        twin, twin_local = pulled(decaying, every=every)
        # What waits of it is in the state, and its first exchange is a later one than that of the others.
        for one, its in ((model, local), (twin, twin_local)) if freezes else ():
            one.second.requires_grad_(False)
            its.zero_grad()
        twin.load_state_dict(model.state_dict())
        twin_local.optimizer.load_state_dict(copy.deepcopy(local.optimizer.state_dict()))
        twin_local.load_state_dict(copy.deepcopy(local.state_dict()))
        for one, its in ((model, local), (twin, twin_local)):
            for step in range(steps, 5 * every + 1):
                if step == 4 * every:
                    one.second.requires_grad_(True)
                pull(one, its, step, 0.5)
            its.synchronize()
        assert same(twin.seen, model.seen) and same(twin.values(), model.values()), steps
        assert_identical(twin)
    text = raised(ValueError, lambda: local.load_state_dict({}))
    assert "LocalUpdates.state_dict()" in text
    state = local.state_dict()
    state["start"] = {"first": torch.zeros(3)}
    assert "another model's" in raised(ValueError, lambda: local.load_state_dict(state))


@scenario(MPI_2, TORCHRUN_2)
def shared_parameters_are_given_and_taken_back() -> None:
    """Also on one worker alone, and to no effect where they are there already."""
    model, local = pulled(every=EVERY)
    for step in range(EVERY):
        pull(model, local, step)
    shared = model.values()
    with local.shared():
        assert same(shared, model.values())
    pull(model, local, EVERY)
    own = model.values()
    assert not same(shared, own)
    if hvd.rank() == 0:
        with local.shared():
            assert same(shared, model.values())
        assert same(own, model.values())
    local.synchronize()
    assert_identical(model)


@scenario(*EVERYWHERE, *TORCHRUN)
def other_beginnings_raise_on_all() -> None:
    """Other steps, other values, or other settings."""
    parameters, move, local = make(sparse.TopK(0.05, warmup=None))
    move(moves(0, 0))
    state = local.state_dict()
    move(moves(1, 0))
    if hvd.rank():
        local.load_state_dict(state)
    assert "'step'" in raised(ValueError, lambda: move(moves(2)))
    local.load_state_dict(state)
    if hvd.rank():
        parameters["second"].add_(1.0)
    assert "shared parameters" in raised(ValueError, lambda: move(moves(2)))
    _, move, _ = make(sparse.TopK(0.05, warmup=None), grow=hvd.rank() == 0)
    assert "grow" in raised(ValueError, lambda: move(moves(2)))


@scenario(MPI_2, TORCHRUN_2)
def exchanges_in_another_order_raise_on_all() -> None:
    made = [make(sparse.TopK(ratio, warmup=None)) for ratio in (0.01, 0.05)]
    for _, move, _ in made:
        move(moves(0))
    text = raised(ValueError, lambda: [move(moves(1)) for _, move, _ in made[:: 1 if hvd.rank() else -1]])
    assert "local updates" in text, text


@scenario(MPI_2)
def an_optimizer_of_horovod_is_refused() -> None:
    model = small_model()
    optimizer = wrap(model, hvd.Compression.none)
    assert "leave hvd.DistributedOptimizer out" in raised(TypeError, lambda: sparse.LocalUpdates(optimizer, model))


@scenario(MPI_2, TORCHRUN_2)
def the_step_of_the_optimizer_is_refused() -> None:
    """It would exchange nothing. Once the local updates are gone, it steps as ever."""
    model, local = pulled()
    optimizer = local.optimizer
    assert "call local.step()" in raised(RuntimeError, optimizer.step)
    pull(model, local, 0)
    del local
    optimizer.step()


class Joint:
    """Several optimizers as one."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for one in self.optimizers for group in one.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.optimizers:
            one.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        for one in self.optimizers:
            one.step(closure)


JointOptimizer: Any = type("JointOptimizer", (Joint, torch.optim.Optimizer), {})
"""The same, as an optimizer that has not been initialised as one."""


@scenario(MPI_2, TORCHRUN_2, cases={"a plain class": (Joint,), "an optimizer": (JointOptimizer,)})
def joint_optimizers_move_as_one(kind: Any) -> None:
    """All parameters move, as by one optimizer of each kind."""
    torch.manual_seed(0)
    models: list[Any] = [Pulled(), Pulled()]
    joint, alone = (
        [torch.optim.AdamW([model.first], lr=0.1), torch.optim.SGD([model.second], lr=0.1)] for model in models
    )
    local = sparse.LocalUpdates(kind(*joint), models[0], grow=False)
    each = [sparse.LocalUpdates(one, models[1], grow=False) for one in alone]
    for step in range(5):
        points = {
            name: torch.from_numpy(normals(one.shape, step=step, rank=hvd.rank()))
            for name, one in Pulled().values().items()
        }
        local.zero_grad()
        models[0](points).backward()
        local.step()
        for one in each:
            one.zero_grad()
        models[1](points).backward()
        for one in each:
            one.step()
        assert_identical(models[0])
    assert same(models[0].values(), models[1].values()) and models[0].second.any()


@scenario(TORCHRUN_2, cases={"at first": (0,), "later": (1,)})
def parameters_that_one_worker_adds_raise_on_all(exchanges: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    local = sparse.LocalUpdates(optimizer, model)
    for _ in range(exchanges):
        local.skip()
    if hvd.rank() == 1:
        optimizer.add_param_group({"params": [model.bias]})
    text = raised((ValueError, RuntimeError), local.skip)
    assert "make it again after parameters were added" in text, text


@scenario(TORCHRUN_2)
def workers_tell_values_of_any_length() -> None:
    group = Group(None, torch.device(DEVICE))
    for length in (0, 1, 100_000):
        assert group.everyone("x" * length * hvd.rank()) == ["", "x" * length]


@scenario(TORCHRUN_2)
def wrong_settings_are_refused() -> None:
    model = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    other = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(2))], lr=0.1)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    local = sparse.LocalUpdates(torch.optim.AdamW(model.parameters()), model)
    assert "scaler.step(local)" in raised(
        RuntimeError, lambda: local.compression.scale_with(torch.amp.GradScaler(DEVICE))
    )
    assert "coefficient must be in [0, 1], got 1.5" in raised(ValueError, lambda: local.ahead(1.5))
    for arguments, text in (
        ({"every": 0}, "every must be >= 1, got 0"),
        ({"optimizer": other}, "optimizer must have parameters of the model only, got 1 others"),
        ({"compression": sparse.DGC(0.1, momentum=0.9)}, "compression must have momentum=None"),
        (
            {"compression": sparse.TopK(0.1, lr_in_residual=True, warmup=None)},
            "compression must have lr_in_residual=False",
        ),
        ({"compression": sparse.TopK(0.1, clip=1.0, warmup=None)}, "compression must have clip=None"),
        ({"compression": "TopK"}, "got 'TopK'"),
        ({"optimizer": model, "model": optimizer}, "LocalUpdates(optimizer, model, compression), got Linear and AdamW"),
        ({"optimizer": object()}, "optimizer must have param_groups, step and zero_grad, got a object without"),
        ({"optimizer": zero}, "got a ZeroRedundancyOptimizer of torch.distributed.optim"),
        ({"model": nn.Sequential(nn.parallel.DistributedDataParallel(model))}, "leave DistributedDataParallel out"),
    ):
        settings = {"optimizer": optimizer, "model": model, **arguments}
        assert text in raised((TypeError, ValueError), lambda settings=settings: sparse.LocalUpdates(**settings))


@scenario(MPI_2, TORCHRUN_2)
def an_error_before_the_first_movement_leaves_no_rank_waiting() -> None:
    """As memory may end there. All ranks then go on."""
    model, local = pulled()
    pull(model, local, 0)
    with patch.object(Movement, "moved", side_effect=MemoryError("full")) if hvd.rank() else nullcontext():
        message = raised(MemoryError if hvd.rank() else RuntimeError, partial(pull, model, local, 1))
    assert ("full" if hvd.rank() else "rank 1 has given up this step") in message, message
    pull(model, local, 2)
    assert_identical(model.values().values())
