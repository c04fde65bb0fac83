"""Scenarios: local updates over Horovod and `torch.distributed`."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from driver import ExactLengths
from torch import nn

import horovod_sparse.torch as sparse
from horovod_sparse.compressors import TopK
from horovod_sparse.torch.group import Group

from .common import DEVICE, Oracle, assert_identical, everyone, hvd, normals, raised, small_model, wrap
from .ddp.common import Exact
from .scenario import EVERYWHERE, MPI_2, PAIR, TORCHRUN, TORCHRUN_2, scenario

SMALL = "small" * 1000
"""What workers tell each other then takes more than the first message of `Group.everyone`."""
SHAPES: dict[str, Sequence[int]] = {SMALL: (30,), "first": (40, 50), "second": (3000,)}
EVERY = 3

Moved = Mapping[str, np.ndarray]
Tensors = dict[str, torch.Tensor]


class Given(torch.optim.Optimizer):
    """Moves every parameter by what its gradient is. With `eps` it is taken for one that divides by the gradient's size."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter += parameter.grad


def make(compression: Any, *, divides: bool = True, **settings: Any) -> tuple[Tensors, Callable[[Moved], None], Any]:
    """Return parameters, what moves them by arrays, and local updates."""
    model = Exact(SHAPES)
    optimizer = Given(model.parameters(), {"eps": 0.0} if divides else {})
    local = sparse.LocalUpdates(optimizer, model, compression, **settings)

    def move(by: Moved) -> None:
        for name, one in by.items():
            getattr(model, name).grad = torch.from_numpy(one).clone()
        local.step()

    return {name: parameter.detach() for name, parameter in model.named_parameters()}, move, local


def moves(step: int, rank: int | None = None) -> dict[str, np.ndarray]:
    """How a worker's parameters move in a local step: this one's, or another one's."""
    rank = hvd.rank() if rank is None else rank
    return {name: 0.01 * normals(shape, step=step, rank=rank) for name, shape in SHAPES.items()}


def formulas(decay: float, outer_lr: Any, momentum: float, divides: bool = True) -> None:
    """Every exchange is what the formulas give with the NumPy pipelines of all workers."""
    compressed = [name for name in SHAPES if name != SMALL]
    arguments: dict[str, Any] = {"ratio": 0.05, "granularity": 16_000}
    settings = {"every": EVERY, "residual_decay": decay, "outer_lr": outer_lr, "outer_momentum": momentum}
    parameters, move, _ = make(sparse.TopK(**arguments), divides=divides, **settings)
    lengths, alpha = ExactLengths([math.prod(shape) for shape in SHAPES.values()], hvd.size()), outer_lr
    oracle = Oracle(TopK(**arguments), {name: SHAPES[name] for name in compressed}, hvd.size())
    shared = {name: one.numpy().copy() for name, one in parameters.items()}
    velocity = {name: np.zeros_like(one) for name, one in shared.items()}
    for outer in range(5):
        for step in range(EVERY):
            move(moves(EVERY * outer + step))
        drifts = []
        for rank in range(hvd.size()):
            made = [moves(EVERY * outer + step, rank) for step in range(EVERY)]
            drifts.append({name: -np.sum([one[name] for one in made], axis=0) for name in SHAPES})
        if outer_lr == "auto":
            alpha, factor = 1.0, np.float32(lengths.factor if divides else 1.0)
            lengths.note([[one.ravel() for one in drift.values()] for drift in drifts])
            drifts = [{name: factor * one for name, one in drift.items()} for drift in drifts]
        means = oracle.reduce([{name: drift[name] for name in compressed} for drift in drifts])
        means[SMALL] = np.stack([one[SMALL] for one in drifts]).mean(axis=0, dtype=np.float32)
        for pipeline in oracle.pipelines:
            for name in compressed:
                pipeline.residuals.views[name][:] *= np.float32(decay)
        for name, mean in means.items():
            velocity[name] = np.float32(momentum) * velocity[name] + mean
            shared[name] = shared[name] - np.float32(alpha) * (mean + np.float32(momentum) * velocity[name])
            found = parameters[name].numpy().copy()
            np.testing.assert_allclose(found, shared[name], rtol=1e-5, atol=1e-6, err_msg=f"{name}, {outer}")
            # Rounding must not choose other entries in later steps.
            shared[name] = found
        assert_identical(parameters.values())


