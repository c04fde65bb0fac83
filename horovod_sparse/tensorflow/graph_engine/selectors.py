"""Selection by TensorFlow operations alone: the algorithms of `horovod_sparse.compressors`, with 0-d tensors as floats.

The formulas are the same code (`estimation.algebra`). Only control flow that depends on data is written again here.
Thresholds are float64, as Python's floats are. TensorFlow's CPU kernels treat denormal numbers as zeros: entries below
1.2e-38 (2.2e-308 in a float64 residual) count as zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from horovod_sparse.compressors import gaussiank, redsync, sidco, threshold, topk
from horovod_sparse.compressors.base import Compressor
from horovod_sparse.compressors.schedules import Schedule
from horovod_sparse.core.agreement import is_elastic
from horovod_sparse.core.binding import BoundCompressor
from horovod_sparse.estimation import fits, search
from horovod_sparse.exchange import owners, protocols
from horovod_sparse.ops.protocol import Moments
from horovod_sparse.tensorflow.graph_engine.tensors import TENSORS, scalar

Tensor = Any
Numbers = dict[str, Tensor]


@dataclass(frozen=True)
class Chosen:
    """What was selected from a bucket."""

    indices: Tensor
    """int64, ascending, unique; at most as many as the capacity."""
    found: Tensor
    """How many entries qualified, as float64."""
    threshold: Tensor
    """float64; NaN if there is none."""
    saved: Numbers = field(default_factory=dict)
    """The algorithm's adaptive numbers after this selection. Numbers that are left out stay as they were."""


Fit = Callable[[Moments, Any], Tensor]
"""(moments, ratio) -> threshold."""
Select = Callable[[Any, Tensor, int, int, Mapping[str, Tensor]], Chosen]
"""(compressor, x, k, capacity, adaptive numbers) -> what it chooses; `x` is as for `Compressor.select`."""


def check(compressor: Compressor) -> None:
    """Raise ValueError, with the name of the setting, if the graph path cannot do what the compressor does."""
    if is_elastic():
        raise ValueError(
            "graph must be False in an elastic job, got True: its operations have the number of workers as a constant; leave "
            "graph=False"
        )
    given = vars(compressor) | {"compression": type(compressor).__name__, "union": True}
    names, is_sidco = "TopK, SIDCo, GaussianK, RedSync, Threshold", isinstance(compressor, sidco.SIDCo)
    no_inverse = "TensorFlow has no inverse of the incomplete gamma function that follows SciPy's"
    rows = (
        ("compression", type(compressor).select not in _SELECTS, "its selection is Python code", f"use one of {names}"),
        (
            "union",
            compressor.exchange not in (protocols.sparse_allgather, owners.balanced, owners.hierarchical),
            "the graph exchanges pairs only",
            "use union=False",
        ),
        ("ratio", isinstance(compressor.ratio, Schedule), "a graph's messages have one shape for good", "use a number"),
        ("dense_steps", compressor.dense_steps > 0, "a graph reduces every step alike", "use dense_steps=0"),
        ("values", compressor.values != "float32", "the graph packs float32 only", "use values='float32'"),
        ("balanced", compressor.balanced, "the graph has no alltoall", "use balanced=False"),
        ("hierarchical", compressor.hierarchical, "the graph has no alltoall", "use hierarchical=False"),
        ("discardable", compressor.discardable, "the graph keeps no copy of a step", "use discardable=False"),
        (
            "lr_in_residual",
            compressor.lr_in_residual,
            "the graph ignores the learning rate",
            "use lr_in_residual=False",
        ),
        ("stages", is_sidco and given["stages"] == "auto", "a graph has a fixed number of stages", "use stages=3"),
        ("distribution", is_sidco and given["distribution"] == "gamma", no_inverse, "use 'exponential' or 'gpareto'"),
    )
    for name, refused, why, remedy in rows:
        if refused:
            raise ValueError(
                f"{name} must not be {given[name]!r} with graph=True: {why}; {remedy}, or leave graph=False"
            )


def select(compressor: Compressor, x: Tensor, k: int, capacity: int, saved: Mapping[str, Tensor]) -> Chosen:
    """Choose about k entries of `x`, and at most `capacity`; `x` is flat, finite and not empty."""
    one = _SELECTS[type(compressor).select](compressor, x, k, capacity, saved)
    return Chosen(one.indices, one.found, one.threshold, {**saved, **one.saved})


