"""Measure the energy of code. A thread samples the power sources, and a window marks a section.

    with EnergyMeter() as meter:
        with meter.window("prefill") as window:
            ...
    meter.measurements(window)

You can nest windows. An exception closes a window. Two windows can have the same name.
"""

import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch

from nanolib.measurement import BadInput, Measurement, Provenance, Status
from nanolib.meters.clock import Device, synchronizer
from nanolib.meters.integration import count, integrate, longest_standstill
from nanolib.meters.machine import gpu_uuid
from nanolib.meters.power import EstimateSource, Reading, find_sources
from nanolib.meters.recording import Trace
from nanolib.stats.intervals import Interval

__all__ = ["EnergyMeter", "integrate"]

MIN_PERIODS = 10  # Smallest number of updates of a sensor in a window.
_SETTLE_S = 2.0  # Longest wait for a slow source at the end of a window, s.
_NO_READING = {
    Provenance.ESTIMATED: "estimated from the utilization of the cores: a range, not a reading",
    Provenance.REPLAYED: "from a recording, not a reading of this machine",
}


@dataclass
class Window:
    """A section of code whose energy nanolib measures.

    Attributes:
        name: Name of the section.
        start_s: Start on the clock `time.monotonic`, s.
        end_s: End on the same clock, s, or NaN while the window is open.
    """

    name: str
    start_s: float
    end_s: float = math.nan

    @property
    def seconds(self) -> float:
        """Length of the window, s."""
        return self.end_s - self.start_s


@dataclass
class Track:
    """A power source and its readings."""

    source: Any
    readings: list[Reading] = field(default_factory=list)

    @property
    def known_until_s(self) -> float:
        """Moment until which energy is known, s. A counter's reading may be one period old."""
        last = self.readings[-1]
        return last.t_s if math.isnan(last.joules) else last.t_s - self.source.period_s

    def energy(self, window: Window, updates: int = 0) -> Interval:
        """Compute the energy of a window, J.

        Args:
            window: A closed window.
            updates: Smallest number of updates of the sensor in the window.

        Raises:
            BadInput: The window is too short, there are too few readings around the window, or the
                readings are not valid.
        """
        name, period_s, seconds = self.source.name, self.source.period_s, window.seconds
        if seconds < updates * period_s:
            raise BadInput(
                f"{window.name} took {seconds:.3g} s, and {name} changes every {period_s:.3g} s: "
                f"a window must contain {updates} updates; repeat the work for "
                f"{updates * period_s:.3g} s"
            )
        # nanolib copies the readings, because the sampling thread adds readings at any time.
        t, watts, joules, low, high = np.array([*self.readings]).T
        span = window.start_s, window.end_s
        inside = (window.start_s <= t) & (t <= window.end_s)
        is_counter, wrong = not np.isnan(joules).all(), ""
        if is_counter:
            usual_s = max(period_s, float(np.median(np.diff(t))))
            still_s = longest_standstill(t[inside], joules[inside])
            if still_s >= MIN_PERIODS / 2 * usual_s:
                wrong = f"did not change in {still_s:.3g} of {seconds:.3g} s"
        elif (watts[inside] <= 0).any() and not (watts[inside] > 0).any():
            wrong = "read 0 W"
        if wrong:
            raise BadInput(
                f"{name} of {self.source.of} {wrong}, so the readings are not valid; replay "
                "another recording of the power (power_trace)"
            )
        if is_counter:
            return count(t, joules, *span, period_s)
        found = integrate(t, np.where(watts > 0, watts, math.nan), *span)
        if self.source.provenance is not Provenance.ESTIMATED:
            return found
        low, high = (integrate(t, end, *span).estimate for end in (low, high))
        return Interval(low, found.estimate, high)

    def power_trace(self, window: Window) -> dict[str, list[float]]:
        """Return the power over a window at no more than 60 moments, without gaps.

        Returns:
            Two lists: `course_s` has times since the start of the window, s, and `course_w` has the
            power, W. A counter's power is the mean since the previous moment.
        """
        t, watts, joules, _, _ = np.array([*self.readings]).T
        chosen = (window.start_s <= t) & (t <= window.end_s)
        is_counter = not np.isnan(joules).all()
        if is_counter:  # nanolib may read a counter more often than the counter changes.
            chosen &= np.diff(joules, prepend=math.nan) != 0
        every = max(1, math.ceil(chosen.sum() / 60))
        t, watts, joules = (x[chosen][::every] for x in (t, watts, joules))
        if is_counter:
            t, watts = t[1:], np.diff(joules) / np.diff(t)
        is_known = watts > 0
        course_s, course_w = (t - window.start_s)[is_known], watts[is_known]
        return {"course_s": course_s.tolist(), "course_w": course_w.tolist()}

    def rows(self, window: Window, idle: Window | None, tokens: int) -> Iterator[Measurement]:
        """Yield the rows of one window for this source, as `EnergyMeter.measurements` describes."""
        source, seconds = self.source, window.seconds
        details = {"of": source.of, "seconds": seconds, "period_s": source.period_s}
        common = {
            "provenance": source.provenance,
            "method": source.name,
            "scope": window.name,
            "message": _NO_READING.get(source.provenance, ""),
            "details": details,
        }

        def row(metric: str, joules: Interval, factor: float = 1.0, **more) -> Measurement:
            low, value, high = (end * factor for end in joules)
            rest = common | {"details": details | more}
            return Measurement(metric, value, low, high, 1.0, n=1, **rest)

        metric = "energy"
        try:
            energy = self.energy(window, MIN_PERIODS)
            yield row(metric, energy)
            yield row("power", energy, 1 / seconds, **self.power_trace(window))
            if tokens:
                yield row("energy_per_token", energy, 1 / tokens)
            if idle is None or source.provenance is Provenance.ESTIMATED:
                return
            metric = "net_energy"
            base = self.energy(idle, MIN_PERIODS)
            low, value, high = (end * seconds / idle.seconds for end in base)
            net = Interval(energy.low - high, energy.estimate - value, energy.high - low)
            yield row(metric, net)
        except BadInput as error:
            refused = common | {"message": str(error), "status": Status.UNSUPPORTED}
            yield Measurement(metric, **refused)