def what_travels_arrives_once(overlap: int) -> None:
    """Moves have few bits. So at any step nothing is missing, and at last parameters are those without overlap, bit for bit."""
    ends = []
    for steps in (0, overlap):
        compression = sparse.TopK(0.05, granularity=4000, warmup=None)
        parameters, move, local = make(compression, every=EVERY if steps else 99, outer_lr=1.0, overlap=steps)
        moved = np.zeros(3000, np.float32)
        for step in range(1, 4 * EVERY + 2):
            by = {name: np.round(one * 2**14) / 2**14 for name, one in moves(step).items()}
            moved += by["second"]
            move(by)
            if not steps and step % EVERY == 0:
                local.synchronize()
            kept = compression.store.pipeline.residuals.views["second"].numpy() if step >= EVERY else 0.0
            assert not sum(everyone(parameters["second"].numpy() - kept - moved)).any(), step
            assert not steps or compression.steps == max(step - steps, 0) // EVERY
        if steps == EVERY:
            assert "no exchange travels" in raised(RuntimeError, local.state_dict)
        local.synchronize()
        assert_identical(parameters.values())
        ends.append(parameters)
    assert same(*ends)


def what_is_not_finite_raises_on_all_and_training_goes_on(overlap: int = 0) -> None:
    """When it arrives."""
    parameters, move, local = make(sparse.TopK(0.05), every=1, overlap=overlap)
    move(moves(0))
    local.synchronize()
    kept = str(local.state_dict()["compression"])
    before = {name: one.clone() for name, one in parameters.items()}
    bad = moves(1)
    if hvd.rank() == 1:
        bad["first"][3, 4] = bad[SMALL][5] = np.nan
    if overlap:
        move(bad)
    raised(FloatingPointError, lambda: move(bad))
    assert same(parameters, before)
    assert str(local.state_dict()["compression"]) == kept
    for step in range(2, 5):
        move(moves(step))
    local.synchronize()
    assert_identical(parameters.values())


def other_beginnings_raise_on_all() -> None:
    """Other steps of a ratio that changes, other values, or other settings."""
    _, move, local = make(sparse.TopK(0.05), every=1)
    move(moves(0, 0))
    state = local.state_dict()
    move(moves(1, 0))
    local.compression.load_state_dict(state["compression"] if hvd.rank() else local.compression.state_dict())
    assert "'step'" in raised(ValueError, lambda: move(moves(2)))
    if hvd.rank():
        state["shared"]["second"] = state["shared"]["second"].flip(0)
    local.load_state_dict(state)
    assert "shared parameters" in raised(ValueError, lambda: move(moves(2)))
    _, move, _ = make(sparse.TopK(0.05), every=1, outer_lr=1.0 + hvd.rank())
    assert "local updates" in raised(ValueError, lambda: move(moves(2)))


def exchanges_in_another_order_raise_on_all(met: bool) -> None:
    """Also where one worker has made more of them. Two that begin alike are told apart at the second."""
    made = [make(sparse.TopK(0.05))[2] for _ in range(2 + hvd.rank())][-2:]
    if met:
        made = [make(sparse.TopK(ratio, warmup=None))[2] for ratio in (0.01, 0.05)]
        for local in made:
            local.synchronize()
    text = raised(ValueError, lambda: [local.synchronize() for local in made[:: 1 if hvd.rank() else -1]])
    assert "local updates" in text, text


class Pulled(nn.Module):
    """Half the squared distance of its parameters from points: gradients are what the forward pass sees, less the points."""

    first: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(tuple(shape))))
        self.seen: Tensors = {}

    def forward(self, points: Tensors) -> torch.Tensor:
        self.seen = self.values()
        return torch.stack([(one - points[name]).square().sum() / 2 for name, one in self.named_parameters()]).sum()

    def values(self) -> Tensors:
        return {name: one.detach().clone() for name, one in self.named_parameters()}


