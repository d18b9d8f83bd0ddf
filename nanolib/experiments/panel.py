"""A panel of a live notebook: predicts as its controls move, measures on a button in a process of its own, can be cancelled.

What was measured stands in the chart beside what the notebook measured, and goes to the database when that is asked for.
"""

from __future__ import annotations

import html
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from nanolib.measurement import BadInput
from nanolib.meters.machine import this_machine
from nanolib.report import renderer, tables
from nanolib.report.display import Table
from nanolib.run import sweep
from nanolib.run.params import Params
from nanolib.run.plan import known_ceilings, prediction_table
from nanolib.run.worker import Cancelled
from nanolib.scratch import Scratch
from nanolib.store import Store

LENGTHS = [2**power for power in range(5, 14)]  # of sequences, that a person may pick


@dataclass(frozen=True)
class Shown:
    """How a panel shows what was measured.

    Attributes:
        chart: Draws it.
        table: Makes a table of the rows.
        columns: Column → title.
    """

    chart: Callable[[pd.DataFrame], Any]
    table: Callable[[pd.DataFrame], pd.DataFrame]
    columns: Mapping[str, str]


class Panel:
    """Controls over a prediction, buttons, a bar, a chart and a table.

    Args:
        experiment: The notebook's module.
        controls: Name → ipywidget.
        build: Makes parameters of the controls' values; may raise `BadInput`.
        shown: How to show what was measured.
        rows: What the notebook measured: drawn beside the new points.

    Attributes:
        widget: What a notebook shows.
    """

    def __init__(
        self,
        experiment: Any,
        controls: Mapping[str, Any],
        build: Callable[[Mapping[str, Any]], Params],
        shown: Shown,
        rows: pd.DataFrame | None = None,
    ) -> None:
        import ipywidgets as widgets

        self._experiment, self.controls, self._build, self._shown = experiment, controls, build, shown
        self._before = pd.DataFrame() if rows is None else rows
        self._folder = Scratch("explore")
        self._path = self._folder.path / "unsaved.sqlite"
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        with Store() as store:
            self._ceilings = known_ceilings(store, this_machine().machine_id)
        self.predicted, self.measured, self.said = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self.measure = widgets.Button(description="Measure", button_style="primary", icon="play")
        self.cancel = widgets.Button(description="Cancel", icon="stop", disabled=True)
        self.save = widgets.Button(description="Save", icon="save", disabled=True)
        self.bar = widgets.IntProgress(min=0, max=1, layout={"visibility": "hidden"})
        self.chart = renderer.live_chart(self._draw())
        for control in controls.values():
            control.observe(self._predict, names="value")
        self.measure.on_click(self._begin)
        self.cancel.on_click(lambda _: self._stop.set())
        self.save.on_click(self._keep)
        self._predict()
        buttons = widgets.HBox([self.measure, self.cancel, self.save, self.bar, self.said])
        boxes = widgets.HBox(list(controls.values()), layout={"flex_flow": "wrap"})
        self.widget = widgets.VBox([boxes, self.predicted, buttons, self.chart, self.measured])

    def params(self) -> Params:
        """The parameters that the controls stand for.

        Raises:
            BadInput: They do not fit together.
        """
        return self._build({name: control.value for name, control in self.controls.items()})

    def _predict(self, _: Any = None) -> None:
        busy = self._thread is not None and self._thread.is_alive()
        try:
            frame = prediction_table(self._experiment, self.params(), self._ceilings)
        except BadInput as error:
            self.predicted.value = f"<b>{html.escape(error.lines[0])}</b>"
            self.measure.disabled = True
            return
        self.predicted.value = "<i>Predicted</i>" + Table(frame)._repr_html_()
        self.measure.disabled = busy

    def _begin(self, _: Any) -> None:
        self._stop.clear()
        self.measure.disabled, self.cancel.disabled = True, False
        self.bar.value, self.bar.layout.visibility = 0, "visible"
        self._thread = threading.Thread(target=self._run, args=(self.params(),), name="nanolib-panel", daemon=True)
        self._thread.start()

    def _run(self, params: Params) -> None:
        try:
            with Store(self._path) as store:
                run = sweep.measure(
                    self._experiment, params, store=store, progress=False, stop=self._stop, on_progress=self._tell
                )
                run.finish()
            self.said.value = "Measured; not saved yet."
            self.save.disabled = False
        except Cancelled:
            self.said.value = "Cancelled."
        except (BadInput, RuntimeError) as error:  # told where the person looks; a thread's traceback goes nowhere
            self.said.value = html.escape(str(error))
        finally:
            self._show()
            self.bar.layout.visibility = "hidden"
            self.measure.disabled, self.cancel.disabled = False, True

    def _tell(self, done: int, total: int, case: str) -> None:
        self.bar.max, self.bar.value = total, done
        self.said.value = f"{done} of {total}: {html.escape(case)}"

    def _new(self) -> pd.DataFrame:
        if not self._path.exists():
            return pd.DataFrame()
        with Store(self._path) as store:
            return store.measurements(samples=True)

    def _draw(self) -> Any:
        rows = [part for part in (self._before, self._new()) if len(part)]
        with Store() as store:
            nothing = store.measurements([], samples=True)
        return self._shown.chart(pd.concat(rows, ignore_index=True) if rows else nothing)

    def _show(self) -> None:
        new = self._new()
        self.chart.chart = self._draw()
        if len(new):
            shown = tables.readable(self._shown.table(new), self._shown.columns)
            self.measured.value = "<i>Measured here</i>" + Table(shown)._repr_html_()

    def _keep(self, _: Any) -> None:
        with Store() as store:
            store.merge(self._path)
            self.said.value = f"Saved in {html.escape(store.path.name)}."
        self.save.disabled = True
