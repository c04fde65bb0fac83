"""Programs: networks that train each other, averages of weights, two backward passes in a step."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ..common import hvd
from .table import BOTH, DDP, FEATURES, HOROVOD, Way, inputs_of, net, program, sgd

# --- two networks that train each other ---

_NOISE = 8
_IN_PASS_OF_G = {kind: (kind,) for kind in ("kept", "zeroed", "frozen", "inputs")}


@contextmanager
def _frozen(module: nn.Module) -> Iterator[None]:
    module.requires_grad_(False)
    yield
    module.requires_grad_(True)


@program(BOTH, cases=_IN_PASS_OF_G, quick={"kept", "zeroed"})
def generator_and_discriminator(way: Way, kind: str) -> nn.Module:
    """The generator's backward pass goes through the discriminator, whose gradients were kept, zeroed, frozen or left out."""
    g, d = net(1, (_NOISE, 32, FEATURES)), net(2, (FEATURES, 48, 1))
    generator, g_optimizer = way.wrap(g, sgd(g, lr=0.05), "generator")
    discriminator, d_optimizer = way.wrap(d, sgd(d, lr=0.05), "discriminator")
    for step in range(12):
        noise, real = inputs_of(step, hvd.rank() + 10, _NOISE), inputs_of(step, hvd.rank())
        d_optimizer.zero_grad()
        with torch.no_grad():
            fake = generator(noise)
        (F.softplus(-discriminator(real)) + F.softplus(discriminator(fake))).mean().backward()
        d_optimizer.step()
        if kind == "zeroed":
            d_optimizer.zero_grad()
        g_optimizer.zero_grad()
        with _frozen(d) if kind == "frozen" else nullcontext():
            loss = F.softplus(-discriminator(generator(noise))).mean()
            loss.backward(inputs=[*g.parameters()] if kind == "inputs" else None)
        g_optimizer.step()
        if way.in_horovod:
            # Otherwise Horovod refuses to zero what is being reduced.
            d_optimizer.synchronize()
    return nn.ModuleList([g, d])


@program(BOTH)
def a_penalty_on_the_gradient_of_the_inputs(way: Way) -> nn.Module:
    critic = net(2, (FEATURES, 48, 1))
    model, optimizer = way.wrap(critic, sgd(critic, lr=0.02))
    for step in range(8):
        optimizer.zero_grad()
        inputs = inputs_of(step, hvd.rank()).requires_grad_()
        scores = model(inputs)
        (slope,) = torch.autograd.grad(scores.sum(), inputs, create_graph=True)
        ((slope.norm(dim=1) - 1).square().mean() + scores.mean()).backward()
        optimizer.step()
    return critic


# --- averages of weights ---


