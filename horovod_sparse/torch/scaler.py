"""A store of gradients, which a `GradScaler` may have scaled. Never imports Horovod."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from horovod_sparse.core.pipeline import Pipeline
from horovod_sparse.core.state import empty_state
from horovod_sparse.torch.detached import Detached, Waiting
from horovod_sparse.torch.momentum import is_sgd
from horovod_sparse.torch.store import TensorStore

WITH_SCALER = (
    "With torch.amp.GradScaler, call compression.scale_with(scaler) before the first step, so that all ranks leave out the "
    "same steps"
)


class ScaledStore(TensorStore):
    """Keeps residuals without the loss scale."""

    scaler: torch.amp.GradScaler | None = None

    detached: Detached | None = None
    """Moves the model's parameters while gradients are computed; None if they stay where they are."""

    def detach(
        self, optimizer: torch.optim.Optimizer, own_step: Callable[..., Any], names: Mapping[Tensor, str]
    ) -> None:
        """Move the parameters of an optimizer as the compressor says, by itself only where the unit of updates is known."""
        coefficient = self.compressor.detached_coefficient
        known = self.updates is not None or is_sgd(own_step) or self.compressor.detached != "auto"
        if self.active and coefficient and known:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self.detached = Detached(coefficient, parameters, partial(self._waiting, optimizer, names))
            optimizer.register_step_pre_hook(self.detached.check)

    def _waiting(self, optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> list[Waiting]:
        """Return what waits between two steps: in the pipeline, or in a state that was loaded before the first step."""
        pipeline, state = self.pipeline, self.deferred or empty_state()
        residuals, known = state["residuals"], state["learning_rates"]
        if pipeline is not None:
            nothing = pipeline.is_open or all(bucket.is_dense for bucket in pipeline.buckets)
            residuals = {} if nothing else {name: pipeline.residuals.view(name) for name in pipeline.bucket_of}
            known = pipeline.learning_rates
        found = []
        for group in optimizer.param_groups:
            rate = 1.0 if self.updates is not None else float(group["lr"])
            for parameter in group["params"]:
                name = names.get(parameter, "")
                if parameter.requires_grad and name in residuals:
                    # A state that was loaded may be in the host's memory.
                    residual = residuals[name].view(parameter.shape).to(parameter.device)
                    found.append(Waiting(parameter, residual, known.get(name, rate)))
        return found

    def note_reduced(self) -> None:
        """Let a change of the gradients be noticed, which gives the updates another unit than the residuals have."""
        if self.detached is not None and self.updates is None:
            self.detached.note(next((p for p in self._routes.compressed.values() if p.grad is not None), None))

    def restore_moved(self) -> None:
        """Give the parameters back what they were before a forward pass."""
        if self.detached is not None:
            self.detached.restore()

    def scale_with(self, scaler: torch.amp.GradScaler) -> None:
        """See `TorchCompressor.scale_with`."""
        if self.updates is not None or self.scaler is scaler or not scaler.is_enabled():
            return
        if self.pipeline is not None or self.scaler is not None:
            raise RuntimeError(
                "scale_with must be called once, before the first step, because residuals are kept without the loss scale; "
                "make a new optimizer and a new compression, or scale by hand: see docs/pytorch.md"
            )
        self.scaler, self.undoes = scaler, True

    def rescale(self, factor: float) -> None:
        if self.scaler is not None:
            raise RuntimeError(
                "rescale must not be called with scale_with(scaler): residuals are kept without the loss scale"
            )
        super().rescale(factor)

    def _end_step(self, pipeline: Pipeline) -> None:
        try:
            pipeline.end_step()
        except FloatingPointError as error:
            error.args = (f"{error}. {WITH_SCALER}",)
            raise

    @property
    def _scale(self) -> float | None:
        """The loss scale of this step, if there is a scaler."""
        return None if self.scaler is None else float(self.scaler.get_scale())
