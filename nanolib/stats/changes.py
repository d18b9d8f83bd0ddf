"""Change points: where the level of a series changed."""

from __future__ import annotations

import itertools
import math

import numpy as np
from numpy.typing import ArrayLike

MIN_SEGMENT = 2  # values between two changes
PENALTY = 10.0  # per ln n: larger finds fewer changes


def step_noise(series: ArrayLike) -> float:
    """Standard deviation by the steps between neighbours, which a few changes of level barely touch."""
    steps = np.diff(np.asarray(series, dtype=float))
    return 1.4826 * float(np.median(np.abs(steps - np.median(steps)))) / math.sqrt(2)


def change_points(series: ArrayLike, penalty: float) -> list[int]:
    """Where the level of a series changes: PELT with the L2 cost.

    Args:
        series: Shape [n], in units of its own noise.
        penalty: What one more change must gain in squared deviation.

    Returns:
        Indices of the first value after each change.

    Source: Killick, Fearnhead & Eckley (2012); `ruptures` has the code.
    """
    import ruptures  # imported here: it is needed once per measurement, not at import

    x = np.asarray(series, dtype=float)
    # the linear kernel is the L2 cost; this search is compiled, `ruptures.Pelt` took hundreds of times as long
    search = ruptures.KernelCPD(kernel="linear", min_size=MIN_SEGMENT).fit(x[:, None])
    return [int(point) for point in search.predict(pen=penalty)[:-1]]


def changes_of_level(values: ArrayLike, uncertainty: ArrayLike, least: float) -> list[tuple[int, float]]:
    """Where a history of estimates changed, and by which factor.

    The scale is the larger of the noise between neighbours and the estimates' own uncertainty, so that neither a quiet
    stretch nor a wide interval makes a change of nothing.

    Args:
        values: Estimates in the order taken, shape [n], above 0; with n < 4 nothing can be said.
        uncertainty: Half-width of each one's 95 % interval as a share, shape [n].
        least: Changes by a smaller share are left out.

    Returns:
        Index of the first value after each change, and the ratio of the level after to that before.
    """
    logs = np.log(np.asarray(values, dtype=float))
    n = len(logs)
    if n < 2 * MIN_SEGMENT:
        return []
    noise = max(step_noise(logs), float(np.median(np.asarray(uncertainty, dtype=float))) / 1.96, 1e-4)
    bounds = [0, *change_points(logs / noise, PENALTY * math.log(n)), n]
    levels = [float(np.median(logs[a:b])) for a, b in itertools.pairwise(bounds)]
    ratios = [math.exp(after - before) for before, after in itertools.pairwise(levels)]
    found = zip(bounds[1:-1], ratios, strict=True)
    return [(index, ratio) for index, ratio in found if abs(math.log(ratio)) > math.log1p(least)]
