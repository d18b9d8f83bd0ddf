"""Find where the level of a series changed."""

from __future__ import annotations

import itertools
import math

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtrit

MIN_SEGMENT = 2  # values between two changes of a series of timings
LEAST_RUNS = 3  # of a history on either side of a change; one or two that stick out are a spike
LEAST_HISTORY = 2 * LEAST_RUNS  # runs that can show one
PENALTY = 8.0  # per ln n: larger finds fewer changes
_NEAR = 8  # runs on either side of a change whose noise it must exceed, since noise may grow while the level stays
_RECENT = 10  # runs before the last ones, whose noise is that of now
_ALARMS = 0.01  # share of level histories in which a run may stick out
_FAR = 5.0  # deviations by its own interval: what is nearer to the level before does not stick out


def step_noise(series: ArrayLike) -> float:
    """Return the standard deviation by the steps between neighbors, which a few changes of level hardly affect."""
    steps = np.diff(np.asarray(series, dtype=float))
    return 1.4826 * float(np.median(np.abs(steps - np.median(steps)))) / math.sqrt(2)


def change_points(series: ArrayLike, penalty: float, least: int = MIN_SEGMENT) -> list[int]:
    """Find where the level of a series changes, by PELT with the L2 cost.

    Args:
        series: Shape [n], in units of its own noise.
        penalty: The squared deviation that one more change must save.
        least: The fewest values between two changes.

    Returns:
        Indices of the first value after each change.

    Source: Killick, Fearnhead & Eckley (2012); `ruptures` has the code.
    """
    import ruptures  # imported here: it is needed once per measurement, not at import

    x = np.asarray(series, dtype=float)
    # The linear kernel is the L2 cost. This search is compiled; `ruptures.Pelt` takes hundreds of times as long.
    search = ruptures.KernelCPD(kernel="linear", min_size=least).fit(x[:, None])
    return [int(point) for point in search.predict(pen=penalty)[:-1]]


def changes_of_level(
    values: ArrayLike, uncertainty: ArrayLike, least: float
) -> list[tuple[int, float]]:
    """Find where a history of estimates changed, and by which factor.

    The scale is the larger of the noise between neighbors and the estimates' own uncertainty. So neither a quiet stretch nor a
    wide interval looks like a change. A change must also exceed the noise near it, because noise may grow at a constant level.
    One or two values that stick out do not make a level: the medians of five neighbors, in which changes are sought, do not show
    them.

    Args:
        values: Estimates in the order taken, shape [n], above 0. With n < 6 there is no change.
        uncertainty: Half-width of each one's 95 % interval as a share, shape [n].
        least: The smallest change that counts, as a share.

    Returns:
        Index of the first value after each change, and the ratio of the level after to that before.
    """
    logs, widths = np.log(np.asarray(values, dtype=float)), np.asarray(uncertainty, dtype=float)
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
    """Drop the weakest bounds one by one until each change is worth the penalty, in units of the noise near it."""
    while len(bounds) > 2:
        levels = np.repeat(levels_between(logs, bounds), np.diff(bounds))
        gains = [
            _gain(smooth[before:at], smooth[at:after])
            / _noise_near(at, logs - levels, uncertainty) ** 2
            for before, at, after in zip(bounds, bounds[1:], bounds[2:], strict=False)
        ]
        weakest = int(np.argmin(gains))
        if gains[weakest] >= PENALTY * math.log(len(logs)):
            break
        bounds = [*bounds[: weakest + 1], *bounds[weakest + 2 :]]
    return bounds


def _gain(before: np.ndarray, after: np.ndarray) -> float:
    """Return how much squared deviation it saves if two neighboring segments have a level each."""
    share = len(before) * len(after) / (len(before) + len(after))
    return share * float(after.mean() - before.mean()) ** 2


def _noise_near(at: int, residuals: np.ndarray, uncertainty: np.ndarray) -> float:
    """Return the larger noise of the runs before and after a change; near an end the window includes the change."""
    last = max(0, len(residuals) - _NEAR)
    starts = (min(max(0, at - _NEAR), last), min(at, last))
    return max(_history_noise(residuals[a : a + _NEAR], uncertainty[a : a + _NEAR]) for a in starts)


def levels_between(series: np.ndarray, bounds: list[int]) -> list[float]:
    """Return the median of each segment from one bound to the next.

    Example:
        >>> levels_between(np.array([1.0, 2.0, 3.0, 7.0]), [0, 3, 4])
        [2.0, 7.0]
    """
    return [float(np.median(series[a:b])) for a, b in itertools.pairwise(bounds)]


def find_recent_outlier(
    values: ArrayLike, uncertainty: ArrayLike, least: float
) -> tuple[int, float] | None:
    """Find whether the last one or two values stick out from those before; further runs show if it is a change or a spike.

    Args:
        values: As in `changes_of_level`.
        uncertainty: As in `changes_of_level`.
        least: As in `changes_of_level`.

    Returns:
        Index of the first of them, and their ratio to the median of the level before; None if they do not stick out.

    Source: Student's prediction interval for one more value, from those since the last change of level. It is wide for few values.
    The noise may have grown, so the interval is the wider one of all these values and of the latest ten.
    """
    x, widths = np.asarray(values, dtype=float), np.asarray(uncertainty, dtype=float)
    for index in (len(x) - LEAST_RUNS + 1, len(x) - 1):
        if index >= LEAST_RUNS:
            changes = changes_of_level(x[:index], widths[:index], least)
            level = np.log(x[changes[-1][0] if changes else 0 : index])
            noise = max(_prediction_reach(level), _prediction_reach(level[-_RECENT:]))
            least_step = max(math.log1p(least), noise, _FAR * float(np.median(widths)) / 1.96)
            last = np.log(x[index:]) - level.mean()
            if (last > least_step).all() or (last < -least_step).all():
                return index, math.exp(float(np.median(np.log(x[index:])) - np.median(level)))
    return None


def _prediction_reach(level: np.ndarray) -> float:
    """Return how far from the mean of a level one more value may be."""
    student = float(stdtrit(len(level) - 1, 1 - _ALARMS / 4))  # two sides, and two looks
    return student * float(level.std(ddof=1)) * math.sqrt(1 + 1 / len(level))


def _history_noise(logs: np.ndarray, widths: np.ndarray) -> float:
    """Return the standard deviation of estimates about their level, by their neighbors or their own intervals; the larger one."""
    return max(step_noise(logs), float(np.median(widths)) / 1.96, 1e-4)


def median_of_neighbors(series: np.ndarray) -> np.ndarray:
    """Return the median of each value and its four neighbors; at the ends that of the first or last five."""
    width = 2 * LEAST_RUNS - 1
    medians = np.median(np.lib.stride_tricks.sliding_window_view(series, width), axis=1)
    return np.pad(medians, LEAST_RUNS - 1, mode="edge")
