"""A figure over seeds, with Student's interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nanolib.measurement import Measurement
from nanolib.stats.intervals import mean_interval


def over_seeds(
    metric: str, values: Sequence[float], scope: str = "", paired: bool = False, **rest: Any
) -> Measurement:
    """The mean over seeds.

    Args:
        metric: What the values are.
        values: One per seed, at least two.
        scope: Of what.
        paired: Whether each is a difference between two runs of one seed.
        rest: More of the row.
    """
    interval = mean_interval(values)
    method = "paired by seed, Student's interval" if paired else "mean over seeds"
    return Measurement(
        metric,
        interval.estimate,
        interval.low,
        interval.high,
        confidence=0.95,
        n=len(values),
        samples=tuple(values),
        **{"method": method, "scope": scope} | rest,
    )
