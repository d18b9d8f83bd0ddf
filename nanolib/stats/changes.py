"""Find changes of level in a series of timings or in a history of runs."""

import itertools
import math

import numpy as np
from numpy.typing import ArrayLike

# In a series of timings, there are at least two values between two changes of level.
MIN_SEGMENT = 2
# A change of level needs three runs on each side, because one or two runs may be a spike.
LEAST_RUNS = 3
LEAST_HISTORY = 2 * LEAST_RUNS
# In a history of n runs, each change must reduce the sum of squared deviations by 8 ln n.
PENALTY = 8.0
# nanolib compares a change with the noise of the eight runs on each side, because noise may grow.
_NEAR = 8


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
