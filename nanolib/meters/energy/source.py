"""Sources of power readings, and an estimate for machines without a sensor.

`nanolib.meters.energy.meter` reads a source again and again. A source gives watts, or the joules
of a counter that only grows. A failed reading is a gap, never zero. 0 W is a gap too, since a
device that answers draws power.
"""

from __future__ import annotations

import math
import os
import time
from typing import NamedTuple, Protocol

import psutil

from nanolib.measurement import Provenance

# Without a sensor the power of idle and busy cores is not known, so the ranges are wide.
_IDLE_W_PER_CORE, _IDLE_W = (0.1, 3.0), (1.0, 60.0)
_BUSY_W_PER_CORE = (1.0, 25.0)


class Reading(NamedTuple):
    """One reading of a source; NaN for values that it does not have or could not read.

    Attributes:
        t_s: Time on the clock `time.monotonic`.
        watts: Power.
        joules: The counter's value.
        low: Lower end of an estimated power, W.
        high: Its upper end.
    """

    t_s: float
    watts: float = math.nan
    joules: float = math.nan
    low: float = math.nan
    high: float = math.nan


class Source(Protocol):
    """Anything that measures power or counts energy.

    Attributes:
        name: The `method` of the rows, such as `nvml_counter`, `rapl (package)` or `utilisation`.
        of: The device that it covers, such as `gpu 0` or `package 0`.
        period_s: Time between changes of its reading.
        provenance: `measured`, `replayed` or `estimated`.
    """

    name: str
    of: str
    period_s: float
    provenance: Provenance

    def read(self) -> Reading:
        """Read it now."""
        ...


class EstimateSource:
    """Estimate the processor's power from the use of its cores: a range, not a reading."""

    name, of, period_s, provenance = "utilisation", "processor", 0.1, Provenance.ESTIMATED

    def __init__(self) -> None:
        self._cores = os.cpu_count() or 1
        psutil.cpu_percent()  # the first call has nothing to compare with

    def read(self) -> Reading:
        """Scale between idle power and that of all cores, by the share of busy cores."""
        busy = psutil.cpu_percent() / 100 * self._cores
        low, high = (
            base + idle * self._cores + extra * busy
            for base, idle, extra in zip(_IDLE_W, _IDLE_W_PER_CORE, _BUSY_W_PER_CORE, strict=True)
        )
        return Reading(time.monotonic(), watts=math.sqrt(low * high), low=low, high=high)
