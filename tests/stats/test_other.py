import numpy as np
import pytest
from statsmodels.stats.diagnostic import acorr_ljungbox

from nanolib.stats.autocorrelation import ljung_box_p
from nanolib.stats.intervals import TooFewSamples
from nanolib.stats.outliers import count_outliers, fences, remove_outliers
from nanolib.stats.scaling import scaling_exponent


def test_fences_are_tukeys():
    f = fences(np.arange(1, 101))  # quartiles 25.75 and 75.25
    assert tuple(f) == pytest.approx((25.75 - 3 * 49.5, 25.75 - 1.5 * 49.5, 75.25 + 1.5 * 49.5, 75.25 + 3 * 49.5))


def test_outliers_are_counted_by_severity_on_both_sides():
    x = [*([10.0, 11.0, 12.0] * 10), 16.0, 60.0, -40.0]
    assert count_outliers(x) == (1, 2)
    assert len(remove_outliers(x)) == 30


def test_scaling_exponent_of_a_power_law_is_its_power():
    n = np.array([128, 256, 512, 1024])
    assert tuple(scaling_exponent(n, 3e-6 * n**2.0)) == pytest.approx((2, 2, 2))


def test_values_that_do_not_change_have_exponent_zero():
    assert tuple(scaling_exponent([1, 2, 4], [7, 7, 7])) == (0, 0, 0)


def test_scaling_interval_covers_the_power():
    rng, n, hits = np.random.default_rng(0), np.array([128, 256, 512, 1024, 2048]), 0
    for _ in range(1000):
        low, _, high = scaling_exponent(n, n**1.5 * np.exp(rng.normal(0, 0.1, 5)))
        hits += low <= 1.5 <= high
    assert 0.93 <= hits / 1000 <= 0.97


def test_two_sizes_give_no_exponent():
    with pytest.raises(TooFewSamples, match="2 different sizes"):
        scaling_exponent([1, 2, 2], [1, 2, 2])


def test_ljung_box_is_that_of_statsmodels():
    x = np.random.default_rng(1).normal(size=60)
    assert ljung_box_p(x) == pytest.approx(float(acorr_ljungbox(x, lags=[10])["lb_pvalue"].iloc[0]))
    assert ljung_box_p(np.repeat(x, 5)) < 1e-6
    assert ljung_box_p(x[:10]) is None
