"""The route of each gradient of an optimizer: a bucket, or Horovod's own path for sparse gradients."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping

from torch import Tensor

from horovod_sparse.core.layout import Parameter, planned
from horovod_sparse.core.pipeline import Pipeline
from horovod_sparse.torch.compressors import TorchCompressor


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