def chosen(compressor: BoundCompressor, tensor: Tensor, dtype: str) -> Tensor:
    """Return which entries of a tensor are selected outside of any bucket; `dtype` is that of a residual."""
    if not tensor.shape.is_fully_defined():
        raise ValueError(
            f"tensor must have a known shape with graph=True, got {tensor.shape}; use tf.ensure_shape, or graph=False"
        )
    numel, state = tensor.shape.num_elements(), compressor.new_state()
    k, saved = compressor.target_count(numel), {name: scalar(getattr(state, name)) for name in state.saved}

    def some() -> Tensor:
        flat = tf.reshape(tf.cast(tensor, dtype), [-1])
        indices = select(compressor, flat, k, compressor.message_capacity(numel, k, 1), saved).indices
        return tf.reshape(tf.scatter_nd(indices[:, None], tf.ones_like(indices), [numel]) > 0, tensor.shape)

    return tf.cond(tf.reduce_all(tf.math.is_finite(tensor)), some, lambda: tf.ones(tensor.shape, tf.bool))


# --- operations, as in `horovod_sparse.ops.protocol` ---


def moments(x: Tensor, threshold: Tensor) -> Moments:
    """Return statistics of the excesses over `threshold`, as float64 tensors. No shape depends on the data."""
    magnitudes, limit = tf.abs(x), _limit(x, threshold)
    above = magnitudes > limit
    excesses = tf.where(above, tf.cast(magnitudes, tf.float64) - tf.cast(limit, tf.float64), scalar(0.0))
    count = count_above(x, threshold)
    number = tf.maximum(count, 1.0)
    mean = tf.reduce_sum(excesses) / number
    deviations = tf.where(above, excesses - mean, scalar(0.0))
    return Moments(count, mean, tf.reduce_sum(deviations * deviations) / number, float("nan"))


def count_above(x: Tensor, threshold: Tensor) -> Tensor:
    """Return how many magnitudes exceed `threshold`, as float64."""
    return tf.cast(tf.math.count_nonzero(tf.abs(x) > _limit(x, threshold)), tf.float64)


def max_abs(x: Tensor) -> Tensor:
    """Return the largest magnitude, as float64."""
    return tf.cast(tf.reduce_max(tf.abs(x)), tf.float64)


def select_above(x: Tensor, threshold: Tensor, capacity: int) -> Chosen:
    """Select the entries above `threshold`; if there are more than `capacity`, only the `capacity` largest."""
    indices = tf.reshape(tf.where(tf.abs(x) > _limit(x, threshold)), [-1])
    found = tf.size(indices)
    indices = tf.cond(
        found > capacity,
        lambda: tf.gather(indices, select_largest(tf.gather(x, indices), capacity)),
        lambda: indices,
    )
    return Chosen(indices, tf.cast(found, tf.float64), scalar(threshold))


def select_largest(x: Tensor, count: int) -> Tensor:
    """Return the ascending indices of the `count` largest magnitudes; among equals, the lowest indices."""
    return tf.cast(tf.sort(tf.math.top_k(tf.abs(x), count).indices), tf.int64)


def below_largest(x: Tensor, threshold: Tensor) -> Tensor:
    """Return the same as `search.below_largest`."""
    largest, zero = max_abs(x), scalar(0.0)
    single = tf.cast(largest, tf.float32)
    in_single = tf.cast(tf.math.nextafter(single, tf.constant(0.0)), tf.float64)
    is_single = tf.equal(tf.cast(single, tf.float64), largest)
    return tf.minimum(threshold, tf.where(is_single, in_single, tf.math.nextafter(largest, zero)))


def search_threshold(x: Tensor, k: int, tolerance: float, *, not_zero: Tensor, start: Tensor | None = None) -> Tensor:
    """Return the same as `search.search_threshold`; `not_zero` must be greater than k."""

    def count_once(
        step: Tensor,
        low: Tensor,
        most: Tensor,
        high: Tensor,
        fewest: Tensor,
        best: Tensor,
        best_error: Tensor,
        _: Tensor,
    ) -> tuple[Tensor, ...]:
        guess = search.next_guess(tf.equal(step % 2, 1), low, high, most, fewest, k, TENSORS)
        if start is not None:
            guess = tf.where(tf.equal(step, 0) & (low < start) & (start < high), start, guess)
        inside = (low < guess) & (guess < high)
        count = count_above(x, guess)
        error = search.error_of(count, k, TENSORS)
        better = inside & (error < best_error)
        too_many = count > k
        return (
            step + 1,
            tf.where(too_many, guess, low),
            tf.where(too_many, count, most),
            tf.where(too_many, high, guess),
            tf.where(too_many, fewest, count),
            tf.where(better, guess, best),
            tf.where(better, error, best_error),
            inside & (tf.abs(count - k) > tolerance * k),
        )

    zero = scalar(0.0)
    begin = (0, zero, not_zero, max_abs(x), zero, zero, TENSORS.log(not_zero / k), True)
    return tf.while_loop(lambda *state: state[-1], count_once, begin, maximum_iterations=search.MOST_COUNTS)[5]


