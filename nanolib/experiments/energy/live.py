"""Power and tokens per second while a model generates, for a live notebook; nothing of it is stored."""

from __future__ import annotations

import html
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pandas as pd

from nanolib.experiments.energy import cases as energy
from nanolib.experiments.energy.view.live import live_chart
from nanolib.experiments.model.case import text_batch
from nanolib.measurement import BadInput, Provenance
from nanolib.meters.energy.meter import EnergyMeter
from nanolib.meters.energy.power import Source
from nanolib.models.generation import generation_of
from nanolib.report import renderer
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
        self._began = 0.0  # of the first window, s
        self._points: deque[dict[str, Any]] = deque(maxlen=int(_SHOWN_S / _TICK_S))
        self.start = widgets.Button(description="Generate", button_style="primary", icon="play")
        self.stop = widgets.Button(description="Stop", icon="stop", disabled=True)
        self.said = widgets.HTML("Generates until it is stopped; nothing is stored.")
        self.chart = renderer.live_chart(live_chart(pd.DataFrame(), Provenance.MEASURED))
        self.start.on_click(self._begin)
        self.stop.on_click(lambda _: self._stop.set())
        buttons = widgets.HBox([self.start, self.stop, self.said], layout={"flex_flow": "wrap"})
        self.widget = widgets.VBox([buttons, self.chart])

    def _begin(self, _: Any) -> None:
        self._stop.clear()
        self._points.clear()
        self._began = 0.0
        self.start.disabled, self.stop.disabled = True, False
        self._thread = threading.Thread(target=self._run, name="nanolib-live", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._generate()
            self.said.value = "Stopped."
        except (
            BadInput,
            RuntimeError,
        ) as error:  # told where the person looks; a thread's traceback goes nowhere
            self.said.value = html.escape(str(error))
        finally:
            self.start.disabled, self.stop.disabled = False, True

    def _generate(self) -> None:
        case = next(
            case for case in energy.cases(self._params.replace(phases=["decode"], profiling=[]))
        )
        self.said.value = "waiting for the device …"
        with device_lock(case.device, "live view"):
            self.said.value = "building the model …"
            built = case.model_case.build(self._params.seed)
            prompt = text_batch(case, "", self._params.seed)[:, :-1]
            generation = generation_of(built.eval(), prompt, case.new_tokens)
            calls = {
                "prefill": (generation.prefill, prompt.numel()),
                "decode": (generation.decode, case.batch_size),
            }
            with EnergyMeter(self._params.sources(), device=case.device) as meter:
                self._tick(meter, "idle", None, 0)
                for phase, (call, tokens) in calls.items():
                    self._tick(meter, phase, call, tokens)
                while not self._stop.is_set():
                    self._tick(meter, "decode", *calls["decode"])

    def _tick(
        self, meter: EnergyMeter, phase: str, call: Callable[[], object] | None, tokens: int
    ) -> None:
        """One more point: the power of half a second of a phase, and what it made."""
        if self._stop.is_set():
            return
        made, track = 0, meter.tracks[0]
        with meter.window(phase) as window:
            if call is None:
                self._stop.wait(_TICK_S)
            while (
                call is not None
                and time.monotonic() < window.start_s + _TICK_S
                and not self._stop.is_set()
            ):
                call()
                made += tokens
        why = ""
        try:
            low, watts, high = (joules / window.seconds for joules in track.energy(window))
        except BadInput as error:  # tokens are counted on
            low = watts = high = math.nan
            ended = track.source.provenance is Provenance.REPLAYED and math.isnan(
                track.readings[-1].watts
            )
            why = "the recording has ended" if ended else error.lines[0]
        self._began = self._began or window.start_s
        point = {
            "phase": phase,
            "seconds": window.end_s - self._began,
            "watts": watts,
            "low": low,
            "high": high,
        }
        self._points.append(
            point | {"tokens_per_second": made / window.seconds if call else math.nan}
        )
        self._show(track.source, why)

    def _show(self, source: Source, why: str) -> None:
        last = self._points[-1]
        estimated = source.provenance is Provenance.ESTIMATED
        if why:
            power = f"no power to draw: {why}"
        elif estimated:
            power = f"{last['low']:.0f} to {last['high']:.0f} W, estimated from how busy the cores are: no sensor was found"
        else:
            power = f"{last['watts']:.0f} W by {source.name}"
        rate = (
            ""
            if math.isnan(last["tokens_per_second"])
            else f"{last['tokens_per_second']:,.1f} tokens/s, "
        )
        self.said.value = html.escape(f"{last['phase']}: {rate}{power}")
        self.chart.chart = live_chart(pd.DataFrame(self._points), source.provenance)
