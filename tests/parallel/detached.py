"""Scenarios: detached error feedback, with Horovod and with `DistributedDataParallel`."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from horovod_sparse.torch import MomentumCorrection, RandomBlock, TopK

from .common import assert_identical, digest, distributed, hvd, normals
from .local import SHAPES, Pulled
from .scenario import MPI, TORCHRUN, scenario

RATES = (0.1, 0.1, 0.2, 0.05, 0.05, 0.1)


def _points(step: int) -> dict[str, Tensor]:
    return {name: torch.from_numpy(normals(shape, step=step, rank=hvd.rank())) for name, shape in SHAPES.items()}


def gradients_are_those_of_moved_parameters(
    settings: dict[str, Any], momentum: float = 0.0, with_closure: bool = False, make: Any = torch.optim.SGD
) -> Pulled:
    """The gradient is that at `x - c eta e`, and the step begins at x, bit by bit."""
    bowl = Pulled()
    compression = RandomBlock(0.1, seed=3, warmup=None, **settings)
    inner = make(bowl.parameters(), lr=RATES[0], **({"momentum": momentum} if momentum else {}))
    model, optimizer = distributed(bowl, inner, compression)
    c = 0.5 if compression.detached == "auto" else compression.detached
    seen: dict[str, Tensor] = {}
    for name, parameter in bowl.named_parameters():
        parameter.register_hook(lambda gradient, name=name: seen.__setitem__(name, gradient.clone()))
    at_step: list[dict[str, Tensor]] = []
    optimizer.register_step_pre_hook(lambda *_: at_step.append(bowl.values()))
    for step, rate in enumerate(RATES):
        optimizer.param_groups[0]["lr"] = rate
        grown = compression.store.lengths.factor(hvd.size())
        unit = 1.0 / grown if compression.in_updates or compression.store.updates is not None else rate
        kept = compression.state_dict()["residuals"] if step else {}
        assert not step or any(residual.any() for residual in kept.values())
        before, points = bowl.values(), _points(step)

        def closure(points: dict[str, Tensor] = points) -> Tensor:
            optimizer.zero_grad()
            loss = model(points)
            loss.backward()
            return loss

        if with_closure:
            optimizer.zero_grad()
            optimizer.step(closure)
        else:
            closure()
            at_step.clear()
            optimizer.step()
            torch.testing.assert_close(at_step[-1], before, rtol=0.0, atol=0.0)
        for name in SHAPES:
            moved = before[name] - c * unit * kept.get(name, 0.0)
            torch.testing.assert_close(seen[name], moved - points[name], rtol=1e-5, atol=1e-6)
    return bowl


def others_see_the_parameters_themselves() -> Pulled:
    """Evaluations, states and copies of the model see x, also between a forward pass and the step."""
    bowl = Pulled()
    model, optimizer = distributed(bowl, torch.optim.SGD(bowl.parameters(), lr=0.1), TopK(0.1, warmup=None))

    def begin(step: int) -> str:
        """Return the digest of x after a step and a forward pass, which moves the parameters."""
        for number in (step, step + 1):
            optimizer.zero_grad()
            before = digest(bowl.parameters())
            loss = model(_points(number))
            if number == step:
                loss.backward()
                optimizer.step()
        assert digest(bowl.parameters()) != before
        return before

    looks: tuple[Callable[[], object], ...] = (
        lambda: (model.eval(), model(_points(0)), model.train()),
        lambda: torch.no_grad()(model)(_points(0)),
        model.state_dict,
        bowl.state_dict,
    )
    for number, look in enumerate(looks):
        expected = begin(2 * number)
        look()
        assert digest(bowl.parameters()) == expected, number
    # What somebody writes meanwhile stays.
    begin(10)
    with torch.no_grad():
        bowl.first.fill_(3.0)
    optimizer.zero_grad()
    bowl.state_dict()
    assert bool((bowl.first == 3.0).all())
    # Copies have none of it.
    for other in (copy.deepcopy(bowl), pickle.loads(pickle.dumps(bowl))):
        first = other.first.detach().clone()
        other(_points(1))
        assert torch.equal(first, other.first)
    return bowl


class Bounded(Pulled):
    def forward(self, points: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-10.0, 10.0)
        return super().forward(points)


def nothing_has_moved(cls: type[Pulled], make: Any = torch.optim.SGD, **settings: Any) -> Pulled:
    """After a forward pass, where it is off; after backward, whatever a model writes to its parameters: they are moved then."""
    bowl = cls()
    model, optimizer = distributed(bowl, make(bowl.parameters(), lr=0.1), TopK(0.1, warmup=None, **settings))
    for step in range(4):
        optimizer.zero_grad()
        before = digest(bowl.parameters())
        loss = model(_points(step))
        assert cls is Bounded or digest(bowl.parameters()) == before
        loss.backward()
        assert digest(bowl.parameters()) == before
        optimizer.step()
    return bowl


def what_is_loaded_after_an_interrupted_pass_stays() -> Pulled:
    bowl = Pulled()
    model, optimizer = distributed(bowl, torch.optim.SGD(bowl.parameters(), lr=0.1), TopK(0.1, warmup=None))
    for step in range(3):
        optimizer.zero_grad()
        loss = model(_points(step))
        if step == 2:
            bowl.load_state_dict({name: torch.full_like(one, 0.5) for name, one in bowl.values().items()})
            loss = model(_points(step))
        loss.backward()
        assert step < 2 or all(bool((one == 0.5).all()) for one in bowl.values().values())
        optimizer.step()
    return bowl


def it_ends_where_gradients_are_changed(change: Callable[[Pulled], object]) -> Pulled:
    """Residuals then have another unit than updates."""
    bowl = Pulled()
    model, optimizer = distributed(bowl, torch.optim.SGD(bowl.parameters(), lr=0.1), TopK(0.1, warmup=None))
    moved = []
    for step in range(6):
        optimizer.zero_grad()
        before = digest(bowl.parameters())
        loss = model(_points(step))
        moved.append(digest(bowl.parameters()) != before)
        loss.backward()
        if hasattr(optimizer, "synchronize"):
            optimizer.synchronize()
        if step == 3:
            change(bowl)
        with optimizer.skip_synchronize() if hasattr(optimizer, "synchronize") else nullcontext():
            optimizer.step()
    assert moved == [False, True, True, True, False, False]
    return bowl


GRADIENTS, ENDS = gradients_are_those_of_moved_parameters, it_ends_where_gradients_are_changed
OFF = partial(nothing_has_moved, Pulled)
LAWS: dict[str, tuple[Any, ...]] = {
    "gradients": (GRADIENTS, {}),
    "gradients, 0.75": (GRADIENTS, {"detached": 0.75}),
    "gradients, lr in residual": (GRADIENTS, {"lr_in_residual": True}),
    "gradients, updates": (GRADIENTS, {"updates": True}),
    "gradients, AdamW": (GRADIENTS, {}, 0.0, False, torch.optim.AdamW),
    "gradients, momentum of the optimizer": (GRADIENTS, {}, 0.9),
    "gradients, closure": (GRADIENTS, {}, 0.0, True),
    "gradients, closure and momentum": (GRADIENTS, {}, 0.9, True),
    "gradients, closure and updates": (GRADIENTS, {"updates": True}, 0.0, True),
    "gradients, momentum": (GRADIENTS, {"momentum": MomentumCorrection(0.9, masking=False), "granularity": "layer"}),
    "others": (others_see_the_parameters_themselves,),
    "written": (nothing_has_moved, Bounded),
    "written, AdamW": (nothing_has_moved, Bounded, torch.optim.AdamW),
    "loaded": (what_is_loaded_after_an_interrupted_pass_stays,),
    "off, 0": (partial(OFF, detached=0.0),),
    "off, residual": (partial(OFF, residual=False),),
    "off, propagate": (partial(OFF, not_finite="propagate"),),
    "off, another optimizer than SGD": (OFF, torch.optim.ASGD),
    "ends, clipping": (ENDS, lambda bowl: nn.utils.clip_grad_norm_(bowl.parameters(), 0.1)),
    "ends, scaling by hand": (ENDS, lambda bowl: [one.grad.data.div_(1024) for one in bowl.parameters()]),
}


@scenario(*MPI, *TORCHRUN, cases=LAWS)
def detached_error_feedback(law: Any, *arguments: Any) -> None:
    assert_identical(law(*arguments))
