import numpy as np
import pytest
from scipy.stats.mstats import median_cihs

from nanolib.stats.intervals import TooFewSamples, mean_interval, median_interval

RUNS = 2000


def _spiky(rng, n):
    return 10 + rng.normal(0, 0.1, n) + (rng.random(n) < 0.05) * rng.exponential(5, n)


def _two_mode(rng, n):
    return np.where(rng.random(n) < 0.35, 12, 10) + rng.normal(0, 0.1, n)


DISTRIBUTIONS = {
    "normal": lambda rng, n: rng.normal(10, 1, n),
    "spiky": _spiky,
    "two_mode": _two_mode,
    "exponential": lambda rng, n: rng.exponential(1, n),
}


@pytest.mark.parametrize("n", [6, 23, 101])
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_interval_agrees_with_scipy(n, confidence):
    x = np.random.default_rng(n).exponential(size=n)
    ours = median_interval(x, confidence)
    assert (ours.low, ours.high) == pytest.approx(
        tuple(median_cihs(x, alpha=1 - confidence)), rel=1e-12
    )
    assert ours.estimate == np.median(x)


def _coverage(intervals, truth):
    return np.mean([low <= truth <= high for low, _, high in intervals])


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("n", [10, 20, 35, 50])
def test_interval_covers_the_median_95_times_in_100(name, n):
    rng = np.random.default_rng(1)
    draw = DISTRIBUTIONS[name]
    median = np.median(draw(np.random.default_rng(2), 2_000_000))
    found = [median_interval(draw(rng, n)) for _ in range(RUNS)]
    assert 0.93 <= _coverage(found, median) <= 0.97


def test_interval_on_a_coarse_clock_still_covers():
    rng = np.random.default_rng(3)
    found = [median_interval(np.round(rng.normal(10, 1, 25))) for _ in range(RUNS)]
    assert _coverage(found, 10) >= 0.93


def test_pooled_single_calls_cover_far_too_seldom():
    """The negative control: calls within a block resemble each other, so they are no independent evidence."""
    rng = np.random.default_rng(4)
    levels, noise = rng.normal(10, 1, (500, 20, 1)), rng.normal(0, 0.3, (500, 20, 10))
    found = [median_interval(calls.ravel()) for calls in levels + noise]
    assert _coverage(found, 10) < 0.85


def test_too_few_samples_are_refused():
    with pytest.raises(TooFewSamples, match="5 samples cannot give a 95% interval"):
        median_interval([1, 2, 3, 4, 5])
    with pytest.raises(TooFewSamples, match="1 samples"):
        median_interval([1], 0.0)
    assert median_interval([1, 4], 0.5) == (1, 2.5, 4)


def test_the_means_interval_is_students():
    from scipy import stats

    x = np.random.default_rng(0).normal(3, 2, 7)
    found = mean_interval(x, 0.9)
    low, high = stats.t.interval(0.9, 6, loc=x.mean(), scale=stats.sem(x))
    assert tuple(found) == pytest.approx((low, x.mean(), high))
    assert mean_interval([1.0, 3.0]).estimate == 2 and mean_interval(x) == mean_interval(x, 0.95)
    with pytest.raises(TooFewSamples, match="1 samples give no interval"):
        mean_interval([1.0])
