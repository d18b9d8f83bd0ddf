"""A panel of a live notebook: predicts as its controls move, measures on a button in a process of its own, can be cancelled.

What was measured stands in the chart beside what the notebook measured, and goes to the database when that is asked for.
"""

from __future__ import annotations

import contextlib
import functools
import html
import json
import shlex
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from nanolib.measurement import BadInput, Status
from nanolib.meters.machine import this_machine
from nanolib.report import renderer, tables
from nanolib.report.display import Table
from nanolib.report.drawing import empty_chart
from nanolib.report.foreseen import MOST, foreseen_chart, timed_points, timed_table
from nanolib.report.overview import failures, pick
from nanolib.run import sweep
from nanolib.run.case import Case
from nanolib.run.ceilings import CeilingCase
from nanolib.run.params import Params
from nanolib.run.plan import known_ceilings, predictions, table_of
from nanolib.run.suite.jobs import DEFAULT_SUITE, plan
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
        timed: Scopes of the latencies that formulas predict. Where there are some, the panel draws the prediction and what was
            measured in one chart, and lists both, in the place of `chart` and `table`.
        follows: Factors that `chart` does not tell apart: it shows what is in them like the case of the controls.
    """

    chart: Callable[[pd.DataFrame], Any]
    table: Callable[[pd.DataFrame], pd.DataFrame]
    columns: Mapping[str, str]
    timed: tuple[str, ...] = ()
    follows: tuple[str, ...] = ()


def _named(case: Case) -> str:
    """What a model does, or the kind of attention: the rest of a case stands in its controls."""
    return str(case.factors.get("mode") or case.factors["name"])


def _newest(rows: pd.DataFrame) -> pd.DataFrame:
    """Of what was measured again the newest alone, whatever was measured along with it (lists of algorithms)."""
    if rows.empty:
        return rows
    of = [json.dumps({k: v for k, v in factors.items() if not isinstance(v, list)}) for factors in rows["factors"]]
    alike = rows.assign(place=range(len(rows))).groupby([pd.Series(of, index=rows.index), "metric", "scope", "method"])
    kept = rows["run_id"] == alike["run_id"].transform("last")
    # where it was, so that series keep their colours
    return rows.loc[alike["place"].transform("min")[kept].sort_values(kind="stable").index]


@functools.cache
def _usual(experiment: str) -> dict[str, Any]:
    from nanolib.experiments import ALL

    (job,) = plan(ALL, [DEFAULT_SUITE, experiment], {}, {})
    return job.params.defining()


def command_of(params: Params) -> str:
    """The `nano run` of a notebook's parameters: those that differ from the suite's."""
    usual = _usual(params.NAME)
    words = ["nano", "run", DEFAULT_SUITE, params.NAME]
    for name, value in params.defining().items():
        if value != usual[name]:
            words += ["-p", f"{name}={value if isinstance(value, str) and value else json.dumps(value)}"]
    return shlex.join(words)


class Panel:
    """Controls over a prediction, buttons, a bar, a chart and a table.

    Args:
        experiment: The notebook's module.
        controls: Name → ipywidget.
        build: Makes parameters of the controls' values; may raise `BadInput`.
        shown: How to show what was measured.
        rows: What the notebook measured: drawn beside the new points.
        idle: Of the controls' values, the names of those that do nothing now; they are grey.

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
        idle: Callable[[Mapping[str, Any]], Collection[str]] = lambda _: (),
    ) -> None:
        import ipywidgets as widgets

        from nanolib.report.command_line import CommandLine

        self._idle, self._moves, self._planning, self._drawing = idle, 0, threading.Lock(), threading.Lock()
        self._foreseen: list[dict[str, Any]] = []
        # Factor → its values in the cases of the controls, and when the chart was drawn.
        self._like: dict[str, set[Any]] = {}
        self._drawn = self._like
        self._here: set[str] = set()  # cases that were measured: their prediction is the one they were measured beside
        self._experiment, self.controls, self._build, self._shown = experiment, controls, build, shown
        self._before = pd.DataFrame() if rows is None else rows
        self._folder = Scratch("explore")
        self._path = self._folder.path / "unsaved.sqlite"
        self._stop = threading.Event()
        self._busy = False
        with Store() as store:
            self._ceilings = known_ceilings(store, this_machine().machine_id)
        self.predicted, self.measured, self.said = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self.measure = widgets.Button(description="Measure", button_style="primary", icon="play")
        self.cancel = widgets.Button(description="Cancel", icon="stop", disabled=True)
        self.save = widgets.Button(
            description="Keep in database", icon="save", disabled=True, layout={"width": "160px"}
        )
        self.command = CommandLine()
        self.bar = widgets.IntProgress(min=0, max=1, layout={"display": "none"})
        with contextlib.suppress(BadInput):  # which is said once all is there
            self._aim()
        self.chart = renderer.live_chart(self._draw())
        for control in controls.values():
            control.observe(self._moved, names="value")
        self.measure.on_click(self._begin)
        self.cancel.on_click(self._end)
        self.save.on_click(self._keep)
        self._moved()
        buttons = widgets.HBox(
            [self.measure, self.cancel, self.save, self.bar, self.said], layout={"flex_flow": "wrap"}
        )
        boxes = widgets.HBox(list(controls.values()), layout={"flex_flow": "wrap"})
        self.widget = widgets.VBox([boxes, self.predicted, buttons, self.chart, self.measured, self.command])

    def params(self) -> Params:
        """The parameters that the controls stand for.

        Raises:
            BadInput: They do not fit together.
        """
        return self._build(self._values())

    def _values(self) -> dict[str, Any]:
        return {name: control.value for name, control in self.controls.items()}

    def _moved(self, _: Any = None) -> None:
        """Say at once what formulas tell; the rest takes planning, in a thread, of which only the newest counts."""
        self._moves += 1
        values = self._values()
        idle = self._idle(values)
        for name, control in self.controls.items():
            control.disabled = name in idle
        try:
            params = self._aim()
        except BadInput as error:
            self._refuse(error)
            return
        if self._shown.timed:
            self.chart.params.foreseen = self._foreseen
        self.measure.disabled = self._busy
        self.command.text = command_of(params)
        planning = threading.Thread(target=self._plan, args=(self._moves, params), name="nanolib-plan", daemon=True)
        planning.start()

    def _plan(self, move: int, params: Params) -> None:
        with self._planning:
            if move != self._moves:
                return
            self._redraw()
            try:
                known = table_of(predictions(self._experiment, params, self._ceilings))
            except BadInput as error:
                self._refuse(error)
                return
            unknown = "" if self._ceilings else "; times need this machine's ceilings: measure once, or run nano doctor"
            if move == self._moves:
                table = f"<i>Predicted{unknown}</i>{Table(known)._repr_html_()}"
                self.predicted.value = table if len(known) else "<i>No formula predicts this case</i>"

    def _refuse(self, error: BadInput) -> None:
        self.predicted.value = f"<b>{html.escape(error.lines[0])}</b>"
        self.measure.disabled = True

    def _aim(self) -> Params:
        """What the controls stand for, what formulas predict of it, and what the chart shows beside it."""
        params = self.params()
        cases = list(self._experiment.cases(params))
        of = [case.factors for case in cases]
        self._like = {name: {one[name] for one in of if name in one} for name in self._shown.follows}
        said = [
            (case, case.formulas(self._ceilings).get("latency")) for case in cases if case.case_id not in self._here
        ]
        points = [{"what": _named(case), "n": case.factors["seq_len"], "ms": ms} for case, ms in said if ms is not None]
        self._foreseen = points[:MOST] if self._shown.timed else []
        return params

    def _begin(self, _: Any) -> None:
        params = self.params()
        self._busy = True
        self._stop.clear()
        self.measure.disabled, self.cancel.disabled = True, False
        self.bar.value, self.bar.layout.display = 0, ""
        cases = [str(case) for case in self._experiment.cases(params) if not isinstance(case, CeilingCase)]
        more = f" and {len(cases) - 1} more" if len(cases) > 1 else ""
        self.said.value = f"Starting {html.escape(cases[0] if cases else params.NAME)}{more} …"
        threading.Thread(target=self._run, args=(params,), name="nanolib-panel", daemon=True).start()

    def _end(self, _: Any) -> None:
        self.cancel.disabled, self.said.value = True, "Cancelling …"
        self._stop.set()

    def _run(self, params: Params) -> None:
        try:
            with Store(self._path) as store:
                run = sweep.measure(
                    self._experiment, params, store=store, progress=False, stop=self._stop, on_progress=self._tell
                )
                run.finish()
                failed = failures(run.measurements()).drop(columns="experiment")
            told = "; ".join(f"{case}: {status}: {why}" for case, status, why in failed.itertuples(index=False))
            self.said.value = html.escape(f"{told or 'Measured'}; not kept yet.")
            self.save.disabled = False
            with Store(self._path) as store:
                self._ceilings |= known_ceilings(store, this_machine().machine_id)
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

    def _new(self) -> pd.DataFrame:
        if not self._path.exists():
            return pd.DataFrame()
        with Store(self._path) as store:
            rows = store.measurements(samples=True)
        return rows[rows["status"] != Status.STARTED]  # which was cancelled

    def _draw(self) -> Any:
        new = self._new()
        self._drawn = self._like
        if self._shown.timed:
            parts = [(self._before, False), (_newest(new), True)]
            parts = [timed_points(rows, self._shown.timed, here) for rows, here in parts]
            parts = [part for part in parts if len(part)] or parts[:1]
            return foreseen_chart(pd.concat(parts, ignore_index=True), self._foreseen)
        rows = _newest(pd.concat([part for part in (self._before, new) if len(part)] or [new], ignore_index=True))
        for name, values in self._like.items():
            rows = rows[rows.get(f"factor.{name}", pd.Series(index=rows.index)).isin(values)]
        if len(rows):
            return self._shown.chart(rows)
        return empty_chart("What was measured", "nothing was measured with these settings yet: press Measure")

    def _redraw(self, anew: bool = False) -> None:
        """Draw the chart anew; unless it must be, only where the controls have left what it shows."""
        with self._drawing:
            if anew or self._like != self._drawn:
                self.chart.chart = self._draw()

    def _show(self) -> None:
        new = self._new()
        self._redraw(anew=True)
        self._here = {*pick(new, "latency")["case_id"]} if len(new) else set()
        if not len(new):
            return
        if self._shown.timed:
            shown = timed_table(timed_points(new, self._shown.timed, True))
        else:
            runs = list(dict.fromkeys(new["run_id"]))
            table = self._shown.table(new).sort_values("run_id", key=lambda ids: -ids.map(runs.index), kind="stable")
            shown = tables.readable(table, self._shown.columns).head(10)
        if len(shown):
            self.measured.value = "<i>Measured here, the newest first</i>" + Table(shown)._repr_html_()

    def _keep(self, _: Any) -> None:
        try:
            with Store() as store:
                store.merge(self._path)
        except BadInput as error:
            self.said.value = html.escape(error.lines[0])
            return
        self.said.value, self.save.disabled = f"Kept in {html.escape(store.path.name)}.", True
