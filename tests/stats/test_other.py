import numpy as np
import pytest
from statsmodels.stats.diagnostic import acorr_ljungbox

from nanolib.stats.steady import MILD, SEVERE, count_outliers, fences, ljung_box_p, remove_outliers


def test_outliers_are_counted_by_severity_on_both_sides():
    x = [*([10.0, 11.0, 12.0] * 10), 16.0, 60.0, -40.0]
    assert count_outliers(x) == (1, 2)
    assert list(remove_outliers(x)) == x[:30]
    assert count_outliers([*([10.0, 11.0, 12.0] * 10), 5.0, 4.0, 18.0, -40.0]) == (3, 1)


def test_what_lies_on_a_fence_is_not_beyond_it():
    middle = [8.0, 8.0, 10.0, 12.0, 12.0]  # quartiles 8 and 12: fences at -4, 2, 18 and 24
    mild, severe = [2.0, *middle, 18.0], [-4.0, *middle, 24.0]
    assert [fences(mild, reach) for reach in (MILD, SEVERE)] == [(2, 18), (-4, 24)]
    assert count_outliers(mild) == (0, 0) and list(remove_outliers(mild)) == mild
    assert count_outliers(severe) == (2, 0) and list(remove_outliers(severe)) == middle


def test_ljung_box_is_that_of_statsmodels():
    x = np.random.default_rng(1).normal(size=60)
    assert ljung_box_p(x) == pytest.approx(float(acorr_ljungbox(x, lags=[10])["lb_pvalue"].iloc[0]))
    assert ljung_box_p(np.repeat(x, 5)) < 1e-6
    for n, lags in ((20, 4), (34, 6), (50, 10), (51, 10)):
        assert ljung_box_p(x[:n]) == pytest.approx(
            float(acorr_ljungbox(x[:n], lags=[lags])["lb_pvalue"].iloc[0])
        )
    assert ljung_box_p(x[:19]) is None and ljung_box_p([3.0] * 30) is None
