"""The capped signed-rank test against enumeration, and its interval against its p."""

import itertools

import numpy as np
import pytest

from nanolib.stats.intervals import TooFewSamples
from nanolib.stats.signed_ranks import capped_centre, capped_p


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
