import functools
import itertools

import numpy as np
import pytest
from scipy.stats.mstats import median_cihs

from nanolib.stats.intervals import TooFewSamples, mean_interval, median_interval
from nanolib.stats.scaling import link_cost
from nanolib.stats.signed_ranks import capped_centre, capped_p

FEW_RUNS, MANY_RUNS = 400, 2000


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


@functools.cache
def _true_median(name):
    return np.median(DISTRIBUTIONS[name](np.random.default_rng(2), 2_000_000))


@pytest.mark.parametrize(
    ("runs", "n"),
    [(FEW_RUNS, 10), (FEW_RUNS, 50)]
    + [pytest.param(MANY_RUNS, n, marks=pytest.mark.thorough) for n in (10, 20, 35, 50)],
)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_interval_covers_the_median_95_times_in_100(name, runs, n):
    rng = np.random.default_rng(1)
    found = [median_interval(DISTRIBUTIONS[name](rng, n)) for _ in range(runs)]
    slack = 0.02 if runs == MANY_RUNS else 0.03
    assert abs(_coverage(found, _true_median(name)) - 0.95) <= slack


def test_interval_on_a_coarse_clock_still_covers():
    rng = np.random.default_rng(3)
    found = [median_interval(np.round(rng.normal(10, 1, 25))) for _ in range(FEW_RUNS)]
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


def _enumerated(x):
    """Two-sided p by all 2^n signs: the smaller sum of the ranks, each at most a quarter of n, of either side."""
    ranks = np.minimum(np.argsort(np.argsort(np.abs(x))) + 1, -(-len(x) // 4))
    least = min(ranks[x < 0].sum(), ranks[x > 0].sum())
    sums = [np.dot(ranks, signs) for signs in itertools.product((0, 1), repeat=len(x))]
    return min(1.0, 2 * np.mean(np.array(sums) <= least))


@pytest.mark.parametrize("n", [1, 4, 6, 9, 13])
def test_p_is_that_of_all_signs(n):
    for seed in range(5):
        x = np.random.default_rng(seed).normal(0.5, 1, n)
        assert capped_p(x) == pytest.approx(_enumerated(x))
    assert capped_p([0.0, 0.0]) == 1.0 and capped_p([0.0, *x]) == capped_p(x)


@pytest.mark.parametrize("n", [6, 12, 80])
@pytest.mark.parametrize("confidence", [0.95, 0.90])
def test_the_interval_is_what_the_test_does_not_reject(n, confidence):
    x = np.random.default_rng(n).normal(0.1, 1, n)
    low, estimate, high = capped_centre(x, confidence)
    step = 1e-9
    assert capped_p(x - (low - step)) <= 1 - confidence < capped_p(x - (low + step))
    assert capped_p(x - (high + step)) <= 1 - confidence < capped_p(x - (high - step))
    assert low < estimate < high
    assert tuple(capped_centre(-x, confidence)) == pytest.approx((-high, -estimate, -low))


def test_equal_values_are_their_own_interval_and_five_are_too_few():
    assert (
        capped_centre([0.1] * 7) == pytest.approx((0.1, 0.1, 0.1))
        and capped_p([0.1] * 7) == 2 / 2**7
    )
    with pytest.raises(TooFewSamples, match="5 pairs cannot give a 95% interval"):
        capped_centre([1, 2, 3, 4, 5])


def test_a_links_costs_are_the_least_squares_of_relative_errors():
    rng = np.random.default_rng(2)
    messages, sent = np.array([1, 1, 2, 3, 1, 4]), np.array([1e2, 1e4, 1e5, 1e6, 1e7, 1e8])
    seconds = (2e-5 * messages + 1e-9 * sent) * np.exp(rng.normal(0, 0.1, 6))
    found = link_cost(messages, sent, seconds)
    design = np.stack([messages / seconds, sent / seconds], axis=1)
    alpha, beta = np.linalg.lstsq(design, np.ones(6), rcond=None)[0]
    assert (found.alpha, found.beta) == pytest.approx((alpha, beta))
    assert found.seconds(3, 7e6) == pytest.approx(3 * alpha + 7e6 * beta)
    assert found.residuals == pytest.approx(list(1 - (alpha * messages + beta * sent) / seconds))


@pytest.mark.parametrize(
    ("messages", "sent", "seconds"), [([1], [8], [1.0]), ([1, 2, 4], [8, 16, 32], [1.0, 2.0, 3.9])]
)
def test_one_size_of_message_cannot_tell_the_two_costs_apart(messages, sent, seconds):
    with pytest.raises(TooFewSamples, match="messages of one size"):
        link_cost(messages, sent, seconds)
