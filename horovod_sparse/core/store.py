"""The base class of reducers: the statistics and the state of one optimizer or tape. Imports no framework."""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Mapping
from typing import Any

from horovod_sparse.compressors.base import Compressor
from horovod_sparse.core.pipeline import Pipeline
from horovod_sparse.core.state import empty_state, holds_anything, merged, names_in, part_of, rescale_state
from horovod_sparse.core.statistics import NO_STATS, Stats
from horovod_sparse.exchange.cost import allreduce_bytes

_log = logging.getLogger("horovod_sparse")


def log_start(pipeline: Pipeline, kernels: str, advice: str = "") -> None:
    """Log in the first step, on the first worker, what is compressed, and `advice`. `kernels` names the compiled ones."""
    if pipeline.position == 0:
        compressor, world = pipeline.compressor, pipeline.world
        ratio = compressor.ratio
        what = f"{ratio:g}" if isinstance(ratio, float) else repr(ratio)
        numel, dense = sum(one.numel for one in pipeline.buckets), sum(len(one.slots) for one in pipeline.dense)
        entries = f"{numel / 1e6:.1f} M" if numel >= 1e5 else str(numel)
        found = f"{len(pipeline.buckets)} buckets, {entries} entries, {dense} parameters dense"
        _log.info("%s %s: %s, kernels %s%s", type(compressor).__name__, what, found, kernels, advice and f". {advice}")
        rounds = [one for bucket in pipeline.buckets for one in compressor.rounds(bucket.numel, None, world)]
        sent, dense_bytes = sum(one.bytes_sent(world) for one in rounds), allreduce_bytes(4 * numel, world)
        # Beside what is sent, a message has a few numbers.
        if sent > 1.05 * dense_bytes > 0:
            _log.warning(
                f"{compressor!r} with {world} workers sends {sent / dense_bytes:.1f} times as many bytes as a dense allreduce "
                "of float32; take a ratio that is as many times smaller, or MiCRO"
            )


class Store:
    """The base of the reducers that adapters bind to compressors; the methods are those of `BoundCompressor`."""

    compressor: Compressor
    active: bool
    """Whether anything is compressed."""
    pipeline: Pipeline | None = None
    """None until the first parameters have buckets."""
    deferred: Mapping[str, Any] | None = None
    """A copy of the state of parameters that have no buckets yet; None if there is nothing in it."""
    sparse: Collection[str] = ()
    """The names of the parameters with sparse gradients, which have no state."""

    def between_steps(self) -> Pipeline | None:
        """Return the pipeline, ready to be used between two steps."""
        return self.pipeline

    def stats(self) -> Stats:
        pipeline = self.between_steps()
        return NO_STATS if pipeline is None else pipeline.stats()

    def state_dict(self) -> dict[str, Any]:
        """Return the pipeline's state, what is deferred, and the names of the parameters with sparse gradients."""
        deferred, pipeline = copy.deepcopy(dict(self.deferred or empty_state())), self.between_steps()
        if pipeline is None:
            return deferred
        return merged({**pipeline.state_dict(), "sparse": sorted(self.sparse)}, deferred)

    def check_place(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if a state belongs to another place than this worker's (a shard of a model)."""

    def load_compression_state(self, state: Mapping[str, Any]) -> None:
        """Load a state that `check_parts` accepts, in place of the old one. Nothing is changed if it is refused."""
        self._load(state, names_in(state))

    def _load(self, state: Mapping[str, Any], names: Collection[str]) -> None:
        """Load the part of a state that belongs to `names`, and defer the rest. Without a pipeline, everything is deferred."""
        pipeline = self.between_steps()
        if pipeline is not None:
            pipeline.load_state_dict(part_of(state, names))
            state = part_of(state, names_in(state).difference(names))
        self.deferred = copy.deepcopy(dict(state)) if holds_anything(state) else None

    def rescale(self, factor: float) -> None:
        if self.deferred is not None:
            self.deferred = rescale_state(self.deferred, self.compressor, factor)
        pipeline = self.between_steps()
        if pipeline is not None:
            pipeline.rescale(factor)

    def reset(self) -> None:
        self.deferred = None
        pipeline = self.between_steps()
        if pipeline is not None:
            pipeline.reset()
