"""Analyze a series of timings: the end of its warm-up, its outliers and its autocorrelation."""

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

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

GROUP = 5  # Samples per median. The median hides an isolated spike.
_PENALTY = 10.0  # Factor of ln n in the penalty of a change, in squared deviations.
MOVED = 0.05  # Smallest slowdown of the first steps that counts, as a share of the later level.
_CLEAR = 4.0  # Largest difference that noise explains, in standard deviations.
# Distance from a quartile to the mild fence and to the severe fence, in interquartile ranges.
MILD, SEVERE = 1.5, 3.0


@dataclass(frozen=True)
class SteadyState:
    """Steady part of a series of timings.

    Attributes:
        cut: Number of warm-up samples, so that `series[cut:]` is the steady part.
        changes: Index of the first sample after each change of level.
        steady: Whether the series settled, so that a verdict may use its samples.
        got_slower: Whether a segment after the warm-up is slower than the segment before.
    """

    cut: int = 0
    changes: tuple[int, ...] = ()
    steady: bool = True
    got_slower: bool = False


def steady_state(series: ArrayLike, group: int = GROUP) -> SteadyState:
    """Find the warm-up of a series of timings by changes of its level.

    PELT with the L2 cost and a penalty of 10 ln n finds the changes in the medians of groups. The
    noise between neighboring medians is the scale. The first segments are warm-up as long as each
    next segment is faster. There is no steady state if the level changes in the last quarter, or if
    the warm-up takes half of the series.

    Args:
        series: Timings in the order taken, shape [n], any unit. With n < 4 · `group`, there is no
            warm-up.
        group: Samples per median.

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
        # On a coarse clock most steps are 0, so the smallest other step is the scale.
        noise = float(np.abs(steps[steps != 0]).min())
    changes = change_points(medians / noise, _PENALTY * math.log(groups))
    bounds = [0, *changes, groups]
    levels = levels_between(medians, bounds)
    cut = 0
    for index, change in enumerate(changes):
        if levels[index + 1] >= levels[index]:
            break
        cut = change
    after = [level for bound, level in zip(bounds, levels, strict=False) if bound >= cut]
    got_slower = any(b > a for a, b in itertools.pairwise(after))
    late = any(change > 0.75 * groups for change in changes)
    return SteadyState(
        cut=cut * group,
        changes=tuple(change * group for change in changes),
        steady=not late and cut < groups / 2,
        got_slower=got_slower,
    )


def _noise(series: np.ndarray) -> float:
    """Return `step_noise`, or the noise from the mean square of steps, whichever is larger.

    The mean square leaves out the four largest steps.
    """
    # The mean square shows both modes of a machine with two modes. The median step shows only one.
    steps = np.sort(np.abs(np.diff(series)))[:-4]
    if len(steps) <= 4:  # A change of level would dominate the mean of so few steps.
        return step_noise(series)
    return max(step_noise(series), math.sqrt(float(np.mean(steps**2)) / 2))


def leading_slow_samples(series: ArrayLike) -> int:
    """Count the cold calls, which are the first samples above the severe fence of the second half.

    Args:
        series: Timings in the order taken, shape [n]. The second half of the series counts as warm.
    """
    x = np.asarray(series, dtype=float)
    _, limit = fences(x[len(x) // 2 :], SEVERE)
    above = x > limit
    return int(np.argmin(above)) if not above.all() else len(x)


def warm_up(curve: ArrayLike) -> tuple[int | None, str]:
    """Find how many warm-up steps a process needs.

    The second half of the curve counts as warm. The warm-up ends when the median of five neighbors
    first reaches the level of the second half, within the noise. Single cold calls and later
    changes of level lengthen the warm-up. The result is unclear if the next step is still slower
    and only a large noise could explain the difference.

    Args:
        curve: Times of consecutive steps from the start of a process, shape [n], any unit, n >= 20.

    Returns:
        Number of warm-up steps and an empty text, or None and the reason why the number is unclear.
    """
    x = np.asarray(curve, dtype=float)
    half = len(x) // 2
    smooth, level = median_of_neighbors(x), float(np.median(x[half:]))
    deviation = max(step_noise(x[half:]), 1.4826 * float(np.median(np.abs(x[half:] - level))))
    # The median of 5 normal values has 0.54 times their deviation, and the level is uncertain too.
    limit = max(level + _CLEAR * 0.6 * deviation, float(smooth[half:].max()), level * (1 + MOVED))
    slow = smooth[:half] > limit
    found = steady_state(x)
    head = half if slow.all() else int(np.argmin(slow))
    steps = max(head, found.cut, leading_slow_samples(x))
    if not found.steady or steps >= half:
        return None, "the curve does not settle within its first half"
    if slow[steps:].any():
        return None, f"the curve rises again at step {steps + int(np.argmax(slow[steps:])) + 1}"
    if smooth[steps] > level * (1 + MOVED):
        share = f"{smooth[steps] / level:.2f}× the later median"
        still = f"from step {steps + 1} on, the steps still take {share}"
        return None, f"{still}, and the noise of the curve is as large as the difference"
    return steps, ""


class OutlierCount(NamedTuple):
    """Number of samples between the mild and severe fences, and beyond the severe fences."""

    mild: int
    severe: int


def fences(samples: ArrayLike, reach: float) -> tuple[float, float]:
    """Return Tukey's lower and upper fence. Samples beyond a fence are outliers.

    Args:
        samples: Samples, shape [n], any unit.
        reach: Distance from a quartile to the fence, in interquartile ranges, for example `MILD`.

    Source: Tukey (1977), Exploratory Data Analysis.
    """
    first, third = np.percentile(np.asarray(samples, dtype=float), [25, 75])
    return first - reach * (third - first), third + reach * (third - first)


def _are_beyond(samples: np.ndarray, reach: float) -> np.ndarray:
    low, high = fences(samples, reach)
    return (samples < low) | (samples > high)


def count_outliers(samples: ArrayLike) -> OutlierCount:
    """Count the mild and severe outliers of samples, shape [n]."""
    x = np.asarray(samples, dtype=float)
    severe = int(_are_beyond(x, SEVERE).sum())
    return OutlierCount(int(_are_beyond(x, MILD).sum()) - severe, severe)


def remove_outliers(samples: ArrayLike) -> np.ndarray:
    """Drop the samples beyond the mild fences, to reproduce results of tools that drop outliers.

    On a machine with two modes, only 2 % of the intervals contain the true mean, if you compute the
    intervals from the remaining samples.
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
