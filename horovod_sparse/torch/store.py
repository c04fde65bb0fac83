"""The base of the reducers of PyTorch's gradients, and what is made when ranks have agreed. Never imports Horovod."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor

from horovod_sparse import kernels
from horovod_sparse.core.pipeline import Pipeline
from horovod_sparse.core.state import check_state, holds_anything, kept_shapes
from horovod_sparse.core.store import Store, log_start
from horovod_sparse.torch.compiled import tensor_ops
from horovod_sparse.torch.compressors import TorchCompressor
from horovod_sparse.torch.device import on_gpu
from horovod_sparse.torch.momentum import MovedMomentum
from horovod_sparse.torch.routes import Routes


class TensorStore(Store):
    """Serves the parameters that have routes, from the step on in which the ranks have agreed on them."""

    compressor: TorchCompressor
    _routes: Routes

    def __init__(self, compressor: TorchCompressor) -> None:
        super().__init__()
        compressor.bind(self)
        self.compressor = compressor
        self.momentum: MovedMomentum | None = None
        """The optimizer's momentum, if it is applied before the selection."""
        self._frozen: set[Tensor] = set()
        """Parameters that are not trained at the moment. They keep no residual and no velocity."""

    def _check(self, state: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ValueError unless a state fits parameters of these shapes."""
        if holds_anything(state):
            check_state(state, self.compressor, *kept_shapes(shapes, self.compressor))

    def _extend(
        self, new: dict[Tensor, str], sparse: Collection[str], gather: Callable[[str], list[str]], **place: Any
    ) -> Pipeline:
        """Make buckets for new parameters, and load the state that was deferred. The first time this blocks.

        `sparse` names those with sparse gradients, `gather` returns every rank's value, and `place` is what `Pipeline` is
        told of this rank and of the others.
        """
        pipeline, compressor = self.pipeline, self.compressor
        if pipeline is None:
            groups = compressor.exchange.hosts(place["world"], gather)
            pipeline = Pipeline(tensor_ops(), compressor, **place, groups=groups, device_selector=on_gpu)
            if self.momentum is not None:
                pipeline.intake.momentum = self.momentum.of
        self._routes.extend(new, sparse, pipeline)
        is_first, self.pipeline = self.pipeline is None, pipeline
        if self.deferred is not None:
            super().load_compression_state(self.deferred)
        if is_first:
            log_start(pipeline, kernels.variant(), self.updates)
        return pipeline

    def _drop_frozen(self, pipeline: Pipeline) -> None:
        """Forget what is kept of parameters that are not trained any more."""
        frozen = {parameter for parameter in self._routes.names if not parameter.requires_grad}
        for parameter in frozen - self._frozen - self._routes.sparse:
            pipeline.drop(self._routes.names[parameter])
        self._frozen = frozen
