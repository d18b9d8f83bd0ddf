import numpy as np
import pytest
from statsmodels.stats.diagnostic import acorr_ljungbox

from nanolib.stats.steady import (
    MILD,
    SEVERE,
    count_outliers,
    fences,
    leading_slow_samples,
    ljung_box_p,
    remove_outliers,
    steady_state,
)

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
    alarms = sum(
        bool(steady_state(10 + 0.1 * _autocorrelated(rng, rho)).changes) for _ in range(RUNS)
    )
    assert alarms / RUNS <= 0.01


@pytest.mark.parametrize(("share", "slower"), [(0.3, 0.1), (0.1, 0.5)])
@pytest.mark.parametrize("n", [20, 50, 100, 200])
def test_calls_of_two_kinds_are_no_change_of_level(n, share, slower):
    """As where a core is shared: now and then a call takes longer, in no order."""
    rng = np.random.default_rng(n)
    draws = [
        10 * (1 + slower * (rng.random(n) < share)) + rng.normal(0, 0.02, n) for _ in range(RUNS)
    ]
    assert np.mean([bool(steady_state(x).changes) for x in draws]) <= 0.04


@pytest.mark.slow
def test_a_decay_is_cut():
    rng = np.random.default_rng(1)
    decay = 1 + 0.5 * np.exp(-np.arange(N) / 10)
    found = [steady_state(decay * (1 + 0.01 * rng.normal(size=N))) for _ in range(RUNS)]
    assert np.mean([f.cut > 0 and f.steady for f in found]) >= 0.99


def test_a_step_of_three_percent_is_found_where_it_is():
    rng = np.random.default_rng(2)
    step = 1 + 0.03 * (np.arange(N) < 60)
    cuts = np.array([steady_state(step * (1 + 0.01 * rng.normal(size=N))).cut for _ in range(RUNS)])
    assert np.mean(cuts > 0) >= 0.99
    assert np.mean(np.abs(cuts - 60) <= 5) >= 0.99


def test_a_later_slower_level_is_a_slowdown_and_cuts_nothing():
    rng = np.random.default_rng(3)
    found = steady_state((1 + 0.05 * (np.arange(N) >= 100)) * (1 + 0.005 * rng.normal(size=N)))
    assert found.got_slower and found.cut == 0 and found.changes == (100,)


@pytest.mark.parametrize("level", [1 + 0.1 * (np.arange(N) >= 170), 1 + 0.5 * (np.arange(N) < 130)])
def test_a_late_change_or_a_long_warm_up_is_no_steady_state(level):
    assert not steady_state(level + 0.005 * np.random.default_rng(4).normal(size=N)).steady


def test_isolated_spikes_are_no_change():
    x = np.random.default_rng(6).normal(10, 0.05, N)
    x[[20, 77, 150]] = 40
    assert steady_state(x).changes == ()


@pytest.mark.parametrize("n", [0, 1, 5, 19])
def test_a_short_series_is_left_whole(n):
    found = steady_state(
        np.arange(n, 0, -1.0)
    )  # nothing can be said, and nothing is said against it
    assert (found.cut, found.changes, found.steady, found.got_slower) == (0, (), True, False)


def test_a_coarse_clock_shows_the_same_steps_as_a_fine_one():
    """Mostly the same tick, now and then the next one: the smallest step is the scale of the noise."""
    ticks = np.repeat([30.0, 20.0], [40, 160])
    ticks[10:15] += 1
    ticks[100:105] += 1
    found = steady_state(ticks)
    assert found.cut == 40 and found.changes == (40,) and found.steady and not found.got_slower


def test_cold_calls_at_the_head_are_counted():
    assert leading_slow_samples([9, 5, 1.1, 1, 1.2, 1, 1.1, 1, 9, 1]) == 2
    assert leading_slow_samples([1.1, 1, 1.2, 1, 1.1, 1]) == 0


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
