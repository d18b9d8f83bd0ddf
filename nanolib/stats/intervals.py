"""Estimate values with their intervals from samples, and find what makes an interval unreliable.

Outliers and autocorrelation make an interval unreliable. This file also fits the cost of messages.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import (  # Importing `scipy.stats` would take a second.
    bdtr,
    chdtrc,
    ndtri,
    stdtrit,
)

from nanolib.measurement import BadInput

# With more than 60 values, the distribution of Wilcoxon's statistic is nearly normal.
_EXACT = 60
# Distance from a quartile to the mild fence and to the severe fence, in interquartile ranges.
MILD, SEVERE = 1.5, 3.0


class Interval(NamedTuple):
    """An estimate and the two ends of its interval, in the same unit."""

    low: float
    estimate: float
    high: float


class TooFewSamples(ValueError):
    """There are too few samples for the requested confidence."""


def median_interval(samples: ArrayLike, confidence: float = 0.95) -> Interval:
    """Return the distribution-free interval for the median, interpolated between order statistics.

    Args:
        samples: Block medians, shape [n], any unit, n >= 6 at 95 %.
        confidence: Nominal coverage in (0, 1).

    Returns:
        Interval(low, estimate, high) in the unit of `samples`.

    Raises:
        TooFewSamples: n is too small for the requested confidence.
        BadInput: A sample is not finite, or the confidence is not in (0, 1).

    Source: Hettmansperger & Sheather (1986). `scipy.stats.mstats.median_cihs` gives the same ends.
    """
    x = np.sort(_check_arguments(samples, confidence))
    n = len(x)
    if range_confidence(n) < confidence:
        raise TooFewSamples(
            f"{n} samples cannot give a {confidence:.0%} interval for the median; take more samples"
        )
    depth = 1
    while range_confidence(n, depth + 1) >= confidence:
        depth += 1
    wide, narrow = range_confidence(n, depth), range_confidence(n, depth + 1)
    share = (wide - confidence) / (wide - narrow)
    weight = (n - depth) * share / (depth + (n - 2 * depth) * share)
    low = (1 - weight) * x[depth - 1] + weight * x[depth]
    high = (1 - weight) * x[n - depth] + weight * x[n - depth - 1]
    return Interval(float(low), float(np.median(x)), float(high))


def mean_interval(samples: ArrayLike, confidence: float = 0.95) -> Interval:
    """Return Student's interval for the mean of nearly normal values.

    Args:
        samples: Values, shape [n], any unit, n >= 2.
        confidence: Nominal coverage in (0, 1).

    Raises:
        TooFewSamples: There are fewer than two samples.
        BadInput: A sample is not finite, or the confidence is not in (0, 1).

    Source: Student (1908). `scipy.stats.t.interval` gives the same ends.
    """
    x = _check_arguments(samples, confidence)
    n = len(x)
    if n < 2:
        raise TooFewSamples(f"{n} sample(s) give no interval for the mean; take at least two")
    mean = float(x.mean())
    half = float(stdtrit(n - 1, (1 + confidence) / 2) * x.std(ddof=1) / np.sqrt(n))
    return Interval(mean - half, mean, mean + half)


def _check_arguments(samples: ArrayLike, confidence: float) -> np.ndarray:
    """Return the samples as an array, after a check of both arguments."""
    x = np.asarray(samples, dtype=float)
    if x.ndim != 1 or not np.isfinite(x).all():
        raise BadInput("samples: a sample is not a finite number; give one list of finite numbers")
    if not 0 < confidence < 1:
        raise BadInput(f"confidence: must be between 0 and 1, got {confidence!r}")
    return x


def range_confidence(n: int, depth: int = 1) -> float:
    """Return the chance that a range of n sorted values contains the true median.

    Args:
        n: Number of values.
        depth: The range extends from the `depth`-th smallest to the `depth`-th largest value. The
            range of all values contains the median with the chance 1 − 2^(1−n).
    """
    return float(1 - 2 * bdtr(depth - 1, n, 0.5))


def hodges_lehmann(delta: ArrayLike, confidence: float = 0.95) -> Interval:
    """Return Hodges and Lehmann's estimate of a center, with the interval of Wilcoxon's test.

    Args:
        delta: Values from a symmetric distribution, shape [n], n >= 6 at 95 %.
        confidence: Nominal coverage in (0, 1).

    Raises:
        TooFewSamples: n is too small for the confidence.
        BadInput: A value is not finite, or the confidence is not in (0, 1).

    Source: Hodges & Lehmann (1963), and Hollander, Wolfe & Chicken (2014), sections 3.2 and 3.3.
    """
    x = _check_arguments(delta, confidence)
    depth = _quantile(len(x), (1 - confidence) / 2)
    if depth < 1:
        raise TooFewSamples(
            f"{len(x)} pairs cannot give a {confidence:.0%} interval; take more pairs"
        )
    rows, columns = np.triu_indices(len(x))
    walsh = np.sort((x[rows] + x[columns]) / 2)
    return Interval(float(walsh[depth - 1]), float(np.median(walsh)), float(walsh[-depth]))


@functools.cache
def _quantile(n: int, tail: float) -> int:
    """Return the largest d with P(rank sum < d) <= tail, if a rank counts with probability 1/2."""
    if n > _EXACT:
        mean, sd = n * (n + 1) / 4, math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
        return max(0, math.floor(mean + float(ndtri(tail)) * sd + 0.5))
    ways = np.zeros(n * (n + 1) // 2 + 1)
    ways[0] = 1.0
    for rank in range(1, n + 1):
        ways[rank:] += ways[:-rank]
    return int(np.searchsorted(np.cumsum(ways) / 2.0**n, tail, side="right"))


class LinkCost(NamedTuple):
    """Linear model of the time to send messages.

    Attributes:
        alpha: Time per message, in s.
        beta: Time per byte, in s.
        residuals: Observed minus predicted time, as a share of the observed time, shape [n].
    """

    alpha: float
    beta: float
    residuals: tuple[float, ...]

    def seconds(self, messages: float, sent_bytes: float) -> float:
        """Predict the time of consecutive messages with `sent_bytes` in total, in s."""
        return self.alpha * messages + self.beta * sent_bytes


def link_cost(messages: ArrayLike, sent_bytes: ArrayLike, seconds: ArrayLike) -> LinkCost:
    """Fit the model seconds ≈ α · messages + β · bytes, with α and β not below zero.

    The fit minimizes squared relative errors, so short and long messages have equal weight.

    Args:
        messages: Number of consecutive messages in each observation, shape [n], n >= 2.
        sent_bytes: Total bytes of these messages, shape [n].
        seconds: Time of each observation, in s, shape [n], above 0.

    Raises:
        TooFewSamples: All observations have the same number of bytes per message.

    Source: Hockney (1994), The communication challenge for MPP.
    """
    m, b, s = (np.asarray(x, dtype=float) for x in (messages, sent_bytes, seconds))
    if len(np.unique(b / m)) < 2:
        raise TooFewSamples(
            "messages of one size do not separate alpha from beta; send messages of several sizes"
        )
    from scipy.optimize import nnls

    # The solver is inaccurate if the columns differ by powers of ten, so nanolib scales the bytes.
    most = float(b.max())
    design = np.stack([m, b / most], axis=1) / s[:, None]
    (alpha, beta), _ = nnls(design, np.ones_like(s))
    residuals = 1 - design @ (alpha, beta)
    return LinkCost(float(alpha), float(beta / most), tuple(residuals.tolist()))


def fences(samples: ArrayLike, reach: float) -> tuple[float, float]:
    """Return Tukey's lower and upper fences. Samples beyond a fence are outliers.

    Args:
        samples: Samples, shape [n], any unit.
        reach: Distance from a quartile to the fence, in interquartile ranges, for example `MILD`.

    Source: Tukey (1977), Exploratory Data Analysis.
    """
    first, third = np.percentile(samples, [25, 75])
    return first - reach * (third - first), third + reach * (third - first)


def _are_beyond(samples: np.ndarray, reach: float) -> np.ndarray:
    low, high = fences(samples, reach)
    return (samples < low) | (samples > high)


def count_outliers(samples: ArrayLike) -> tuple[int, int]:
    """Count the outliers of samples, shape [n].

    Returns:
        Number of mild outliers, which are within the severe fences, and of severe outliers.
    """
    x = np.asarray(samples, dtype=float)
    severe = int(_are_beyond(x, SEVERE).sum())
    return int(_are_beyond(x, MILD).sum()) - severe, severe


def without_outliers(samples: ArrayLike) -> np.ndarray:
    """Drop the samples beyond the mild fences, to reproduce results of tools that drop outliers.

    Intervals from the remaining samples are not valid. On a machine with two speeds, only 2 % of
    these intervals contain the true mean.
    """
    x = np.asarray(samples, dtype=float)
    return x[~_are_beyond(x, MILD)]


def ljung_box_p(samples: ArrayLike) -> float | None:
    """Return the p-value of the hypothesis that samples have no autocorrelation.

    The test uses lags up to min(10, n / 5). The result is None if n < 20 or all samples are equal.

    Args:
        samples: Samples in the order taken, shape [n].

    Source: Ljung & Box (1978). `acorr_ljungbox` of statsmodels gives the same p-value.
    """
    x = np.asarray(samples, dtype=float)
    n, lags = len(x), min(10, len(x) // 5)
    if n < 20 or np.ptp(x) == 0:
        return None
    x = x - x.mean()
    correlations = [float(x[lag:] @ x[:-lag] / (x @ x)) for lag in range(1, lags + 1)]
    q = n * (n + 2) * sum(r**2 / (n - lag) for lag, r in enumerate(correlations, 1))
    return float(chdtrc(lags, q))
