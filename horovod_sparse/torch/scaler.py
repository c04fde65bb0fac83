"""A server of gradients, which a `GradScaler` may have scaled. Never imports Horovod."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from horovod_sparse.core.pipeline import Pipeline
from horovod_sparse.torch.detached import check_detachable, moved
from horovod_sparse.torch.server import TensorServer

WITH_SCALER = (
    "With torch.amp.GradScaler, call compression.scale_with(scaler) before the first step, so that all ranks leave out the "
    "same steps"
)


class ScaledServer(TensorServer):
    """Keeps residuals without the loss scale."""

    scaler: torch.amp.GradScaler | None = None

    def detached(self, optimizer: torch.optim.Optimizer, coefficient: float) -> AbstractContextManager[None]:
        """See `TorchCompressor.detached`."""
        check_detachable(self.compressor, coefficient)
        groups, moves = optimizer.param_groups, self.updates is not None
        rates = {parameter: 1.0 if moves else float(group["lr"]) for group in groups for parameter in group["params"]}
        return moved(self.between_steps(), self._routes.compressed, rates, coefficient)

    def scale_with(self, scaler: torch.amp.GradScaler) -> None:
        """See `TorchCompressor.scale_with`."""
        if self.updates is not None or self.scaler is scaler or not scaler.is_enabled():
            return
        if self.pipeline is not None or self.scaler is not None:
            raise RuntimeError(
                "scale_with must be called once, before the first step, because residuals are kept without the loss scale; "
                "make a new optimizer and a new compression, or scale by hand: see docs/pytorch.md"
            )
        self.compressor.discardable = True
        self.scaler = scaler

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
