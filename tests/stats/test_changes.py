"""Changes of level in a history of runs are found where they are, and noise raises no alarm."""

import os

import numpy as np
import pytest

from nanolib.stats.changes import changes_of_level
from nanolib.stats.compare import MARGIN

RUNS = int(os.environ.get("NANOLIB_SIMULATIONS", "200"))


def _history(rng, n, step=0.0, at=0, noise=0.01):
    level = np.log1p(step) * (np.arange(n) >= at)
    return 10 * np.exp(level + noise * rng.normal(size=n))


def _changes(series, width=0.02):
    """What is found in a series whose values all have intervals of one width."""
    return changes_of_level(series, np.full(len(series), width), MARGIN)


def _alarms(series):
    """Share of series in which something is found."""
    return np.mean([bool(_changes(one)) for one in series])


@pytest.mark.parametrize("noise", [0.01, 0.05])
@pytest.mark.parametrize("n", [4, 8, 20, 60])
def test_a_level_history_hardly_ever_shows_a_change(n, noise):
    rng = np.random.default_rng(n + 7)
    series = [_history(rng, n, noise=noise) for _ in range(RUNS)]
    assert _alarms(series) <= 0.01


@pytest.mark.parametrize("evenly", [True, False])
@pytest.mark.parametrize("n", [30, pytest.param(120, marks=pytest.mark.thorough)])
def test_noise_that_grows_at_one_level_is_hardly_ever_a_change(n, evenly):
    """Noise of 1 % becomes 5 %, evenly or at half of the runs."""
    rng = np.random.default_rng(n + 1)
    noise = np.linspace(0.01, 0.05, n) if evenly else np.repeat([0.01, 0.05], n // 2)
    series = [_history(rng, n, noise=noise) for _ in range(RUNS)]
    assert _alarms(series) <= 0.05


@pytest.mark.parametrize(("n", "at"), [(8, 4), (20, 10), (20, 17), (60, 30)])
def test_a_step_of_ten_per_cent_is_found_where_it_is(n, at):
    rng = np.random.default_rng(n + at)
    found = [_changes(_history(rng, n, 0.10, at)) for _ in range(RUNS)]
    ratios = [changes[0][1] for changes in found if [index for index, _ in changes] == [at]]
    assert len(ratios) >= 0.98 * RUNS
    assert np.mean(ratios) == pytest.approx(1.10, abs=0.01)


def test_small_changes_and_short_histories_are_left_out():
    assert not _changes([10, 10.0001, 10, 10.0001, 10.2, 10.2001, 10.2, 10.2001], width=0)
    assert not _changes([1, 1, 3, 3, 3], width=0)
    assert _changes([1, 1, 1, 3, 3, 3], width=0) == [(3, pytest.approx(3))]


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("at", [0, 9, -2])
def test_one_or_two_values_that_stick_out_are_a_spike_wherever_they_are(width, at):
    rng = np.random.default_rng(at + 50)
    series = np.array([_history(rng, 20) for _ in range(200)])
    series[:, slice(at, at + width or None)] *= 1.5
    assert _alarms(series) <= 0.01
