"""Reduces the gradients of a model in `DistributedDataParallel`, whose hook hands them over bucket by bucket. No Horovod.

DDP's buckets are not ours. DDP packs its own anew after the first step, and ours keep the residuals by parameter. A gradient is
taken from DDP's bucket as soon as that is ready, and exchanges begin while backward goes on. The hook of DDP's last
bucket ends all of them, in one order on all ranks, and writes the reduced gradients to the memory of DDP's buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from horovod_sparse import kernels
from horovod_sparse.compressors.schedules import Schedule
from horovod_sparse.core.agreement import RELEASE, agree_on_states, compare, warn_of_kernels
from horovod_sparse.core.binding import compresses
from horovod_sparse.core.layout import Slot
from horovod_sparse.core.pipeline import Pipeline, UnderWay
from horovod_sparse.core.preparation import Arrived
from horovod_sparse.core.server import Server
from horovod_sparse.core.state import check_state, empty_state, holds_anything, kept_shapes
from horovod_sparse.exchange.grid import groups_of
from horovod_sparse.exchange.protocols import Collective, Reduced
from horovod_sparse.torch.compiled import tensor_ops
from horovod_sparse.torch.compressors import TorchCompressor
from horovod_sparse.torch.device import on_gpu
from horovod_sparse.torch.gradients import write_to
from horovod_sparse.torch.group import Group
from horovod_sparse.torch.parameters import check_real, described
from horovod_sparse.torch.routes import Routes, dense_message
from horovod_sparse.torch.step import Step

Future = torch.futures.Future


@dataclass
class _HookedStep(Step):
    gradients: dict[Tensor, Tensor] = field(default_factory=dict)
    """The parameters' gradients: views of DDP's buckets, which the reduced gradients are written to."""
    promised: list[tuple[Tensor, Future[Tensor]]] = field(default_factory=list)
    """DDP's buckets, and what tells DDP that each is reduced."""
    under_way: list[UnderWay] = field(default_factory=list)


