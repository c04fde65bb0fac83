"""Scenarios: mixed precision. A loss scale changes nothing, and a step that overflows leaves no trace, on every rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from horovod_sparse.torch import DGC, Clip, MiCRO, SIDCo, Threshold, TopK

from .common import (
    BUCKET_BYTES,
    COMPRESSORS,
    DEVICE,
    IN_DDP,
    MakeCompression,
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
    **{name: COMPRESSORS[name] for name in ("SIDCo", "TopK", "RandomK", "MiCRO", "NoOp")},
    "DGC": lambda **settings: DGC(0.02, warmup=None, **settings),
    "Threshold": lambda **settings: Threshold(0.05, **settings),
    "clipped": lambda **settings: TopK(0.02, clip=0.5, warmup=None, **settings),
    "clipped_as_a_whole": lambda **settings: TopK(0.02, clip=Clip(0.5, "model"), warmup=None, **settings),
    "in_units_of_the_update": lambda **settings: SIDCo(0.02, lr_in_residual=True, warmup=None, **settings),
}


def _train_scaled(model: nn.Module, optimizer: Any, scaler: Any, steps: Iterable[int]) -> None:
    """The usual form."""
    for step in steps:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.step(optimizer)
        scaler.update()


@scenario(*PAIR, TORCHRUN_2, cases={name: (make,) for name, make in _KINDS.items()})
def overflow_leaves_no_trace(make: MakeCompression) -> None:
    """Training with steps that overflow on one rank is training without those steps, bit by bit: powers of two are exact."""
    results = []
    for scaled in (False, True):
        # In DDP a scaler ends detached feedback, and has to be announced.
        model, compression = overflowing(), make(granularity=BUCKET_BYTES, **({"detached": 0.0} if IN_DDP else {}))
        moves: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.1} if compression.momentum == "auto" else {}
        called, optimizer = distributed(model, torch.optim.SGD(model.parameters(), lr=0.05, **moves), compression)
        scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**7, growth_interval=2)
        if scaled and IN_DDP:
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
        results.append((digest(model.parameters()), kept(compression)))
    assert results[0] == results[1]


@scenario(*PAIR)
def reduced_gradients_are_unscaled_and_clipped_before_the_step() -> None:
    results = []
    for scaled in (False, True):
        model = small_model()
        optimizer = wrap(model, SIDCo(0.02, warmup=None), momentum=0.0)
        scaler = torch.amp.GradScaler(DEVICE, init_scale=64.0, enabled=scaled)
        for step in range(5):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            if scaled:
                scaler.unscale_(optimizer)
            else:
                optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            if scaled:
                scaler.step(optimizer)
            else:
                with optimizer.skip_synchronize():
                    optimizer.step()
            scaler.update()
        results.append(digest(model.parameters()))
    assert results[0] == results[1]


@scenario(MPI_2)
def several_optimizers_share_a_scaler() -> None:
    """Each leaves out its own steps. An optimizer that unscales in its own kernel works, too."""
    models = [overflowing(), overflowing()]
    compressions = [SIDCo(0.02, warmup=None, updates=False), TopK(0.02, warmup=None, updates=False)]
    optimizers = [
        distributed(model, torch.optim.Adam(model.parameters(), lr=1e-3, fused=True), compression)[1]
        for model, compression in zip(models, compressions, strict=True)
    ]
    scaler = torch.amp.GradScaler(DEVICE, init_scale=8.0)
    for compression in compressions:
        compression.scale_with(scaler)
    for step in range(6):
        models[1].overflows = step == 3 and hvd.rank() == 0
        before = [digest(model.parameters()) for model in models]
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
        for optimizer in optimizers:
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
    optimizer = wrap(model, compression)
    compression.scale_with(scaler)
    compression.scale_with(scaler)
    other = torch.amp.GradScaler(DEVICE)
    assert "scale_with must be called once" in raised(RuntimeError, lambda: compression.scale_with(other))
    assert "rescale must not be called" in raised(RuntimeError, lambda: compression.rescale(2.0))
    _train_scaled(model, optimizer, scaler, range(2))
    late_model, late = small_model(), MiCRO(0.01, warmup=None)
    train(late_model, wrap(late_model, late), range(1))
    assert "before the first step" in raised(RuntimeError, lambda: late.scale_with(scaler))
