"""Where power readings come from, and energy over a window of time with its error bounds.

A source is asked again and again by a sampler (`nanolib.meters.energy`). It gives watts, or the joules of a counter that only
grows. What cannot be read is a gap, never zero.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil
from numpy.typing import ArrayLike

from nanolib.measurement import BadInput, Provenance
from nanolib.stats.intervals import Interval

MIN_PERIODS = 10  # a window must hold so many updates of its sensor
_GAP = 2.5  # samples further apart than this many times the usual are a gap
_RAPL_ROOT = Path("/sys/class/powercap")
# What an idle core and package draw, and how far a busy one goes, is not known without a sensor: these ends are honest, not tight.
_IDLE_W_PER_CORE, _IDLE_W = (0.1, 3.0), (1.0, 60.0)
_BUSY_W_PER_CORE = (1.0, 25.0)


@dataclass(frozen=True)
class Reading:
    """One answer of a source.

    Attributes:
        t_s: When, on the clock `time.monotonic`.
        watts: Power; NaN where it could not be read, or the source counts joules.
        joules: A counter's state; NaN where it could not be read, or the source gives power.
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
        name: The `method` of the rows: `nvml_counter`, `nvml_power`, `rapl`, `replay`, `utilisation`, ...
        of: What it covers: `gpu 0`, `package 0`, ...
        period_s: How often its reading changes.
        wrap_j: Where its counter starts again at zero, J; infinite where it does not.
        provenance: `measured`, or `estimated`.
    """

    name: str
    of: str
    period_s: float
    wrap_j: float
    provenance: Provenance

    def read(self) -> Reading:
        """The reading now; NaN for what could not be read."""
        ...


# energy over a window


def integrate(t_s: ArrayLike, power_w: ArrayLike, start_s: float, end_s: float) -> Interval:
    """Energy between two moments, from samples of power.

    Straight lines between samples; of two samples at one moment the first ends what was before and the second begins what comes,
    so a step is exact. A NaN, or samples much further apart than usual, is a gap: within it the power may be anything that was
    seen.

    Args:
        t_s: Moments in order, s, shape [n].
        power_w: Power at each, W, shape [n]; NaN where it could not be read.
        start_s: Beginning of the window.
        end_s: Its end.

    Returns:
        Joules. Each edge adds what the power changes by between the samples around it, over the time between them.

    Raises:
        BadInput: Fewer than two samples, moments out of order, or a window that is empty or reaches beyond the samples.
    """
    t, p = _checked(t_s, power_w, start_s, end_s)
    read = ~np.isnan(p)
    # a failed read makes a gap between its neighbours that could be read
    failed = np.add.reduceat(~read, np.flatnonzero(read))[:-1] > 0
    t, p = t[read], p[read]
    _check_reach(t, start_s, end_s)
    length, left, right = np.diff(t), p[:-1], p[1:]
    first, last = np.clip(start_s, t[:-1], t[1:]), np.clip(end_s, t[:-1], t[1:])
    share = np.where(length > 0, length, 1.0)
    at_first = left + (right - left) * (first - t[:-1]) / share
    at_last = left + (right - left) * (last - t[:-1]) / share
    energy = (at_first + at_last) / 2 * (last - first)
    usual = np.median(length[length > 0])
    gaps = (failed | (length > _GAP * usual)) & (last > first)
    edges = (t[:-1] < start_s) & (start_s < t[1:]) | (t[:-1] < end_s) & (end_s < t[1:])
    unsure = float((np.abs(right - left) * length)[edges & ~gaps].sum())
    inside = (last - first)[gaps]
    low = energy[~gaps].sum() + inside.sum() * p.min() - unsure
    high = energy[~gaps].sum() + inside.sum() * p.max() + unsure
    return Interval(float(low), float(energy.sum()), float(high))


def count(t_s: ArrayLike, joules: ArrayLike, start_s: float, end_s: float, wrap_j: float = math.inf) -> Interval:
    """Energy between two moments, from a counter.

    Args:
        t_s: Moments in order, s, shape [n].
        joules: The counter at each, J, shape [n]; NaN where it could not be read.
        start_s: Beginning of the window.
        end_s: Its end.
        wrap_j: Where the counter starts again at zero; every step is taken modulo this.

    Returns:
        Joules. Each edge is unsure by one step of the counter; so is what a counter without a wrap lost by going backwards, which
        counts as if the steps around it had gone on.

    Raises:
        BadInput: As for `integrate`.
    """
    t, counted = _checked(t_s, joules, start_s, end_s)
    read = ~np.isnan(counted)
    t, counted = t[read], counted[read]
    _check_reach(t, start_s, end_s)
    steps = counter_steps(counted, wrap_j)
    length = np.diff(t)
    backwards = steps < 0
    good = ~backwards & (length > 0)
    rates = steps[good] / length[good] if good.any() else np.zeros(1)
    steps = np.where(backwards, np.median(rates) * length, steps)
    total = np.concatenate([[0.0], np.cumsum(steps)])
    energy = float(np.interp(end_s, t, total) - np.interp(start_s, t, total))
    seen = (t[1:] > start_s) & (t[:-1] < end_s)
    lost = float((length * rates.max())[backwards & seen].sum())
    # a counter moves in steps: the last one before an edge may have been due for as long as its neighbours take
    moved = steps[steps > 0]
    quantum = float(np.median(moved)) if len(moved) else 0.0
    return Interval(energy - 2 * quantum - lost, energy, energy + 2 * quantum + lost)


def counter_steps(joules: np.ndarray, wrap_j: float) -> np.ndarray:
    """From each state of a counter to the next, J, shape [n − 1]; modulo where it starts again at zero."""
    steps = np.diff(joules)
    return steps % wrap_j if math.isfinite(wrap_j) else steps


def _checked(t_s: ArrayLike, values: ArrayLike, start_s: float, end_s: float) -> tuple[np.ndarray, np.ndarray]:
    t, x = np.asarray(t_s, dtype=float), np.asarray(values, dtype=float)
    if t.shape != x.shape or t.ndim != 1:
        raise BadInput(f"t_s: shape {list(t.shape)} beside {list(x.shape)}; give one moment per sample")
    if np.isnan(x).all() or (~np.isnan(x)).sum() < 2:
        raise BadInput(f"power_w: {int((~np.isnan(x)).sum())} samples could be read; at least two are needed")
    if (np.diff(t) < 0).any():
        raise BadInput("t_s: its moments go backwards; give them in order")
    if not start_s < end_s:
        raise BadInput(f"end_s: {end_s} is not after start_s {start_s}; give a window with some length")
    first = int(np.flatnonzero(~np.isnan(x))[0])
    return t[first:], x[first:]


def _check_reach(t: np.ndarray, start_s: float, end_s: float) -> None:
    if start_s < t[0] or end_s > t[-1]:
        raise BadInput(
            f"start_s, end_s: {start_s} to {end_s} reaches beyond the samples, {t[0]} to {t[-1]}; "
            "sample before and after the window"
        )


# sources


class NoSensor:
    """This machine tells nothing: every reading is a gap."""

    name, of, period_s, wrap_j, provenance = "none", "", math.inf, math.inf, Provenance.MEASURED

    def read(self) -> Reading:
        """Nothing."""
        return Reading(time.monotonic())


class ReplaySource:
    """A recorded trace through the same code as a sensor.

    Args:
        t_s: Moments since the start of the trace, s.
        watts: Power at each.
        clock: Tells the time; the trace begins at its first answer.
    """

    name, of, wrap_j, provenance = "replay", "trace", math.inf, Provenance.MEASURED

    def __init__(
        self, t_s: Sequence[float], watts: Sequence[float], clock: Callable[[], float] = time.monotonic
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


class EstimateSource:
    """What the processor may draw, from how busy its cores are: a range, never a reading."""

    name, of, period_s, wrap_j, provenance = "utilisation", "processor", 0.1, math.inf, Provenance.ESTIMATED

    def __init__(self) -> None:
        self._cores = os.cpu_count() or 1
        psutil.cpu_percent()  # the first answer has nothing to compare with

    def read(self) -> Reading:
        """Idle power to that of all cores at work, by the share of the cores that is."""
        busy = psutil.cpu_percent() / 100 * self._cores
        ends = [
            base + idle * self._cores + extra * busy
            for base, idle, extra in zip(_IDLE_W, _IDLE_W_PER_CORE, _BUSY_W_PER_CORE, strict=True)
        ]
        return Reading(time.monotonic(), watts=math.sqrt(ends[0] * ends[1]), low=ends[0], high=ends[1])


class RaplSource:
    """One RAPL domain, through Linux's powercap.

    Args:
        folder: Of the domain, such as /sys/class/powercap/intel-rapl:0.

    Raises:
        OSError: Its counter cannot be read.
    """

    name, period_s, provenance = "rapl", 0.001, Provenance.MEASURED

    def __init__(self, folder: Path) -> None:
        self._counter = folder / "energy_uj"
        self.of = (folder / "name").read_text().strip()
        self.wrap_j = int((folder / "max_energy_range_uj").read_text()) / 1e6
        self._counter.read_text()

    def read(self) -> Reading:
        """The counter."""
        now = time.monotonic()
        try:
            return Reading(now, joules=int(self._counter.read_text()) / 1e6)
        except (OSError, ValueError):
            return Reading(now)


class NvmlSource:
    """One NVIDIA GPU: its energy counter where it has one, else its power.

    Args:
        nvml: The module `pynvml`, initialised.
        index: Of the GPU.
    """

    period_s, wrap_j, provenance = 0.1, math.inf, Provenance.MEASURED

    def __init__(self, nvml: Any, index: int) -> None:
        self._nvml, self._handle, self.of = nvml, nvml.nvmlDeviceGetHandleByIndex(index), f"gpu {index}"
        try:
            nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
            self.name = "nvml_counter"
        except nvml.NVMLError:
            nvml.nvmlDeviceGetPowerUsage(self._handle)
            self.name = "nvml_power"

    def read(self) -> Reading:
        """The counter in J, or the power in W."""
        now = time.monotonic()
        try:
            if self.name == "nvml_counter":
                return Reading(now, joules=self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3)
            return Reading(now, watts=self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3)
        except self._nvml.NVMLError:
            return Reading(now)


# what this machine has


@dataclass(frozen=True)
class Found:
    """What looking for sensors gave.

    Attributes:
        sources: Those that answer; none of them counts what another counts too.
        missing: Kind of source → why it is not there, and what would help.
    """

    sources: list[Source]
    missing: dict[str, str]


def find_sources(rapl_root: Path = _RAPL_ROOT, nvml: Any = None) -> Found:
    """The sensors of this machine.

    Args:
        rapl_root: Where Linux shows its power domains.
        nvml: The module to ask for NVIDIA's; `pynvml` by default.
    """
    found = Found([], {})
    for kind, look in (
        ("NVIDIA (NVML)", lambda: _nvml_sources(nvml)),
        ("RAPL (powercap)", lambda: _rapl_sources(rapl_root)),
    ):
        sources, reason = look()
        found.sources.extend(sources)
        if reason:
            found.missing[kind] = reason
    return found


def _nvml_sources(nvml: Any) -> tuple[list[Source], str]:
    if nvml is None:
        try:
            import pynvml as nvml
        except ModuleNotFoundError:
            return [], "nvidia-ml-py is not installed"
    try:
        nvml.nvmlInit()
        return [NvmlSource(nvml, index) for index in range(nvml.nvmlDeviceGetCount())], ""
    except nvml.NVMLError as error:
        return [], f"no NVIDIA driver answers ({error})"


def _rapl_sources(root: Path) -> tuple[list[Source], str]:
    """Packages alone: cores are a part of them, and psys a whole of which they are a part; summed they would count twice."""
    domains = [folder for folder in sorted(root.glob("*-rapl:*")) if (folder / "energy_uj").exists()]
    packages = [folder for folder in domains if (folder / "name").read_text().startswith("package")]
    if not packages:
        return [], "Linux shows no power domain of the processor here (a virtual machine has none)"
    try:
        return [RaplSource(folder) for folder in packages], ""
    except PermissionError:
        counter = packages[0] / "energy_uj"
        return [], f"{counter} may be read by root alone; as root: chmod a+r {root}/*-rapl:*/energy_uj"
    except OSError as error:
        return [], f"its counter cannot be read ({error.strerror})"
