"""Signed-rank statistics of a center: Wilcoxon's, and one with capped ranks, which values far off do not move."""

from __future__ import annotations

import bisect
import functools
import math

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtri

from nanolib.stats.intervals import Interval, TooFewSamples

_EXACT = 60  # values; Wilcoxon's statistic of more is normal enough


def hodges_lehmann(delta: ArrayLike, confidence: float = 0.95) -> Interval:
    """Return Hodges and Lehmann's estimate of a center, and the interval that Wilcoxon's signed-rank test does not reject.

    Args:
        delta: Shape [n], n >= 6 at 95 %; symmetric about the center.
        confidence: Nominal coverage.

    Raises:
        TooFewSamples: n is too small for the confidence.

    Source: Hodges & Lehmann (1963); Hollander, Wolfe & Chicken (2014), section 3.2-3.3.
    """
    x = np.asarray(delta, dtype=float)
    depth = _depth(len(x), len(x), confidence)
    walsh = _walsh(x)
    return Interval(float(walsh[depth - 1]), float(np.median(walsh)), float(walsh[-depth]))


def capped_centre(delta: ArrayLike, confidence: float = 0.95) -> Interval:
    """Return the center and the interval that the signed-rank test with ranks capped at a quarter does not reject.

    Ranks of |delta| above n / 4 count n / 4. Of nearly normal values it needs a tenth more than Wilcoxon's test. If a third of the
    values is far off on either side, it moves little, because they do not get the largest ranks.

    Args:
        delta: Shape [n], n >= 6 at 95 %; symmetric about the center.
        confidence: Nominal coverage. The distribution is exact for any symmetric values.

    Raises:
        TooFewSamples: n is too small for the confidence.

    Source: Policello & Hettmansperger (1976) for Winsorized signed ranks; Bauer (1972) for inverting a rank test.
    """
    x = np.asarray(delta, dtype=float)
    walsh, cap = np.unique(_walsh(x)), _cap(len(x))

    def ends(least: float) -> list[float]:
        return [side * _first(side * x, side * walsh[::side], cap, least) for side in (1, -1)]

    low, high = ends(_depth(len(x), cap, confidence))
    middle = sum(ends(cap_sum(len(x), cap) / 2)) / 2
    return Interval(low, min(max(middle, low), high), high)


def capped_p(delta: ArrayLike) -> float:
    """Return the exact two-sided p of "the center is 0" by the same test; values of 0 are left out.

    Args:
        delta: Shape [n].
    """
    x = np.asarray(delta, dtype=float)
    x = x[x != 0]
    if not len(x):
        return 1.0
    cap = _cap(len(x))
    least = min(_of_side(x, 0.0, cap), _of_side(-x, 0.0, cap))
    return min(1.0, 2 * float(_distribution(len(x), cap)[least]))


def attained_level(n: int, alpha: float) -> float:
    """Return how often Wilcoxon's two-sided test of n values at level `alpha` rejects what is true: few ranks leave gaps in p.

    Example:
        >>> attained_level(8, 0.05)
        0.0390625
    """
    if n > _EXACT:
        return alpha
    return 2 * float(_distribution(n, n)[_depth(n, n, 1 - alpha) - 1])


def cap_sum(n: int, cap: int) -> int:
    """Return the sum of the ranks 1 … n, each capped."""
    return int(np.minimum(np.arange(1, n + 1), cap).sum())


def _cap(n: int) -> int:
    return max(1, math.ceil(n / 4))


def _walsh(x: np.ndarray) -> np.ndarray:
    """Return the means of all pairs of `x`, each element with itself included, in order."""
    rows, columns = np.triu_indices(len(x))
    return np.sort((x[rows] + x[columns]) / 2)


def _of_side(x: np.ndarray, center: float, cap: int) -> int:
    """Sum the capped ranks of the values below a center; values at equal distance are ranked in their order."""
    away = x - center
    ranks = np.empty(len(x), dtype=int)
    ranks[np.argsort(np.abs(away), kind="stable")] = np.minimum(np.arange(1, len(x) + 1), cap)
    return int(ranks[away < 0].sum())


def _first(x: np.ndarray, walsh: np.ndarray, cap: int, least: float) -> float:
    """Return the first Walsh average just above which the sum of ranks reaches `least`; it never falls (Bauer 1972)."""
    above = (walsh[1:] + walsh[:-1]) / 2
    first = bisect.bisect_left(range(len(above)), least, key=lambda i: _of_side(x, above[i], cap))
    return float(walsh[first])


def _depth(n: int, cap: int, confidence: float) -> int:
    """Return the largest d with P(statistic < d) <= (1 - confidence) / 2, at least 1."""
    depth = _quantile(n, cap, (1 - confidence) / 2)
    if depth < 1:
        raise TooFewSamples(f"{n} pairs cannot give a {confidence:.0%} interval; take more")
    return depth


@functools.lru_cache(maxsize=256)
def _quantile(n: int, cap: int, tail: float) -> int:
    """Return a quantile: exact, except for Wilcoxon's own statistic of many values, which is normal."""
    if cap == n > _EXACT:
        mean, sd = n * (n + 1) / 4, math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
        return max(0, math.floor(mean + float(ndtri(tail)) * sd + 0.5))
    return int(np.searchsorted(_distribution(n, cap), tail, side="right"))


@functools.lru_cache(maxsize=256)
def _distribution(n: int, cap: int) -> np.ndarray:
    """Return P(statistic <= t) for t from 0 on: each rank counts with probability 1/2."""
    ways = np.zeros(cap_sum(n, cap) + 1)
    ways[0] = 1.0
    for rank in np.minimum(np.arange(1, n + 1), cap):
        ways[rank:] = ways[rank:] + ways[:-rank]
    return np.cumsum(ways) / 2.0**n
