"""A live notebook's controls: its parameters, changed by hand, predicted, and measured on a button that can be cancelled.

The chart and the table show what was measured last; all of it goes to the database when that is asked for.
"""

from __future__ import annotations

import functools
import html
import json
import shlex
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args, get_origin

import pandas as pd

from nanolib.measurement import BadInput, Status
from nanolib.meters.machine import this_machine
from nanolib.report import renderer
from nanolib.report.display import Table
from nanolib.report.overview import failures
from nanolib.report.section import Section
from nanolib.report.theme import empty_chart
from nanolib.run import params as shared
from nanolib.run import sweep
from nanolib.run.dry_run import predictions, table_of
from nanolib.run.jobs import DEFAULT_SUITE, plan
from nanolib.run.peaks_case import CeilingCase, ceilings_of
from nanolib.run.worker import Cancelled
from nanolib.store import Store


def explore(experiment: Any, params: shared.Params, rows: pd.DataFrame | None = None) -> Any:
    """Controls for a notebook's parameters. Returns nothing in a batch run.

    Args:
        experiment: The notebook's module.
        params: Where the controls begin.
        rows: What the notebook measured.
    """
    if not sweep.live_front_end():
        return None
    widget = Explore(experiment, params, rows).widget
    if params.NAME != "energy":
        return widget
    import ipywidgets as widgets

    from nanolib.experiments.energy.live import LivePower

    return widgets.VBox([widget, LivePower(params).widget])


class Explore:
    """Controls over a prediction, buttons, a bar, a chart and a table; arguments as of `explore`.

    Attributes:
        controls: Parameter → its control, for those that only this notebook has, and the time for one timing.
        widget: What a notebook shows.
    """

    def __init__(
        self, experiment: Any, params: shared.Params, rows: pd.DataFrame | None = None
    ) -> None:
        import ipywidgets as widgets

        from nanolib.report.command_line import CommandLine

        self._experiment, self._params = experiment, params
        self._section = _section(params.NAME)
        self._before = pd.DataFrame() if rows is None else rows
        self._folder = TemporaryDirectory(prefix="nanolib-explore-")
        self._path = Path(self._folder.name) / "unsaved.sqlite"
        self._stop, self._busy = threading.Event(), False
        own = [name for name in type(params).model_fields if name not in shared.Params.model_fields]
        self.controls = {name: _control(params, name) for name in [*own, "budget_s"]}
        self.predicted, self.measured, self.said = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self.predict = widgets.Button(description="Predict", icon="calculator")
        self.measure = widgets.Button(description="Measure", button_style="primary", icon="play")
        self.cancel = widgets.Button(description="Cancel", icon="stop", disabled=True)
        self.keep = widgets.Button(
            description="Keep in database", icon="save", disabled=True, layout={"width": "160px"}
        )
        self.bar = widgets.IntProgress(min=0, max=1, layout={"display": "none"})
        self.command = CommandLine()
        self.chart = renderer.live_chart(self._drawn())
        for control in self.controls.values():
            control.observe(self._moved, names="value")
        for button, act in {
            self.predict: self._predict,
            self.measure: self._begin,
            self.cancel: self._end,
            self.keep: self._keep,
        }.items():
            button.on_click(act)
        self._moved()
        wrapped = {"flex_flow": "row wrap"}
        buttons = widgets.HBox(
            [self.predict, self.measure, self.cancel, self.keep, self.bar, self.said],
            layout=wrapped,
        )
        wide = {name for name in own if isinstance(getattr(params, name), list | dict)}
        lines = widgets.VBox([self.controls[name] for name in self.controls if name in wide])
        grid = {"grid_template_columns": "repeat(auto-fill, minmax(220px, 1fr))"}
        boxes = widgets.GridBox(
            [self.controls[name] for name in self.controls if name not in wide], layout=grid
        )
        self.widget = widgets.VBox(
            [lines, boxes, buttons, self.predicted, self.chart, self.measured, self.command]
        )

    def params(self) -> shared.Params:
        """The parameters that the controls stand for.

        Raises:
            BadInput: They do not fit together.
        """
        given = {name: control.value for name, control in self.controls.items()}
        return type(self._params)(**self._params.model_dump() | given)

    def _moved(self, _: Any = None) -> None:
        """Say what does not fit; the command line follows."""
        try:
            self.command.text = command_of(self.params())
            self.predicted.value = ""
        except BadInput as error:
            self.predicted.value = f"<b>{html.escape(error.lines[0])}</b>"
        self.predict.disabled = bool(self.predicted.value)
        self.measure.disabled = self._busy or self.predict.disabled

    def _predict(self, _: Any) -> None:
        with Store() as store:
            ceilings = ceilings_of(store, this_machine().machine_id)
        unknown = (
            ""
            if ceilings
            else "; times need this machine's ceilings: keep a measurement, or run nano doctor"
        )
        known = table_of(predictions(self._experiment, self.params(), ceilings))
        table = f"<i>Predicted{unknown}</i>{Table(known)._repr_html_()}"
        self.predicted.value = table if len(known) else "<i>No formula predicts these cases</i>"

    def _begin(self, _: Any) -> None:
        params = self.params()
        self._busy = True
        self._stop.clear()
        self.measure.disabled, self.cancel.disabled = True, False
        self.bar.value, self.bar.layout.display = 0, ""
        count = sum(not isinstance(case, CeilingCase) for case in self._experiment.cases(params))
        self.said.value = f"Starting {count} case(s) …"
        threading.Thread(
            target=self._run, args=(params,), name="nanolib-explore", daemon=True
        ).start()

    def _end(self, _: Any) -> None:
        self.cancel.disabled, self.said.value = True, "Cancelling …"
        self._stop.set()

    def _run(self, params: shared.Params) -> None:
        try:
            with Store(self._path) as store:
                run = sweep.measure(
                    self._experiment,
                    params,
                    store=store,
                    progress=False,
                    stop=self._stop,
                    on_progress=self._tell,
                )
                run.finish()
                failed = failures(run.measurements()).drop(columns="experiment")
            told = "; ".join(
                f"{case}: {status}: {why}" for case, status, why in failed.itertuples(index=False)
            )
            self.said.value = html.escape(f"{told or 'Measured'}; not kept yet.")
            self.keep.disabled = False
        except Cancelled:
            self.said.value = "Cancelled."
        except Exception as error:  # told where the person looks; a thread's traceback goes nowhere
            self.said.value = html.escape(str(error) or type(error).__name__)
        finally:
            self._busy, self.cancel.disabled, self.bar.layout.display = False, True, "none"
            self._show()
            self._moved()

    def _tell(self, done: int, total: int, case: str) -> None:
        self.bar.max, self.bar.value = total, done
        self.said.value = f"{done} of {total}: {html.escape(case)}"
        self._show()

    def _new(self) -> pd.DataFrame:
        """The rows of the last run; without cases that are in flight, or were cancelled."""
        if not self._path.exists():
            return pd.DataFrame()
        with Store(self._path) as store:
            rows = store.measurements(samples=True)
        return rows[
            (rows["status"] != Status.STARTED) & (rows["run_id"] == rows["run_id"].iloc[-1:].max())
        ]

    def _drawn(self) -> Any:
        new = self._new()
        rows = new if len(new) else self._before
        if len(rows):
            return self._section.main_chart(rows)
        return empty_chart("What was measured", "nothing was measured yet: press Measure")

    def _show(self) -> None:
        new = self._new()
        if new.empty:
            return
        self.chart.chart = self._drawn()
        table = next(iter(self._section.tables.values())).readable(new)
        if len(table):
            self.measured.value = "<i>Measured here</i>" + Table(table)._repr_html_()

    def _keep(self, _: Any) -> None:
        try:
            with Store() as store:
                store.merge(self._path)
        except BadInput as error:
            self.said.value = html.escape(error.lines[0])
            return
        self.said.value, self.keep.disabled = f"Kept in {html.escape(store.path.name)}.", True


