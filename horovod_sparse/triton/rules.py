"""What the compressors ask of the kernels, and what they learn from a step: plain numbers in, plain numbers out.

Departures from the same compressors elsewhere, because only a step's own sums are known on the device when its threshold is
needed: SIDCo's stages before the last are never fitted; in a step without a cut that can be used, and where an estimate
is off by more than a factor 2, the k largest entries are sent, and the next cut is taken from the histogram of that search.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from horovod_sparse import exchanges
from horovod_sparse.compressors import sidco, threshold, topk
from horovod_sparse.compressors.base import BucketState, Compressor
from horovod_sparse.compressors.sidco import SIDCo, SIDCoState
from horovod_sparse.ops import Sums
from horovod_sparse.stages import most_stages

LOWER = 0.9
"""The next step's candidates are the entries above this part of the magnitude that was needed."""


@dataclass(frozen=True)
class Request:
    """What a step asks of the kernel `fit` and of the search after it; see there."""

    rule: str
    aim: int = 0
    cut: float = math.inf
    most_tail: float = 0.0
    trust: tuple[int, int] = (0, 0)
    """Least and most entries above an estimate that is trusted."""
    cut_exponent: float = 0.0
    """The next cut leaves FIRST_RATIO * (k/count/FIRST_RATIO)^this of the `count` entries that are not zero."""


class Rule(Protocol):
    """How one compressor uses the kernels."""

    measures: bool
    """Whether sums are needed."""

    def request(self, state: BucketState, k: int) -> Request:
        """What to do in the next step; the same from the first gradient to the selection."""

    def floor(self, state: BucketState, limit: float) -> float:
        """Above what magnitude entries are candidates, after a step that compared with `limit` (infinity: before the first)."""

    def learn(self, state: BucketState, k: int, numbers: Mapping[str, float]) -> None:
        """Take in what a step told, if all its gradients were finite (see `kernels.NUMBERS`)."""


class Largest:
    """TopK."""

    measures = False

    def request(self, state: BucketState, k: int) -> Request:
        return Request("largest")

    def floor(self, state: BucketState, limit: float) -> float:
        return LOWER * limit

    def learn(self, state: BucketState, k: int, numbers: Mapping[str, float]) -> None:
        return


@dataclass(frozen=True)
class Above:
    """Threshold."""

    threshold: float
    measures = False

    def request(self, state: BucketState, k: int) -> Request:
        return Request("above")

    def floor(self, state: BucketState, limit: float) -> float:
        return self.threshold * _scale(state)

    def learn(self, state: BucketState, k: int, numbers: Mapping[str, float]) -> None:
        state.threshold = self.threshold * _scale(state)


@dataclass(frozen=True)
class Fitted:
    """SIDCo with a distribution whose fit is a formula."""

    compressor: SIDCo
    measures = True

    def request(self, state: BucketState, k: int) -> Request:
        assert isinstance(state, SIDCoState)
        stages = self._stages(state)
        trust = math.ceil(k / sidco.TRUSTED), math.floor(k * sidco.TRUSTED)
        aim = max(1, round(state.aim * k))
        if stages == 1:
            # The excesses over zero are the magnitudes of all that is not zero: the only stage's.
            return Request(self.compressor.distribution, aim, 0.0, 1.0, trust)
        exponent = (stages - 2) / (stages - 1)
        return Request(self.compressor.distribution, aim, state.cut, sidco.MOST_TAIL, trust, exponent)

    def floor(self, state: BucketState, limit: float) -> float:
        return LOWER * limit

    def learn(self, state: BucketState, k: int, numbers: Mapping[str, float]) -> None:
        assert isinstance(state, SIDCoState)
        request = self.request(state, k)
        state.stages = stages = self._stages(state)
        state.threshold = numbers["limit"]
        if numbers["count"] <= k:
            # There was room for everything that is not zero; nothing was estimated, so there is nothing to learn from.
            return
        low = numbers["low"]
        following, trusted = low if 0.0 < low < numbers["largest"] else math.inf, False
        if numbers["estimated"]:
            aim, found = min(request.aim, int(numbers["count"]) - 1), int(numbers["found"])
            if self.compressor.stages == "auto":
                most = most_stages(self.compressor.ratio_at(state.step))
                state.controller.observe(found, aim, most)
            trusted = request.trust[0] <= found <= request.trust[1]
            state.aim = sidco.next_aim(state.aim, numbers["sent"] if trusted else found, k)
            if trusted and stages > 1:
                tail = Sums(int(numbers["tail_count"]), numbers["tail_total"], numbers["tail_squares"]).moments()
                _, following = sidco.last_stage(
                    state.cut, tail, numbers["count"], numbers["largest"], aim, stages, self.compressor._tail_fit
                )
        state.cut = following if stages > 1 else math.inf

    def _stages(self, state: SIDCoState) -> int:
        return state.controller.stages if self.compressor.stages == "auto" else self.compressor.stages


def _scale(state: BucketState) -> float:
    assert isinstance(state, threshold.ThresholdState)
    return state.scale


def rule_of(compressor: Compressor) -> Rule | None:
    """How a compressor selects on the device; None where it does not."""
    if compressor.exchange is not exchanges.pairs or compressor.clip_norm is not None:
        return None
    select = type(compressor).select
    if select is topk.TopK.select:
        return Largest()
    if isinstance(compressor, threshold.Threshold) and select is threshold.Threshold.select:
        return Above(compressor.threshold)
    if isinstance(compressor, SIDCo) and select is SIDCo.select:
        formula = compressor.distribution != "gamma" and compressor.adapt == "robust"
        return Fitted(compressor) if formula else None
    return None