class EnergyMeter:
    """Sample power sources within a `with` statement.

    Args:
        sources: Power sources. By default, nanolib uses the sensors of this machine, without other
            NVIDIA GPUs than `device`, or an estimate if the machine has no sensor.
        sample_s: Time between samples, s.
        device: Device that computes. A window starts and ends when the device's queue is empty.
        trace: Receiver of all readings and windows, or None for a new trace.

    Attributes:
        tracks: Readings of each source.
        trace: Rows of all readings and windows.

    Example:
        >>> with EnergyMeter(device="cpu") as meter, meter.window("generation") as window:
        ...     _ = [torch.rand(256, 256) @ torch.rand(256, 256) for _ in range(100)]
        >>> [row.provenance for row in meter.measurements(window, tokens=100)]
        [<Provenance...
    """

    def __init__(
        self,
        sources: Sequence[Any] | None = None,
        sample_s: float = 0.05,
        device: Device = "cpu",
        trace: Trace | None = None,
    ):
        if sources is None:
            gpu = gpu_uuid(str(device)) if torch.device(device).type == "cuda" else ""
            sources = find_sources(gpu=gpu).sources or [EstimateSource()]
        self.tracks = [Track(source) for source in sources]
        self.trace = trace or Trace()
        self._synchronize = synchronizer(device)
        self._sample_s = sample_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="nanolib-power", daemon=True)

    def __enter__(self) -> Self:
        self.read()
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self._stop.set()
        self._thread.join()
        self.read()

    def _sample(self):
        while not self._stop.wait(self._sample_s):
            self.read()

    def read(self) -> None:
        """Sample each source once."""
        for track in self.tracks:
            t_s, *values = reading = track.source.read()
            track.readings.append(reading)
            name = f"{track.source.name} {track.source.of}".strip()
            self.trace.rows["power_samples"].append((name, self.trace.at_us(t_s), *values))

    @contextmanager
    def window(self, name: str) -> Iterator[Window]:
        """Open a window within the context, and wait at the end for one more reading per source."""
        self._synchronize()
        window = Window(name, time.monotonic())
        try:
            yield window
        finally:
            self._synchronize()
            window.end_s = time.monotonic()
            start_us, ns = self.trace.at_us(window.start_s), round(1e9 * window.seconds)
            self.trace.rows["sections"].append((name, start_us, ns))
            give_up = time.monotonic() + _SETTLE_S
            # To compute the energy, nanolib needs a reading of each source after the window.
            while time.monotonic() < give_up and any(
                track.known_until_s < window.end_s for track in self.tracks
            ):
                time.sleep(self._sample_s / 4)

    def idle(self, seconds: float) -> Window:
        """Measure the idle baseline, a window of `seconds` in which this process sleeps."""
        with self.window("idle") as window:
            time.sleep(seconds)
        return window

    def measurements(
        self, window: Window, *, idle: Window | None = None, tokens: int = 0
    ) -> list[Measurement]:
        """Make the rows of one window, for each source.

        Args:
            window: A closed window.
            idle: Window of the idle baseline. `net_energy` is the energy above this baseline.
            tokens: Number of tokens that the model processed in the window, or 0.

        Returns:
            Rows of `energy` (J), `power` (W), `energy_per_token` (J) and `net_energy` (J). Each
            row's scope is the window's name. If a window is too short for a sensor, the source has
            a row with the status `unsupported` instead.
        """
        return [row for track in self.tracks for row in track.rows(window, idle, tokens)]
