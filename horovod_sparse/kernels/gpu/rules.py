"""What the compressors ask of the kernels, and what they learn from a step: plain numbers in, plain numbers out.

When the device needs a step's threshold, it knows only that step's own sums. So the compressors here depart from the same
compressors elsewhere: SIDCo's stages before the last are never fitted. If a step has no usable cut, or if an estimate is off by
more than a factor 2, the k largest entries are sent, and the next cut is taken from the histogram of that search. With one
stage and a gamma distribution the k largest are always sent. So they are where a threshold of DGC's leaves too few.

Tested by tests/kernels/gpu/test_kernels.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from horovod_sparse.compressors import dgc, gaussiank, redsync, sidco, threshold, topk
from horovod_sparse.compressors.base import BucketState, Compressor
from horovod_sparse.compressors.dgc import DGC
from horovod_sparse.compressors.draws import RandomCompressor
from horovod_sparse.compressors.gaussiank import GaussianK, GaussianKState
from horovod_sparse.compressors.micro import MiCRO, MiCROState
from horovod_sparse.compressors.redsync import RedSync
from horovod_sparse.compressors.sidco import SIDCo, SIDCoState
from horovod_sparse.exchange.pairs import Pairs
from horovod_sparse.exchange.shared import SharedIndices
from horovod_sparse.exchange.union import Union
from horovod_sparse.ops.protocol import Sums

_ANY = 2**62
"""More entries than there are."""


@dataclass(frozen=True)
class Request:
    """What a step asks of the kernel `fit` and of the search after it; see their docstrings."""

    rule: str
    aim: int = 0
    cut: float = math.inf
    most_tail: float = 0.0
    scale: float = 0.0
    sample: tuple[int, int, int] | None = None
    """Start and stride of some entries; of these, so many should exceed the threshold that is given."""
    trust: tuple[int, int] = (0, _ANY)
    """Least and most entries that may exceed a threshold if it is to be trusted."""
    rank: int | None = None
    """How many of the largest are sent if it is not; None: k."""
    room: int | None = None
    """The most entries that are sent; None: as many as the message has room for."""
    cut_exponent: float | None = None
    """The next cut leaves the fraction FIRST_RATIO * (k/count/FIRST_RATIO)^this of the `count` entries that are not zero; None:
    there is no cut."""
    part: tuple[int, int] | None = None
    """Where the entries begin and end that are looked at; None: all."""
    proposes: tuple[int, float] = (0, math.inf)
    """The worker proposes the smallest of so many of the largest entries if more than so many qualify; 0: nothing."""


class Rule:
    """How one compressor uses the kernels. This is the rule of TopK."""

    measures = False
    """True if the rule needs the sums."""

    def request(self, state: BucketState, k: int, capacity: int) -> Request:
        """Return what to do in the next step. It does not change from the first gradient to the selection."""
        return Request("largest")

    def drawn(self, state: BucketState, k: int) -> NDArray[np.int64] | None:
        """Return the indices of a choice that needs no look at the entries, ascending; None if there is no such choice."""
        return None

    def floor(self, state: BucketState, guess: float) -> float:
        """Return the magnitude that candidates exceed: a guess of somewhat less than the limit, or better if it is known."""
        return guess

    def learn(self, state: BucketState, k: int, numbers: Mapping[str, float]) -> None:
        """Learn from the numbers of a step (see `tiles.NUMBERS`). Called only if all its gradients were finite."""
        return


@dataclass(frozen=True)
class Above(Rule):
    """The rule of Threshold."""

    threshold: float

    def request(self, state: BucketState, k: int, capacity: int) -> Request:
        return Request("above")

    def floor(self, state: BucketState, guess: float) -> float:
        return self.threshold

    def learn(self, state: BucketState, k: int, numbers: Mapping[str, float]) -> None:
        state.threshold = self.threshold


class Blind(Rule):
    """The rule of dense steps, which look at no entry."""

    def request(self, state: BucketState, k: int, capacity: int) -> Request:
        return Request("nothing")

    def floor(self, state: BucketState, guess: float) -> float:
        return math.inf


@dataclass(frozen=True)
class Drawn(Blind):
    """The rule of RandomK and RandomBlock."""

    compressor: RandomCompressor
    numel: int
    """Entries of the bucket."""

    def drawn(self, state: BucketState, k: int) -> NDArray[np.int64]:
        return self.compressor.drawn(self.numel, k, state)


@dataclass(frozen=True)
class InPart(Rule):
    """The rule of MiCRO. Its state also learns from the number that all ranks have selected (`MiCRO.observe`)."""

    compressor: MiCRO
    numel: int

    def request(self, state: BucketState, k: int, capacity: int) -> Request:
        assert isinstance(state, MiCROState)
        begin, end = self.compressor.part(state, self.numel)
        share, room, most = self.compressor.share(state, k, capacity, end - begin), capacity, math.inf
        if state.current == 0.0:
            room, most = share, -1.0
        elif self.compressor.scaling == "two_sided":
            most = capacity
        return Request("above", trust=(1, _ANY), rank=1, room=room, part=(begin, end), proposes=(share, most))

    def floor(self, state: BucketState, guess: float) -> float:
        assert isinstance(state, MiCROState)
        return state.current

    def learn(self, state: BucketState, k: int, numbers: Mapping[str, float]) -> None:
        assert isinstance(state, MiCROState)
        state.threshold = state.current


@dataclass(frozen=True)
class Normal(Rule):
    """The rule of GaussianK with refine="exact"."""

    compressor: GaussianK
    numel: int
    measures = True

    def request(self, state: BucketState, k: int, capacity: int) -> Request:
        assert isinstance(state, GaussianKState)
        # Of a mean square of 1 over all entries.
        whole = Sums(self.numel, 0.0, self.numel)
        scale = gaussiank.fit(whole, k, self.numel) / math.sqrt(self.numel) * state.factor
        near = math.floor(gaussiank.TOLERANCE * k)
        return Request("normal", cut=0.0, scale=scale, trust=(k - near, k + near))

    def learn(self, state: BucketState, k: int, numbers: Mapping[str, float]) -> None:
        assert isinstance(state, GaussianKState)
        state.threshold = numbers["limit"]
        if numbers["count"] > k:
            sums = Sums(int(numbers["count"]), numbers["tail_total"], numbers["tail_squares"])
            fitted = gaussiank.fit(sums, k, self.numel)
            self.compressor.learn(state, k, fitted, int(numbers["found"]), numbers["limit"])


@dataclass(frozen=True)
class NotZero(Rule):
    """The rule of RedSync."""

    numel: int
    measures = True

    def request(self, state: BucketState, k: int, capacity: int) -> Request:
        return Request("largest", cut=0.0)

    def learn(self, state: BucketState, k: int, numbers: Mapping[str, float]) -> None:
        mean, limit = numbers["tail_total"] / self.numel, numbers["limit"]
        state.threshold = redsync.tried(mean, numbers["largest"], limit) if numbers["count"] > k else 0.0


@dataclass(frozen=True)
class Sampled(Rule):
    """The rule of DGC."""

    compressor: DGC
    numel: int
    measures = True

    def request(self, state: BucketState, k: int, capacity: int) -> Request:
        trust = math.ceil(dgc.TOO_FEW * k), math.floor(dgc.TOO_MANY * k)
        return Request("given", sample=self.compressor.sample(self.numel, k, state), trust=trust)

    def learn(self, state: BucketState, k: int, numbers: Mapping[str, float]) -> None:
        state.threshold = numbers["limit"]


@dataclass(frozen=True)
class Fitted(Rule):
    """The rule of SIDCo with adapt="robust"."""

    compressor: SIDCo
    numel: int
    """Entries of the bucket."""
    measures = True

    def request(self, state: BucketState, k: int, capacity: int) -> Request:
        assert isinstance(state, SIDCoState)
        stages = state.controller.stages
        trust = math.ceil(k / sidco.TRUSTED), math.floor(k * sidco.TRUSTED)
        aim = max(1, round(state.aim * k))
        # The last of several stages fits excesses, which are never of a gamma distribution (`SIDCo._tail_fit`).
        tail = "exponential" if self.compressor.distribution == "exponential" else "gpareto"
        if stages == 1:
            if self.compressor.distribution == "gamma":
                return Request("largest")
            # The only stage fits the magnitudes of all entries that are not zero. These are the excesses over zero.
            return Request(tail, aim, 0.0, 1.0, trust=trust)
        exponent, most = (stages - 2) / (stages - 1), sidco.MOST_TAIL
        return Request(tail, aim, state.cut, most, trust=trust, cut_exponent=exponent)

    def learn(self, state: BucketState, k: int, numbers: Mapping[str, float]) -> None:
        assert isinstance(state, SIDCoState)
        request, state.stages = self.request(state, k, k), state.controller.stages
        state.threshold = numbers["limit"]
        if numbers["count"] <= k:
            # There was room for everything that is not zero. Nothing was estimated, so there is nothing to learn from.
            return
        low = numbers["low"]
        following = low if 0.0 < low < numbers["largest"] else math.inf
        if numbers["estimated"]:
            count, found = int(numbers["count"]), int(numbers["found"])
            aim = min(request.aim, count - 1)
            if request.trust[0] <= found <= request.trust[1] and state.stages > 1:
                tail = Sums(int(numbers["tail_count"]), numbers["tail_total"], numbers["tail_squares"])
                _, following = self.compressor.last_stage(state.cut, tail, count, numbers["largest"], aim, state.stages)
            self.compressor.learn(state, k, self.numel, aim, found)
        state.cut = following if state.stages > 1 else math.inf


def rule_of(compressor: Compressor, numel: int) -> Rule | None:
    """Return how a compressor selects on the device from a bucket of `numel` entries, or None if it does not."""
    if type(compressor.exchange) not in (Pairs, SharedIndices, Union) or compressor.clip is not None:
        return None
    select = type(compressor).select
    if select is topk.TopK.select:
        return Rule()
    if isinstance(compressor, threshold.Threshold) and select is threshold.Threshold.select:
        return Above(compressor.threshold)
    if isinstance(compressor, RandomCompressor) and select is RandomCompressor.select:
        return Drawn(compressor, numel)
    if isinstance(compressor, MiCRO) and select is MiCRO.select:
        return InPart(compressor, numel)
    if isinstance(compressor, GaussianK) and select is GaussianK.select:
        return Normal(compressor, numel) if compressor.refine == "exact" else None
    if select is RedSync.select:
        return NotZero(numel)
    if isinstance(compressor, DGC) and select is DGC.select:
        return Sampled(compressor, numel)
    if isinstance(compressor, SIDCo) and select is SIDCo.select:
        return Fitted(compressor, numel) if compressor.adapt == "robust" else None
    return None
