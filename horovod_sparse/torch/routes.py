"""The route of each gradient of an optimizer: a bucket, or Horovod's own path for sparse gradients."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from horovod_sparse.core.layout import Parameter, planned
from horovod_sparse.core.pipeline import Pipeline
from horovod_sparse.torch.compressors import TorchCompressor
from horovod_sparse.torch.parameters import check_memory


class Routes:
    """The routes of the parameters that one compressor serves; more parameters can join later.

    Args:
        compressor: the compressor.
        groups: the group of each parameter that has one: Horovod's `groups=`.
        sparse_as_dense: whether sparse gradients are compressed, too.
    """

    def __init__(
        self,
        compressor: TorchCompressor,
        groups: Mapping[Tensor, Hashable] | None = None,
        *,
        sparse_as_dense: bool = False,
    ) -> None:
        self._compressor = compressor
        self._groups = groups
        self._sparse_as_dense = sparse_as_dense
        self.names: dict[Tensor, str] = {}
        """All parameters that have a route, with their names, in the order of the model."""
        self.in_buckets: dict[str, Tensor] = {}
        """Those whose gradients go through a bucket, by name."""
        self.sparse: set[Tensor] = set()
        """Embeddings whose gradients are sparse tensors, which Horovod's own path reduces."""
        self.sparse_as_dense: set[Tensor] = set()
        """Parameters whose reduced gradients become sparse tensors again on every rank."""

    def extend(self, new: dict[Tensor, str], sparse: Collection[str], pipeline: Pipeline) -> None:
        """Give routes to new parameters, and make buckets for them. `sparse` names those with sparse gradients."""
        here: dict[str, Tensor] = {}
        for parameter, name in new.items():
            if name in sparse and not self._sparse_as_dense:
                self.sparse.add(parameter)
                continue
            if name in sparse:
                self.sparse_as_dense.add(parameter)
            here[name] = parameter
        members = self._groups or {}
        numbers = {group: number for number, group in enumerate(dict.fromkeys(members.values()))}
        described = [
            Parameter(
                name,
                tuple(parameter.shape),
                self._compressor.residual_dtype_of(parameter),
                str(parameter.device),
                numbers[members[parameter]] if numbers else None,
            )
            for name, parameter in here.items()
        ]
        buckets, dense = planned(described, self._compressor, pipeline.world)
        pipeline.add_buckets(buckets, here.__getitem__)
        pipeline.add_dense(dense, here.__getitem__)
        self.names.update(new)
        self.in_buckets.update(here)


class OptimizerRoutes(Routes):
    """The routes of the parameters of one `hvd.DistributedOptimizer`."""

    def __init__(self, optimizer: Any, compressor: TorchCompressor) -> None:
        super().__init__(compressor, optimizer._p_to_group, sparse_as_dense=optimizer.sparse_as_dense)
        self._optimizer = optimizer

    @torch.enable_grad()
    def adopt(self) -> None:
        """Hook parameters that stock Horovod would ignore: those of added groups, and those that require gradients only now."""
        optimizer = self._optimizer
        for number, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                if parameter.requires_grad and parameter not in optimizer._requires_update:
                    name = optimizer._parameter_names.setdefault(parameter, f"allreduce.noname.{number}.{position}")
                    check_memory({parameter: name})
                    optimizer._allreduce_delay[parameter] = optimizer.backward_passes_per_step
                    if optimizer._groups is not None:
                        optimizer._p_to_group[parameter] = (parameter,)
                        optimizer._group_counts[(parameter,)] = 0
                    optimizer._requires_update.add(parameter)
                    accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
                    accumulator.register_hook(optimizer._make_hook(parameter))
                    optimizer._grad_accs.append(accumulator)

    def without_route(self) -> dict[Tensor, str]:
        """Return the parameters that are to be reduced and have no route yet, with their names."""
        optimizer = self._optimizer
        return {
            parameter: optimizer._parameter_names[parameter]
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter in optimizer._requires_update and parameter not in self.names
        }

    def shapes(self, sparse: Collection[str]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all parameters that will have a route, except those named in `sparse`."""
        optimizer = self._optimizer
        return {
            name: tuple(parameter.shape)
            for parameter, name in optimizer._parameter_names.items()
            if parameter in optimizer._requires_update and name not in sparse
        }