# --- algorithms ---


def _topk(compressor: topk.TopK, x: Tensor, k: int, capacity: int, saved: Mapping[str, Tensor]) -> Chosen:
    return Chosen(select_largest(x, k), scalar(k), scalar(float("nan")))


def _hard(compressor: threshold.Threshold, x: Tensor, k: int, capacity: int, saved: Mapping[str, Tensor]) -> Chosen:
    return select_above(x, compressor.threshold * saved["scale"], capacity)


def _sidco(compressor: sidco.SIDCo, x: Tensor, k: int, capacity: int, saved: Mapping[str, Tensor]) -> Chosen:
    whole = moments(x, 0.0)

    def fitted() -> tuple[Tensor, Tensor, Tensor]:
        aim = tf.minimum(tf.maximum(tf.round(saved["aim"] * k), 1.0), whole.count - 1.0)
        estimate, cut = _estimate(compressor, x, aim, whole, saved["cut"])
        estimate = below_largest(x, estimate)
        if compressor.adapt == "paper":
            return estimate, saved["aim"], cut
        found = count_above(x, estimate)
        trusted = (found >= k / sidco.TRUSTED) & (found <= k * sidco.TRUSTED)
        limit = tf.cond(
            trusted,
            lambda: estimate,
            lambda: below_largest(x, search_threshold(x, k, sidco.SEARCH_TOLERANCE, not_zero=whole.count)),
        )
        cut = tf.where(trusted, cut, scalar(math.inf))
        if compressor.adapt == "guarded":
            return limit, saved["aim"], cut
        achieved = tf.where(trusted, tf.minimum(found, float(capacity)), found)
        return limit, sidco.next_aim(saved["aim"], achieved, k, TENSORS), cut

    limit, aim, cut = tf.cond(whole.count <= k, lambda: (scalar(0.0), saved["aim"], saved["cut"]), fitted)
    chosen = select_above(x, limit, capacity)
    return Chosen(chosen.indices, chosen.found, limit, {"aim": aim, "cut": cut})


def _estimate(compressor: sidco.SIDCo, x: Tensor, aim: Tensor, whole: Moments, cut: Tensor) -> Any:
    """Return the fitted threshold and the next step's cut, as in `SIDCo.select`."""
    assert compressor.stages != "auto"
    stages, ratio = compressor.stages, aim / whole.count
    no_cut = scalar(math.inf)

    def fit(moments: Moments, ratio: Tensor) -> Tensor:
        if compressor.distribution == "exponential":
            return fits.exponential(moments.mean, ratio, TENSORS)
        return fits.generalized_pareto(moments.mean, moments.variance, ratio, TENSORS)

    if stages == 1:
        return fit(whole, ratio), no_cut

    def peaks_over_threshold() -> tuple[Tensor, Tensor]:
        first = fit(whole, sidco.FIRST_RATIO)
        tails = tf.boolean_mask(x, tf.abs(x) > _limit(x, first))
        return _later_stages(compressor, tails, aim, whole.count, first, fit)

    def all_stages() -> Any:
        return tf.cond(ratio >= sidco.FIRST_RATIO, lambda: (fit(whole, ratio), no_cut), peaks_over_threshold)

    if compressor.adapt != "robust":
        return all_stages()
    tail = moments(x, cut)
    return tf.cond(
        (tail.count > aim) & (tail.count <= sidco.MOST_TAIL * whole.count),
        lambda: sidco.last_stage(cut, tail, whole.count, max_abs(x), aim, stages, fit, TENSORS),
        all_stages,
    )


def _later_stages(
    compressor: sidco.SIDCo, tails: Tensor, aim: Tensor, count: Tensor, first: Tensor, fit: Fit
) -> tuple[Tensor, Tensor]:
    """Return the threshold and the next step's cut after the stages that follow the first, which leaves `tails`."""
    assert compressor.stages != "auto"
    stages, robust = compressor.stages, compressor.adapt == "robust"
    same_ratio = (aim / count / sidco.FIRST_RATIO) ** (1.0 / (stages - 1))

    def stage(
        remaining: Tensor, previous: Tensor, before: Tensor, threshold: Tensor, cut: Tensor, _: Tensor
    ) -> tuple[Tensor, ...]:
        tail = moments(tails, threshold)
        if robust:
            goes_on, ratio = tail.count > aim, (aim / tf.maximum(tail.count, 1.0)) ** (1.0 / remaining)
            cut = tf.where(goes_on, threshold, cut)
            best = sidco.nearer(previous, before, threshold, tail.count, aim, TENSORS)
        else:
            goes_on, ratio, best = tail.count >= 2.0, same_ratio, previous
        following = tf.where(goes_on, threshold + fit(tail, ratio), best)
        return remaining - 1.0, threshold, tail.count, following, cut, goes_on

    begin = (scalar(stages - 1), scalar(0.0), count, first, scalar(math.inf), True)
    done = tf.while_loop(lambda *state: state[-1] & (state[0] > 0.0), stage, begin)
    return done[3], done[4]


