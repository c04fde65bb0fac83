"""Reduces gradients over a group of ranks, in one order on all of them. Never imports Horovod.

Where gradients come from is left to others: DDP's hook (`ddp`) and local updates (`local`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from horovod_sparse.core.agreement import agree_on_states, check_steps, compare
from horovod_sparse.core.binding import compresses
from horovod_sparse.core.intake import Arrived
from horovod_sparse.core.layout import Slot
from horovod_sparse.core.pipeline import Pipeline, UnderWay, Wait
from horovod_sparse.core.state import empty_state
from horovod_sparse.exchange.protocols import Collective, Reduced
from horovod_sparse.torch.compressors import TorchCompressor
from horovod_sparse.torch.gradients import write_to
from horovod_sparse.torch.parameters import check_real, description
from horovod_sparse.torch.routes import Routes, dense_message
from horovod_sparse.torch.step import Step
from horovod_sparse.torch.store import TensorStore


class Transport(Protocol):
    """The collectives of some ranks. All of them start the same ones in the same order."""

    world: int
    position: int
    """This rank's number among them."""
    rank: int
    """This rank's number among all, for messages."""

    def everyone(self, value: Any) -> list[Any]:
        """Return every rank's value, which JSON can hold, in rank order. Blocks."""

    def start(self, collective: Collective) -> Wait:
        """Start a collective, and return a function that waits for its result. An allreduce is in place."""

    def together(self) -> AbstractContextManager[None]:
        """Return a block that all ranks enter. If it raises on one of them, it raises on all, where the transport can do so."""


@dataclass
class GroupStep(Step):
    """What this rank has done in a step so far."""

    gradients: dict[Tensor, Tensor] = field(default_factory=dict)
    """The gradients by parameter. The reduced gradients are written to their memory."""
    under_way: list[UnderWay] = field(default_factory=list)
    numbers: Wait | None = None
    """Waits for the numbers of the step that the ranks are in; None if they are known, or do not matter."""


