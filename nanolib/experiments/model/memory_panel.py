"""Explore the memory that a model needs: a bar for each use that moves with the controls; nothing is run."""

from __future__ import annotations

import html
import shlex
import threading
from collections.abc import Mapping
from typing import Any

from nanolib.config import DTYPES, PRESETS
from nanolib.experiments.model.cases import Params
from nanolib.experiments.model.planner import USES, Planner, Use
from nanolib.experiments.model.planning import GIB, MemoryPlan, checked, memory_bytes
from nanolib.experiments.model.steps import OPTIMIZERS
from nanolib.experiments.model.view.plan_chart import plan_chart
from nanolib.experiments.panel import LENGTHS
from nanolib.measurement import BadInput, Held
from nanolib.report import renderer
from nanolib.run import sweep

_MEMORY = [2, 4, 8, 16, 24, 32, 40, 48, 64, 80, 96, 141, 192, 288, 640]  # GiB, as devices have them


def memory_panel(params: Params) -> Any:
    """Controls over a plan of a preset's memory. Returns nothing in a batch run."""
    return MemoryPanel(params).widget if sweep.live_front_end() else None


class MemoryPanel:
    """What a preset needs for each use, planned as its controls move; the newest setting wins.

    Args:
        params: Of the notebook.

    Attributes:
        widget: What a notebook shows.
    """

    def __init__(self, params: Params) -> None:
        import ipywidgets as widgets

        from nanolib.report.command_line import CommandLine

        self._moves, self._planning = 0, threading.Lock()
        self._planners: dict[tuple[Any, ...], Planner] = {}
        dtypes = [dtype for dtype in DTYPES if dtype != "float64"]
        self.controls = {
            "model": widgets.Dropdown(options=list(PRESETS), value=params.presets[0], description="preset"),
            "seq_len": widgets.SelectionSlider(options=LENGTHS, value=1024, description="tokens"),
            "batch_size": widgets.BoundedIntText(value=1, min=1, max=4096, description="sequences"),
            "dtype": widgets.Dropdown(
                options=dtypes,
                value=next((dtype for dtype in params.dtypes if dtype in dtypes), dtypes[0]),
                description="type",
            ),
            "optimizer": widgets.Dropdown(options=list(OPTIMIZERS), description="optimizer"),
            "memory": widgets.SelectionSlider(options=_MEMORY, value=24, description="GiB"),
        }
        self.said, self.command = widgets.HTML(), CommandLine(label="Copy as nano plan …")
        self.chart = renderer.live_chart(plan_chart(list(USES), float(self.controls["memory"].value)))
        for control in self.controls.values():
            control.observe(self._moved, names="value")
        self._moved()
        boxes = widgets.HBox(list(self.controls.values()), layout={"flex_flow": "wrap"})
        self.widget = widgets.VBox([boxes, self.said, self.chart, self.command])

    def _moved(self, _: Any = None) -> None:
        self._moves += 1
        values = {name: control.value for name, control in self.controls.items()}
        options = " ".join(
            f"--{name.replace('_', '-')} {values[name]}" for name in ("seq_len", "batch_size", "dtype", "optimizer")
        )
        self.command.text = f"nano plan {shlex.quote(values['model'])} --memory {values['memory']}GiB {options}"
        self.chart.params.memory = float(values["memory"])
        threading.Thread(target=self._plan, args=(self._moves, values), name="nanolib-memory-plan", daemon=True).start()

    def _plan(self, move: int, values: Mapping[str, Any]) -> None:
        """Plan use after use, and stop as soon as a control has moved again."""
        with self._planning:
            uses: list[Use] = []
            memory = memory_bytes(f"{values['memory']}GiB")
            try:
                planner = self._planner(values)
                for name in USES:
                    if move != self._moves:
                        return
                    uses.append(planner.needs(name, memory))
                    self.chart.params.held = _parts(uses)
            except BadInput as error:
                self.said.value = f"<b>{html.escape(error.lines[0])}</b>"
                return
            fitting = [use.name for use in uses if use.fits]
            self.said.value = f"fits: {'; '.join(fitting)}" if fitting else "nothing fits as it is"
            for at, use in enumerate(uses):  # what would fit takes a search
                if move != self._moves:
                    return
                uses[at] = use if use.fits or use.refused else planner.use(use.name, memory)
            if move == self._moves:
                self.said.value = "<br>".join(map(html.escape, MemoryPlan("", tuple(uses), memory).sentences))

    def _planner(self, values: Mapping[str, Any]) -> Planner:
        key = tuple(values[name] for name in ("model", "seq_len", "batch_size", "dtype", "optimizer"))
        if key not in self._planners:
            self._planners[key] = Planner(checked(*key[:4], "dense", {}), values["optimizer"], 1)
        return self._planners[key]


def _parts(uses: list[Use]) -> list[dict[str, Any]]:
    """Of each use what each kind holds, as the chart takes it."""
    return [
        {"use": use.name, "kind": kind, "order": [*Held].index(kind), "gib": size / GIB}
        for use in uses
        for kind, size in use.holding.by_kind.items()
    ]
