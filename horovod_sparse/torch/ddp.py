"""Reduces the gradients of a model in `DistributedDataParallel`, whose hook hands them over bucket by bucket. No Horovod.

DDP's buckets are not ours: DDP packs its own anew after the first step. The hook of the last one ends all exchanges, in one
order on all ranks, and writes to DDP's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from weakref import finalize

import torch
from torch import Tensor
from torch.autograd import Variable

from horovod_sparse.core.agreement import check_momentum
from horovod_sparse.torch.compressors import TorchCompressor
from horovod_sparse.torch.group_reducer import GroupReducer

Future = torch.futures.Future
_NO_BACKWARD = -1


def check_fit(
    compression: TorchCompressor, optimizer: torch.optim.Optimizer | None, names: Mapping[Tensor, str]
) -> None:
    """Raise ValueError if a compressor does not fit to an optimizer, or needs one that is not given."""
    compression.check_free()
    if optimizer is None:
        if compression.lr_in_residual:
            raise ValueError(
                "optimizer must be given with lr_in_residual=True, since residuals are in units of the update; call "
                "register(model, compression, optimizer)"
            )
        return
    check_momentum(compression, optimizer.param_groups)
    moved = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    absent = [name for parameter, name in names.items() if parameter.requires_grad and parameter not in moved]
    if absent and compression.lr_in_residual:
        raise ValueError(
            f"optimizer must have all parameters of the model with lr_in_residual=True, got none of {absent}; give the "
            "optimizer that has them"
        )


class DDPReducer(GroupReducer):
    """Reduces the gradients of one model. `GroupReducer` has its other arguments.

    Args:
        finds_unused: whether a backward pass may leave out parameters. DDP then hands over what is left in their gradients.
    """

    def __init__(self, *args: Any, finds_unused: bool = True) -> None:
        super().__init__(*args)
        self._backward = _NO_BACKWARD
        """The number that PyTorch has given to the backward pass in which this step began."""
        self._noted: set[Tensor] = set()
        """The parameters whose gradients are noted as they come."""
        if finds_unused and self.active:
            self._used = set()
            self._note(self._given_names)

    def _note(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Note from now on which parameters get gradients, as long as this object lives. Return those that are new."""
        assert self._used is not None
        # PyTorch takes hooks of parameters that are trained only.
        new = [one for one in parameters if one.requires_grad and one not in self._noted]
        for parameter in new:
            hook: Any = parameter.register_post_accumulate_grad_hook(self._used.add)  # type: ignore[no-untyped-call]
            finalize(self, hook.remove)
        self._noted.update(new)
        return new

    @torch.no_grad()
    def reduce(self, bucket: Any) -> Future[Tensor]:
        """Take a bucket's gradients. Return the bucket, which holds the mean of all ranks' gradients once all are reduced."""
        buffer = bucket.buffer()
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        if not self.active:
            future.set_result(buffer)
            return future
        self._take_bucket(bucket)
        self._step.promised.append((buffer, future))
        if bucket.is_last():
            self._finish()
        return future

    def _take_bucket(self, bucket: Any) -> None:
        if bucket.index() == 0:
            backward = torch._C._current_graph_task_id()
            if self._step.promised and backward != self._backward:
                # Backward was interrupted.
                self.give_up()
            self._backward = backward
        known = self._routes.names or self._given_names
        if known and any(parameter not in known for parameter in bucket.parameters()):
            raise ValueError(
                f"compression must serve one model, but {self.compressor!r} is the hook of another one, too; give each model a "
                "compressor of its own"
            )
        if bucket.buffer().is_sparse:
            # DDP reduces sparse gradients alone, in a bucket each.
            names = [self._given_names.get(parameter, "(without a name)") for parameter in bucket.parameters()]
            raise ValueError(
                f"parameters must have dense gradients in DistributedDataParallel, got sparse ones of {names}; make the "
                "embedding with sparse=False"
            )
        if self._used is not None:
            # The bare hook meets its parameters here. Those that are new have gradients.
            self._used.update(self._note(bucket.parameters()))
        self._step.gradients.update(zip(bucket.parameters(), bucket.gradients(), strict=True))
        if self.pipeline is not None and not self.compressor.holds_back:
            self._begin_step()
            for parameter in bucket.parameters():
                self._take(parameter, self._routes.names[parameter])

    def _finish(self) -> None:
        """End the step. What all ranks raise comes when DDP has ended its own step: before, training could not go on."""
        promised = self._step.promised
        try:
            self._complete()
        except RuntimeError as raised:
            error = raised
            if self.pipeline is None or self.pipeline.is_broken or self._backward == _NO_BACKWARD:
                raise

            def end() -> None:
                raise error

            # DDP ends its step in a callback that comes between these two.
            engine = Variable._execution_engine
            engine.queue_callback(lambda: engine.queue_callback(end))
        for buffer, future in promised:
            future.set_result(buffer)

    def state_dict(self) -> dict[str, Any]:
        if self._step.begun:
            # The last bucket of a backward pass ends the step, so this one was interrupted.
            self.give_up()
        return super().state_dict()
