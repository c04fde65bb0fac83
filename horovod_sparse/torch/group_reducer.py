"""Reduces gradients over a group of ranks, in one order on all of them. Never imports Horovod.

Where gradients come from is left to others: DDP's hook (`ddp`), FSDP (`fsdp`) and local updates (`contrib.local_updates`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from horovod_sparse.core.agreement import compare
from horovod_sparse.core.binding import compresses
from horovod_sparse.core.pipeline import Pipeline
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
        self._used: set[Tensor] | None = None
        """The parameters that have got a gradient in this step; None if all have."""

    def _gradient(self, parameter: Tensor) -> Tensor | None:
        return self._step.gradients[parameter] if self._used is None or parameter in self._used else None

    def _target(self, parameter: Tensor) -> Tensor:
        return self._step.gradients[parameter]

    def _take_all(self) -> None:
        if self.pipeline is None:
            self._agree([*self._step.gradients])
        super()._take_all()

    def _complete(self) -> None:
        try:
            super()._complete()
        finally:
            self._step = Step()
            if self._used is not None:
                self._used.clear()

    def _fail_together(self, pipeline: Pipeline) -> None:
        if self.shards:
            failed = torch.tensor([int(pipeline.fails)], device=self.shards[0].device)
            for shards in self.shards:
                failed = shards.start(Collective("allreduce", failed))()
            if failed.item():
                pipeline.fail()

    def _agree(self, parameters: Sequence[Tensor]) -> None:
        """Agree with the other ranks, make buckets for all parameters, and load the state that was deferred. Blocks."""
        group = self._transport
        given, here, known = self._given_names, self._step.gradients, self._routes.names
        new = {parameter: name for parameter, name in given.items() if parameter in here and parameter not in known}
        if not new:
            # Backward begins with the last parameters of the model.
            new = {parameter: f"parameter {number}" for number, parameter in reversed([*enumerate(parameters)])}
        mine = self._describe(new)
        compare(mine, group.everyone(mine), group.rank)
        check_real(new)
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
