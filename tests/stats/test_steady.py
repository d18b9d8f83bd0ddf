"""The steady part of a series of timings, its outliers and its autocorrelation."""

import numpy as np
import pytest
from statsmodels.stats.diagnostic import acorr_ljungbox

from nanolib.stats.changes import SteadyState, steady_state
from nanolib.stats.intervals import count_outliers, ljung_box_p, without_outliers

N, RUNS = 200, 200


def _autocorrelated(rng, rho):
    noise = rng.normal(size=N + 50)
    x = np.zeros(N + 50)
    for i in range(1, N + 50):
        x[i] = rho * x[i - 1] + noise[i]
    return x[50:] * np.sqrt(1 - rho**2)


@pytest.mark.slow
@pytest.mark.parametrize("rho", [0.0, 0.3, 0.6])
def test_false_alarms_are_rare(rho):
    rng = np.random.default_rng(0)
    found = [steady_state(10 + 0.1 * _autocorrelated(rng, rho)) for _ in range(RUNS)]
    assert np.mean([each != SteadyState() for each in found]) <= 0.01


@pytest.mark.parametrize(("share", "slower"), [(0.3, 0.1), (0.1, 0.5)])
@pytest.mark.parametrize("n", [20, 50, 100, 200])
def test_calls_of_two_kinds_are_no_change_of_level(n, share, slower):
    """As on a shared core: now and then a call takes longer, in no order."""
    rng = np.random.default_rng(n)
    draws = [
        10 * (1 + slower * (rng.random(n) < share)) + rng.normal(0, 0.02, n) for _ in range(RUNS)
    ]
    assert np.mean([steady_state(x) != SteadyState() for x in draws]) <= 0.04


DECAY = 1 + 0.5 * np.exp(-np.arange(N) / 10)
STEP = 1 + 0.03 * (np.arange(N) < 60)
STAIRS = STEP + 0.1 * (np.arange(N) < 30)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("warm_up", "first", "last"), [(DECAY, 1, N // 2), (STEP, 55, 65), (STAIRS, 55, 65)]
)
def test_a_decay_and_steps_down_are_cut_where_the_last_of_them_ends(warm_up, first, last):
    rng = np.random.default_rng(2)
    found = [steady_state(warm_up * (1 + 0.01 * rng.normal(size=N))) for _ in range(RUNS)]
    assert np.mean([each.steady and first <= each.cut <= last for each in found]) >= 0.99


@pytest.mark.parametrize(
    ("at", "before", "steady"),
    [(150, 0.9, True), (155, 0.9, False), (95, 1.1, True), (100, 1.1, False)],
)
def test_a_change_settles_before_the_last_quarter_and_a_warm_up_before_the_half(at, before, steady):
    level = np.where(np.arange(N) < at, before, 1.0)
    found = steady_state(level * (1 + 0.001 * np.random.default_rng(5).normal(size=N)))
    cut, got_slower = (0, True) if before < 1 else (at, False)
    assert found == SteadyState(cut, steady, got_slower)


def test_a_short_series_is_left_whole_and_settled():
    assert steady_state(np.arange(19, 0, -1.0)) == SteadyState()


def test_a_coarse_clock_shows_the_same_steps_as_a_fine_one():
    """Mostly the same tick, now and then the next: the smallest step is the scale of the noise."""
    ticks = np.repeat([30.0, 20.0], [40, 160])
    ticks[10:15] += 1
    ticks[100:105] += 1
    assert steady_state(ticks) == SteadyState(cut=40)


MIDDLE = [8.0, 8.0, 10.0, 12.0, 12.0]  # quartiles 8 and 12: fences at -4, 2, 18 and 24


@pytest.mark.parametrize(
    ("ends", "counts", "kept"),
    [
        ([2.0, 18.0], (0, 0), [2.0, 18.0]),  # on a fence is not beyond it
        ([-4.0, 24.0], (2, 0), []),
        ([1.9, 24.1], (1, 1), []),
        ([-4.1, 18.1], (1, 1), []),
    ],
)
def test_outliers_are_beyond_tukeys_fences_on_both_sides(ends, counts, kept):
    x = [*MIDDLE, *ends]
    assert count_outliers(x) == counts
    assert list(without_outliers(x)) == MIDDLE + kept


@pytest.mark.parametrize(("n", "lags"), [(20, 4), (50, 10), (60, 10)])
def test_ljung_box_is_that_of_statsmodels_for_twenty_samples_that_vary(n, lags):
    x = np.random.default_rng(1).normal(size=n)
    expected = acorr_ljungbox(x, lags=[lags])["lb_pvalue"].iloc[0]
    assert ljung_box_p(x) == pytest.approx(float(expected))
    assert ljung_box_p(x[:19]) is None and ljung_box_p([3.0] * n) is None
