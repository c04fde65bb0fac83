"""Scenarios: mixed precision. A loss scale changes nothing, and a step that overflows leaves no trace, on every rank."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from horovod_sparse.torch import DGC, MiCRO, SIDCo, Threshold, TopK

from .common import (
    BUCKET_BYTES,
    COMPRESSORS,
    DEVICE,
    IN_DDP,
    MakeCompression,
    assert_close,
    assert_identical,
    digest,
    distributed,
    everyone,
    hvd,
    kept,
    loss_of,
    overflowing,
    raised,
    small_model,
    train,
    wrap,
)
from .scenario import MPI_2, PAIR, TORCHRUN_2, scenario

_KINDS: dict[str, MakeCompression] = {
    "momentum": lambda **settings: DGC(0.02, momentum=0.9, warmup=None, **settings),
    **{name: COMPRESSORS[name] for name in ("SIDCo", "TopK", "RandomK", "MiCRO", "NoOp")},
    "DGC": lambda **settings: DGC(0.02, warmup=None, **settings),
    "Threshold": lambda **settings: Threshold(0.05, **settings),
    "clipped": lambda **settings: TopK(0.02, clip=0.5, warmup=None, **settings),
    "in_units_of_the_update": lambda **settings: SIDCo(0.02, lr_in_residual=True, warmup=None, **settings),
}


def _reduced(optimizer: Any) -> Any:
    """Between backward and the scaler: what Horovod's documentation shows. With DDP there is nothing to do."""
    if IN_DDP:
        return nullcontext()
    optimizer.synchronize()
    return optimizer.skip_synchronize()


def _train_scaled(model: nn.Module, optimizer: Any, scaler: Any, steps: Iterable[int], max_norm: float = 0.0) -> None:
    for step in steps:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        with _reduced(optimizer):
            if max_norm or not IN_DDP:
                scaler.unscale_(optimizer)
            if max_norm:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            scaler.step(optimizer)
        scaler.update()


@scenario(*PAIR, TORCHRUN_2, cases={name: (make,) for name, make in _KINDS.items()})
def overflow_leaves_no_trace(make: MakeCompression) -> None:
    """Steps that overflow on one rank have never been: training without them is the same, bit by bit with momentum.

    Without momentum, to rounding. Residuals are kept without the scale: powers of two are exact.
    """
    models, compressions = [], []
    for scaled in (False, True):
        model, compression = overflowing(), make(granularity=BUCKET_BYTES)
        called, optimizer = distributed(model, torch.optim.SGD(model.parameters(), lr=0.05), compression)
        scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**7, growth_interval=2)
        if scaled:
            compression.scale_with(scaler)
        for step in range(8):
            overflows = step in (0, 3, 4)
            if not scaled and not overflows:
                train(called, optimizer, [step])
            elif scaled:
                model.overflows = overflows and hvd.rank() == 1
                before = digest(model.parameters())
                _train_scaled(called, optimizer, scaler, [step])
                assert (digest(model.parameters()) == before) == overflows
        if scaled:
            assert everyone(scaler.get_scale()) == [2.0**6] * hvd.size()
        assert compression.stats().steps == compression.steps == 5
        assert_identical(model)
        models.append(model)
        compressions.append(compression)
    if compressions[0].momentum_correction is None:
        assert_close(models[1], models[0], rtol=1e-4, atol=1e-5)
    else:
        assert digest(models[0].parameters()) == digest(models[1].parameters())
        assert kept(compressions[0]) == kept(compressions[1])


@scenario(*PAIR, TORCHRUN_2, cases={"announced": (True,), "by itself": (False,)})
def reduced_gradients_are_unscaled_and_clipped_before_the_step(is_announced: bool) -> None:
    """With one scale all the time, whether residuals have it or not."""
    results = []
    for scaled in (False, True):
        model, compression = small_model(), SIDCo(0.02, warmup=None)
        called, optimizer = distributed(model, torch.optim.SGD(model.parameters(), lr=0.05), compression)
        scaler = torch.amp.GradScaler(DEVICE, init_scale=64.0, enabled=scaled)
        if is_announced:
            compression.scale_with(scaler)
        _train_scaled(called, optimizer, scaler, range(5), max_norm=0.01)
        results.append(digest(model.parameters()))
        assert_identical(model)
    assert results[0] == results[1]


@scenario(MPI_2, TORCHRUN_2)
def several_optimizers_share_a_scaler() -> None:
    """Each leaves out its own steps. An optimizer that unscales in its own kernel works, too."""
    models = [overflowing(), overflowing()]
    compressions = [SIDCo(0.02, warmup=None), TopK(0.02, warmup=None)]
    made = [
        distributed(model, torch.optim.Adam(model.parameters(), lr=1e-3, fused=True), compression)
        for model, compression in zip(models, compressions, strict=True)
    ]
    scaler = torch.amp.GradScaler(DEVICE, init_scale=8.0)
    for compression in compressions:
        compression.scale_with(scaler)
    for step in range(6):
        models[1].overflows = step == 3 and hvd.rank() == 0
        before = [digest(model.parameters()) for model in models]
        for called, optimizer in made:
            optimizer.zero_grad()
            scaler.scale(loss_of(called, step)).backward()
        for _, optimizer in made:
            with _reduced(optimizer):
                scaler.step(optimizer)
        scaler.update()
        moved = [digest(model.parameters()) != old for model, old in zip(models, before, strict=True)]
        assert moved == [True, step != 3]
        for model in models:
            assert_identical(model)
    assert scaler.get_scale() == 4.0


@scenario(MPI_2)
def misuse_of_a_scaler_is_refused() -> None:
    scaler = torch.amp.GradScaler(DEVICE)
    assert "serves no optimizer yet" in raised(RuntimeError, lambda: MiCRO(0.01, warmup=None).scale_with(scaler))
    model, compression = small_model(), MiCRO(0.01, warmup=None)
    optimizer = wrap(model, compression, momentum=0.0)
    compression.scale_with(scaler)
    compression.scale_with(scaler)
    other = torch.amp.GradScaler(DEVICE)
    assert "scale_with must be called once" in raised(RuntimeError, lambda: compression.scale_with(other))
    assert "rescale must not be called" in raised(RuntimeError, lambda: compression.rescale(2.0))
    _train_scaled(model, optimizer, scaler, range(2))
    late_model, late = small_model(), MiCRO(0.01, warmup=None)
    train(late_model, wrap(late_model, late), range(1))
    assert "before the first step" in raised(RuntimeError, lambda: late.scale_with(scaler))


@scenario(MPI_2, TORCHRUN_2)
def a_scaler_keeps_its_own_methods() -> None:
    """Nothing of PyTorch's scaler is replaced."""
    for name in ("unscale_", "step", "update", "scale"):
        assert getattr(torch.amp.GradScaler, name).__module__ == "torch.amp.grad_scaler", name
