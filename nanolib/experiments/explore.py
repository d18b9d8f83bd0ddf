"""Add controls to a live notebook, to set parameters and to predict, measure and keep results."""

import json
import shlex
import threading
from collections.abc import Callable
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args, get_origin

import ipywidgets as widgets
import pandas as pd

from nanolib.experiments import ALL, sections
from nanolib.measurement import BadInput, Status, cause
from nanolib.meters.energy import EnergyMeter, Track, Window
from nanolib.meters.machine import this_machine
from nanolib.meters.power import find_sources
from nanolib.params import DEFAULT_SUITE, plan_jobs
from nanolib.report.display import CommandLine, Table, live_chart
from nanolib.report.tables import readable
from nanolib.report.theme import empty_chart
from nanolib.run import case as shared
from nanolib.run import sweep
from nanolib.run.group import Canceled
from nanolib.run.peaks import ceilings_of
from nanolib.run.prepare import prediction_table
from nanolib.store import Store


def explore(experiment, params: shared.Params, rows: pd.DataFrame | None = None):
    """Return controls for a notebook's parameters, or None in a batch run.

    Args:
        experiment: Module with the parameters and cases of the notebook.
        params: Initial values of the controls.
        rows: Rows to draw before the first measurement.
    """
    if not sweep.is_interactive():
        return None
    return Explore(experiment, params, rows).widget


class Explore:
    """Controls for one notebook, with a prediction, a chart and a table.

    The arguments are those of `explore`.

    Attributes:
        controls: Controls by the name of their parameter, for the notebook's main parameters.
        widget: Widget that the notebook shows.
    """

    def __init__(self, experiment, params: shared.Params, rows: pd.DataFrame | None = None):
        def button(text: str, icon: str, act: Callable[[Any], None], **rest):
            made = widgets.Button(description=text, icon=icon, **rest)
            made.on_click(act)
            return made

        self._experiment, self._params = experiment, params
        self._section = next(section for section in sections() if section.experiment == params.NAME)
        self._stop = threading.Event()
        self.controls = {name: _control(params, name) for name in type(params).MAIN}
        for control in self.controls.values():
            control.observe(self._update, names="value")
        self.predicted, self.measured, self.status, self.power = (widgets.HTML() for _ in range(4))
        self.predict = button("Predict", "calculator", self._predict)
        self.measure = button("Measure", "play", self._start, button_style="primary")
        self.cancel = button("Cancel", "stop", self._cancel, disabled=True)
        self.keep = button("Keep", "save", self._keep, disabled=True)
        self.command = CommandLine()
        drawing = empty_chart("Measured", "not measured yet; select Measure")
        if rows is not None:
            drawing = self._section.main_chart(rows)
        self.chart = live_chart(drawing)
        self._update()
        boxes = widgets.GridBox(
            [*self.controls.values()],
            layout={"grid_template_columns": "repeat(auto-fill, minmax(220px, 1fr))"},
        )
        row = widgets.HBox(
            [self.predict, self.measure, self.cancel, self.keep, self.status],
            layout={"flex_flow": "row wrap"},
        )
        self.widget = widgets.VBox(
            [boxes, row, self.power, self.predicted, self.chart, self.measured, self.command]
        )

    def params(self) -> shared.Params:
        """Return the parameters that the controls set.

        Raises:
            BadInput: The value of a control is not valid.
        """
        return self._params.replace(
            **{name: control.value for name, control in self.controls.items()}
        )

    def _update(self, change=None):
        """Show the command for the values of the controls, or why a value is not valid.

        Args:
            change: Change of a control. Without a change, the prediction is still valid.
        """
        if change is not None:
            self.predicted.value = ""
        try:
            self.command.text = command_of(self.params())
        except BadInput as error:
            self.predicted.value = f"<b>{escape(error.lines[0])}</b>"
            self.command.text = ""
        self.predict.disabled = not self.command.text
        # While a measurement runs, only Cancel is enabled.
        self.measure.disabled = self.predict.disabled or not self.cancel.disabled

    def _predict(self, _):
        try:
            with Store() as store:
                ceilings = ceilings_of(store, this_machine().machine_id)
            table = prediction_table(self._experiment, self.params(), ceilings)
        except BadInput as error:
            self.predicted.value = f"<b>{escape(error.lines[0])}</b>"
            return
        title = "Predicted"
        if not ceilings:
            title += " (times need measured peak rates: keep a measurement, or run nano doctor)"
        self.predicted.value = f"<i>{title}</i>{Table(table)._repr_html_()}"

    def _start(self, _):
        params = self.params()
        self._folder = TemporaryDirectory(prefix="nanolib-explore-")
        self._path = Path(self._folder.name) / "results.sqlite"
        self._stop.clear()
        self.measure.disabled, self.keep.disabled, self.cancel.disabled = True, True, False
        self.status.value = "Starting …"
        worker = threading.Thread(target=self._measure, args=(params,), daemon=True)
        worker.start()
        threading.Thread(target=self._show_power, args=(worker,), daemon=True).start()

    def _cancel(self, _):
        self.status.value = "Canceling …"
        self._stop.set()

    def _measure(self, params: shared.Params):
        try:
            with Store(self._path) as store:
                run = sweep.measure(
                    self._experiment,
                    params,
                    store=store,
                    stop=self._stop,
                    on_progress=self._progress,
                )
                run.finish()
            self.status.value = "Measured. Results are not stored yet."
            self.keep.disabled = False
        except Canceled:
            self.status.value = "Canceled."
        except Exception as error:  # A thread shows no traceback, so the status shows the error.
            self.status.value = escape(cause(error))
        finally:
            self.cancel.disabled = True
            self._show()
            self._update()

    def _show_power(self, worker: threading.Thread):
        """Show the power once a second until a thread ends, or why no sensor measures the power."""
        found = find_sources()
        why = "; ".join(f"{kind}: {reason}" for kind, reason in found.missing.items())
        meter = EnergyMeter(found.sources)
        meter.read()
        worker.join(1.0)
        while worker.is_alive():
            meter.read()
            powers = ", ".join(map(_last_power, meter.tracks))
            self.power.value = escape(powers or f"Power not measured. {why}")
            worker.join(1.0)
        self.power.value = ""

    def _progress(self, line: str):
        self.status.value = escape(line)
        self._show()

    def _show(self):
        """Show the rows of the measurement, without rows of unfinished cases."""
        with Store(self._path) as store:
            rows = store.measurements(samples=True)
        rows = rows[rows["status"] != Status.STARTED]
        if rows.empty:
            return
        self.chart.chart = self._section.main_chart(rows)
        table = next(iter(self._section.tables.values()))
        shown = Table(readable(table.of(rows), table.columns))
        self.measured.value = f"<i>Measured</i>{shown._repr_html_()}"

    def _keep(self, _):
        try:
            with Store() as store:
                store.merge(self._path)
        except BadInput as error:
            self.status.value = escape(error.lines[0])
            return
        self.status.value, self.keep.disabled = f"Results are in {escape(store.path.name)}.", True


