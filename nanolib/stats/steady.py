"""Analyze a series of timings: where its warm-up ends, its outliers, and whether neighbors resemble each other."""

from __future__ import annotations

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

GROUP = 5  # samples per median: an isolated spike must not look like a change
_PENALTY = 10.0  # per ln n
MOVED = 0.05  # of the level; a smaller difference between the first steps and the later ones does not count
_CLEAR = 4.0  # standard deviations; what is further above the level is not noise
MILD, SEVERE = (
    1.5,
    3.0,
)  # interquartile ranges from a quartile to the fence beyond which outliers begin


@dataclass(frozen=True)
class SteadyState:
    """Where a series of timings settles.

    Attributes:
        cut: Samples to drop from the head; the steady part is `series[cut:]`.
        changes: Where the level changed, in samples.
        steady: False if the series kept changing, so that no verdict may use it.
        got_slower: A later segment is slower than the one before.
    """

    cut: int = 0
    changes: tuple[int, ...] = ()
    steady: bool = True
    got_slower: bool = False


def steady_state(series: ArrayLike, group: int = GROUP) -> SteadyState:
    """Find the warm-up of a series of timings by change points in its level.

    Change points are those of PELT with the L2 cost on medians of 5, scaled by the noise between neighboring medians
    (which a change of level hardly affects), with a penalty of 10 ln n. The head is cut only if what follows is faster. A
    change in the last quarter, or a cut of half or more, means that there is no steady state.

    Args:
        series: Timings in the order taken, shape [n], any unit. With n < 20 nothing is cut.
        group: Samples per median; a block, where blocks are longer than 5 samples.

    Source: Killick, Fearnhead & Eckley (2012) for PELT; Barrett et al. (2017) for the classification.
    """
    x = np.asarray(series, dtype=float)
    groups = len(x) // group
    if groups < 2 * MIN_SEGMENT:
        return SteadyState()
    medians = np.median(x[: groups * group].reshape(groups, group), axis=1)
    steps = np.diff(medians)
    # Two estimates of the noise of one median: between neighboring medians, and from neighboring samples (the median of 5
    # normal ones has 0.54 of their sd). With few medians the first one varies. Autocorrelation makes the second one too small.
    noise = max(_noise(medians), math.sqrt(math.pi / 2 / (group + 0.5)) * _noise(x))
    if noise == 0:  # the clock is coarse, so the smallest step is the scale
        distinct = np.abs(steps[steps != 0])
        if not len(distinct):
            return SteadyState()
        noise = float(distinct.min())
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
    """Return `step_noise`, or the noise of all steps but the four largest: the median of the steps shows only one of two modes."""
    steps = np.sort(np.abs(np.diff(series)))[:-4]
    if len(steps) <= 4:  # too few to leave out changes
        return step_noise(series)
    return max(step_noise(series), math.sqrt(float(np.mean(steps**2)) / 2))


def leading_slow_samples(series: ArrayLike) -> int:
    """Count the samples at the head above the severe fence of the second half: cold calls.

    Medians of 5 hide a single slow first call on purpose. It is counted here.

    Args:
        series: Timings in the order taken, shape [n]. The second half counts as warm.
    """
    x = np.asarray(series, dtype=float)
    _, limit = fences(x[len(x) // 2 :], SEVERE)
    above = x > limit
    return int(np.argmin(above)) if not above.all() else len(x)


def warm_up(curve: ArrayLike) -> tuple[int | None, str]:
    """Find how many warm-up steps a curve of single steps needs.

    The second half counts as warm. The curve is smoothed (the median of five neighbors), and its head ends where the smoothed curve
    comes down to the level that the second half reaches with its own noise. Single cold calls and changes of level lengthen the
    head. There is no clear answer if the next step is still above the level and only the noise could explain it.

    Args:
        curve: Times of single steps from the first one of a process, shape [n], any unit; n >= 20.

    Returns:
        The number of steps and an empty reason; or None, and why it is unclear.
    """
    x = np.asarray(curve, dtype=float)
    half = len(x) // 2
    smooth, level = median_of_neighbors(x), float(np.median(x[half:]))
    deviation = max(step_noise(x[half:]), 1.4826 * float(np.median(np.abs(x[half:] - level))))
    # The median of five normal values has 0.54 of their deviation; the level has its own share.
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
        still = f"from step {steps + 1} on the steps still take {share}"
        return None, f"{still}, and the curve's noise is as large"
    return steps, ""


class OutlierCount(NamedTuple):
    """How many samples are beyond the mild fences only, and beyond the severe ones."""

    mild: int
    severe: int


def fences(samples: ArrayLike, reach: float) -> tuple[float, float]:
    """Return Tukey's lower and upper fence, beyond which outliers begin.

    Args:
        samples: Shape [n], any unit.
        reach: Interquartile ranges from a quartile to its fence, `MILD` or `SEVERE`.

    Source: Tukey (1977), Exploratory Data Analysis.
    """
    first, third = np.percentile(np.asarray(samples, dtype=float), [25, 75])
    return first - reach * (third - first), third + reach * (third - first)


def _are_beyond(samples: np.ndarray, reach: float) -> np.ndarray:
    low, high = fences(samples, reach)
    return (samples < low) | (samples > high)


def count_outliers(samples: ArrayLike) -> OutlierCount:
    """Count the `samples`, shape [n], beyond their own fences. Outliers are labeled and kept."""
    x = np.asarray(samples, dtype=float)
    severe = int(_are_beyond(x, SEVERE).sum())
    return OutlierCount(int(_are_beyond(x, MILD).sum()) - severe, severe)


def remove_outliers(samples: ArrayLike) -> np.ndarray:
    """Drop the samples beyond the mild fences, to reproduce a result that was made so.

    On a machine with two modes the interval of the rest is right only 2 % of the time.
    """
    x = np.asarray(samples, dtype=float)
    return x[~_are_beyond(x, MILD)]


def ljung_box_p(samples: ArrayLike) -> float | None:
    """Return the p-value of "no autocorrelation up to lag min(10, n/5)"; None with n < 20 or constant samples.

    Args:
        samples: In the order taken, shape [n].

    Source: Ljung & Box (1978); agrees with statsmodels' acorr_ljungbox.
    """
    x = np.asarray(samples, dtype=float)
    n, lags = len(x), min(10, len(x) // 5)
    if n < 20 or np.ptp(x) == 0:
        return None
    x = x - x.mean()
    correlations = [float(x[lag:] @ x[:-lag] / (x @ x)) for lag in range(1, lags + 1)]
    q = n * (n + 2) * sum(r**2 / (n - lag) for lag, r in enumerate(correlations, 1))
    return float(chdtrc(lags, q))
