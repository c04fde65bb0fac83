"""Reduces the gradients of a model in `DistributedDataParallel`, whose hook hands them over bucket by bucket. No Horovod.

DDP's buckets are not ours. DDP packs its own anew after the first step, and ours keep the residuals by parameter. A gradient is
taken from DDP's bucket as soon as that is ready, and exchanges begin while backward goes on. The hook of DDP's last
bucket ends all of them, in one order on all ranks, and writes the reduced gradients to the memory of DDP's buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from horovod_sparse.torch.grouped import GroupReducer

Future = torch.futures.Future


class HookReducer(GroupReducer):
    """Reduces the gradients of one model. `GroupReducer` has its arguments."""

    finds_unused = True
    """Whether DDP may leave a gradient as it was if no rank has used the parameter in this step."""
    scaler: torch.amp.GradScaler | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._promised: list[tuple[Tensor, Future[Tensor]]] = []
        """DDP's buckets of this step, and what tells DDP that each is reduced."""

    def scale_with(self, scaler: torch.amp.GradScaler) -> None:
        """See `TorchCompressor.scale_with`."""
        if not scaler.is_enabled():
            return
        if self.pipeline is not None or self.scaler not in (None, scaler):
            raise RuntimeError(
                "scale_with must be called once, before the first step: residuals are kept without its scale"
            )
        self.compressor.discardable = True
        self.scaler = scaler

    def rescale(self, factor: float) -> None:
        if self.scaler is not None:
            raise RuntimeError(
                "rescale must not be called with scale_with(scaler): residuals are kept without the loss scale"
            )
        super().rescale(factor)

    # --- DDP's buckets ---

    @torch.no_grad()
    def reduce(self, bucket: Any) -> Future[Tensor]:
        """Take a bucket's gradients. Return the bucket, which holds the mean of all ranks' gradients once all are reduced."""
        buffer = bucket.buffer()
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        if not self.active:
            future.set_result(buffer)
            return future
        try:
            self._take_bucket(bucket)
            self._promised.append((buffer, future))
            if bucket.is_last():
                self._finish()
        except BaseException:
            self._give_up_step()
            raise
        return future

    def _take_bucket(self, bucket: Any) -> None:
        if bucket.index() == 0 and self._step.gradients:
            # Backward was interrupted.
            self._give_up_step()
        self._check_known(bucket.parameters())
        self._step.gradients.update(zip(bucket.parameters(), bucket.gradients(), strict=True))
        if self.pipeline is not None and not self.compressor.holds_back:
            self._take(self.pipeline, bucket.parameters())

    def _check_known(self, parameters: Iterable[Tensor]) -> None:
        """Raise ValueError if a bucket is that of another model."""
        known = self._routes.names or self._given_names
        if known and any(parameter not in known for parameter in parameters):
            raise ValueError(
                f"compression must serve one model, but {self.compressor!r} is the hook of another one, too; give each model a "
                "compressor of its own"
            )

    def _give_up_step(self) -> None:
        self._promised = []
        super()._give_up_step()

    @property
    def _scale(self) -> float | None:
        return None if self.scaler is None else float(self.scaler.get_scale())

    def _finish(self) -> None:
        gradients, error = self._complete(), None
        try:
            assert self.pipeline is not None
            self.pipeline.end_step()
        except FloatingPointError as raised:
            error = raised
        self._end_backward(gradients, error)
        promised, self._promised = self._promised, []
        for buffer, future in promised:
            future.set_result(buffer)

    def _end_backward(self, gradients: Mapping[Tensor, Tensor], error: BaseException | None) -> None:
        """When DDP has ended its step, write the gradients that it has left out, and raise `error`, as all ranks do.

        If it were raised before, training could not go on.
        """

        def end() -> None:
            for parameter, reduced in gradients.items():
                if not parameter.requires_grad:
                    continue
                if parameter.grad is None:
                    # As with DDP alone, a parameter that was never used has no gradient.
                    parameter.grad = reduced.clone() if reduced.any() else None
                elif self.finds_unused and not torch.equal(parameter.grad, reduced):
                    parameter.grad.copy_(reduced)
            if error is not None:
                raise error

        # DDP ends its step in a callback that comes between these two.
        engine = Variable._execution_engine
        engine.queue_callback(lambda: engine.queue_callback(end))