def pulled(
    keep: float, *, model: Pulled | None = None, exchange: Any = None, optimizer: Any = torch.optim.SGD, **settings: Any
) -> tuple[Pulled, Any]:
    """Return a model and its local updates."""
    model = model or Pulled()
    compression = sparse.TopK(0.05, warmup=None, exchange=exchange)
    optimizer = optimizer(model.parameters(), lr=0.1)
    return model, sparse.LocalUpdates(optimizer, model, compression, every=EVERY, keep=keep, **settings)


def pull(model: Pulled, local: Any, step: int, with_closure: bool = False) -> Tensors:
    """Make a local step. Return its points."""
    points = {name: torch.from_numpy(one) for name, one in moves(step).items()}

    def closure() -> torch.Tensor:
        local.zero_grad()
        loss = model(points)
        loss.backward()
        return loss

    if with_closure:
        local.step(closure)
    else:
        closure()
        local.step()
    return points


def waiting(local: Any) -> Tensors:
    """What waits of each parameter on this worker."""
    kept = local.compression.state_dict()["residuals"]
    return {name: kept.get(name, torch.zeros(tuple(shape))) for name, shape in SHAPES.items()}


def same(ours: Tensors, theirs: Tensors) -> bool:
    """Whether two models hold the same bits."""
    return all(torch.equal(one, theirs[name]) for name, one in ours.items())


def gradients_know_of_what_waits(keep: float, with_closure: bool = False) -> None:
    """They are those at theta_r - c e_r. Steps, exchanges and evaluations know only theta_r, and nothing is lost."""
    model, local = pulled(keep)
    moved: list[Tensors] = []
    local.optimizer.register_step_post_hook(lambda *_: moved.append(model.values()))
    shared = model.values()
    for step in range(4 * EVERY):
        before, kept = model.values(), waiting(local)
        assert step < EVERY or kept["first"].any()
        points = pull(model, local, step, with_closure)
        for name, one in before.items():
            assert torch.equal(model.seen[name], one.sub(kept[name], alpha=keep)), (name, step)
            torch.testing.assert_close(moved[-1][name], one - 0.1 * (model.seen[name] - points[name]))
        if (step + 1) % EVERY:
            continue
        assert_identical(model)
        drift, mean = ({name: shared[name] - one for name, one in ends.items()} for ends in (moved[-1], model.values()))
        nothing_is_lost(drift, kept, waiting(local), mean)
        shared = model.values()
        with torch.no_grad():
            model(points)
        assert same(model.seen, shared)


def nothing_is_lost(drift: Tensors, kept: Tensors, left: Tensors, mean: Tensors) -> None:
    """What was sent and what is left are the drift and what was kept, exactly. The mean of what was sent has moved theta."""
    for name in ("first", "second"):
        whole = kept[name] + drift[name]
        assert bool(((left[name] == whole) | (left[name] == 0.0)).all())
        sent = everyone((whole - left[name]).tolist())
        torch.testing.assert_close(torch.tensor(sent).mean(dim=0), mean[name], rtol=1e-4, atol=1e-6)


def a_resumed_run_keeps_what_waits(overlap: int = 0) -> None:
    """Bit for bit, also between two exchanges, and before the first exchange of the process."""
    settings: dict[str, Any] = {"optimizer": torch.optim.Adam, "outer_momentum": 0.5, "overlap": overlap}
    for steps in (2 * EVERY + overlap, 2 * EVERY + 1 + overlap):
        model, local = pulled(0.5, **settings)
        for step in range(steps):
            pull(model, local, step)
        assert local.compression.store.lengths.factor(hvd.size()) > 1.0
        twin, twin_local = pulled(0.5, **settings)
        twin.load_state_dict(model.state_dict())
        twin_local.optimizer.load_state_dict(copy.deepcopy(local.optimizer.state_dict()))
        twin_local.load_state_dict(local.state_dict())
        for one, its in ((model, local), (twin, twin_local)):
            for step in range(steps, 5 * EVERY + 1):
                before = one.values()
                pull(one, its, step)
                # Also while an exchange travels.
                assert not same(one.seen, before)
            its.synchronize()
        assert same(twin.seen, model.seen) and same(twin.values(), model.values()), steps
        assert_identical(twin)


