"""Find changes of level: the warm-up in a series of timings, and changes in a history of runs."""

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from nanolib.stats.intervals import SEVERE, fences

# In a series of timings, there are at least two values between two changes of level.
MIN_SEGMENT = 2
# A change of level needs three runs on each side, because one or two runs may be a spike.
LEAST_RUNS = 3
LEAST_HISTORY = 2 * LEAST_RUNS
# In a history of n runs, each change must reduce the sum of squared deviations by 8 ln n.
PENALTY = 8.0
# nanolib compares a change with the noise of the eight runs on each side, because noise may grow.
_NEAR = 8
# The median of five samples hides an isolated spike.
GROUP = 5
# In a series of n medians of timings, each change must reduce the sum by 10 ln n.
_TIMING_PENALTY = 10.0
# The first steps count as slow if they take at least 5 % longer than later steps.
MOVED = 0.05
# Noise explains a difference of up to four standard deviations.
_CLEAR = 4.0


def step_noise(series: ArrayLike) -> float:
    """Estimate the standard deviation of a series from the steps between neighboring values.

    A few changes of level hardly affect the estimate.
    """
    steps = np.diff(series)
    return 1.4826 * float(np.median(np.abs(steps - np.median(steps)))) / math.sqrt(2)


def change_points(series: np.ndarray, penalty: float, least: int = MIN_SEGMENT) -> list[int]:
    """Find the changes of level in a series, with the algorithm PELT and the L2 cost.

    Args:
        series: Values divided by their noise, shape [n].
        penalty: Amount by which each change must reduce the sum of squared deviations.
        least: Smallest number of values between two changes.

    Returns:
        Index of the first value after each change.

    Source: Killick, Fearnhead & Eckley (2012), with the code of `ruptures`.
    """
    import ruptures  # The import is slow, so nanolib delays the import until the first search.

    # The linear kernel gives the L2 cost in compiled code. `ruptures.Pelt` is far slower.
    search = ruptures.KernelCPD(kernel="linear", min_size=least).fit(series[:, None])
    return [int(point) for point in search.predict(pen=penalty)[:-1]]


def changes_of_level(
    values: ArrayLike, uncertainty: ArrayLike, least: float
) -> list[tuple[int, float]]:
    """Find where the level of a history of estimates changed, and by which factor.

    The search reads medians of five neighboring values, so one or two outliers are not a change.
    The unit of a change is the noise between neighbors or the uncertainty of the estimates,
    whichever is larger. In this unit, neither a quiet period nor a wide interval looks like a
    change. A change must also exceed the noise of the runs near the change, because noise may grow
    while the level stays the same.

    Args:
        values: Estimates in order of time, shape [n], above 0. With n < 6, there is no change.
        uncertainty: Half-width of each 95 % interval, as a share of the estimate, shape [n].
        least: Smallest change that counts, as a share of the old level.

    Returns:
        Index of the first value after each change, and the ratio of the new level to the old level.
    """
    logs, widths = np.log(values), np.asarray(uncertainty, dtype=float)
    n = len(logs)
    if n < LEAST_HISTORY:
        return []
    smooth, penalty = median_of_neighbors(logs), PENALTY * math.log(n)
    points = change_points(smooth / _history_noise(logs, widths), penalty, LEAST_RUNS)
    bounds = _beyond_local_noise([0, *points, n], smooth, logs, widths)
    seen, steps = (np.diff(levels_between(series, bounds)) for series in (smooth, logs))
    found = []
    for index, smoothed, step in zip(bounds[1:-1], seen, steps, strict=True):
        if abs(smoothed) > math.log1p(least):
            found.append((index, math.exp(step)))
    return found


def _beyond_local_noise(
    bounds: list[int], smooth: np.ndarray, logs: np.ndarray, uncertainty: np.ndarray
) -> list[int]:
    """Drop the weakest changes of level until each remaining change exceeds the noise near it."""
    while len(bounds) > 2:
        levels = np.repeat(levels_between(logs, bounds), np.diff(bounds))
        gains = [
            _gain(smooth[before:bound], smooth[bound:after])
            / _noise_near(bound, logs - levels, uncertainty) ** 2
            for before, bound, after in zip(bounds, bounds[1:], bounds[2:], strict=False)
        ]
        weakest = int(np.argmin(gains))
        if gains[weakest] >= PENALTY * math.log(len(logs)):
            break
        del bounds[weakest + 1]
    return bounds


def _gain(before: np.ndarray, after: np.ndarray) -> float:
    """Return how much the sum of squared deviations falls if each segment has its own level."""
    share = len(before) * len(after) / (len(before) + len(after))
    return share * float(after.mean() - before.mean()) ** 2


def _noise_near(bound: int, residuals: np.ndarray, uncertainty: np.ndarray) -> float:
    """Return the noise of the runs before a change or after the change, whichever is larger.

    The function reads a window of eight runs on each side. If fewer runs follow or precede the
    change, the window extends across the change.
    """
    last = max(0, len(residuals) - _NEAR)
    starts = (max(0, bound - _NEAR), min(bound, last))
    return max(_history_noise(residuals[a : a + _NEAR], uncertainty[a : a + _NEAR]) for a in starts)


def levels_between(series: np.ndarray, bounds: list[int]) -> list[float]:
    """Return the median of the values between each pair of neighboring bounds.

    Example:
        >>> levels_between(np.array([1.0, 2.0, 3.0, 7.0]), [0, 3, 4])
        [2.0, 7.0]
    """
    return [float(np.median(series[a:b])) for a, b in itertools.pairwise(bounds)]


def _history_noise(logs: np.ndarray, widths: np.ndarray) -> float:
    """Return the noise between neighboring estimates or their uncertainty, whichever is larger."""
    return max(step_noise(logs), float(np.median(widths)) / 1.96, 1e-4)


def median_of_neighbors(series: np.ndarray) -> np.ndarray:
    """Return the median of each value and its four nearest neighbors, shape [n], n >= 5."""
    width = 2 * LEAST_RUNS - 1
    medians = np.median(np.lib.stride_tricks.sliding_window_view(series, width), axis=1)
    return np.pad(medians, LEAST_RUNS - 1, mode="edge")


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
    noise = max(_timing_noise(medians), math.sqrt(math.pi / 2 / (group + 0.5)) * _timing_noise(x))
    if noise == 0:
        if not steps.any():
            return SteadyState()
        # On a coarse clock, most steps are 0, so the smallest other step counts as the noise.
        noise = float(np.abs(steps[steps != 0]).min())
    changes = change_points(medians / noise, _TIMING_PENALTY * math.log(groups))
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


def _timing_noise(series: np.ndarray) -> float:
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
