"""What a compressor can do once it serves an optimizer, the same in every framework. Imports no framework."""

from __future__ import annotations

import gc
import math
import os
import warnings
from collections.abc import Mapping
from typing import Any, Protocol
from weakref import WeakSet

from horovod_sparse.compressors.base import Compressor, Place
from horovod_sparse.compressors.selection import check_selection
from horovod_sparse.core.agreement import is_elastic
from horovod_sparse.core.state import check_parts
from horovod_sparse.core.statistics import Stats
from horovod_sparse.core.store import Store
from horovod_sparse.ops.protocol import Array, Ops

_FORCE = "HOROVOD_SPARSE_FORCE"
_serving: WeakSet[BoundCompressor] = WeakSet()


class Source(Protocol):
    """Where an adapter gets gradients from: an optimizer's hooks, a model's buckets, a tape."""

    @property
    def driver(self) -> Store:
        """What keeps residuals and adaptive state."""

    @property
    def active(self) -> bool:
        """Whether anything is compressed."""


class BoundCompressor(Compressor):
    """A sparsifier that serves one optimizer. Residuals and adaptive state are this rank's own."""

    _source: Source | None = None
    _calls: int = 0

    def __init_subclass__(cls) -> None:
        """Give a class without a docstring that of its algorithm."""
        super().__init_subclass__()
        if cls.__doc__ is None:
            cls.__doc__ = cls.__bases__[-1].__doc__

    def bind(self, source: Source) -> None:
        """Let this compressor serve a source, which calls this when it is given the compressor; refuse a second one."""
        self.check_free()
        self._source = source
        _serving.add(self)

    @property
    def source(self) -> Source | None:
        """What this compressor serves; None if nothing yet."""
        return self._source

    def check_free(self) -> None:
        """Raise ValueError if this compressor already serves an optimizer or a model."""
        if self._source is not None:
            raise ValueError(
                f"compression must serve one optimizer or model, but {self!r} already serves another, whose residuals it "
                "would mix in; give this one a compressor of its own, for instance copy.deepcopy(compression)"
            )

    def choose_alone(self, ops: Ops, x: Array) -> Array:
        """Return the indices of the entries of `x` to send outside of any bucket; `x` is flat, finite and not empty."""
        k = self.target_count(len(x))
        state = self.new_state(Place(numel=len(x)))
        # Random choices differ from call to call.
        state.step = self._calls
        self._calls += 1
        capacity = self.message_capacity(len(x), k, 1)
        selection = self.select(ops, x, k, capacity, state)
        return check_selection(type(self).__name__, selection, x, capacity).indices

    def warn_dense(self) -> None:
        """Warn that Horovod allreduces what `compress` returns. Python shows a warning once per place, so it appears once."""
        warnings.warn(
            f"{type(self).__name__} was called by Horovod outside hvd.DistributedOptimizer or hvd.DistributedGradientTape: "
            "the result is right, but it is sent dense, so no bandwidth is saved",
            stacklevel=1,
        )

    def decompress(self, tensor: Array, ctx: None) -> Array:
        """Return the tensor as it is."""
        return tensor

    def stats(self) -> Stats:
        """Return counts, bytes and residual norms per bucket and in total, of the last step and on average; computed now."""
        return self._driver().stats()

    @property
    def steps(self) -> int:
        """Number of steps that `stats` counts, without the cost of computing the rest."""
        feedback = None if self._source is None else self._source.driver.feedback
        return 0 if feedback is None else feedback.steps

    @property
    def residual_bytes(self) -> int:
        """Memory that this rank's residuals take, in bytes; 0 before the first step."""
        feedback = None if self._source is None else self._source.driver.feedback
        return 0 if feedback is None else sum(bucket.buffer.nbytes for bucket in feedback.buckets)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals and adaptive state by parameter name: the framework's arrays, and plain values."""
        return self._driver().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned, on the same model. It is strict; bucketing and world size may differ."""
        driver = self._driver()
        check_parts(state, self)
        driver.load(state)

    def rescale(self, factor: float) -> None:
        """Multiply the residuals and velocities, because gradients will be `factor` times as large from now on.

        With dynamic loss scaling, call this whenever the scale has changed; `factor` is the new scale / the old one.
        """
        check_factor(factor)
        driver = self._driver()
        if factor != 1.0:
            driver.rescale(float(factor))

    def reset(self) -> None:
        """Forget residuals, adaptive state and statistics."""
        self._driver().reset()

    def _driver(self) -> Store:
        if self._source is None:
            raise RuntimeError(f"{self!r} serves no optimizer yet; give it to one first, by its argument compression")
        return self._source.driver

    def __getstate__(self) -> dict[str, Any]:
        # A copy has the settings but not the residuals, because it is for another optimizer.
        return {name: value for name, value in vars(self).items() if name not in ("_source", "_ahead")}


def check_kind(compression: object, kind: type, module: str, *, stock: bool = True) -> None:
    """Raise TypeError unless `compression` is of `kind`, from the adapter `module`, or if `stock` what stock Horovod takes."""
    if isinstance(compression, type) and issubclass(compression, BoundCompressor):
        raise TypeError(f"compression must be an instance, such as {compression.__name__}(...), got the class itself")
    if isinstance(compression, kind):
        return
    if isinstance(compression, Compressor):
        raise TypeError(
            f"compression must be a compressor of {module}, got one of {type(compression).__module__}, {compression!r}; import "
            f"the class from {module}, or let a class of your own derive from {kind.__name__}, too"
        )
    if not (stock and all(callable(getattr(compression, method, None)) for method in ("compress", "decompress"))):
        others = " or one of hvd.Compression," if stock else ""
        raise TypeError(
            f"compression must be a compressor of {module}, such as TopK(ratio=0.01),{others} got {compression!r}"
        )


def refuse_join() -> None:
    """Raise AssertionError if this process compresses. Stock `hvd.join` would let the other ranks hang."""
    # An optimizer refers to itself, so it may outlive its last use.
    gc.collect()
    for one in _serving:
        if one.source is not None and one.source.active:
            # Horovod would turn a RuntimeError into one that elastic jobs try again after.
            raise AssertionError(
                f"hvd.join() was called while {one!r} serves an optimizer, whose messages a rank that has joined does not "
                "send; give all ranks equally many batches, or agree on their number before: see docs/troubleshooting.md"
            )


def check_factor(factor: float) -> None:
    """Raise ValueError unless residuals can be multiplied by `factor`."""
    if not (isinstance(factor, (int, float)) and 0.0 < factor < math.inf):
        raise ValueError(f"factor must be a finite number > 0, got {factor!r}")


def compresses(workers: int) -> bool:
    """Return whether this many workers compress: several do. One alone does if forced or in an elastic job; else it warns."""
    if workers > 1 or is_elastic() or os.environ.get(_FORCE) == "1":
        return True
    warnings.warn(
        f"horovod_sparse: there is one worker, so nothing is compressed (set {_FORCE}=1 to compress all the same)",
        stacklevel=1,
    )
    return False
