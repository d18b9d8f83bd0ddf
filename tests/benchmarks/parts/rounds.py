"""Things that are timed in turn, and the ratio of one to another in each round."""

from collections.abc import Callable

import numpy as np

from nanolib.measurement import Measurement
from nanolib.meters import measure_phases
from nanolib.stats.intervals import Interval, median_interval


def rounds(phases: dict[str, Callable[[], object]], budget: float) -> dict[str, Measurement]:
    """At least ten rounds, however long that takes."""
    once = measure_phases(phases, budget_s=0.01)["total"].samples[-1] / 1e3
    return measure_phases(phases, budget_s=max(budget, 10 * once))


def ratio(rows: dict[str, Measurement], over: str, under: str) -> Interval:
    """The median over rounds of one time over the other, with its interval."""
    return median_interval(np.asarray(rows[over].samples) / np.asarray(rows[under].samples))


def text(found: Interval) -> str:
    """`1.60× [1.55 … 1.66]`."""
    return f"{found.estimate:5.2f}× [{found.low:.2f} … {found.high:.2f}]"
