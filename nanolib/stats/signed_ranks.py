"""Estimate the center of a distribution by Wilcoxon's signed ranks."""

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
    depth = _quantile(len(x), (1 - confidence) / 2)
    if depth < 1:
        raise TooFewSamples(
            f"{len(x)} pairs cannot give a {confidence:.0%} interval; take more pairs"
        )
    rows, columns = np.triu_indices(len(x))
    walsh = np.sort((x[rows] + x[columns]) / 2)
    return Interval(float(walsh[depth - 1]), float(np.median(walsh)), float(walsh[-depth]))


@functools.lru_cache(maxsize=256)
def _quantile(n: int, tail: float) -> int:
    """Return the largest d with P(rank sum < d) <= tail, if each rank counts with probability 1/2."""
    if n > _EXACT:
        mean, sd = n * (n + 1) / 4, math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
        return max(0, math.floor(mean + float(ndtri(tail)) * sd + 0.5))
    ways = np.zeros(n * (n + 1) // 2 + 1)
    ways[0] = 1.0
    for rank in range(1, n + 1):
        ways[rank:] = ways[rank:] + ways[:-rank]
    return int(np.searchsorted(np.cumsum(ways) / 2.0**n, tail, side="right"))