def what_is_kept_is_no_drift() -> None:
    """Between a forward pass and its step. An exchange that fails leaves no trace of it either, but for rounding."""
    model, local = pulled(0.5)
    for step in range(EVERY):
        pull(model, local, step)
    shared, kept, adaptive = model.values(), waiting(local), local.compression.state_dict()["adaptive"]
    for fails in (True, False):
        model(shared)
        assert not same(model.values(), shared)
        if fails:
            with torch.no_grad():
                model.first[3, 4] += float("nan") if hvd.rank() == 1 else 0.0
            raised(FloatingPointError, local.synchronize)
            assert same(model.values(), shared) and local.compression.state_dict()["adaptive"] == adaptive
            before, kept = kept, waiting(local)
            torch.testing.assert_close(kept, before, rtol=1e-6, atol=1e-8)
    local.synchronize()
    nothing = {name: torch.zeros_like(one) for name, one in shared.items()}
    nothing_is_lost(nothing, kept, waiting(local), {name: shared[name] - one for name, one in model.values().items()})
    assert_identical(model)


def nothing_moves_for_local_updates_that_were_replaced() -> None:
    model, local = pulled(0.5)
    for step in range(EVERY):
        pull(model, local, step)
    assert waiting(local)["first"].any()
    _, again = pulled(0.5, model=model)
    before = model.values()
    pull(model, again, EVERY)
    assert same(model.seen, before)


LAWS: dict[str, tuple[Any, ...]] = {
    "formulas": (formulas, 0.95, "auto", 0.0),
    "kept": (gradients_know_of_what_waits, 0.5),
    "kept, all": (gradients_know_of_what_waits, 1.0),
    "kept, nothing": (gradients_know_of_what_waits, 0.0),
    "kept, closure": (gradients_know_of_what_waits, 0.5, True),
    "kept, resumed": (a_resumed_run_keeps_what_waits,),
    "kept, no drift": (what_is_kept_is_no_drift,),
    "kept, replaced": (nothing_moves_for_local_updates_that_were_replaced,),
    "formulas-undivided": (formulas, 0.95, "auto", 0.0, False),
    "formulas-outer": (formulas, 0.9, 0.7, 0.5),
    "travels": (what_travels_arrives_once, 2),
    "travels, always": (what_travels_arrives_once, EVERY),
    "travels, resumed": (a_resumed_run_keeps_what_waits, 1),
    "travels, not finite": (what_is_not_finite_raises_on_all_and_training_goes_on, 1),
    "another-order": (exchanges_in_another_order_raise_on_all, True),
    "another-order-at-first": (exchanges_in_another_order_raise_on_all, False),
    "other-beginnings": (other_beginnings_raise_on_all,),
    "not-finite": (what_is_not_finite_raises_on_all_and_training_goes_on,),
}


@scenario(*EVERYWHERE, *TORCHRUN, cases=LAWS)
def local_updates(law: Any, *arguments: Any) -> None:
    law(*arguments)


@scenario(*PAIR, TORCHRUN_2)
def two_can_travel_at_the_same_time() -> None:
    """Each does as it does alone."""
    settings: dict[str, Any] = {"every": 2, "overlap": 2, "outer_lr": 1.0}

    def trained(count: int) -> list[Tensors]:
        made = [make(sparse.TopK(0.05, granularity=4000, warmup=None), **settings) for _ in range(count)]
        for step in range(9):
            # The second travels from one step later on.
            for number, (_, move, _) in enumerate(made):
                if step >= number:
                    move(moves(step))
        for _, _, local in made:
            local.synchronize()
        return [parameters for parameters, _, _ in made]

    (alone,), (together, other) = trained(1), trained(2)
    assert same(alone, together)
    assert_identical([*together.values(), *other.values()])


@scenario(MPI_2)
def an_optimizer_of_horovod_is_refused() -> None:
    model = small_model()
    optimizer = wrap(model, hvd.Compression.none)
    assert "leave hvd.DistributedOptimizer out" in raised(TypeError, lambda: sparse.LocalUpdates(optimizer, model))


