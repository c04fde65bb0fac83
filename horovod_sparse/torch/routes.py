"""The route of each gradient of an optimizer: compressed, dense, or Horovod's own path for sparse gradients."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from horovod_sparse.core.intake import Intake
from horovod_sparse.core.layout import Layout, Parameter, layouts_of
from horovod_sparse.core.pipeline import Pipeline
from horovod_sparse.exchange.cost import allreduce_bytes
from horovod_sparse.torch.compressors import TorchCompressor
from horovod_sparse.torch.parameters import check_memory


@dataclass(frozen=True, eq=False)
class Dense:
    """Parameters whose gradients are reduced by one allreduce: a single large one, or small ones of one type and device."""

    layout: Layout
    parameters: list[Tensor]

    @property
    def name(self) -> str:
        """The name of the first parameter."""
        return self.layout.name


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
        self.compressed: dict[str, Tensor] = {}
        self.dense: dict[Tensor, Dense] = {}
        self.sparse: set[Tensor] = set()
        """Embeddings whose gradients are sparse tensors, which Horovod's own path reduces."""
        self.sparse_as_dense: set[Tensor] = set()
        """Parameters whose reduced gradients become sparse tensors again on every rank."""
        self._shapes: dict[Tensor, torch.Size] = {}

    def extend(self, new: dict[Tensor, str], sparse: Collection[str], pipeline: Pipeline) -> None:
        """Give routes to new parameters, and buckets to the compressed ones. `sparse` names those with sparse gradients."""
        compressed: dict[str, Tensor] = {}
        dense: dict[str, Tensor] = {}
        for parameter, name in new.items():
            if name in sparse and not self._sparse_as_dense:
                self.sparse.add(parameter)
                continue
            if name in sparse:
                self.sparse_as_dense.add(parameter)
            chosen = dense if self._compressor.leaves_dense(name, parameter.numel()) else compressed
            chosen[name] = parameter
        layouts = layouts_of(self._describe(compressed), self._compressor, pipeline.world)
        pipeline.add_buckets(layouts, compressed.__getitem__)
        together = self._reduced_together(dense)
        pipeline.add_dense([one.layout for one in together], dense.__getitem__)
        pipeline.dense_bytes_sent += sum(
            allreduce_bytes(parameter.numel() * wire_dtype(parameter).itemsize, pipeline.world)
            for parameter in dense.values()
        )
        self.names.update(new)
        self._shapes.update((parameter, parameter.shape) for parameter in new)
        self.compressed.update(compressed)
        self.dense.update((parameter, one) for one in together for parameter in one.parameters)

    def check_shape(self, parameter: Tensor) -> None:
        """Raise ValueError if a parameter has another shape than when it got its route."""
        before = self._shapes[parameter]
        if parameter.shape != before:
            raise ValueError(
                f"parameter {self.names[parameter]!r} must keep its shape, which was {tuple(before)} in its first step, got "
                f"{tuple(parameter.shape)}: its residual has the first one; make a new optimizer and a new compression"
            )

    def _describe(self, compressed: dict[str, Tensor]) -> list[Parameter]:
        members = self._groups or {}
        groups = {group: number for number, group in enumerate(dict.fromkeys(members.values()))}
        return [
            Parameter(
                name,
                tuple(parameter.shape),
                self._compressor.residual_dtype_of(parameter),
                str(parameter.device),
                groups[members[parameter]] if groups else None,
            )
            for name, parameter in compressed.items()
        ]

    def _reduced_together(self, dense: dict[str, Tensor]) -> list[Dense]:
        # With many small parameters, one allreduce for each would cost more time than their entries do.
        groups: dict[object, dict[str, Tensor]] = {}
        for name, parameter in dense.items():
            small = parameter.numel() < self._compressor.min_numel
            key = (parameter.dtype, parameter.device) if small else name
            groups.setdefault(key, {})[name] = parameter
        together = []
        for members in groups.values():
            parameters = list(members.values())
            shapes = [(name, tuple(parameter.shape)) for name, parameter in members.items()]
            together.append(Dense(Layout.of(shapes, self._compressor.residual_dtype_of(parameters[0])), parameters))
        return together


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

    @property
    def complete(self) -> bool:
        """True if every parameter that is to be reduced has a route."""
        return len(self.names) >= len(self._optimizer._requires_update)

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


def wire_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of a dense allreduce. Horovod cannot reduce bfloat16, and small tensors can afford float32."""
    return torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype


def dense_message(
    together: Dense, given: Sequence[Tensor | None], compressor: TorchCompressor, intake: Intake
) -> Tensor:
    """Return the parameters' gradients, one after the other. A large one stays in its own memory if possible."""
    gradients: list[Tensor] = []
    for parameter, gradient in zip(together.parameters, given, strict=True):
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        if compressor.clip is not None:
            gradient = intake.clipped(gradient, "float64" if gradient.dtype == torch.float64 else "float32")
        gradients.append(gradient)
    wire = wire_dtype(gradients[0])
    if together.layout.numel >= compressor.min_numel and len(gradients) == 1:
        return gradients[0].to(wire).contiguous()
    return torch.cat([gradient if gradient.dim() == 1 else gradient.reshape(-1) for gradient in gradients]).to(wire)
