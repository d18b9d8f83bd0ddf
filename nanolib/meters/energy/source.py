"""Define sources of power readings, and an estimate for machines without a sensor.

A source has these attributes: `name` is the method of the rows, such as `nvml_counter`. `of` is the
device that the source covers, such as `gpu 0`. `period_s` is the time between changes of the
reading, s. `provenance` is `measured`, `replayed` or `estimated`. The method `read` returns a
`Reading` of watts, or of the joules of a counter that only grows. A failed reading is a gap, never
zero. A reading of 0 W is a gap too, because a running device always draws power.
"""

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from nanolib.measurement import BadInput, Provenance, one_line, shown

# Without a sensor, the power of idle and busy cores is not known, so the ranges are wide.
_IDLE_W_PER_CORE, _IDLE_W = (0.1, 3.0), (1.0, 60.0)
_BUSY_W_PER_CORE = (1.0, 25.0)


class Reading(NamedTuple):
    """One reading of a source, with NaN for each value that the source could not read.

    Attributes:
        t_s: Time on the clock `time.monotonic`, s.
        watts: Power, W.
        joules: Value of the energy counter, J.
        low: Lower end of an estimated power, W.
        high: Upper end of an estimated power, W.
    """

    t_s: float
    watts: float = math.nan
    joules: float = math.nan
    low: float = math.nan
    high: float = math.nan


class EstimateSource:
    """Estimate the processor's power from the utilization of its cores, as a range."""

    name, of, period_s, provenance = "utilisation", "processor", 0.1, Provenance.ESTIMATED

    def __init__(self) -> None:
        self._cores = os.cpu_count() or 1
        self._share, self._before = math.nan, self._cpu_seconds()
        time.sleep(self.period_s)  # The first reading is a mean over one period too.
        self.read()

    def _cpu_seconds(self) -> tuple[float, float]:
        """Return the busy time and the whole time of all cores since the system started, s."""
        times = psutil.cpu_times()
        whole = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        return whole - times.idle - getattr(times, "iowait", 0.0), whole

    def read(self) -> Reading:
        """Interpolate between the power of idle and busy cores, by the share of busy cores.

        The share is a mean over at least half a period.
        """
        busy_s, whole_s = (
            now - past for now, past in zip(self._cpu_seconds(), self._before, strict=True)
        )
        if whole_s >= self._cores * self.period_s / 2:
            self._share, self._before = busy_s / whole_s, self._cpu_seconds()
        busy = self._share * self._cores
        low, high = (
            base + idle * self._cores + extra * busy
            for base, idle, extra in zip(_IDLE_W, _IDLE_W_PER_CORE, _BUSY_W_PER_CORE, strict=True)
        )
        return Reading(time.monotonic(), watts=math.sqrt(low * high), low=low, high=high)


class ReplaySource:
    """Replay a recorded power trace, from the moment at which you create the source.

    Args:
        t_s: Moments since the start of the trace, s.
        watts: Power at each moment, W.
    """

    name, of, provenance = "replay", "trace", Provenance.REPLAYED

    def __init__(self, t_s: Sequence[float], watts: Sequence[float]) -> None:
        self._t, self._watts = np.asarray(t_s, float), np.asarray(watts, float)
        self._start = time.monotonic()
        steps = np.diff(self._t)
        self.period_s = float(np.median(steps[steps > 0])) if (steps > 0).any() else math.inf

    def read(self) -> Reading:
        """Return the trace's latest sample, or NaN after the end of the trace."""
        now = time.monotonic()
        at = int(np.searchsorted(self._t, now - self._start, side="right")) - 1
        over = now - self._start > self._t[-1]
        return Reading(now, watts=math.nan if at < 0 or over else float(self._watts[at]))


def read_trace(path: Path) -> tuple[list[float], list[float]]:
    """Read a recorded power trace, a CSV file with the columns `t_s` and `power_w`.

    Returns:
        Times since the first sample, s, and the power at each time, W.

    Raises:
        BadInput: The file cannot be read, lacks a column, has fewer than two samples, or has a time
            or a power that is not valid.
    """
    import pandas as pd  # Importing pandas is slow, and only this function needs pandas.

    name, columns = shown(path.name), ["t_s", "power_w"]
    try:
        table = pd.read_csv(path, encoding="utf-8-sig", usecols=columns, dtype=float)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or one_line(error)
        raise BadInput(
            f"power_trace: {name} cannot be read ({why}); give a CSV file with the columns t_s and "
            "power_w"
        ) from None
    t_s, watts = (table[column].to_numpy() for column in columns)
    is_valid = np.isfinite(t_s).all() and np.isfinite(watts).all() and (watts >= 0).all()
    if len(table) < 2 or not is_valid or not (np.diff(t_s) > 0).all():
        raise BadInput(
            f"power_trace: {name} is not a recording; give at least 2 lines with rising times (s) "
            "and powers from 0 (W)"
        )
    return (t_s - t_s[0]).tolist(), watts.tolist()
