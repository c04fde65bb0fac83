"""Detached error feedback: gradients at parameters that part of this rank's residual has moved already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from horovod_sparse.compressors.base import Compressor
from horovod_sparse.core.pipeline import Pipeline


def check_detachable(compressor: Compressor, coefficient: float) -> None:
    """Raise ValueError unless a rank's residual holds what this rank has not sent, and the coefficient is in its range."""
    if isinstance(coefficient, bool) or not 0.0 <= coefficient <= 1.0:
        raise ValueError(f"coefficient must be in [0, 1], got {coefficient!r}")
    if compressor.balanced or compressor.hierarchical:
        raise ValueError(
            "balanced and hierarchical must be False for detached error feedback, because residuals else hold "
            f"what other ranks have sent, too; got {compressor!r}"
        )


@contextmanager
def moved(
    pipeline: Pipeline | None, parameters: Mapping[str, Tensor], rates: Mapping[Tensor, float], coefficient: float
) -> Iterator[None]:
    """Move parameters within the block. `TorchCompressor.detached` has the formula.

    Args:
        pipeline: which has their residuals; None before the first step, when nothing waits.
        parameters: those that have residuals, by name.
        rates: what their residuals are multiplied by: the learning rates, or 1 where updates are exchanged.
        coefficient: c, in [0, 1].
    """
    before = {} if pipeline is None or coefficient == 0.0 else _move(pipeline, parameters, rates, coefficient)
    versions = [parameter._version for parameter in before]
    try:
        yield
    finally:
        changed = versions != [parameter._version for parameter in before]
        with torch.no_grad():
            for parameter, value in before.items():
                parameter.copy_(value)
    if changed:
        raise RuntimeError(
            "parameters must not be changed within compression.detached(...), which has restored them; call optimizer.step() "
            "after the block"
        )


@torch.no_grad()
def _move(
    pipeline: Pipeline, parameters: Mapping[str, Tensor], rates: Mapping[Tensor, float], coefficient: float
) -> dict[Tensor, Tensor]:
    """Move parameters. Return what they were."""
    unknown = [name for name, parameter in parameters.items() if parameter not in rates]
    if unknown:
        raise ValueError(
            f"optimizer must have the parameters that the compression reduces, got one without {unknown[0]!r}; give the one "
            "that steps them"
        )
    before = {parameter: parameter.clone() for parameter in parameters.values()}
    for name, parameter in parameters.items():
        rate = 1.0 if pipeline.compressor.in_updates else rates[parameter]
        parameter.sub_(pipeline.residuals.view(name).view(parameter.shape), alpha=coefficient * rate)
    return before
