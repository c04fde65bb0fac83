"""What the reducer and the compressors ask of the engine that does the work, and where they get one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from horovod_sparse.core.binding import BoundCompressor
from horovod_sparse.core.layout import Layout
from horovod_sparse.core.statistics import Stats
from horovod_sparse.tensorflow.exchange import Collectives
from horovod_sparse.tensorflow.host import HostPipeline
from horovod_sparse.tensorflow.step import Step

Tensor = Any


class Engine(Protocol):
    """Residuals, selection and reduction for one optimizer; see `Pipeline` for the terms and for what is not described here."""

    dense_bytes_sent: float

    def __init__(
        self,
        compressor: BoundCompressor,
        collectives: Collectives,
        *,
        world: int,
        position: int,
        rank: int,
        averages: bool,
    ) -> None: ...

    @staticmethod
    def check(compressor: BoundCompressor) -> None:
        """Raise ValueError, with the name of the setting, if this engine cannot do what the compressor does."""

    @staticmethod
    def check_mode() -> None:
        """Raise RuntimeError if this engine cannot work in the way that TensorFlow now calls functions."""

    @staticmethod
    def chosen(compressor: BoundCompressor, tensor: Tensor, dtype: str) -> Tensor:
        """Return which entries of a tensor are selected outside of any bucket, as booleans; `dtype` is that of a residual."""

    @staticmethod
    def device_of(device: str) -> str:
        """Return the kind of device for the residual of a variable on `device`; a bucket has one."""

    @property
    def nbytes(self) -> int:
        """Memory that the residuals take, in bytes."""

    def add_buckets(self, layouts: Sequence[Layout], device: Callable[[str], Any], /) -> None:
        """Add buckets; `device(name)` is the parameter's device."""

    def add_dense(self, layouts: Sequence[Layout], device: Callable[[str], Any], /) -> None:
        """Set which parameters are reduced dense; each layout holds one of them."""

    def reduce(self, step: Step) -> dict[str, Tensor]:
        """Build the operations that reduce one step's gradients, and return the reduced gradients by name."""

    def adopt_memory(self) -> None:
        """Use the memory that the variables have now: a checkpoint may have been restored."""

    def discard_step(self) -> None: ...

    def stats(self) -> Stats: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> None: ...

    def rescale(self, factor: float, /) -> None: ...

    def reset(self) -> None: ...


def engine_class(*, graph: bool) -> type[Engine]:
    """Return the class of the shared CPU path or, with `graph`, of the EXPERIMENTAL second engine."""
    if graph:
        # Nothing else imports `graph_engine`. To remove it, delete its folder, these lines and the argument `graph`.
        from horovod_sparse.tensorflow.graph_engine.pipeline import GraphPipeline

        return GraphPipeline
    return HostPipeline
