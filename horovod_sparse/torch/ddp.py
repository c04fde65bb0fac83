"""Reduces the gradients of a model in `DistributedDataParallel`, whose hook hands them over bucket by bucket. No Horovod.

DDP's buckets are not ours: DDP packs its own anew after the first step. The hook of the last one ends all exchanges, in one
order on all ranks, and writes to DDP's memory.

Tested by tests/parallel/ddp/hook.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from weakref import finalize

import torch
from torch import Tensor
from torch.autograd import Variable

from horovod_sparse.core.agreement import check_momentum
from horovod_sparse.core.binding import compresses
from horovod_sparse.core.feedback import Feedback
from horovod_sparse.torch.compressors import TorchCompressor
from horovod_sparse.torch.group import Group
from horovod_sparse.torch.meeting import agree
from horovod_sparse.torch.source import TensorSource, uncompiled

Future = torch.futures.Future
_NO_BACKWARD = -1
"""The number of a backward pass that PyTorch has compiled."""


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


class Used:
    """The parameters that have got a gradient in this step, noted as these come as long as this object lives."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.now: set[Tensor] = set()
        self.noted: set[Tensor] = set()
        """The parameters whose gradients are noted."""
        self.note(parameters)

    def note(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Note from now on which parameters get gradients. Return those that are new."""
        # PyTorch takes hooks of parameters that are trained only.
        new = [one for one in parameters if one.requires_grad and one not in self.noted]
        for parameter in new:
            hook: Any = parameter.register_post_accumulate_grad_hook(self.now.add)  # type: ignore[no-untyped-call]
            finalize(self, hook.remove)
        self.noted.update(new)
        return new


def check_bucket(bucket: Any, given: Mapping[Tensor, str], compressor: TorchCompressor) -> None:
    """Raise ValueError for a bucket that cannot be reduced. `given` are the parameters of the model, if they are known."""
    if given and any(parameter not in given for parameter in bucket.parameters()):
        raise of_another_model(compressor)
    if bucket.buffer().is_sparse:
        # DDP reduces sparse gradients alone, in a bucket each.
        names = [given.get(parameter, "(without a name)") for parameter in bucket.parameters()]
        raise ValueError(
            f"parameters must have dense gradients in DistributedDataParallel, got sparse ones of {names}; make the "
            "embedding with sparse=False"
        )


def of_another_model(compressor: TorchCompressor) -> ValueError:
    """Return what is raised where a compressor gets a bucket of a model that it does not serve."""
    return ValueError(
        f"compression must serve one model, but {compressor!r} is the hook of another one, too; give each model a "
        "compressor of its own"
    )


def raise_after_step(error: RuntimeError, feedback: Feedback | None, used: Used | None) -> None:
    """Let backward raise what all ranks raise when DDP has ended its own step: before, training could not go on.

    Where DDP finds unused parameters, its end would wait for what a rank that has given the step up has used: raise now.
    """
    is_compiled = torch._C._current_graph_task_id() == _NO_BACKWARD
    if used is not None or feedback is None or feedback.is_broken or is_compiled:
        raise error

    def end() -> None:
        raise error

    # DDP ends its step in a callback that comes between these two.
    engine = Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(end))


class DDPSource(TensorSource):
    """The gradients of one model in `DistributedDataParallel`.

    Args:
        compressor: whose gradients these are.
        group: DDP's ranks.
        given: the model's parameters with their names; none if nobody has told them. They get numbers then.
        optimizer: see `TensorSource`.
        finds_unused: whether a backward pass may leave out parameters. DDP then hands over what is left in their gradients.
    """

    def __init__(
        self,
        compressor: TorchCompressor,
        group: Group,
        given: Mapping[Tensor, str],
        optimizer: torch.optim.Optimizer | None = None,
        *,
        finds_unused: bool = True,
    ) -> None:
        super().__init__(compressor, group, active=compresses(group.world), optimizer=optimizer)
        self._given, self.reduce = given, uncompiled(self._reduce)
        self._promised: list[tuple[Tensor, Future[Tensor]]] = []
        """DDP's buckets in this step, and what tells DDP that each is reduced."""
        self._used = Used(given) if finds_unused and self.active else None
        """What has got a gradient in this step; None if all parameters have."""

    def gradient(self, parameter: Tensor) -> Tensor | None:
        return self.memory[parameter] if self._used is None or parameter in self._used.now else None

    @torch.no_grad()
    def _reduce(self, bucket: Any) -> Future[Tensor]:
        """Take a bucket's gradients. Return the bucket, which holds the mean of all ranks' gradients once all are reduced."""
        buffer, parameters = bucket.buffer(), bucket.parameters()
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        if not self.active:
            future.set_result(buffer)
            return future
        if bucket.index() == 0 and self._promised:
            # The last bucket of a backward pass ends the step, so one that has begun was interrupted.
            self.give_up()
        if self.driver.feedback is None:
            check_bucket(bucket, self._given, self.compressor)
        if self._used is not None and not self._used.noted.issuperset(parameters):
            # Here the bare hook meets its parameters, and others those that are trained only now: these have gradients.
            self._used.now.update(self._used.note(parameters))
        self.memory.update(zip(parameters, bucket.gradients(), strict=True))
        self._promised.append((buffer, future))
        if self.driver.feedback is not None:
            self.begin()
            for parameter in parameters:
                if parameter not in self.names:
                    raise of_another_model(self.compressor)
                self.add(parameter)
        if bucket.is_last():
            self._finish()
        return future

    def _finish(self) -> None:
        """End the step."""
        promised = self._promised
        try:
            if self.driver.feedback is None:
                self._agree()
                self.add_rest()
            self.driver.complete()
            self.driver.finish(self.write)
        except RuntimeError as error:
            raise_after_step(error, self.driver.feedback, self._used)
        finally:
            if self.driver.step is not None:
                self.driver.drop()
            self._forget()
        for buffer, future in promised:
            future.set_result(buffer)

    def _agree(self) -> None:
        new = {parameter: name for parameter, name in self._given.items() if parameter in self.memory}
        if not new:
            # Backward begins with the last parameters of the model.
            new = {parameter: f"parameter {number}" for number, parameter in reversed([*enumerate(self.memory)])}
        agree(self, new)

    def _forget(self) -> None:
        self.memory, self._promised = {}, []
        if self._used is not None:
            self._used.now.clear()

    def give_up(self) -> None:
        super().give_up()
        self._forget()
