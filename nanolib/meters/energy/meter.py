"""Energy of what runs: sources sampled by a thread of this process, and windows over the samples.

    with EnergyMeter() as meter:
        with meter.window("prefill") as window:
            ...
    meter.measurements(window)

Windows nest. What was interrupted leaves its window closed at that moment, and the same name can be measured again.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch

from nanolib.measurement import BadInput, Measurement, Provenance, Status
from nanolib.meters.energy.integration import count, counter_steps, integrate, longest_standstill
from nanolib.meters.energy.power import find_sources
from nanolib.meters.energy.source import EstimateSource, Reading, Source
from nanolib.meters.machine import gpu_uuid
from nanolib.meters.sink import Sink
from nanolib.meters.time.clock import synchronizer
from nanolib.stats.intervals import Interval

_SAMPLE_S = 0.05
MIN_PERIODS = 10  # a window must hold so many updates of its sensor
_COURSE = 60
_SETTLE_S = 2.0  # how long leaving waits for one more reading of a slow source
IDLE_S = 2.0
_NO_READING = {
    Provenance.ESTIMATED: "from how busy the cores were: a range, not a reading",
    Provenance.REPLAYED: "from a recording, and no reading of this machine",
}


@dataclass
class Window:
    """A section of time.

    Attributes:
        name: What runs in it.
        start_s: When it began, on `time.monotonic`.
        end_s: When it ended; NaN while it is open.
    """

    name: str
    start_s: float
    end_s: float = math.nan

    @property
    def seconds(self) -> float:
        """How long it was."""
        return self.end_s - self.start_s


@dataclass
class Track:
    """A source and what it said."""

    source: Source
    readings: list[Reading] = field(default_factory=list)

    @property
    def told_s(self) -> float:
        """Up to when its last reading tells all; a counter's may be old by its period."""
        last = self.readings[-1]
        return last.t_s if math.isnan(last.joules) else last.t_s - self.source.period_s

    def energy(self, window: Window) -> Interval:
        """Joules in a window.

        Raises:
            BadInput: Too few readings lie around it, or what was read is no power.
        """
        t, watts, joules, low, high = np.array([*self.readings]).T  # the thread goes on adding
        span = window.start_s, window.end_s
        inside = (window.start_s <= t) & (t <= window.end_s)
        if not np.isnan(joules).all():
            usual_s = max(self.source.period_s, float(np.median(np.diff(t))) if len(t) > 1 else 0)
            stood_s = longest_standstill(t[inside], joules[inside])
            if stood_s >= MIN_PERIODS / 2 * usual_s:
                raise self._no_reading(f"stood still for {stood_s:.3g} of {window.seconds:.3g} s")
            return count(t, joules, *span, self.source.period_s)
        if (watts[inside] <= 0).any() and not (watts[inside] > 0).any():
            raise self._no_reading("read 0 W")
        found = integrate(t, np.where(watts > 0, watts, math.nan), *span)
        if self.source.provenance is not Provenance.ESTIMATED:
            return found
        ends = (integrate(t, end, *span).estimate for end in (low, high))
        return Interval(next(ends), found.estimate, next(ends))

    def _no_reading(self, what: str) -> BadInput:
        named = " of ".join(filter(None, [self.source.name, self.source.of]))
        remedy = "record the power by other means, and replay it (power_trace)"
        if self.source.provenance is Provenance.REPLAYED:
            remedy = "record it again"
        return BadInput(f"{named} {what}, which is no reading; {remedy}")

    def checked_energy(self, window: Window) -> Interval:
        """Joules in a window that is long enough for its sensor.

        Raises:
            BadInput: It is not, or too few readings lie around it.
        """
        name, period_s = self.source.name, self.source.period_s
        least_s = MIN_PERIODS * period_s
        if window.seconds < least_s:
            raise BadInput(
                f"{window.name} took {window.seconds:.3g} s, and {name} changes every {period_s:.3g} s: a window must hold "
                f"{MIN_PERIODS} updates; repeat the work until it takes {least_s:.3g} s"
            )
        return self.energy(window)

    def course(self, window: Window) -> dict[str, list[float]]:
        """Power over a window, thinned to at most `_COURSE` points; gaps are left out.

        A counter's power is that between two moments at which it moved.

        Returns:
            `course_s`, seconds since its start, and `course_w`.
        """
        t, watts, joules, _, _ = np.array([*self.readings]).T
        inside = (window.start_s <= t) & (t <= window.end_s)
        t, watts, joules = t[inside], watts[inside], joules[inside]
        if not np.isnan(joules).all():
            # a counter may be read more often than it counts
            moved = np.diff(joules, prepend=math.nan) != 0
            t, joules = t[moved], joules[moved]
            watts = counter_steps(t, joules, self.source.period_s) / np.diff(t)
            t = t[1:]
        t, watts = t[watts > 0], watts[watts > 0]
        parts = np.array_split(np.arange(len(t)), min(_COURSE, len(t)) or 1)
        parts = [part for part in parts if len(part)]
        return {
            "course_s": [float(t[part].mean() - window.start_s) for part in parts],
            "course_w": [float(watts[part].mean()) for part in parts],
        }

    def rows(self, window: Window, idle: Window | None, tokens: int) -> Iterator[Measurement]:
        """As of `EnergyMeter.measurements`."""
        source, seconds = self.source, window.seconds
        details = {"of": source.of, "seconds": seconds, "period_s": source.period_s}
        common = {"provenance": source.provenance, "method": source.name, "scope": window.name}

        def refused(metric: str, why: str) -> Measurement:
            said = {"status": Status.UNSUPPORTED, "message": why, "details": details}
            return Measurement(metric, **common, **said)

        def row(metric: str, joules: Interval, factor: float = 1.0) -> Measurement:
            low, value, high = (end * factor for end in joules)
            more = self.course(window) if metric == "power" else {}
            said = {"message": _NO_READING.get(source.provenance, ""), "details": details | more}
            return Measurement(metric, value, low, high, 1.0, n=1, **common, **said)

        try:
            energy = self.checked_energy(window)
        except BadInput as error:
            yield refused("energy", str(error))
            return
        yield row("energy", energy)
        yield row("power", energy, 1 / seconds)
        yield row("energy_delay", energy, seconds)
        if tokens:
            yield row("energy_per_token", energy, 1 / tokens)
        if idle is None or source.provenance is Provenance.ESTIMATED:
            return
        try:
            base = self.checked_energy(idle)
        except BadInput as error:
            yield refused("net_energy", f"the idle baseline: {error}")
            return
        low, value, high = (end * seconds / idle.seconds for end in base)
        net = Interval(energy.low - high, energy.estimate - value, energy.high - low)
        yield row("net_energy", net)


