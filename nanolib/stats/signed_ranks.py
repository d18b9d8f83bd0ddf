"""Estimate the center of a distribution by Wilcoxon's signed ranks, or by capped ranks."""

import bisect
import functools
import math

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtri

from nanolib.stats.intervals import Interval, TooFewSamples

# With more than 60 values, the distribution of Wilcoxon's statistic is nearly normal.
_EXACT = 60


def hodges_lehmann(delta: ArrayLike, confidence: float = 0.95) -> Interval:
    """Return Hodges and Lehmann's estimate of a center, with the interval of Wilcoxon's test.

    Args:
        delta: Values from a symmetric distribution, shape [n], n >= 6 at 95 %.
        confidence: Nominal coverage in (0, 1).

    Raises:
        TooFewSamples: n is too small for the confidence.

    Source: Hodges & Lehmann (1963), and Hollander, Wolfe & Chicken (2014), sections 3.2 and 3.3.
    """
    x = np.asarray(delta, dtype=float)
    depth = _depth(len(x), len(x), confidence)
    walsh = _walsh(x)
    return Interval(float(walsh[depth - 1]), float(np.median(walsh)), float(walsh[-depth]))


def capped_centre(delta: ArrayLike, confidence: float = 0.95) -> Interval:
    """Estimate the center of a distribution, with its interval, from signed ranks capped at n / 4.

    The cap limits the weight of outliers. The estimate hardly changes even if a third of the values
    are outliers, some on each side. For nearly normal values, the test needs 10 % more values than
    Wilcoxon's test. The interval contains each center that the test does not reject.

    Args:
        delta: Values from a symmetric distribution, shape [n], n >= 6 at 95 %.
        confidence: Smallest coverage of the interval for any symmetric distribution, in (0, 1).

    Raises:
        TooFewSamples: n is too small for the confidence.

    Source: Policello & Hettmansperger (1976) for the ranks, and Bauer (1972) for the interval.
    """
    x = np.asarray(delta, dtype=float)
    walsh, cap = np.unique(_walsh(x)), _cap(len(x))

    def ends(least: float) -> list[float]:
        return [side * _first(side * x, side * walsh[::side], cap, least) for side in (1, -1)]

    low, high = ends(_depth(len(x), cap, confidence))
    middle = sum(ends(cap_sum(len(x), cap) / 2)) / 2
    return Interval(low, min(max(middle, low), high), high)


def capped_p(delta: ArrayLike) -> float:
    """Return the exact two-sided p-value for a center of 0, from signed ranks capped at n / 4.

    Args:
        delta: Values from a symmetric distribution, shape [n]. The test leaves out values of 0.
    """
    x = np.asarray(delta, dtype=float)
    x = x[x != 0]
    if not len(x):
        return 1.0
    cap = _cap(len(x))
    least = min(_of_side(x, 0.0, cap), _of_side(-x, 0.0, cap))
    return min(1.0, 2 * float(_distribution(len(x), cap)[least]))


def attained_level(n: int, alpha: float) -> float:
    """Return the real false-alarm rate of Wilcoxon's two-sided test of n values at level `alpha`.

    The rate may be below `alpha`, because p has only a few possible values if n is small.

    Example:
        >>> attained_level(8, 0.05)
        0.0390625
    """
    if n > _EXACT:
        return alpha
    return 2 * float(_distribution(n, n)[_depth(n, n, 1 - alpha) - 1])


def cap_sum(n: int, cap: int) -> int:
    """Return the sum of the ranks from 1 to n, with `cap` in place of each larger rank."""
    return int(np.minimum(np.arange(1, n + 1), cap).sum())


def _cap(n: int) -> int:
    return max(1, math.ceil(n / 4))


def _walsh(x: np.ndarray) -> np.ndarray:
    """Return the sorted means of all pairs of values, including each value paired with itself."""
    rows, columns = np.triu_indices(len(x))
    return np.sort((x[rows] + x[columns]) / 2)


def _of_side(x: np.ndarray, center: float, cap: int) -> int:
    """Return the sum of the capped ranks of the values below a center."""
    away = x - center
    ranks = np.empty(len(x), dtype=int)
    ranks[np.argsort(np.abs(away), kind="stable")] = np.minimum(np.arange(1, len(x) + 1), cap)
    return int(ranks[away < 0].sum())


def _first(x: np.ndarray, walsh: np.ndarray, cap: int, least: float) -> float:
    """Find the smallest mean of a pair above which the rank sum is at least `least`."""
    # The rank sum never falls as the center rises (Bauer 1972), so bisection finds this mean.
    above = (walsh[1:] + walsh[:-1]) / 2
    first = bisect.bisect_left(range(len(above)), least, key=lambda i: _of_side(x, above[i], cap))
    return float(walsh[first])


def _depth(n: int, cap: int, confidence: float) -> int:
    """Return the largest d >= 1 with P(statistic < d) <= (1 - confidence) / 2."""
    depth = _quantile(n, cap, (1 - confidence) / 2)
    if depth < 1:
        raise TooFewSamples(f"{n} pairs cannot give a {confidence:.0%} interval; take more pairs")
    return depth


@functools.lru_cache(maxsize=256)
def _quantile(n: int, cap: int, tail: float) -> int:
    """Return a quantile of the rank sum, which is nearly normal for many uncapped ranks."""
    if cap == n > _EXACT:
        mean, sd = n * (n + 1) / 4, math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
        return max(0, math.floor(mean + float(ndtri(tail)) * sd + 0.5))
    return int(np.searchsorted(_distribution(n, cap), tail, side="right"))


@functools.lru_cache(maxsize=256)
def _distribution(n: int, cap: int) -> np.ndarray:
    """Return P(rank sum <= t) for each t >= 0, if each rank counts with probability 1/2."""
    ways = np.zeros(cap_sum(n, cap) + 1)
    ways[0] = 1.0
    for rank in np.minimum(np.arange(1, n + 1), cap):
        ways[rank:] = ways[rank:] + ways[:-rank]
    return np.cumsum(ways) / 2.0**n
