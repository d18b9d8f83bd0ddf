"""Show power and throughput in a live notebook while a model generates tokens."""

import html
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import pandas as pd

from nanolib.experiments.energy import cases as energy
from nanolib.experiments.model.look import random_ids
from nanolib.measurement import BadInput, Provenance
from nanolib.meters.energy.meter import EnergyMeter
from nanolib.models.generation import generation_of
from nanolib.report import renderer
from nanolib.report.plot import plot
from nanolib.report.theme import Drawing
from nanolib.run.lock import device_lock

_TICK_S, _MOST_POINTS = 0.5, 120


class LivePower:
    """Widget with buttons that start and stop generation, and a chart of power and throughput.

    Args:
        params: Parameters of the notebook. The widget uses only the first preset and length.

    Attributes:
        widget: Widget that a notebook displays.
    """

    def __init__(self, params: energy.Params) -> None:
        import ipywidgets as widgets

        self._params = params
        self._stop = threading.Event()
        self._points = deque(maxlen=_MOST_POINTS)
        self.start = widgets.Button(description="Generate", button_style="primary", icon="play")
        self.stop = widgets.Button(description="Stop", icon="stop", disabled=True)
        self.said = widgets.HTML("Select Generate to start. nanolib stores nothing.")
        self.charts = [renderer.live_chart(chart) for chart in _charts()]
        self.start.on_click(self._begin)
        self.stop.on_click(lambda _: self._stop.set())
        buttons = widgets.HBox([self.start, self.stop, self.said], layout={"flex_flow": "wrap"})
        charts = widgets.HBox(self.charts, layout={"flex_flow": "row wrap"})
        self.widget = widgets.VBox([buttons, charts])

    def _begin(self, _: Any) -> None:
        self._stop.clear()
        self._points.clear()
        self.start.disabled, self.stop.disabled = True, False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._generate()
            self.said.value = "Stopped."
        # The widget shows the error, since nobody sees the traceback of a thread.
        except (BadInput, RuntimeError) as error:
            self.said.value = html.escape(str(error))
        finally:
            self.start.disabled, self.stop.disabled = False, True

    def _generate(self) -> None:
        params = self._params.replace(phases=["decode"], profiling=[])
        case = energy.cases(params)[0]
        self.said.value = "Waiting for the device …"
        meter = EnergyMeter(params.sources(), device=case.device)
        with device_lock(case.device, "live view"), meter:
            self._tick(meter, "idle", lambda: self._stop.wait(_TICK_S), 0)
            self.said.value = "Building the model …"
            built = case.model_case.build(params.seed)
            prompt = random_ids(case, params.seed)[:, :-1]
            generation = generation_of(built.eval(), prompt, case.new_tokens)
            self._tick(meter, "prefill", generation.prefill, prompt.numel())
            while not self._stop.is_set():
                self._tick(meter, "decode", generation.decode, case.batch_size)

    def _tick(
        self, meter: EnergyMeter, phase: str, call: Callable[[], object], tokens: int
    ) -> None:
        """Repeat the call of a phase for half a second or more, and add a point to the chart."""
        calls, track = 0, meter.tracks[0]
        with meter.window(phase) as window:
            while not self._stop.is_set() and time.monotonic() < window.start_s + _TICK_S:
                call()
                calls += 1
        provenance, rate = track.source.provenance, calls * tokens / window.seconds
        try:
            low, watts, high = (joules / window.seconds for joules in track.energy(window))
            power = f"{watts:.0f} W by {track.source.name}"
            if provenance is Provenance.ESTIMATED:
                power = f"{low:.0f} to {high:.0f} W, estimated from CPU utilization"
        except BadInput as error:  # The chart shows the throughput without power.
            low = watts = high = math.nan
            reason = error.lines[0]
            if provenance is Provenance.REPLAYED and math.isnan(track.readings[-1].watts):
                reason = "the recording has ended"
            power = f"power not measured: {reason}"
        speed = f"{rate:,.1f} tokens/s, " if tokens else ""
        self.said.value = html.escape(f"{phase}: {speed}{power}")
        point = {"series": phase, "x": window.end_s, "low": low, "high": high, "y": watts}
        point |= {"sure": provenance is Provenance.MEASURED, "rate": rate or math.nan}
        self._points.append(point)
        charts = _charts(self._points, f"Power, {provenance}")
        for widget, chart in zip(self.charts, charts, strict=True):
            widget.chart = chart


def _charts(points: Iterable[dict[str, Any]] = (), title: str = "Power") -> tuple[Drawing, Drawing]:
    """Draw the power and throughput of the last 120 points. Unmeasured power is a hollow point."""
    look = {"xunit": "Time (s)", "empty": "not measured yet"}
    power = pd.DataFrame(points, columns=["series", "x", "y", "low", "high", "sure", "rate"])
    power["x"] -= power["x"].min()
    speed = power[["series", "x"]].assign(y=power.pop("rate")).dropna()
    return (
        plot(power, title, unit="Power (W)", **look),
        plot(speed, "Throughput", unit="Throughput (tokens/s)", log="y", **look),
    )
