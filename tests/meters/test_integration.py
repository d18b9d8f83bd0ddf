"""Energy in closed form: power over time, and counters that fail or jump."""

import math

import numpy as np
import pytest

from nanolib.measurement import BadInput
from nanolib.meters.integration import count, integrate

NAN = math.nan


def test_gaps_and_failed_reads_are_unknown_and_never_zero():
    t = np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9.0])
    p = np.array([100, 100, 100, NAN, NAN, 200, 200, 200, 200, 200])
    found = integrate(t, p, 0, 9)
    assert found.estimate == pytest.approx(200 + 450 + 800)
    assert found.low == pytest.approx(200 + 300 + 800)
    assert found.high == pytest.approx(200 + 600 + 800)
    kept = ~np.isnan(p)  # a long silence is a gap too
    assert integrate(t[kept], p[kept], 0, 9).high == pytest.approx(found.high)
    low, _, high = integrate(t, p, 5, 9)
    assert low == high


@pytest.mark.parametrize(
    ("t", "p", "start", "end", "words"),
    [
        ([0, 1], [1, 1], -1, 1, "reaches beyond"),
        ([0, 1], [1, 1], 1, 1, "not after"),
        ([0, 1, 2], [1, 1], 0, 1, "3 moments for 2 values"),
        ([1, 0], [1, 1], 0, 1, "out of order"),
        ([0, NAN, 2], [1, 1, 1], 0, 2, "a moment is NaN"),
        ([0, 1], [1, NAN], 0, 1, "at least two"),
        ([0, 1, 2], [1, -1, 1], 0, 2, "infinite or below 0"),
        ([0, 1, 2], [1, 1, NAN], 0, 2, "reaches beyond"),
    ],
)
def test_what_cannot_be_integrated_is_one_line(t, p, start, end, words):
    with pytest.raises(BadInput, match=words):
        integrate(t, p, start, end)


_T = np.array([0.0, 2, 4, 4, 6, 8, 10, 12, 14, 16, 18, 20])  # one read twice


@pytest.mark.parametrize(
    ("joules", "words"),
    [
        # a driver that was loaded again
        (np.where(_T < 10, 1000 + 10 * _T, 10 * (_T - 10)), "from 1080 to 0 J"),
        (np.where(_T < 10, 10 * _T, 1e6 + 10 * _T), r"from 80 to 1.0001e\+06 J"),
    ],
)
def test_a_window_in_which_the_counter_jumps_is_refused_and_those_around_it_are_not(joules, words):
    with pytest.raises(BadInput, match=f"^joules: the counter jumped {words}.*measure the window"):
        count(_T, joules, 0, 20)
    for start, end in ((0, 8), (10, 20)):
        assert count(_T, joules, start, end).estimate == pytest.approx(10 * (end - start))


def test_a_counter_that_lags_is_read_until_the_lag_is_over():
    with pytest.raises(BadInput, match="reaches beyond the samples"):
        count(range(4), range(4), 1, 2.5, lag_s=1.0)


def test_the_smallest_step_of_a_counter_widens_the_bounds():
    assert tuple(count(range(5), [0.0, 0.5, 1.0, 1.5, 2.0], 1, 3)) == (0.5, 1.0, 1.5)
    assert tuple(count(range(5), [2.0] * 5, 1, 3)) == (0, 0, 0)


@pytest.mark.parametrize(("period_s", "seconds"), [(0.001, 0.02), (0.1, 1.0)])
@pytest.mark.parametrize(("before", "within"), [(10.0, 200.0), (200.0, 10.0)])
def test_what_a_window_took_lies_within_its_bounds_wherever_readings_and_updates_fall(
    period_s, before, within, seconds
):
    for at in np.linspace(0, 0.15, 31):
        t = np.arange(-2 + at % 0.05, 3, 0.05)
        updated = np.floor((t - at) / period_s) * period_s + at
        joules = before * (updated + 5) + (within - before) * np.clip(updated, 0, seconds)
        failed = np.where(np.arange(len(t)) % 3 == 1, NAN, joules)
        for told in (joules, failed):
            low, value, high = count(t, told, 0, seconds, lag_s=period_s)
            assert low <= within * seconds <= high and low <= value <= high


def test_each_edge_within_a_change_adds_the_change_over_its_step():
    t, p = np.arange(-1.0, 6), [0.0, 10, 20, 40, 40, 10, 100]
    found = integrate(t, p, 0.5, 3.5)
    assert found.estimate == pytest.approx(8.75 + 30 + 40 + 16.25)
    # 10 before, 30 after
    assert (found.low, found.high) == pytest.approx((found.estimate - 40, found.estimate + 40))
    low, _, high = integrate(t, p, 1, 3)
    assert low == high  # edges on samples are sure
