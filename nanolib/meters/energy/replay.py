"""A recording of power, read from a file and replayed through the same code as a sensor."""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from nanolib.measurement import BadInput, Provenance, shown
from nanolib.meters.energy.power import Reading


class ReplaySource:
    """A recorded trace through the same code as a sensor.

    Args:
        t_s: Moments since the start of the trace, s.
        watts: Power at each.
        clock: Tells the time; the trace begins at its first answer.
    """

    name, of, wrap_j, provenance = "replay", "trace", math.inf, Provenance.REPLAYED

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
        """The trace's last sample until now; NaN after its end."""
        now = self._clock()
        at = int(np.searchsorted(self._t, now - self._start, side="right")) - 1
        over = now - self._start > self._t[-1]
        return Reading(now, watts=math.nan if at < 0 or over else float(self._watts[at]))


def read_trace(path: Path) -> tuple[list[float], list[float]]:
    """Moments (s, the first at zero) and power (W) of a recording: a CSV file with the columns `t_s` and `power_w`.

    Raises:
        BadInput: It cannot be read, lacks a column, holds fewer than two samples or what is no number, or is not in order of time.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            table = csv.DictReader(file)
            if missing := {"t_s", "power_w"} - set(table.fieldnames or ()):
                raise BadInput(
                    f"power_trace: {shown(path.name)} has no column {min(missing)}; give t_s and power_w"
                )
            lines = [(table.line_num, (row["t_s"], row["power_w"])) for row in table]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = getattr(error, "strerror", "") or "it is no text"
        raise BadInput(
            f"power_trace: {shown(str(path))} cannot be read ({why}); give a CSV file"
        ) from None
    samples = []
    for number, line in lines:
        try:
            t_s, watts = map(float, line)
        except (TypeError, ValueError):
            t_s, watts = math.nan, math.nan
        if not (math.isfinite(t_s) and math.isfinite(watts) and watts >= 0):
            raise BadInput(
                f"power_trace: line {number} of {shown(path.name)} holds {shown(line)}; give seconds and watts"
            )
        if samples and t_s <= samples[-1][0]:
            raise BadInput(
                f"power_trace: line {number} of {shown(path.name)} is not later than the one before; sort by t_s"
            )
        samples.append((t_s, watts))
    if len(samples) < 2:
        raise BadInput(
            f"power_trace: {shown(path.name)} holds {len(samples)} sample(s); give at least 2"
        )
    return [t_s - samples[0][0] for t_s, _ in samples], [watts for _, watts in samples]