class MoCo(nn.Module):
    """Its key encoder is an average of its query encoder, taken in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.query = net(sizes=(FEATURES, 48, 16))
        self.key = copy.deepcopy(self.query).requires_grad_(False)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        with torch.no_grad():
            for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
                key.lerp_(query, 0.1)
            keys = F.normalize(self.key(other), dim=1)
        return F.normalize(self.query(x), dim=1) @ keys.T


@program(BOTH, quick=True)
def an_average_of_weights_in_forward(way: Way) -> nn.Module:
    module = MoCo()
    optimizer = torch.optim.SGD(module.query.parameters(), lr=0.1, momentum=0.9)
    if way.in_horovod:
        model, optimizer = module, way.horovod(optimizer, module.query.named_parameters())
    else:
        model = way.ddp(module, optimizer)
    for step in range(10):
        optimizer.zero_grad()
        x = inputs_of(step, hvd.rank())
        F.cross_entropy(model(x, 0.9 * x + 0.1) / 0.2, torch.arange(len(x))).backward()
        optimizer.step()
    return module


@program(BOTH, cases={"before": (True,), "after": (False,)})
def an_average_of_weights_around_the_step(way: Way, before: bool) -> nn.Module:
    """The average takes part in the loss, as a teacher."""
    module = net()
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    model, optimizer = way.wrap(module, sgd(module))
    for step in range(8):
        optimizer.zero_grad()
        x = inputs_of(step, hvd.rank())
        with torch.no_grad():
            target = average(x)
        (way.loss(model, step) + 0.1 * F.mse_loss(model(x), target)).backward()
        if before:
            average.update_parameters(module)
        optimizer.step()
        if not before:
            average.update_parameters(module)
    return nn.ModuleList([module, average])


@program(BOTH)
def weights_exchanged_for_their_average_and_back(way: Way) -> nn.Module:
    """In every third step, to evaluate."""
    module = net()
    average = copy.deepcopy(module)
    model, optimizer = way.wrap(module, sgd(module))
    losses = []
    for step in range(9):
        way.train(model, optimizer, [step])
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), module.parameters(), strict=True):
                mean.lerp_(parameter, 0.3)
        if step % 3 == 2:
            own = copy.deepcopy(module.state_dict())
            module.load_state_dict(average.state_dict())
            with torch.no_grad():
                losses.append(F.mse_loss(model(inputs_of(0, 0)), torch.zeros(12, 4)))
            module.load_state_dict(own)
    module.register_buffer("losses", torch.stack(losses))
    return nn.ModuleList([module, average])


# --- two passes in a step ---


def _ascend(module: nn.Module, gradients: list[Tensor]) -> list[Tensor]:
    """SAM: move to where the loss is higher. Return where the parameters were."""
    old = [parameter.detach().clone() for parameter in module.parameters()]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    with torch.no_grad():
        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
            parameter.add_(gradient, alpha=0.05 / float(norm))
    return old


def _put_back(module: nn.Module, old: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), old, strict=True):
            parameter.copy_(value)


def _gradients(module: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


@program(DDP, cases={"no_sync": (True,), "both": (False,)}, quick={"no_sync", "both"})
def sharpness_aware_in_ddp(way: Way, local: bool) -> nn.Module:
    """The first pass is each rank's own, or averaged too."""
    module = net()
    model, optimizer = way.wrap(module, sgd(module))
    for step in range(8):
        optimizer.zero_grad()
        with model.no_sync() if local else nullcontext():
            way.loss(model, step).backward()
        old = _ascend(module, _gradients(module))
        optimizer.zero_grad()
        way.loss(model, step).backward()
        _put_back(module, old)
        optimizer.step()
    return module


@program(HOROVOD, cases={"local": (True,), "both": (False,)}, quick={"local", "both"})
def sharpness_aware_in_horovod(way: Way, local: bool) -> nn.Module:
    module = net()
    model, optimizer = way.wrap(module, sgd(module))
    for step in range(8):
        optimizer.zero_grad()
        if local:
            first = [*torch.autograd.grad(way.loss(model, step), [*module.parameters()])]
        else:
            way.loss(model, step).backward()
            optimizer.synchronize()
            first = _gradients(module)
        old = _ascend(module, first)
        optimizer.zero_grad()
        way.loss(model, step).backward()
        with way.reduced(optimizer):
            _put_back(module, old)
            optimizer.step()
    return module


@program(BOTH)
def a_step_looked_ahead(way: Way) -> nn.Module:
    """Lookahead: in every third step parameters go half-way back to where they were."""
    module = net()
    slow = copy.deepcopy(module)
    model, optimizer = way.wrap(module, sgd(module))
    for step in range(9):
        way.train(model, optimizer, [step])
        if step % 3 == 2:
            with torch.no_grad():
                for old, new in zip(slow.parameters(), module.parameters(), strict=True):
                    old.lerp_(new, 0.5)
                    new.copy_(old)
    return module


@program(BOTH)
def gradients_of_an_anchor(way: Way) -> nn.Module:
    """Variance reduction: the averaged gradient, less the one at an anchor, plus the anchor's mean of all data."""
    module = net()
    anchor = copy.deepcopy(module)
    model, optimizer = way.wrap(module, sgd(module, lr=0.05))
    anchored, anchor_optimizer = way.wrap(anchor, sgd(anchor), "anchor")
    whole: list[Tensor] = []
    for step in range(9):
        if step % 3 == 0:
            anchor.load_state_dict(module.state_dict())
            anchor_optimizer.zero_grad()
            torch.stack([way.loss(anchored, number) for number in range(3)]).mean().backward()
            with way.reduced(anchor_optimizer):
                whole = [gradient.clone() for gradient in _gradients(anchor)]
        anchor_optimizer.zero_grad()
        way.loss(anchored, step % 3).backward()
        optimizer.zero_grad()
        way.loss(model, step % 3).backward()
        with way.reduced(anchor_optimizer, optimizer):
            for parameter, then, mean in zip(module.parameters(), _gradients(anchor), whole, strict=True):
                assert parameter.grad is not None
                parameter.grad.sub_(then).add_(mean)
            optimizer.step()
    return module