def _last_power(track: Track) -> str:
    """Return the mean power between the last two readings of a source, or why there is none."""
    window = Window("live", track.readings[-2].t_s, track.known_until_s)
    try:
        power = f"{track.energy(window).estimate / window.seconds:.0f} W"
    except BadInput as error:
        power = f"not measured ({error.lines[0]})"
    return f"Power of {track.source.of}: {power}"


def command_of(params: shared.Params) -> str:
    """Return the `nano run` command with the parameters that differ from the default suite."""
    (job,) = plan_jobs(ALL, [DEFAULT_SUITE, params.NAME], {}, {})
    usual = job.params.defining()
    words = ["nano", "run", DEFAULT_SUITE, params.NAME]
    for name, value in params.defining().items():
        if value != usual[name]:
            text = value if isinstance(value, str) and value else json.dumps(value)
            words += ["-p", f"{name}={text}"]
    return shlex.join(words)


def _control(params: shared.Params, name: str):
    """Return a checkbox, a dropdown or a text field that sets a parameter."""
    value, kind = params.model_dump(mode="json")[name], type(params).model_fields[name].annotation
    layout = {"width": "98%"}
    if isinstance(value, list | dict):  # These are long. ipywidgets ignores `grid_column`.
        layout["grid_area"] = "auto / 1 / auto / -1"
    look = {"description": name, "style": {"description_width": "initial"}, "layout": layout}
    if isinstance(value, bool):
        return widgets.Checkbox(value=value, indent=False, **look)
    if get_origin(kind) is Literal:
        return widgets.Dropdown(value=value, options=get_args(kind), **look)
    text = value if isinstance(value, str) else json.dumps(value)
    return widgets.Text(value=text, continuous_update=False, **look)
