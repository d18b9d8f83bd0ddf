import os

import numpy as np
import pytest
import ruptures

from nanolib.stats.changes import PENALTY, change_points, changes_of_level, find_recent_outlier
from nanolib.stats.compare import MARGIN

RUNS = int(os.environ.get("NANOLIB_SIMULATIONS", "200"))


def _history(rng, n, step=0.0, at=None, noise=0.01):
    level = np.zeros(n)
    level[at if at is not None else n // 2 :] = np.log1p(step)
    return 10 * np.exp(level + noise * rng.normal(size=n))


def _changes(series, find=changes_of_level, width=0.02):
    """What is found in a series whose values all have intervals of one width."""
    return find(series, np.full(len(series), width), MARGIN)


@pytest.mark.parametrize("n", [4, 8, 20, 60])
def test_a_level_history_hardly_ever_shows_a_change(n):
    rng = np.random.default_rng(n)
    series = [_history(rng, n) for _ in range(RUNS)]
    assert np.mean([bool(_changes(one)) for one in series]) <= 0.01


@pytest.mark.parametrize(("n", "at"), [(8, 4), (20, 10), (20, 17), (60, 30)])
def test_a_step_of_ten_per_cent_is_found_where_it_is(n, at):
    rng = np.random.default_rng(n + at)
    found = [_changes(_history(rng, n, 0.10, at)) for _ in range(RUNS)]
    right = [len(changes) == 1 and changes[0][0] == at for changes in found]
    assert np.mean(right) >= 0.98
    ratios = [changes[0][1] for changes, ok in zip(found, right, strict=True) if ok]
    assert np.mean(ratios) == pytest.approx(1.10, abs=0.01)


def _growing_noise(shape, n):
    """Noise of 1 % that becomes 5 %: evenly, or at half of the runs."""
    if shape == "evenly":
        return np.linspace(0.01, 0.05, n)
    return np.where(np.arange(n) < n / 2, 0.01, 0.05)


@pytest.mark.parametrize("shape", ["evenly", "at half"])
@pytest.mark.parametrize("n", [30, pytest.param(120, marks=pytest.mark.thorough)])
def test_noise_that_grows_at_one_level_is_hardly_ever_a_change(n, shape):
    rng, noise = np.random.default_rng(n + 1), _growing_noise(shape, n)
    series = [_history(rng, n, noise=noise) for _ in range(RUNS)]
    assert np.mean([bool(_changes(one)) for one in series]) <= 0.05
    assert np.mean([_changes(one, find_recent_outlier) is not None for one in series]) <= 0.05


def test_change_points_are_those_of_the_plain_search():
    rng = np.random.default_rng(3)
    for _ in range(15):
        x = rng.normal(size=rng.integers(4, 60))
        for at in rng.integers(0, len(x), size=rng.integers(0, 4)):
            x[at:] += rng.normal(scale=4)
        penalty = 10 * np.log(len(x))
        plain = ruptures.Pelt(model="l2", min_size=2, jump=1).fit(x[:, None]).predict(pen=penalty)
        assert change_points(x, penalty) == plain[:-1]


def test_an_interval_is_taken_for_196_deviations():
    """A step of d in the middle of n quiet values gains n/4 · (d / deviation)² and is worth it above the penalty."""
    step, n = np.log(1.1), 20
    deviation = step * np.sqrt(n / 4 / (PENALTY * np.log(n)))
    series = np.exp(step * (np.arange(n) >= n // 2))
    assert changes_of_level(series, np.full(n, 1.96 * deviation * 0.99), MARGIN) == [
        (10, pytest.approx(1.1))
    ]
    assert not changes_of_level(series, np.full(n, 1.96 * deviation * 1.01), MARGIN)


def test_small_changes_and_short_histories_are_left_out():
    series = np.array([10, 10.0001, 10, 10.0001, 10.2, 10.2001, 10.2, 10.2001])
    assert not changes_of_level(series, np.zeros(8), MARGIN)
    assert not changes_of_level([1, 1, 3, 3, 3], np.zeros(5), MARGIN)
    assert changes_of_level([1, 1, 1, 3, 3, 3], np.zeros(6), MARGIN) == [(3, pytest.approx(3))]


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("at", [0, 9, -2])
def test_one_or_two_values_that_stick_out_are_a_spike_wherever_they_lie(width, at):
    rng = np.random.default_rng(at + 50)
    alarms = 0
    for _ in range(200):
        series = _history(rng, 20)
        series[slice(at, at + width or None)] *= 1.5
        alarms += bool(_changes(series))
    assert alarms <= 2


def test_three_values_at_the_end_are_a_level_and_fewer_stick_out():
    level = np.array([10, 10.1, 9.9, 10, 10.1, 10])
    step = (6, pytest.approx(1.2, rel=0.01))
    for runs, changes, newest in ((1, [], step), (2, [], step), (3, [step], None)):
        series, widths = np.append(level, [12.0, 12.1, 12.0][:runs]), np.full(6 + runs, 0.01)
        assert changes_of_level(series, widths, MARGIN) == changes
        assert find_recent_outlier(series, widths, MARGIN) == newest
    one = np.append(level, 12.0)
    assert find_recent_outlier(1 / one, np.full(7, 0.01), MARGIN)[1] == pytest.approx(1 / 1.2)
    assert find_recent_outlier(one, np.full(7, 0.2), MARGIN) is None  # its intervals are as wide
    assert (
        find_recent_outlier([10, 10, 10.25], np.zeros(3), MARGIN) is None
    )  # before that there is no level


@pytest.mark.parametrize("noise", [0.01, 0.05])
@pytest.mark.parametrize("n", [4, 6, 20])
def test_in_a_level_history_hardly_ever_a_run_sticks_out_also_beyond_its_own_interval(n, noise):
    rng = np.random.default_rng(n + 7)
    series = [_history(rng, n, noise=noise) for _ in range(RUNS)]
    found = [_changes(one, find_recent_outlier, 0.01) is not None for one in series]
    assert np.mean(found) <= 0.01