class EnergyMeter:
    """Samples every source while it is entered.

    Args:
        sources: What to sample; by default this machine's sensors, and where it has none the estimate.
        sample_s: How often.
        sink: Where samples and windows go as they are made.
        device: What works in the windows: each begins and ends when all that was queued there is done.

    Example:
        >>> with EnergyMeter(device="cpu") as meter, meter.window("generation") as window:
        ...     _ = [torch.rand(256, 256) @ torch.rand(256, 256) for _ in range(100)]
        >>> [row.provenance for row in meter.measurements(window, tokens=100)]  # where there is no sensor: from the processor's use
        [<Provenance...
    """

    def __init__(
        self,
        sources: Sequence[Source] | None = None,
        sample_s: float = _SAMPLE_S,
        sink: Sink | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        if sources is None:
            under_test = gpu_uuid(str(device)) if torch.device(device).type == "cuda" else ""
            sources = find_sources(under_test=under_test).sources or [EstimateSource()]
        self.tracks = [Track(source) for source in sources]
        self._sink = sink
        self._synchronize = synchronizer(device)
        self._sample_s = sample_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="nanolib-power", daemon=True)

    def __enter__(self) -> Self:
        self.read()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        self.read()

    def _sample(self) -> None:
        while not self._stop.wait(self._sample_s):
            self.read()

    def read(self) -> None:
        """Take one sample of every source; the thread does so by itself."""
        for track in self.tracks:
            t_s, *values = reading = track.source.read()
            track.readings.append(reading)
            if self._sink is not None:
                name = self._sink.name(f"{track.source.name} {track.source.of}".strip())
                self._sink.put("power_samples", [(name, self._sink.at_us(t_s), *values)])

    @contextmanager
    def window(self, name: str) -> Iterator[Window]:
        """Open a window that ends with the block, however that ends.

        Leaving waits for one more reading.
        """
        self._synchronize()
        window = Window(name, time.monotonic())
        try:
            yield window
        finally:
            self._synchronize()
            window.end_s = time.monotonic()
            if self._sink is not None:
                start_us, ns = self._sink.at_us(window.start_s), round(1e9 * window.seconds)
                self._sink.put("sections", [(self._sink.name(name), start_us, ns)])
            self._wait_until(window.end_s)

    def _wait_until(self, moment_s: float) -> None:
        """Until every source has told what was at a moment, so that its edge lies between two readings."""
        give_up = time.monotonic() + _SETTLE_S
        while any(track.told_s < moment_s for track in self.tracks) and time.monotonic() < give_up:
            time.sleep(self._sample_s / 4)

    def idle(self, seconds: float = IDLE_S) -> Window:
        """Measure the baseline: a window in which this process does nothing."""
        with self.window("idle") as window:
            time.sleep(seconds)
        return window

    def measurements(
        self, window: Window, *, idle: Window | None = None, tokens: int = 0
    ) -> list[Measurement]:
        """Give the rows of one window.

        Per source its energy and power; per token where tokens are given, and above idle.

        Args:
            window: Closed.
            idle: The baseline; its power times the window's length is taken off in rows of their own (`net_energy`).
            tokens: Made in the window.

        Returns:
            `energy` (J), `power` (W), `energy_per_token` (J), `energy_delay` (J·s), `net_energy` (J); provenance and method are the
            source's, scope is the window's name. A window too short for its sensor is a row `unsupported` that says so.
        """
        return [row for track in self.tracks for row in track.rows(window, idle, tokens)]
