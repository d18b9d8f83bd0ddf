"""Power and tokens per second while a model generates, for a live notebook; nothing of it is stored."""

from __future__ import annotations

import html
import threading
import time
from collections import deque
from typing import Any

import pandas as pd

from nanolib.experiments.energy import cases as energy
from nanolib.experiments.energy.view.live import live_chart
from nanolib.experiments.model.model_cases import text_batch
from nanolib.measurement import BadInput, Provenance
from nanolib.meters.energy.meter import EnergyMeter
from nanolib.models.generation import generation_of
from nanolib.report import renderer
from nanolib.run import sweep
from nanolib.run.lock import device_lock

_TICK_S, _SHOWN_S = 0.5, 60.0


class LivePower:
    """A start and a stop button over a chart that follows a thread which generates.

    Args:
        params: The first preset and length are used.

    Attributes:
        widget: What a notebook shows.
    """

    def __init__(self, params: energy.Params) -> None:
        import ipywidgets as widgets

        self._params = params
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._points: deque[dict[str, float]] = deque(maxlen=int(_SHOWN_S / _TICK_S))
        self.start = widgets.Button(description="Generate", button_style="primary", icon="play")
        self.stop = widgets.Button(description="Stop", icon="stop", disabled=True)
        self.said = widgets.HTML("Generates until it is stopped; nothing is stored.")
        self.chart = renderer.live_chart(live_chart(pd.DataFrame(), False))
        self.start.on_click(self._begin)
        self.stop.on_click(lambda _: self._stop.set())
        self.widget = widgets.VBox([widgets.HBox([self.start, self.stop, self.said]), self.chart])

    def _begin(self, _: Any) -> None:
        self._stop.clear()
        self._points.clear()
        self.start.disabled, self.stop.disabled = True, False
        self._thread = threading.Thread(target=self._run, name="nanolib-live", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._generate()
            self.said.value = "Stopped."
        except (BadInput, RuntimeError) as error:  # told where the person looks; a thread's traceback goes nowhere
            self.said.value = html.escape(str(error))
        finally:
            self.start.disabled, self.stop.disabled = False, True

    def _generate(self) -> None:
        case = next(case for case in energy.cases(self._params.replace(phases=["decode"], profiling=[])))
        self.said.value = "waiting for the device …"
        with device_lock(case.device, "live view"):
            self.said.value = "building the model …"
            built = case.model_case.build(self._params.seed)
            prompt = text_batch(case, "", self._params.seed)[:, :-1]
            generation = generation_of(built.eval(), prompt, case.new_tokens)
            generation.prefill()
            with EnergyMeter(device=case.device) as meter:
                track = meter.tracks[0]
                begin, estimated = time.monotonic(), track.source.provenance is Provenance.ESTIMATED
                while not self._stop.is_set():
                    tokens = 0
                    with meter.window("live") as window:
                        while time.monotonic() < window.start_s + _TICK_S and not self._stop.is_set():
                            generation.decode()
                            tokens += case.batch_size
                    low, watts, high = (joules / window.seconds for joules in track.energy(window))
                    point = {"seconds": window.end_s - begin, "watts": watts, "low": low, "high": high}
                    self._points.append(point | {"tokens_per_second": tokens / window.seconds})
                    self._show(track.source.name, estimated)

    def _show(self, source: str, estimated: bool) -> None:
        last = self._points[-1]
        power = f"{last['low']:.0f} to {last['high']:.0f} W (estimated)" if estimated else f"{last['watts']:.0f} W"
        self.said.value = f"{last['tokens_per_second']:.1f} tokens/s, {power} by {source}"
        self.chart.chart = live_chart(pd.DataFrame(self._points), estimated)


def live_panel(params: energy.Params) -> Any:
    """Power and tokens per second while the notebook's first model generates. Returns nothing in a batch run."""
    if not sweep.live_front_end():
        return None
    return LivePower(params).widget
