"""Find the warm-up, the outliers and the autocorrelation of a series of timings."""

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import chdtrc

from nanolib.stats.changes import (
    MIN_SEGMENT,
    change_points,
    levels_between,
    median_of_neighbors,
    step_noise,
)

# The median of five samples hides an isolated spike.
GROUP = 5
# In a series of n medians, each change must reduce the sum of squared deviations by 10 ln n.
_PENALTY = 10.0
# The first steps count as slow if they take at least 5 % longer than later steps.
MOVED = 0.05
# Noise explains a difference of up to four standard deviations.
_CLEAR = 4.0
# Distance from a quartile to the mild fence and to the severe fence, in interquartile ranges.
MILD, SEVERE = 1.5, 3.0


@dataclass(frozen=True)
class SteadyState:
    """Steady part of a series of timings.

    Attributes:
        cut: Number of warm-up samples. The steady part is `series[cut:]`.
        steady: Whether the series reached a steady state.
        got_slower: Whether a segment after the warm-up is slower than the previous segment.
    """

    cut: int = 0
    steady: bool = True
    got_slower: bool = False


def steady_state(series: ArrayLike, group: int = GROUP) -> SteadyState:
    """Find the warm-up of a series of timings from the changes of its level.

    nanolib takes the median of each group of samples, and divides the medians by their noise. The
    algorithm PELT, with the L2 cost and a penalty of 10 ln n, finds the changes of level. The
    warm-up consists of the first segments that are each slower than the next segment. There is no
    steady state if the level changes in the last quarter, or if the warm-up takes at least half of
    the series.

    Args:
        series: Timings in the order taken, shape [n], any unit. With n < 4 · `group`, there is no
            warm-up.
        group: Number of samples per median.

    Source: Killick, Fearnhead & Eckley (2012) for PELT, and Barrett et al. (2017) for the rules.
    """
    x = np.asarray(series, dtype=float)
    groups = len(x) // group
    if groups < 2 * MIN_SEGMENT:
        return SteadyState()
    medians = np.median(x[: groups * group].reshape(groups, group), axis=1)
    steps = np.diff(medians)
    # With few medians, the estimate of the noise between medians is inaccurate. The estimate from
    # samples is too small if the samples are autocorrelated. The median of 5 normal samples has
    # 0.54 times the standard deviation of a sample.
    noise = max(_noise(medians), math.sqrt(math.pi / 2 / (group + 0.5)) * _noise(x))
    if noise == 0:
        if not steps.any():
            return SteadyState()
        # On a coarse clock, most steps are 0, so the smallest other step counts as the noise.
        noise = float(np.abs(steps[steps != 0]).min())
    changes = change_points(medians / noise, _PENALTY * math.log(groups))
    bounds = [0, *changes, groups]
    levels = levels_between(medians, bounds)
    first = 0  # index of the first segment after the warm-up
    while first < len(changes) and levels[first + 1] < levels[first]:
        first += 1
    cut, last_change = bounds[first], bounds[-2]
    return SteadyState(
        cut=cut * group,
        steady=last_change <= 0.75 * groups and cut < groups / 2,
        got_slower=any(b > a for a, b in itertools.pairwise(levels[first:])),
    )


def _noise(series: np.ndarray) -> float:
    """Return `step_noise`, or the noise from the mean square of steps, whichever is larger.

    The mean square leaves out the four largest steps.
    """
    # If a machine has two speeds, the mean square includes the steps between both speeds.
    steps = np.sort(np.abs(np.diff(series)))[:-4]
    if len(steps) <= 4:  # A change of level would dominate the mean of four steps.
        return step_noise(series)
    return max(step_noise(series), math.sqrt(float(np.mean(steps**2)) / 2))


def warm_up(curve: ArrayLike) -> tuple[int | None, str]:
    """Find how many warm-up steps a process needs.

    The second half of the curve counts as warm. The warm-up ends when the median of five
    neighboring steps first falls to the level of the second half, within the noise. Cold calls at
    the start, above the severe fence of the second half, and later changes of level lengthen the
    warm-up. The number is unclear if the steps after the warm-up are still slower, and the noise is
    as large as the difference.

    Args:
        curve: Times of consecutive steps from the start of a process, shape [n], any unit, n >= 20.

    Returns:
        Number of warm-up steps and an empty string, or None and the reason why the number is
        unclear.
    """
    x = np.asarray(curve, dtype=float)
    half = len(x) // 2
    smooth, level = median_of_neighbors(x), float(np.median(x[half:]))
    deviation = max(step_noise(x[half:]), 1.4826 * float(np.median(np.abs(x[half:] - level))))
    # The median of 5 normal values has 0.54 times their standard deviation. The level is noisy too.
    limit = max(level + _CLEAR * 0.6 * deviation, float(smooth[half:].max()), level * (1 + MOVED))
    slow = smooth[:half] > limit
    found = steady_state(x)
    head = half if slow.all() else int(np.argmin(slow))
    _, fence = fences(x[half:], SEVERE)
    cold = int(np.argmin(x > fence))  # The fence is above most of the second half.
    steps = max(head, found.cut, cold)
    if not found.steady or steps >= half:
        return None, "the curve does not settle within its first half"
    if slow[steps:].any():
        return None, f"the curve rises again at step {steps + int(np.argmax(slow[steps:])) + 1}"
    if smooth[steps] > level * (1 + MOVED):
        share = f"{smooth[steps] / level:.2f}× the later median"
        still = f"from step {steps + 1} on, the steps still take {share}"
        return None, f"{still}, and the noise of the curve is as large as the difference"
    return steps, ""


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
