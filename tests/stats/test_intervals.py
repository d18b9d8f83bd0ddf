"""Intervals for medians, means and link costs, against scipy, numpy and simulation."""

import math

import numpy as np
import pytest
from scipy import stats
from scipy.stats.mstats import median_cihs

from nanolib.measurement import BadInput
from nanolib.stats.intervals import (
    TooFewSamples,
    hodges_lehmann,
    link_cost,
    mean_interval,
    median_interval,
)

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
    "coarse_clock": lambda rng, n: np.round(rng.normal(10, 1, n)),
}


@pytest.mark.parametrize("n", [6, 23, 101])
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_interval_agrees_with_scipy(n, confidence):
    x = np.random.default_rng(n).exponential(size=n)
    low, estimate, high = median_interval(x, confidence)
    assert (low, high) == pytest.approx(tuple(median_cihs(x, alpha=1 - confidence)), rel=1e-12)
    assert estimate == np.median(x)


def _coverage(intervals, truth):
    return np.mean([low <= truth <= high for low, _, high in intervals])


@pytest.mark.parametrize(
    ("runs", "n"),
    [(FEW_RUNS, 10), (FEW_RUNS, 50)]
    + [pytest.param(MANY_RUNS, n, marks=pytest.mark.thorough) for n in (10, 20, 35, 50)],
)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_interval_covers_the_median_95_times_in_100(name, runs, n):
    draw, rng = DISTRIBUTIONS[name], np.random.default_rng(1)
    truth = np.median(draw(np.random.default_rng(2), 2_000_000))
    coverage = _coverage([median_interval(draw(rng, n)) for _ in range(runs)], truth)
    slack = 0.02 if runs == MANY_RUNS else 0.03
    least, most = (0.93, 1) if name == "coarse_clock" else (0.95 - slack, 0.95 + slack)
    assert least <= coverage <= most


def test_pooled_single_calls_cover_far_too_seldom():
    """The negative control: calls within a block depend on each other."""
    rng = np.random.default_rng(4)
    levels, noise = rng.normal(10, 1, (500, 20, 1)), rng.normal(0, 0.3, (500, 20, 10))
    found = [median_interval(calls.ravel()) for calls in levels + noise]
    assert _coverage(found, 10) < 0.85


def test_the_means_interval_is_students():
    x = np.random.default_rng(0).normal(3, 2, 7)
    low, high = stats.t.interval(0.9, 6, loc=x.mean(), scale=stats.sem(x))
    assert tuple(mean_interval(x, 0.9)) == pytest.approx((low, x.mean(), high))
    assert mean_interval([1.0, 3.0]).estimate == 2


@pytest.mark.parametrize(
    ("interval", "values", "said"),
    [
        (median_interval, ([1, 2, 3, 4, 5],), "5 samples cannot give a 95% interval"),
        (median_interval, ([1], 0.01), "1 samples"),
        (median_interval, ([1, 2, 3, 4, 5, math.nan],), "a sample is not a finite number"),
        (hodges_lehmann, ([1, 2, 3, 4, 5, math.nan],), "a sample is not a finite number"),
        (median_interval, (range(9), 0.0), "confidence: must be between 0 and 1, got 0.0"),
        (mean_interval, ([1.0],), r"1 sample\(s\) give no interval"),
        (mean_interval, ([[1, 2, 3], [4, 5, 6]],), "samples: .*give one list of finite numbers"),
        (mean_interval, (range(9), 1.0), "confidence: must be between 0 and 1, got 1.0"),
        (hodges_lehmann, ([1, 2, 3, 4, 5],), "5 pairs cannot give a 95% interval"),
        (link_cost, ([1, 2, 4], [8, 16, 32], [1.0, 2.0, 3.9]), "messages of one size"),
    ],
)
def test_what_has_no_interval_is_refused(interval, values, said):
    with pytest.raises((TooFewSamples, BadInput), match=said):
        interval(*values)


def test_a_links_costs_are_the_least_squares_of_relative_errors():
    rng = np.random.default_rng(2)
    messages, sent = np.array([1, 1, 2, 3, 1, 4]), np.array([1e2, 1e4, 1e5, 1e6, 1e7, 1e8])
    seconds = (2e-5 * messages + 1e-9 * sent) * np.exp(rng.normal(0, 0.1, 6))
    found = link_cost(messages, sent, seconds)
    design = np.stack([messages / seconds, sent / seconds], axis=1)
    alpha, beta = np.linalg.lstsq(design, np.ones(6), rcond=None)[0]
    assert (found.alpha, found.beta) == pytest.approx((alpha, beta))
    assert found.seconds(3, 7e6) == pytest.approx(3 * alpha + 7e6 * beta)
    assert found.residuals == pytest.approx(list(1 - design @ (alpha, beta)))