class GroupReducer(TensorStore):
    """Reduces the gradients of some parameters.

    Args:
        compressor: what it serves from now on.
        transport: the collectives.
        names: the parameters' names, in the order of the model. If there are none, parameters get numbers in the reverse
            order of their gradients.
        optimizer: the optimizer, which `lr_in_residual` needs.
    """

    def __init__(
        self,
        compressor: TorchCompressor,
        transport: Transport,
        names: Mapping[Tensor, str],
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        super().__init__(compressor)
        self.active = compresses(transport.world)
        self._transport = transport
        self._given_names = names
        self._optimizer = optimizer
        self._routes = Routes(compressor)
        self._step = GroupStep()

    def reduce_all(self, prepare: Callable[[], dict[Tensor, Tensor]]) -> dict[Tensor, Tensor]:
        """Replace all gradients, which `prepare` returns, by their means over the ranks. All ranks call this together."""
        try:
            with self._transport.together():
                gradients = prepare()
                if not self.active:
                    return gradients
                self._step.gradients.update(gradients)
                self._complete()
        except BaseException:
            self._give_up_step()
            raise
        assert self.pipeline is not None
        self.pipeline.end_step()
        return gradients

    def _give_up_step(self) -> None:
        self._step = GroupStep()
        if self.pipeline is not None:
            self.pipeline.abort()

    @property
    def _scale(self) -> float | None:
        """The loss scale of this step, if there is a scaler."""
        return None

    def scale_with(self, scaler: torch.amp.GradScaler) -> None:
        """See `TorchCompressor.scale_with`. Refused here, because nothing that is scaled is reduced."""
        raise RuntimeError(
            "scale_with must not be called with local updates, because the scaler's gradients stay on their worker: call "
            "scaler.step(optimizer) with the optimizer itself, and then local.count_step()"
        )

    # --- gradients in ---

    def _take(self, pipeline: Pipeline, parameters: Iterable[Tensor]) -> None:
        """Give gradients to the pipeline, and start the exchanges of buckets that are complete."""
        step = self._step
        if not step.begun:
            step.begun = True
            if pipeline.buckets and self.compressor.changes:
                # Others learn this step's number before its messages, and while gradients are added up.
                number = pipeline.buckets[0].buffer.new_tensor([pipeline.buckets[0].state.step], dtype=torch.int64)
                step.numbers = self._transport.start(Collective("allgather", number))
            self._drop_frozen(pipeline)
            pipeline.start_step(step.gradients.values(), self._scale, undoes=self.undoes)
        for parameter in parameters:
            together = self._routes.dense.get(parameter)
            if together is None:
                self._take_compressed(pipeline, parameter)
                continue
            self._check_step()
            step.arrived[together.name] += 1
            if step.arrived[together.name] == len(together.parameters):
                gradients = [step.gradients[member] for member in together.parameters]
                message = dense_message(together, gradients, self.compressor, pipeline.intake)
                step.dense.append((together, message, self._transport.start(Collective("allreduce", message))))

    def _check_step(self) -> None:
        """Before the first exchange of a step, raise RuntimeError on all ranks if they are in different steps."""
        numbers, self._step.numbers = self._step.numbers, None
        if numbers is not None:
            check_steps(numbers().tolist(), self._transport.rank)

    def _take_compressed(self, pipeline: Pipeline, parameter: Tensor) -> None:
        step, name = self._step, self._routes.names[parameter]
        rate = step.learning_rate(parameter, self._param_groups) if self.compressor.in_updates else None
        bucket = pipeline.bucket_of[name]
        arrived = step.collect(bucket, Arrived(name, step.gradients[parameter], rate))
        if arrived and pipeline.arrive_together(bucket, arrived) is not None:
            collective = bucket.begin()
            self._check_step()
            step.under_way.append((bucket, self._transport.start(collective)))

    # --- reduced gradients out ---

    def _complete(self) -> dict[Tensor, Tensor]:
        """End all exchanges, and write the reduced gradients, which are returned, to the memory of the gradients."""
        step = self._step
        pipeline = self.pipeline or self._begin([*step.gradients])
        if not step.begun:
            self._take(pipeline, step.gradients)
        means = None if step.sample is None else self._transport.start(Collective("allreduce", step.sample))
        pipeline.complete(step.under_way, self._write, lambda bucket, collective: self._transport.start(collective))
        for together, message, wait in step.dense:
            wait()
            message /= self._transport.world
            pipeline.finish_dense(together.name, message)
            parts = torch.split(message.view(-1), [slot.numel for slot in together.layout.slots])
            targets = [step.gradients[parameter] for parameter in together.parameters]
            sources = [part.view(target.shape) for part, target in zip(parts, targets, strict=True)]
            torch._foreach_copy_(targets, sources)
        if means is not None:
            self.lengths.note((means() / self._transport.world).tolist())
        self._step = GroupStep()
        return step.gradients

    def _write(self, slots: Sequence[Slot], reduced: Reduced) -> list[str]:
        gradients, compressed = self._step.gradients, self._routes.compressed
        return write_to([(slot, gradients[compressed[slot.name]]) for slot in slots], reduced)

    # --- agreement ---

    def _begin(self, parameters: Sequence[Tensor]) -> Pipeline:
        """Agree with the other ranks, make buckets for all parameters, and load the state that was deferred. Blocks."""
        group = self._transport
        new = {parameter: name for parameter, name in self._given_names.items() if parameter in self._step.gradients}
        if not new:
            # Backward begins with the last parameters of the model.
            new = {parameter: f"parameter {number}" for number, parameter in reversed([*enumerate(parameters)])}
        mine = description(self.compressor, new, self._param_groups)
        compare(mine, group.everyone(mine), group.rank)
        check_real(new)
        shapes = {name: tuple(parameter.shape) for parameter, name in new.items()}
        agree_on_states(lambda: self._check(self.deferred or empty_state(), shapes), group.everyone, group.rank)
        return self._extend(new, (), group.everyone, world=group.world, position=group.position, rank=group.rank)

    @property
    def _param_groups(self) -> list[dict[str, Any]]:
        return [] if self._optimizer is None else self._optimizer.param_groups

    def load_compression_state(self, state: Mapping[str, Any]) -> None:
        super().load_compression_state(state)
        self._step = GroupStep()