def command_of(params: shared.Params) -> str:
    """The `nano run` of a notebook's parameters: those that differ from the suite's."""
    usual = _usual(params.NAME)
    words = ["nano", "run", DEFAULT_SUITE, params.NAME]
    for name, value in params.defining().items():
        if value != usual[name]:
            words += [
                "-p",
                f"{name}={value if isinstance(value, str) and value else json.dumps(value)}",
            ]
    return shlex.join(words)


@functools.cache
def _usual(experiment: str) -> dict[str, Any]:
    from nanolib.experiments import ALL

    (job,) = plan(ALL, [DEFAULT_SUITE, experiment], {}, {})
    return job.params.defining()


def _section(experiment: str) -> Section:
    from nanolib.experiments import sections

    return next(section for section in sections() if section.experiment == experiment)


def _control(params: shared.Params, name: str) -> Any:
    """What a parameter is changed by: a box, a list of its choices, or a line of text as `-p` takes it."""
    import ipywidgets as widgets

    value, kind = params.model_dump(mode="json")[name], type(params).model_fields[name].annotation
    look: dict[str, Any] = {"description": name, "style": {"description_width": "initial"}}
    if isinstance(value, bool):
        return widgets.Checkbox(value=value, indent=False, **look)
    if get_origin(kind) is Literal:
        return widgets.Dropdown(value=value, options=get_args(kind), **look)
    text = value if isinstance(value, str) else json.dumps(value)
    width = "98%" if isinstance(value, list | dict) else "auto"
    return widgets.Text(value=text, continuous_update=False, layout={"width": width}, **look)