def _gaussiank(
    compressor: gaussiank.GaussianK, x: Tensor, k: int, capacity: int, saved: Mapping[str, Tensor]
) -> Chosen:
    whole = moments(x, 0.0)
    few = whole.count <= k

    def fitted() -> tuple[Tensor, Tensor]:
        eta = gaussiank.fit(whole, k, x.shape[0], TENSORS)
        if compressor.refine == "paper":
            limit, factor = _corrected(x, k, eta), saved["factor"]
        else:
            limit = search_threshold(x, k, gaussiank.TOLERANCE, not_zero=whole.count, start=eta * saved["factor"])
            factor = tf.where((limit > 0.0) & (eta > 0.0), limit / eta, 1.0)
        return below_largest(x, limit), factor

    limit, factor = tf.cond(few, lambda: (scalar(0.0), saved["factor"]), fitted)
    chosen = select_above(x, limit, capacity)
    if compressor.refine == "paper":
        return Chosen(chosen.indices, chosen.found, limit)
    recentred = factor * (tf.maximum(chosen.found, 1.0) / k) ** gaussiank.RECENTRE
    return Chosen(chosen.indices, chosen.found, limit, {"factor": tf.where(few, factor, recentred)})


def _corrected(x: Tensor, k: int, eta: Tensor) -> Tensor:
    def correct(limit: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        count = count_above(x, limit)
        few, many = count < gaussiank.TOO_FEW * k, count > gaussiank.TOO_MANY * k
        by = tf.where(few, gaussiank.LOWER, tf.where(many, gaussiank.RAISE, 1.0))
        return limit * tf.cast(by, tf.float64), few | many

    begin = (eta, True)
    return tf.while_loop(lambda _, going: going, correct, begin, maximum_iterations=gaussiank.CORRECTIONS)[0]


def _redsync(compressor: redsync.RedSync, x: Tensor, k: int, capacity: int, saved: Mapping[str, Tensor]) -> Chosen:
    whole = moments(x, 0.0)
    few = whole.count <= k
    mean, largest = whole.mean * whole.count / x.shape[0], max_abs(x)
    if compressor.method == "trim":
        limit = tf.cond(few, lambda: scalar(0.0), lambda: _trimmed(x, k, mean, largest))
        chosen = select_above(x, limit, k)
        # These are the entries that TopK finds. No others qualify.
        return Chosen(chosen.indices, tf.minimum(chosen.found, float(k)), limit)
    limit = tf.cond(few, lambda: scalar(0.0), lambda: below_largest(x, _bisected(x, k, mean, largest)))
    return select_above(x, limit, min(capacity, 2 * k))


def _trimmed(x: Tensor, k: int, mean: Tensor, largest: Tensor) -> Tensor:
    def trim(number: Tensor, _: Tensor, __: Tensor) -> tuple[Tensor, ...]:
        limit = mean + tf.gather(parts, number) * (largest - mean)
        return number + 1, limit, count_above(x, limit) >= k

    parts = scalar(redsync.PARTS)
    _, limit, enough = tf.while_loop(
        lambda number, _, enough: tf.logical_not(enough) & (number < len(redsync.PARTS)), trim, (0, mean, False)
    )
    return tf.where(enough, limit, scalar(0.0))


def _bisected(x: Tensor, k: int, mean: Tensor, largest: Tensor) -> Tensor:
    def halve(low: Tensor, high: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        middle = 0.5 * (low + high)
        count = count_above(x, middle)
        few = count < k
        return tf.where(few, low, middle), tf.where(few, middle, high), few | (count > 2 * k)

    over_mean = count_above(x, mean) >= k
    begin = (tf.where(over_mean, mean, scalar(0.0)), tf.where(over_mean, largest, mean), True)
    return tf.while_loop(lambda _, __, going: going, halve, begin, maximum_iterations=redsync.MOST_PROBES)[0]


# The key is the function, so that a subclass with its own `select` is not found here.
_SELECTS: dict[Any, Select] = {
    topk.TopK.select: _topk,
    threshold.Threshold.select: _hard,
    sidco.SIDCo.select: _sidco,
    gaussiank.GaussianK.select: _gaussiank,
    redsync.RedSync.select: _redsync,
}


def _limit(x: Tensor, threshold: Tensor) -> Tensor:
    """Return the threshold in the precision of the comparison; beyond the range of that precision it is infinity."""
    return tf.cast(scalar(threshold), x.dtype)
