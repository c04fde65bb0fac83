"""Reduces the gradients of a model in `DistributedDataParallel`, whose hook hands them over bucket by bucket. No Horovod.

DDP's buckets are not ours: DDP packs its own anew after the first step. The hook of the last one ends all exchanges, in one
order on all ranks, and writes to DDP's memory. Where updates are exchanged, DDP's buckets stay as they are.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.distributed.algorithms.join import Joinable
from torch.optim.optimizer import register_optimizer_step_pre_hook

from horovod_sparse.core.agreement import check_optimizer, exchanges_updates, warn_unseen
from horovod_sparse.torch.compressors import TorchCompressor
from horovod_sparse.torch.group_reducer import GroupReducer
from horovod_sparse.torch.parameters import is_sharded

Future = torch.futures.Future
_NO_BACKWARD = -1


def replace_step(optimizer: torch.optim.Optimizer, around: Callable[[Callable[..., Any], Any], Any]) -> None:
    """Let `around(own_step, closure)` take the place of an optimizer's `step`, as schedulers of the learning rate do.

    PyTorch's own hooks would come twice where `step` calls that of its base, and not at all after an exception.
    The optimizer then raises RuntimeError if it steps in any other way.
    """
    own, begun = optimizer.step, False

    @functools.wraps(getattr(own, "__func__", own))
    def step(_: object, closure: Callable[[], Any] | None = None) -> Any:
        nonlocal begun
        begun = True
        try:
            return around(own, closure)
        finally:
            begun = False

    def check(*_: object) -> None:
        if not begun:
            raise RuntimeError(
                "optimizer.step must be that which register has left, to exchange gradients or updates, but it was replaced or "
                "passed by; call register after what replaces it (Accelerator.prepare, for instance)"
            )

    optimizer.register_step_pre_hook(check)
    # Mypy has no notion of a method that one object alone has.
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


def check_fit(
    compression: TorchCompressor, optimizer: torch.optim.Optimizer | None, names: Mapping[Tensor, str]
) -> tuple[bool, bool]:
    """Raise if they do not fit together. Return whether updates are exchanged, and whether the optimizer moves all of them."""
    compression.check_free()
    if optimizer is not None:
        groups = optimizer.param_groups
        # What a `ZeroRedundancyOptimizer` moves comes from other ranks.
        updates = not isinstance(optimizer, Joinable) and exchanges_updates(compression, groups)
        if not updates:
            check_optimizer(compression, type(optimizer).__name__, groups)
        moved = {parameter for group in groups for parameter in group["params"]}
        absent = [name for parameter, name in names.items() if parameter.requires_grad and parameter not in moved]
        others = len(moved.difference(names)) if updates else 0
        if others or (absent and (compression.in_updates or updates or any(map(is_sharded, names)))):
            raise ValueError(
                "optimizer must have all parameters of the model with lr_in_residual=True and with fully_shard, which replaces "
                "them, and no others where updates are exchanged (updates=False exchanges gradients), got none of "
                f"{absent}, and {others} others"
            )
        return updates, not absent
    for needs, why in (
        (compression.in_updates, "lr_in_residual=True, since residuals are in units of the update"),
        (compression.momentum_correction, f"{compression.momentum_correction!r}, since it must have no momentum"),
        (compression.updates is True, "updates=True, since its steps exchange them"),
        (compression.detached not in ("auto", 0), "detached, since its steps end what a forward pass begins"),
    ):
        if needs:
            raise ValueError(f"optimizer must be given with {why}; call register(model, compression, optimizer)")
    return False, False


class DDPReducer(GroupReducer):
    """Reduces the gradients of one model. `GroupReducer` has its arguments."""

    finds_unused = True
    """Whether DDP may leave a gradient as it was if no rank has used the parameter in this step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._backward = _NO_BACKWARD
        """The number that PyTorch has given to the backward pass in which this step began."""
        self._watches = self.active and self.optimizer is None
        """Whether all optimizers are looked at, until one steps these parameters."""
        if self._watches:
            self._watch_optimizers()

    # --- an optimizer that nobody has given ---

    def _watch_optimizers(self) -> None:
        """Warn once if an optimizer steps these parameters that had better be given to `register`."""
        known = weakref.ref(self)

        def look(optimizer: torch.optim.Optimizer, *_: object) -> None:
            living, groups = known(), optimizer.param_groups
            if living is None or not living._watches:
                return
            if any(parameter in living._routes.names for group in groups for parameter in group["params"]):
                living._watches = False
                # With a `ZeroRedundancyOptimizer` nothing would change.
                if not isinstance(optimizer, Joinable):
                    instead = "write register(model, compression, optimizer) (horovod_sparse.torch)"
                    warn_unseen(living.compressor, type(optimizer).__name__, groups, instead)

        weakref.finalize(self, register_optimizer_step_pre_hook(look).remove)

    def scale_with(self, scaler: torch.amp.GradScaler) -> None:
        super().scale_with(scaler)
        if self.detached is not None:
            # The scaler changes gradients, and nothing tells whether anybody else does so.
            self.detached.stop("a scaler changes them")

    # --- DDP's buckets ---

    @torch.no_grad()
    def reduce(self, bucket: Any) -> Future[Tensor]:
        """Take a bucket's gradients. Return the bucket, which holds the mean of all ranks' gradients once all are reduced."""
        buffer = bucket.buffer()
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        if not self.active or self.updates is not None:
            future.set_result(buffer)
            if self.updates is not None and bucket.is_last():
                if torch._C._current_graph_task_id() == _NO_BACKWARD:
                    # This rank has no data left: DDP's `join`.
                    self.step_alone(lambda: None)
                else:
                    Variable._execution_engine.queue_callback(self.restore_moved)
            return future
        try:
            self._take_bucket(bucket)
            self._step.promised.append((buffer, future))
            if bucket.is_last():
                self._finish()
        except BaseException:
            self.give_up()
            raise
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
        self._step.gradients.update(zip(bucket.parameters(), bucket.gradients(), strict=True))
        if self.pipeline is not None and not self.compressor.holds_back:
            self._begin_step()
            for parameter in bucket.parameters():
                self._take(parameter, self._routes.names[parameter])

    def state_dict(self) -> dict[str, Any]:
        if self._step.begun:
            # The last bucket of a backward pass ends the step, so this one was interrupted.
            self.give_up()
        return super().state_dict()

    def _finish(self) -> None:
        """End the step. When DDP has ended its own, write the gradients that it has left out, and raise what all ranks raise.

        If that were raised before, training could not go on.
        """
        error: BaseException | None = None
        gradients, promised = self._step.gradients, self._step.promised
        self._complete()
        try:
            assert self.pipeline is not None
            self._end_step(self.pipeline)
        except FloatingPointError as raised:
            error = raised

        def end() -> None:
            for parameter, reduced in gradients.items():
                if not parameter.requires_grad:
                    continue
                if parameter.grad is None:
                    # As with DDP alone, a parameter that was never used has no gradient.
                    parameter.grad = reduced.clone() if reduced.any() else None
                elif self.finds_unused and not torch.equal(parameter.grad, reduced):
                    parameter.grad.copy_(reduced)
            self.restore_moved()
            self.note_reduced()
            if error is not None:
                raise error

        if self._backward != _NO_BACKWARD:
            # DDP ends its step in a callback that comes between these two.
            engine = Variable._execution_engine
            engine.queue_callback(lambda: engine.queue_callback(end))
        elif error is not None:
            # This rank has no data left, and takes part in the steps of the others: DDP's `join`.
            raise error
        for buffer, future in promised:
            future.set_result(buffer)
