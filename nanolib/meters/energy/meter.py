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
from typing import Any, Self

import numpy as np
import torch

from nanolib.measurement import BadInput, Measurement, Provenance, Status
from nanolib.meters.energy.integration import count, counter_steps, integrate, longest_standstill
from nanolib.meters.energy.power import MIN_PERIODS, EstimateSource, Reading, Source, find_sources
from nanolib.meters.machine import gpu_uuid
from nanolib.meters.sink import Sink
from nanolib.meters.time.clock import synchronizer
from nanolib.stats.intervals import Interval

_SAMPLE_S = 0.05
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
        readings = list(self.readings)  # the thread goes on adding to them
        t = [reading.t_s for reading in readings]
        joules = [reading.joules for reading in readings]
        if not np.isnan(joules).all():
            if reason := self._stands_still(window, np.array(t), np.array(joules)):
                raise BadInput(reason)
            return count(
                t, joules, window.start_s, window.end_s, self.source.wrap_j, self.source.period_s
            )
        watts = np.array([reading.watts for reading in readings])
        inside = watts[(np.array(t) >= window.start_s) & (np.array(t) <= window.end_s)]
        if (inside <= 0).any() and not (inside > 0).any():
            raise BadInput(f"{self._named} read 0 W, which is no reading; {self._remedy}")
        found = integrate(t, np.where(watts > 0, watts, math.nan), window.start_s, window.end_s)
        if self.source.provenance is not Provenance.ESTIMATED:
            return found
        ends = [
            integrate(
                t, [getattr(reading, end) for reading in readings], window.start_s, window.end_s
            ).estimate
            for end in ("low", "high")
        ]
        return Interval(ends[0], found.estimate, ends[1])

    def _stands_still(self, window: Window, t: np.ndarray, joules: np.ndarray) -> str:
        """Why a counter tells nothing of a window: it missed half as many updates as a window must hold."""
        inside = (t >= window.start_s) & (t <= window.end_s)
        usual_s = max(self.source.period_s, float(np.median(np.diff(t))) if len(t) > 1 else 0.0)
        stood_s = longest_standstill(t[inside], joules[inside])
        if stood_s < MIN_PERIODS / 2 * usual_s:
            return ""
        stood = f"stood still for {stood_s:.3g} of {window.seconds:.3g} s"
        return f"{self._named} {stood}, which is no reading; {self._remedy}"

    @property
    def _named(self) -> str:
        return " of ".join(filter(None, [self.source.name, self.source.of]))

    @property
    def _remedy(self) -> str:
        replayed = self.source.provenance is Provenance.REPLAYED
        return (
            "record it again"
            if replayed
            else "record the power by other means, and replay it (power_trace)"
        )

    def checked_energy(self, window: Window) -> Interval:
        """Joules in a window that is long enough for its sensor.

        Raises:
            BadInput: It is not, or too few readings lie around it.
        """
        if reason := too_short(window, self.source):
            raise BadInput(reason)
        return self.energy(window)

    def course(self, window: Window) -> tuple[list[float], list[float]]:
        """Power over a window: seconds since its start, and W, thinned to at most `_COURSE` points; gaps are left out.

        A counter's power is that between two moments at which it moved.
        """
        inside = [r for r in self.readings if window.start_s <= r.t_s <= window.end_s]
        t, watts = np.array([r.t_s for r in inside]), np.array([r.watts for r in inside])
        joules = np.array([r.joules for r in inside])
        if not np.isnan(joules).all():
            moved = np.append(
                True, np.diff(joules) != 0
            )  # a counter may be read more often than it counts
            t, joules = t[moved], joules[moved]
            watts = counter_steps(t, joules, self.source.wrap_j, self.source.period_s) / np.diff(t)
            t, read = t[1:], ~np.isnan(watts)
        else:
            read = watts > 0
        t, watts = t[read], watts[read]
        parts = np.array_split(np.arange(len(t)), min(_COURSE, len(t)) or 1)
        means = [
            (float(t[part].mean() - window.start_s), float(watts[part].mean()))
            for part in parts
            if len(part)
        ]
        return [at for at, _ in means], [power for _, power in means]


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
        names = [f"{track.source.name} {track.source.of}".strip() for track in self.tracks]
        self._names = [sink.name(name) for name in names] if sink else []
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
            track.readings.append(track.source.read())
        if self._sink is not None:
            last = [track.readings[-1] for track in self.tracks]
            rows = zip(self._names, last, strict=True)
            at_us = self._sink.at_us
            values = [(name, at_us(r.t_s), r.watts, r.joules, r.low, r.high) for name, r in rows]
            self._sink.put("power_samples", values)

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
                row = (
                    self._sink.name(name),
                    self._sink.at_us(window.start_s),
                    round(1e9 * window.seconds),
                )
                self._sink.put("sections", [row])
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
        return [row for track in self.tracks for row in self._of_track(track, window, idle, tokens)]

    def _of_track(
        self, track: Track, window: Window, idle: Window | None, tokens: int
    ) -> Iterator[Measurement]:
        common: dict[str, Any] = {
            "provenance": track.source.provenance,
            "method": track.source.name,
            "scope": window.name,
            "details": {
                "of": track.source.of,
                "seconds": window.seconds,
                "period_s": track.source.period_s,
            },
        }
        try:
            energy = track.checked_energy(window)
        except BadInput as error:
            yield Measurement("energy", status=Status.UNSUPPORTED, message=str(error), **common)
            return
        message = _NO_READING.get(track.source.provenance, "")
        seconds, watts = track.course(window)
        course = {"course_s": seconds, "course_w": watts}

        def row(metric: str, factor: float, of: Interval = energy) -> Measurement:
            low, value, high = (end * factor for end in of)
            details = common["details"] | (course if metric == "power" else {})
            return Measurement(
                metric, value, low, high, 1.0, n=1, message=message, **common | {"details": details}
            )

        yield row("energy", 1.0)
        yield row("power", 1 / window.seconds)
        yield row("energy_delay", window.seconds)
        if tokens:
            yield row("energy_per_token", 1 / tokens)
        if idle is not None and track.source.provenance is not Provenance.ESTIMATED:
            try:
                base = track.checked_energy(idle)
            except BadInput as error:
                said = f"the idle baseline: {error}"
                yield Measurement("net_energy", status=Status.UNSUPPORTED, message=said, **common)
                return
            share = window.seconds / idle.seconds
            net = Interval(
                energy.low - base.high * share,
                energy.estimate - base.estimate * share,
                energy.high - base.low * share,
            )
            yield row("net_energy", 1.0, net)


def too_short(window: Window, source: Source) -> str:
    """Why a window holds too few updates of its sensor; empty where it holds enough."""
    least = MIN_PERIODS * source.period_s
    if window.seconds >= least:
        return ""
    return (
        f"{window.name} took {window.seconds:.3g} s, and {source.name} changes every {source.period_s:.3g} s: "
        f"a window must hold {MIN_PERIODS} updates; repeat the work until it takes {least:.3g} s"
    )