@scenario(TORCHRUN_2)
def a_scaler_belongs_to_its_worker() -> None:
    torch.manual_seed(0)
    model = nn.Linear(30, 40)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler(DEVICE, init_scale=2.0**10)
    local = sparse.LocalUpdates(optimizer, model, sparse.TopK(0.1, min_numel=0, warmup=None), every=3)
    for step in range(6):
        local.zero_grad()
        loss = model(torch.ones(1, 30)).sum() * (float("inf") if (step, hvd.rank()) == (1, 1) else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        local.count_step()
    assert local.compression.stats().steps == local.compression.steps == 2
    assert_identical(model)
    assert everyone(scaler.get_scale()) == [2.0**10, 2.0**9]
    assert "scaler.step(optimizer)" in raised(RuntimeError, lambda: scaler.step(local))  # type: ignore[arg-type]
    assert "scaler.step(optimizer)" in raised(RuntimeError, lambda: local.compression.scale_with(scaler))


@scenario(TORCHRUN_2, cases={"bfloat16": (torch.bfloat16,), "float16": (torch.float16,)})
def half_precision_keeps_what_was_too_small_to_see(dtype: torch.dtype) -> None:
    """Each exchange moves the shared parameters by less than half of a unit of the parameters' type."""
    model = nn.Linear(40, 50, bias=False).to(dtype)
    nn.init.ones_(model.weight)
    # Worker 0 alone moves, by the smallest step that the type can make.
    model.weight.grad = torch.full_like(model.weight, torch.finfo(dtype).eps * (hvd.rank() == 0))
    local = sparse.LocalUpdates(Given(model.parameters(), {}), model, every=1, outer_lr=0.5)
    for exchanges in range(1, 9):
        local.step()
        expected = torch.tensor(1.0 + exchanges * torch.finfo(dtype).eps / 4).to(dtype)
        assert torch.equal(model.weight, expected.expand(50, 40)), exchanges
    assert_identical(model)


@scenario(TORCHRUN_2, cases={"at first": (0,), "later": (1,)})
def parameters_that_one_worker_adds_raise_on_all(exchanges: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    local = sparse.LocalUpdates(optimizer, model)
    for _ in range(exchanges):
        local.synchronize()
    if hvd.rank() == 1:
        optimizer.add_param_group({"params": [model.bias]})
    assert "make it again after parameters were added" in raised(ValueError, local.synchronize)


@scenario(TORCHRUN_2)
def workers_tell_values_of_any_length() -> None:
    group = Group(None, torch.device(DEVICE))
    # With its quotation marks, one of 4094 characters takes just the room of the first message.
    for length in (0, 4093, 4094, 4095, 100_000):
        assert group.everyone("x" * length * hvd.rank()) == ["", "x" * length]


@scenario(TORCHRUN_2)
def wrong_settings_are_refused() -> None:
    model = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    other = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(2))], lr=0.1)
    for arguments, text in (
        ({"every": 0}, "every must be >= 1, got 0"),
        ({"residual_decay": 0.0}, "residual_decay must be in"),
        ({"outer_lr": float("inf")}, "outer_lr must be 'auto' or a finite number > 0, got inf"),
        ({"outer_momentum": 1.0}, "outer_momentum must be in"),
        ({"keep": 1.5}, "keep must be in [0, 1], got 1.5"),
        ({"overlap": 2}, "overlap must be in [0, every=1], got 2"),
        ({"overlap": 1, "compression": sparse.TopK(0.1, exchange=sparse.Union())}, "overlap must be 0 with Union"),
        ({"optimizer": other}, "optimizer must have parameters of the model only, got 1 others"),
        ({"compression": sparse.DGC(0.1, momentum=0.9)}, "compression must have momentum=None"),
        (
            {"compression": sparse.TopK(0.1, lr_in_residual=True, warmup=None)},
            "compression must have lr_in_residual=False",
        ),
        ({"compression": sparse.TopK(0.1, clip=1.0, warmup=None)}, "compression must have clip=None"),
        ({"compression": "TopK"}, "got 'TopK'"),
        ({"optimizer": model, "model": optimizer}, "LocalUpdates(optimizer, model, compression), got Linear and AdamW"),
        ({"model": nn.Sequential(nn.parallel.DistributedDataParallel(model))}, "leave DistributedDataParallel out"),
    ):
        settings = {"optimizer": optimizer, "model": model, **arguments}
        assert text in raised((TypeError, ValueError), lambda settings=settings: sparse.LocalUpdates(**settings))
