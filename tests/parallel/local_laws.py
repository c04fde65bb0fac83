"""What local updates must do over Horovod and `torch.distributed`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .common import Oracle, normals, raised

SHAPES: dict[str, Sequence[int]] = {"first": (40, 50), "second": (3000,), "small": (30,)}
EVERY = 3


@dataclass(frozen=True)
class Workers:
    """The workers of a transport."""

    rank: int
    size: int
    everyone: Callable[[Any], list[Any]]
    make: Callable[..., tuple[dict[str, np.ndarray], Callable[[Mapping[str, np.ndarray]], object], Any]]
    """(a compressor's class, its arguments, settings) -> views of the parameters, what moves them by arrays, local updates."""


def moves(step: int, rank: int) -> dict[str, np.ndarray]:
    """How a worker's parameters move in a local step."""
    return {name: 0.01 * normals(shape, step=step, rank=rank) for name, shape in SHAPES.items()}


def formulas(workers: Workers, decay: float, outer_lr: float, momentum: float) -> None:
    """Every exchange is what the formulas give with the NumPy pipelines of all workers."""
    compressed = [name for name in SHAPES if name != "small"]
    arguments: dict[str, Any] = {"ratio": 0.05, "granularity": 16_000}
    settings = {"every": EVERY, "residual_decay": decay, "outer_lr": outer_lr, "outer_momentum": momentum}
    parameters, move, _ = workers.make("TopK", arguments, **settings)
    from horovod_sparse.compressors import TopK

    oracle = Oracle(TopK(**arguments), {name: SHAPES[name] for name in compressed}, workers.size)
    shared = {name: one.copy() for name, one in parameters.items()}
    velocity = {name: np.zeros_like(one) for name, one in shared.items()}
    for outer in range(5):
        for step in range(EVERY):
            move(moves(EVERY * outer + step, workers.rank))
        drifts = []
        for rank in range(workers.size):
            mine = {name: one.copy() for name, one in shared.items()}
            for step in range(EVERY):
                for name, by in moves(EVERY * outer + step, rank).items():
                    mine[name] += by
            drifts.append({name: shared[name] - mine[name] for name in SHAPES})
        means = oracle.reduce([{name: drift[name] for name in compressed} for drift in drifts])
        means["small"] = np.mean([one["small"] for one in drifts], axis=0, dtype=np.float32)
        for pipeline in oracle.pipelines:
            for name in compressed:
                pipeline.residuals.view(name)[:] *= np.float32(decay)
        for name, mean in means.items():
            velocity[name] = np.float32(momentum) * velocity[name] + mean
            shared[name] = shared[name] - np.float32(outer_lr) * (mean + np.float32(momentum) * velocity[name])
            np.testing.assert_allclose(parameters[name], shared[name], rtol=1e-5, atol=1e-6, err_msg=f"{name}, {outer}")
            # Rounding must not choose other entries in later steps.
            shared[name] = parameters[name].copy()
        assert len({str([one.tobytes() for one in each]) for each in workers.everyone([*parameters.values()])}) == 1


def a_resumed_run_goes_on_bit_for_bit(workers: Workers) -> None:
    """Also between two exchanges."""
    make = lambda: workers.make("SIDCo", {"ratio": 0.05}, every=EVERY, outer_momentum=0.5)  # noqa: E731
    parameters, move, local = make()
    for step in range(4 * EVERY + 1):
        move(moves(step, workers.rank))
    assert local.state_dict()["shared"]["first"].any()
    twin, twin_move, twin_local = make()
    twin_local.load_state_dict(local.state_dict())
    for name, parameter in parameters.items():
        twin[name][...] = parameter
    for step in range(4 * EVERY + 1, 7 * EVERY):
        move(moves(step, workers.rank))
        twin_move(moves(step, workers.rank))
    for name, parameter in parameters.items():
        np.testing.assert_array_equal(twin[name], parameter)


def what_is_not_finite_raises_on_all_and_training_goes_on(workers: Workers) -> None:
    parameters, move, local = workers.make("TopK", {"ratio": 0.05}, every=1)
    move(moves(0, workers.rank))
    kept = str(local.state_dict())
    before = {name: one.copy() for name, one in parameters.items()}
    bad = moves(1, workers.rank)
    if workers.rank == 1:
        bad["first"][3, 4] = np.nan
    raised(FloatingPointError, lambda: move(bad))
    for name, parameter in parameters.items():
        np.testing.assert_array_equal(parameter, before[name])
    assert str(local.state_dict()) == kept
    for step in range(2, 5):
        move(moves(step, workers.rank))
    assert len({str([one.tobytes() for one in each]) for each in workers.everyone([*parameters.values()])}) == 1


def other_beginnings_raise_on_all(workers: Workers) -> None:
    """Other values, or other settings."""
    for change in ({}, {"outer_lr": 1.0 + workers.rank}):
        _, move, local = workers.make("TopK", {"ratio": 0.05}, **{"every": 1, **change})
        if not change:
            move(moves(0, 0))
            state = local.state_dict()
            state["shared"]["second"][7] += workers.rank
            local.load_state_dict(state)
        text = raised(ValueError, lambda move=move: move(moves(1, workers.rank)))
        assert "shared parameters" in text or "local updates" in text, text


def exchanges_in_another_order_raise_on_all(workers: Workers, met: bool) -> None:
    """Also where one worker has made more of them. Two that begin alike are told apart at the second."""
    made = [workers.make("TopK", {"ratio": 0.05})[2] for _ in range(2 + workers.rank)][-2:]
    if met:
        for local in made:
            local.synchronize()
    text = raised(ValueError, lambda: [local.synchronize() for local in made[:: 1 if workers.rank else -1]])
    assert "local updates" in text, text


LAWS: dict[str, tuple[Any, ...]] = {
    "formulas": (formulas, 0.95, 1.0, 0.0),
    "formulas-outer": (formulas, 0.9, 0.7, 0.5),
    "resumed": (a_resumed_run_goes_on_bit_for_bit,),
    "another-order": (exchanges_in_another_order_raise_on_all, True),
    "another-order-at-first": (exchanges_in_another_order_raise_on_all, False),
    "other-beginnings": (other_beginnings_raise_on_all,),
    "not-finite": (what_is_not_finite_raises_on_all_and_training_goes_on,),
}
"""The cases of a scenario."""


def torch_maker(sparse: Any) -> Any:
    """Return what makes local updates for PyTorch, of the module `sparse`."""
    import torch
    from torch import nn

    class Given(torch.optim.Optimizer):
        """Moves every parameter by what its gradient is."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter += parameter.grad

    def make(name: str, arguments: dict[str, Any], **settings: Any) -> Any:
        model = nn.Module()
        for parameter, shape in SHAPES.items():
            model.register_parameter(parameter, nn.Parameter(torch.zeros(tuple(shape))))
        local = sparse.LocalUpdates(
            Given(model.parameters(), {}), model, getattr(sparse, name)(**arguments), **settings
        )

        def move(by: Mapping[str, np.ndarray]) -> None:
            for parameter, one in by.items():
                getattr(model, parameter).grad = torch.from_numpy(one).clone()
            local.step()

        return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}, move, local

    return make
