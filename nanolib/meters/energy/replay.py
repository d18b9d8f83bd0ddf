"""Replay a recording of power through the same code as a sensor."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from nanolib.measurement import BadInput, Provenance, shown
from nanolib.meters.energy.source import Reading


class ReplaySource:
    """A recorded trace as a `Source`.

    Args:
        t_s: Moments since the start of the trace, s.
        watts: Power at each moment.
        clock: Returns the time, s; the trace starts when the source is made.
    """

    name, of, provenance = "replay", "trace", Provenance.REPLAYED

    def __init__(
        self,
        t_s: Sequence[float],
        watts: Sequence[float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._t, self._watts, self._clock = np.asarray(t_s, float), np.asarray(watts, float), clock
        self._start = clock()
        steps = np.diff(self._t)
        self.period_s = float(np.median(steps[steps > 0])) if (steps > 0).any() else math.inf

    def read(self) -> Reading:
        """Return the trace's latest sample; NaN after its end."""
        now = self._clock()
        at = int(np.searchsorted(self._t, now - self._start, side="right")) - 1
        over = now - self._start > self._t[-1]
        return Reading(now, watts=math.nan if at < 0 or over else float(self._watts[at]))


def read_trace(path: Path) -> tuple[list[float], list[float]]:
    """Read a recording: a CSV file with the columns `t_s` and `power_w`.

    Returns:
        Moments (s, the first at zero) and power (W).

    Raises:
        BadInput: The file cannot be read, lacks a column or has fewer than two samples; or a
            line is not a time and a power, or is not in order.
    """
    import pandas as pd  # it loads slowly

    name = shown(path.name)
    try:
        table = pd.read_csv(path, encoding="utf-8-sig", skip_blank_lines=False)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise BadInput(f"power_trace: {name} cannot be read ({why}); give a CSV file") from None
    if missing := {"t_s", "power_w"} - set(table):
        raise BadInput(f"power_trace: {name} has no column {min(missing)}; give t_s and power_w")
    t_s, watts = (pd.to_numeric(table[of], errors="coerce") for of in ("t_s", "power_w"))
    wrong = ~(np.isfinite(t_s) & np.isfinite(watts) & (watts >= 0))
    for is_bad, why in (
        (wrong, "is not a time and a power; give seconds and watts"),
        (t_s.diff() <= 0, "is not later than the one before; sort by t_s"),
    ):
        if is_bad.any():
            raise BadInput(f"power_trace: line {is_bad.argmax() + 2} of {name} {why}")
    if len(table) < 2:
        raise BadInput(f"power_trace: {name} has {len(table)} sample(s); give at least 2")
    return [*map(float, t_s - t_s[0])], [*map(float, watts)]
