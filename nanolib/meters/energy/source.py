"""What tells power or counts energy: what a reading is, and an estimate where there is no sensor.

A source is asked again and again by a sampler (`nanolib.meters.energy.meter`). It gives watts, or the
joules of a counter that only grows. What cannot be read is a gap, never zero. Power of 0 W is a gap
too, since whatever answers draws some.
"""

from __future__ import annotations

import math
import os
import time
from typing import NamedTuple, Protocol

import psutil

from nanolib.measurement import Provenance

# What an idle core and package draw, and how far a busy one goes, is not known without a sensor: these ends are honest, not tight.
_IDLE_W_PER_CORE, _IDLE_W = (0.1, 3.0), (1.0, 60.0)
_BUSY_W_PER_CORE = (1.0, 25.0)


class Reading(NamedTuple):
    """One answer of a source; NaN for what it does not give, or could not read.

    Attributes:
        t_s: When, on the clock `time.monotonic`.
        watts: Power.
        joules: A counter's state.
        low: Lower end of the power where it is an estimate, W.
        high: Upper end.
    """

    t_s: float
    watts: float = math.nan
    joules: float = math.nan
    low: float = math.nan
    high: float = math.nan


class Source(Protocol):
    """Something that tells power or counts energy.

    Attributes:
        name: The `method` of the rows: `nvml_counter`, `nvml_power`, `rapl (package + dram)`, `replay`, `utilisation`, ...
        of: What it covers: `gpu 0`, `package 0`, ...
        period_s: How often its reading changes.
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
    """What the processor may draw, from how busy its cores are: a range, never a reading."""

    name, of, period_s, provenance = "utilisation", "processor", 0.1, Provenance.ESTIMATED

    def __init__(self) -> None:
        self._cores = os.cpu_count() or 1
        psutil.cpu_percent()  # the first answer has nothing to compare with

    def read(self) -> Reading:
        """Idle power to that of all cores at work, by the share of the cores that is."""
        busy = psutil.cpu_percent() / 100 * self._cores
        low, high = (
            base + idle * self._cores + extra * busy
            for base, idle, extra in zip(_IDLE_W, _IDLE_W_PER_CORE, _BUSY_W_PER_CORE, strict=True)
        )
        return Reading(time.monotonic(), watts=math.sqrt(low * high), low=low, high=high)