class HookReducer(Server):
    """Reduces the gradients of one model.

    Args:
        compressor: what it serves from now on.
        group: the process group; None for the default one.
        device: where the collectives of the agreement are carried out.
        names: the parameters' names, in the order of the model. If there are none, they get numbers, in the order in which
            DDP hands them over.
        optimizer: the optimizer, which `lr_in_residual` needs.
        finds_unused: whether DDP leaves a gradient as it was if no rank has used the parameter in this step.
    """

    compressor: TorchCompressor

    def __init__(
        self,
        compressor: TorchCompressor,
        group: Any,
        device: torch.device,
        names: Mapping[Tensor, str],
        optimizer: torch.optim.Optimizer | None = None,
        *,
        finds_unused: bool = False,
    ) -> None:
        self._group = Group(group, device)
        compressor.bind(self)
        self.compressor = compressor
        self._optimizer = optimizer
        self._given_names = names
        self._finds_unused = finds_unused
        self._routes = Routes(compressor)
        self._step = _HookedStep()
        self.scaler: torch.amp.GradScaler | None = None
        self.active = compresses(self._group.world)

    def scale_with(self, scaler: torch.amp.GradScaler) -> None:
        """See `TorchCompressor.scale_with`."""
        if self.pipeline is not None or self.scaler not in (None, scaler):
            raise RuntimeError(
                "scale_with must be called once, before the first step: residuals are kept without its scale"
            )
        self.compressor.discardable = True
        self.scaler = scaler

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
            self._step.promised.append((buffer, future))
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
        self._step.gradients.update(zip(bucket.parameters(), bucket.gradients(), strict=True))
        if self.pipeline is not None and not self.compressor.holds_back:
            self._take(self.pipeline, bucket.parameters())

    def _give_up_step(self) -> None:
        self._step = _HookedStep()
        if self.pipeline is not None:
            self.pipeline.abort()

    # --- gradients in ---

    def _take(self, pipeline: Pipeline, parameters: Iterable[Tensor]) -> None:
        """Give gradients to the pipeline, and start the exchanges of buckets that are complete."""
        step = self._step
        if not step.begun:
            step.begun = True
            self._check_steps(pipeline)
            scale = None if self.scaler is None else float(self.scaler.get_scale())
            pipeline.start_step(step.gradients.values(), scale)
        for parameter in parameters:
            together = self._routes.dense.get(parameter)
            if together is None:
                self._take_compressed(pipeline, parameter)
                continue
            step.arrived[together.name] += 1
            if step.arrived[together.name] == len(together.parameters):
                gradients = [step.gradients[member] for member in together.parameters]
                message = dense_message(together, gradients, self.compressor, pipeline.preparation)
                step.dense.append((together, message, self._group.start(Collective("allreduce", message))))

    def _take_compressed(self, pipeline: Pipeline, parameter: Tensor) -> None:
        step, name = self._step, self._routes.names[parameter]
        rate = step.learning_rate(parameter, self._param_groups) if self.compressor.lr_in_residual else None
        bucket = pipeline.bucket_of[name]
        arrived = step.collect(bucket, Arrived(name, step.gradients[parameter], rate))
        if arrived and pipeline.arrive_together(bucket, arrived) is not None:
            step.under_way.append((bucket, self._group.start(pipeline.begin(bucket))))

    # --- reduced gradients out ---

    def _finish(self) -> None:
        step = self._step
        pipeline = self.pipeline or self._begin([*step.gradients])
        if not step.begun:
            self._take(pipeline, step.gradients)
        pipeline.complete(step.under_way, self._write, lambda bucket, collective: self._group.start(collective))
        for together, message, wait in step.dense:
            wait()
            message /= self._group.world
            pipeline.finish_dense(together.name, message)
            parts = torch.split(message.view(-1), [slot.numel for slot in together.layout.slots])
            targets = [step.gradients[parameter] for parameter in together.parameters]
            sources = [part.view(target.shape) for part, target in zip(parts, targets, strict=True)]
            torch._foreach_copy_(targets, sources)
        self._step = _HookedStep()
        try:
            pipeline.end_step()
        except FloatingPointError as error:
            self._end_backward(step.gradients, error)
        else:
            self._end_backward(step.gradients, None)
        for buffer, future in step.promised:
            future.set_result(buffer)

    def _write(self, slots: Sequence[Slot], reduced: Reduced) -> None:
        gradients, compressed = self._step.gradients, self._routes.compressed
        write_to([(slot, gradients[compressed[slot.name]]) for slot in slots], reduced)

    def _end_backward(self, gradients: Mapping[Tensor, Tensor], error: BaseException | None) -> None:
        """When DDP has ended its step, write the gradients that it has left out, and raise `error`, as all ranks do.

        If it were raised before, training could not go on.
        """

        def end() -> None:
            for parameter, reduced in gradients.items():
                if parameter.grad is None:
                    parameter.grad = reduced.clone()
                elif self._finds_unused and not torch.equal(parameter.grad, reduced):
                    parameter.grad.copy_(reduced)
            if error is not None:
                raise error

        # DDP ends its step in a callback that comes between these two.
        engine = Variable._execution_engine
        engine.queue_callback(lambda: engine.queue_callback(end))

    # --- agreement ---

    def _begin(self, parameters: Sequence[Tensor]) -> Pipeline:
        """Agree with the other ranks, make buckets for all parameters, and load the state that was deferred. Blocks."""
        group, compressor = self._group, self.compressor
        new = {parameter: name for parameter, name in self._given_names.items() if parameter in self._step.gradients}
        if not new:
            # DDP begins with the last parameters of the model.
            new = {parameter: f"parameter {number}" for number, parameter in reversed([*enumerate(parameters)])}
        mine: dict[str, str | list[str]] = {
            "release": RELEASE,
            "compression": repr(compressor),
            "parameters": described(new),
        }
        if compressor.lr_in_residual:
            mine["lr"] = [str(float(one["lr"])) for one in self._param_groups]
        everyone = group.everyone([mine, kernels.variant()])
        compare(mine, [theirs for theirs, _ in everyone], group.rank)
        warn_of_kernels([theirs for _, theirs in everyone], group.position, group.rank)
        check_real(new)
        agree_on_states(
            lambda: self._check({name: tuple(p.shape) for p, name in new.items()}), group.everyone, group.rank
        )
        pipeline = Pipeline(
            tensor_ops(),
            compressor,
            world=group.world,
            position=group.position,
            rank=group.rank,
            groups=groups_of(compressor.hierarchical, group.world, group.hosts),
            device_selector=on_gpu,
        )
        pipeline.measure(group, next(iter(new)))
        self._routes.extend(new, (), pipeline)
        self.pipeline = pipeline
        if self.deferred is not None:
            super().load_compression_state(self.deferred)
        return pipeline

    @property
    def _param_groups(self) -> list[dict[str, Any]]:
        return [] if self._optimizer is None else self._optimizer.param_groups

    def _check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ValueError unless the state that is deferred fits the parameters."""
        state = self.deferred or empty_state()
        if holds_anything(state):
            check_state(state, self.compressor, *kept_shapes(shapes, self.compressor))

    def _check_steps(self, pipeline: Pipeline) -> None:
        """Raise RuntimeError on all ranks if they are in different steps: their messages would have different sizes."""
        if isinstance(self.compressor.ratio, Schedule) or self.compressor.dense_steps:
            step = pipeline.buckets[0].state.step if pipeline.buckets else 0
            steps = self._group.everyone(step)
            if len(set(steps)) > 1:
                raise RuntimeError(
                    f"rank {self._group.rank}: the ranks are in different steps of the schedule, {steps}; load the compression "
                    "state on every rank or on none"
                )

    def load_compression_state(self, state: Mapping[str, Any]) -> None:
        super().load_compression_state(state)
        self._step = _HookedStep()
