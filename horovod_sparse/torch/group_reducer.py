"""Reduces gradients over a group of ranks, in one order on all of them. Never imports Horovod.

Where gradients come from is left to others: DDP's hook (`ddp`) and local updates (`contrib.torch_local`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from horovod_sparse.core.agreement import agree_on_states, check_steps, compare
from horovod_sparse.core.binding import compresses
from horovod_sparse.core.pipeline import AnyBucket, Pipeline, Wait
from horovod_sparse.exchange.protocols import Collective
from horovod_sparse.torch.compressors import TorchCompressor
from horovod_sparse.torch.group import Group
from horovod_sparse.torch.parameters import check_real, description
from horovod_sparse.torch.step import Step
from horovod_sparse.torch.store import TensorReducer


class GroupReducer(TensorReducer):
    """Reduces the gradients of some parameters, which have `names`, over the ranks of a group.

    If there are no names, parameters get numbers in the reverse order of their gradients. `lr_in_residual` needs `optimizer`.
    """

    _transport: Group
    shards: Sequence[Group] = ()
    """The ranks that hold one replica together, if the parameters are sharded, for each dimension of their mesh."""
    agrees = False
    """Whether another rank has still to agree, and this one takes part, though it has."""
    compared = False
    """Whether the ranks have compared the number of a step before it begins."""

    def __init__(
        self,
        compressor: TorchCompressor,
        transport: Group,
        names: Mapping[Tensor, str],
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        super().__init__(compressor)
        self.active = compresses(transport.world)
        self.optimizer = optimizer
        self._transport = transport
        self._given_names = names

    def reduce_all(self, prepare: Callable[[], dict[Tensor, Tensor]]) -> dict[Tensor, Tensor]:
        """Replace all gradients, which `prepare` returns, by their means over the ranks. All ranks call this together."""
        self.start_all(prepare)
        return self.finish_all()

    def start_all(self, prepare: Callable[[], dict[Tensor, Tensor]]) -> dict[Tensor, Tensor]:
        """Start to reduce what `prepare` returns, and return it; it is as it was until `finish_all`."""
        with self._together(goes_on=True):
            gradients = prepare()
            self._step.gradients.update(gradients)
            if self.active:
                self._take_all()
            self.in_flight = True
        return gradients

    def finish_all(self) -> dict[Tensor, Tensor]:
        """Wait for what was started, and return the means, in the memory of the gradients."""
        gradients = self._step.gradients
        with self._together():
            if self.active:
                self._complete()
            self._step, self.in_flight = Step(), False
        if self.pipeline is not None:
            self.pipeline.end_step()
        return gradients

    @contextmanager
    def _together(self, *, goes_on: bool = False) -> Iterator[None]:
        """A block that all ranks enter. If it raises, the step is given up."""
        try:
            with self._transport.together(goes_on=goes_on):
                yield
        except BaseException:
            self._transport.give_up()
            self.give_up()
            raise

    def give_up(self) -> None:
        self._step, self.in_flight = Step(), False
        if self.pipeline is not None:
            self.pipeline.abort()

    def _start(self, bucket: AnyBucket | None, collective: Collective) -> Wait:
        numbers, self._step.numbers = self._step.numbers, None
        if numbers is not None:
            # Before the first exchange of a step: if the ranks are in different steps, all raise.
            check_steps(numbers().tolist(), self._transport.rank)
        return super()._start(bucket, collective)

    def _gradient(self, parameter: Tensor) -> Tensor | None:
        return self._step.gradients[parameter]

    def _reduce_updates(self, drifts: dict[Tensor, Tensor]) -> None:
        self.reduce_all(lambda: self._of_all(self.grown(drifts)))

    def _begin_step(self) -> None:
        pipeline = self.pipeline
        assert pipeline is not None
        if not (self._step.begun or self.compared) and pipeline.buckets and self.compressor.changes:
            # Others learn this step's number before its messages, and while gradients are added up.
            number = pipeline.buckets[0].buffer.new_tensor([pipeline.buckets[0].state.step], dtype=torch.int32)
            self._step.numbers = self._transport.start(Collective("allgather", number))
        super()._begin_step()

    def _take_all(self) -> None:
        if self.pipeline is None or self.agrees:
            self._agree([*self._step.gradients])
        super()._take_all()

    def _complete(self) -> None:
        self._take_all()
        if self._step.check is not None:
            self._step.check()
        super()._complete()
        self._step = Step()

    def _fail_together(self, pipeline: Pipeline) -> None:
        if self.shards:
            failed = torch.tensor([int(pipeline.fails)], device=self.shards[0].device)
            for shards in self.shards:
                failed = shards.start(Collective("allreduce", failed))()
            if failed.item() and not pipeline.fails:
                pipeline.note_not_finite("some parameter in another shard")

    def _agree(self, parameters: Sequence[Tensor]) -> None:
        """Agree with the other ranks, make buckets for all parameters, and load the state that was deferred. Blocks."""
        group = self._transport
        new = {parameter: name for parameter, name in self._given_names.items() if parameter in self._step.gradients}
        if not new:
            # Backward begins with the last parameters of the model.
            new = {parameter: f"parameter {number}" for number, parameter in reversed([*enumerate(parameters)])}
        mine = self._describe(new)
        compare(mine, group.everyone(mine), group.rank)
        check_real(new)
        if self.agrees:
            agree_on_states(lambda: None, group)
            self.agrees = False
            return
        self._extend(new)

    def _describe(self, new: Mapping[Tensor, str]) -> dict[str, str | list[str]]:
        """Return what must be equal on all ranks."""
        return description(self.compressor, new, self._param_groups)

    def _of_all(self, given: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Return gradients or movements of the parameters that are trained, and zeros for those that are not any more.

        Raise ValueError for those that are trained only since the first step.
        """
        known = self._routes.names or given
        late = [self._given_names.get(parameter, "(without a name)") for parameter in given if parameter not in known]
        if late:
            raise ValueError(
                f"parameters must require gradients from the first step on, or never, got {late} later; wrap the module anew, "
                "and register it with a new compression"
            )
        return {one: given[one] if one in given else torch.zeros_like(one) for one in known}

    def load_compression_state(self, state: Mapping[str, Any]) -> None:
        super().load_compression_state(state)
        self._step = Step()
