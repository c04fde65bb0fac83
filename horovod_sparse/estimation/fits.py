"""Compute the threshold that a given ratio of a distribution's magnitudes exceeds, from their moments. Scalars only.

With `L = ln(1/ratio)`, each fit solves `P(|X| > threshold) = ratio` for one sparsity-inducing distribution of SIDCo
(arXiv 2101.10761, https://arxiv.org/abs/2101.10761). All fits are scale-equivariant: moments of c|X| give c * threshold.
Applied to the excesses over an earlier threshold, they give the step to the next one. A ratio above 1 extrapolates
below that earlier threshold (a negative step).

`mean` must be >= 0, `variance` >= 0, `mean_log <= ln(mean)`, and ratios positive. A variance that float64 cannot hold is 0,
infinite or NaN, and is not used. If the mean is infinite, so is the threshold. No fit returns NaN for a ratio below 1.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

# If variance / mean^2 is below this, all magnitudes are equal as far as float32 data can tell, and no shape can be fitted.
_CONSTANT = 1e-12
_NEARLY_NORMAL = 1e4
"""From this shape on, the error of a formula in closed form is below a millionth."""
_NEAR = 1e-6
"""Above `_TINY`, neighbouring float32 differ by less than this fraction."""
_TINY = 1e-30
LEAST_SQUARE = 1e-290
"""Smaller squares lose digits in float64. Its smallest number with all digits is 2e-308."""


def is_held(square: float) -> bool:
    """Return whether float64 holds a mean of squares: it has neither overflowed nor underflowed."""
    return LEAST_SQUARE <= square < math.inf


def exponential(mean: float, ratio: float) -> float:
    """Fit exponential magnitudes (double-exponential gradients): `threshold = beta L`, `beta = mean`."""
    return mean * -math.log(ratio)


def generalized_pareto(mean: float, variance: float, ratio: float) -> float:
    """Fit generalised Pareto magnitudes with location 0, by the method of moments.

    `alpha = (1 - mean^2/variance)/2`, `beta = mean (mean^2/variance + 1)/2`,
    `threshold = beta (exp(alpha L) - 1)/alpha`. The shape alpha is below 1/2; alpha = 0 is the exponential. If float64 does
    not hold the squares, the exponential is fitted, since it needs none.
    """
    if not is_held(mean * mean + variance):
        return exponential(mean, ratio)
    squared_mean_over_variance = mean * mean / max(variance, _CONSTANT * mean * mean)
    shape = 0.5 * (1.0 - squared_mean_over_variance)
    scale = 0.5 * mean * (squared_mean_over_variance + 1.0)
    log_survival = -math.log(ratio)
    x = shape * log_survival
    # (exp(x) - 1)/x without cancellation near 0; for x > 700 a large number instead of an overflow.
    expm1_over = 1.0 + x / 2.0 + x * x / 6.0 if abs(x) < 1e-4 else math.expm1(min(x, 700.0)) / x
    return scale * log_survival * expm1_over


def gamma(mean: float, mean_log: float, ratio: float, *, closed_form: bool = False) -> float:
    """Fit gamma magnitudes: closed-form shape, exact inverse of the survival function.

    `s = ln(mean) - mean(ln|X|)`, `alpha = (3 - s + sqrt((s-3)^2 + 24 s))/(12 s)`, `beta = mean/alpha`,
    `threshold = beta Q^-1(alpha, ratio)` with the regularised upper incomplete gamma function Q.

    `closed_form` uses the paper's approximation of that inverse, `threshold = -beta (ln ratio + ln Gamma(alpha))`. It is exact
    only for alpha = 1. For small alpha it is negative, and 0 is returned.
    """
    if not 0.0 < mean < math.inf:
        return mean
    s = math.log(mean) - mean_log
    if s <= _CONSTANT:
        return mean
    shape = (3.0 - s + math.sqrt((s - 3.0) ** 2 + 24.0 * s)) / (12.0 * s)
    scale = mean / shape
    if closed_form:
        return max(-scale * (math.log(ratio) + math.lgamma(shape)), 0.0)
    return scale * inverse_gamma_tail(shape, ratio)


def inverse_gamma_tail(shape: float, ratio: float) -> float:
    """Return x with Q(shape, x) = ratio, for shape > 0 and a ratio in (0, 1]. Five digits are right for ratios from 1e-9 on.

    Newton's method solves ln Q = ln(ratio) for u = ln x. ln Q is concave in u, so steps from above never go too far. They start
    at a + sqrt(2 a L) + L with L = ln(1/ratio), a bound (Boucheron, Lugosi and Massart, Concentration Inequalities, 2.4).
    """
    if ratio >= 1.0:
        return 0.0
    level = -math.log(ratio)
    if shape > _NEARLY_NORMAL:
        # Wilson and Hilferty: the cube root of x is nearly normal.
        deviation = -NormalDist().inv_cdf(ratio) / (3.0 * math.sqrt(shape))
        return shape * (1.0 - 1.0 / (9.0 * shape) + deviation) ** 3
    u, step = math.log(shape + math.sqrt(2.0 * shape * level) + level), -math.inf
    while step < -1e-12:
        x = math.exp(u)
        density = math.exp(shape * u - x - math.lgamma(shape))
        # P = 1 - Q is density * (1/a + x/(a (a+1)) + x^2/(a (a+1) (a+2)) + ...).
        term = total = 1.0 / shape
        number = shape
        while term > 1e-17 * total:
            number += 1.0
            term *= x / number
            total += term
        tail = max(1.0 - density * total, 1e-16)
        step = (math.log(tail) + level) * tail / density
        u += step
    return math.exp(u)


def below_largest(largest: float, threshold: float) -> float:
    """Return `threshold`, lowered if necessary so that at least the largest entry exceeds it, unless all entries are zero."""
    if threshold < (1.0 - _NEAR) * largest and largest > _TINY:
        return threshold
    # The step down is in the precision of the comparison, which is that of the entries: float32 if it holds `largest`.
    with np.errstate(over="ignore"):
        single = np.float32(largest)
    below = np.nextafter(single, np.float32(0.0)) if float(single) == largest else math.nextafter(largest, 0.0)
    return min(threshold, float(below))
