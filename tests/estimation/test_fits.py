"""The fits against exact quantiles, and their behaviour at the edges."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.special import digamma, gammainccinv

from horovod_sparse.compressors import gaussiank
from horovod_sparse.estimation import fits
from horovod_sparse.ops.protocol import Sums

POSITIVE = st.floats(1e-30, 1e30)
RATIOS = st.floats(1e-6, 1.0)


@pytest.mark.parametrize("shape", [-3.0, -0.5, -1e-5, 0.0, 1e-5, 0.3, 0.45])
def test_generalized_pareto_inverts_the_survival_function(shape: float) -> None:
    mean = 2.0 / (1 - shape)
    variance = 4.0 / ((1 - shape) ** 2 * (1 - 2 * shape))
    for ratio in (0.5, 0.1, 0.001):
        threshold = fits.generalized_pareto(mean, variance, ratio)
        assert stats.genpareto(shape, scale=2.0).sf(threshold) == pytest.approx(ratio, rel=1e-6)


@pytest.mark.parametrize("shape", [0.5, 2.0])
@pytest.mark.parametrize("ratio", [0.25, 0.1, 0.01, 0.001])
def test_gamma_is_a_quantile_of_the_shape_that_the_paper_estimates(shape: float, ratio: float) -> None:
    """From scale 1: the mean of the logarithms is the digamma function of the shape."""
    s = math.log(shape) - digamma(shape)
    fitted = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    expected = shape / fitted * gammainccinv(fitted, ratio)
    assert fits.gamma(shape, digamma(shape), ratio) == pytest.approx(expected, rel=3e-6)


@pytest.mark.parametrize("ratio", [1e-9, 1e-6, 0.001, 0.1, 0.25, 0.5, 0.9, 0.999])
def test_the_tail_of_the_gamma_distribution_is_inverted(ratio: float) -> None:
    for shape in np.geomspace(1e-3, 1e9, 60).tolist():
        expected = gammainccinv(shape, ratio)
        assert fits.inverse_gamma_tail(shape, ratio) == pytest.approx(expected, rel=2e-5 if ratio < 1e-6 else 1e-6)
    assert fits.inverse_gamma_tail(2.0, 1.0) == 0.0


@pytest.mark.parametrize("ratio", [0.25, 0.01, 0.001])
def test_the_papers_closed_form_of_gamma(ratio: float) -> None:
    """Exact for shape 1, and never negative."""
    for shape in (0.5, 2.0):
        fitted = fits.gamma(shape, digamma(shape), ratio, closed_form=True)
        # The shape is approximate too.
        assert fitted == pytest.approx(-math.log(ratio) - math.lgamma(shape), rel=0.02)
    assert fits.gamma(1.0, digamma(1.0), ratio, closed_form=True) == pytest.approx(-math.log(ratio), rel=0.01)
    assert fits.gamma(1e-4, math.log(1e-4) - 1e4, ratio, closed_form=True) == 0.0


@pytest.mark.parametrize("ratio", [0.25, 0.001])
@pytest.mark.parametrize(
    ("mean", "variance"),
    [
        (1e-170, 0.0),
        (1e-150, 1e-300),
        (5e-324, 0.0),
        (1e160, math.inf),
        (1e160, math.nan),
        (1e160, 0.0),
        (1.0, math.inf),
    ],
)
def test_squares_that_float64_does_not_hold_are_not_used(mean: float, variance: float, ratio: float) -> None:
    assert fits.generalized_pareto(mean, variance, ratio) == fits.exponential(mean, ratio)
    whole = Sums(100, 100 * mean, 100 * (variance + mean * mean))
    # Of a normal distribution of mean magnitude 1.
    expected = math.sqrt(math.pi / 2) * -NormalDist().inv_cdf(0.005)
    assert gaussiank.fit(whole, 1, 100) == pytest.approx(mean * expected)


@given(mean=POSITIVE, variance=st.floats(0.0, 1e60), ratio=RATIOS, scale=st.sampled_from((2.0**-20, 2.0**20)))
def test_fits_are_scale_equivariant_and_never_negative(
    mean: float, variance: float, ratio: float, scale: float
) -> None:
    for threshold, scaled in (
        (fits.exponential(mean, ratio), fits.exponential(scale * mean, ratio)),
        (
            fits.generalized_pareto(mean, variance, ratio),
            fits.generalized_pareto(scale * mean, scale * scale * variance, ratio),
        ),
    ):
        assert 0.0 <= threshold < math.inf
        assert scaled == pytest.approx(scale * threshold, rel=1e-9)


@given(mean=POSITIVE, log_gap=st.floats(0.0, 60.0), ratio=RATIOS)
def test_gamma_never_fails(mean: float, log_gap: float, ratio: float) -> None:
    assert 0.0 <= fits.gamma(mean, math.log(mean) - log_gap, ratio) < math.inf


@pytest.mark.parametrize("ratio", [0.25, 0.01, 0.001])
def test_of_nothing_the_threshold_is_zero_and_of_an_infinite_mean_infinite(ratio: float) -> None:
    for mean, variance, mean_log in ((0.0, 0.0, math.nan), (math.inf, math.nan, 700.0)):
        assert fits.exponential(mean, ratio) == fits.generalized_pareto(mean, variance, ratio) == mean
        for closed_form in (False, True):
            assert fits.gamma(mean, mean_log, ratio, closed_form=closed_form) == mean


@given(mean=POSITIVE, variance=st.floats(0.0, 1e60), ratio=st.floats(1.001, 1e6))
def test_ratios_above_one_step_down(mean: float, variance: float, ratio: float) -> None:
    assert fits.exponential(mean, ratio) < 0.0
    assert fits.generalized_pareto(mean, variance, ratio) < 0.0
