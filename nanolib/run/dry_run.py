"""What an experiment would do: its cases with what is predicted of them, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from nanolib.numbers import format_number
from nanolib.run.case import Case
from nanolib.run.memory_plan import shortage
from nanolib.run.params import Params
from nanolib.stats.intervals import Interval
from nanolib.store import Store

_UNITS = {
    "flops": "FLOP",
    "bytes": "MiB",
    "peak_memory": "MiB",
    "weight_memory": "MiB",
    "latency": "ms",
}
_TIMING = ("budget_s", "rel_ci", "device")  # parameters that change how long a case takes
_NOT_LOOKED_AT = "told by running it: its model is code of yours"

Prediction = tuple[Case, dict[str, Any]]


def prediction_table(experiment: Any, params: Params) -> pd.DataFrame:
    """One line per case that formulas speak of: the case, and each prediction with its unit; no times, so the same everywhere."""
    return table_of(predictions(experiment, params))


def predictions(
    experiment: Any, params: Params, ceilings: dict[str, float] | None = None
) -> list[Prediction]:
    """Each case with what formulas say of it.

    Args:
        experiment: A module of `nanolib.experiments`.
        params: Its parameters.
        ceilings: As `roofline_ms` takes them; without them no time is predicted.
    """
    cases = experiment.cases(params)
    params.look(cases)
    return [(case, case.predict(ceilings)) for case in cases]


def table_of(predicted: Sequence[Prediction]) -> pd.DataFrame:
    """Predictions for people, as `prediction_table` returns them."""
    lines = [
        {"case": str(case)} | {_title(name): _text(name, value) for name, value in values.items()}
        for case, values in predicted
        if values
    ]
    return pd.DataFrame(lines).fillna("")


class CasePrediction(NamedTuple):
    """What is known of a case before it runs; texts for people."""

    case: str
    ms: str
    mib: str
    here: str


def predict_case(case: Case, ceilings: dict[str, float]) -> CasePrediction:
    """Predict a case by its formulas and its plan; a model of the user's own is not built."""
    ms = mib = "—"
    if case.runs_code:
        return CasePrediction(str(case), ms, mib, _NOT_LOOKED_AT)
    if (latency := case.predict(ceilings).get("latency")) is not None:
        ms = _text("latency", latency)
    if reason := case.unsupported():
        return CasePrediction(str(case), ms, mib, f"unsupported: {reason}")
    plan = case.plan()
    if plan.most is not None:
        mib = format_number(plan.most / 2**20)
    lacking = shortage(plan, case.device)
    return CasePrediction(str(case), ms, mib, f"oom_predicted: {lacking}" if lacking else "runs")


def expected_s(
    params: Params, cases: Sequence[Case], store: Store, machine_id: str
) -> Interval | None:
    """How long the cases will take, from earlier runs of this notebook on this machine.

    A case takes what it took before with the same timing parameters; one that was never measured
    takes what a case of the notebook took. The ends of the interval are the least and the most of
    these times, or the quartiles for a case that was never measured.

    Args:
        params: Of the notebook.
        cases: Those that will be measured.
        store: Where the runs are.
        machine_id: Of this machine.

    Returns:
        Seconds inside cases; None without an earlier run.
    """
    asked = _timing(params.model_dump(mode="json"))
    runs = store.runs("experiment = ? AND machine_id = ?", (params.NAME, machine_id))
    alike = [run.run_id for run in runs.itertuples() if _timing(run.params) == asked]
    rows = store.measurements(alike)
    ended = rows[(rows["metric"] == "case_duration") & rows["estimate"].notna()]
    if ended.empty:
        return None
    usual = np.quantile(ended["estimate"], [0.25, 0.5, 0.75])
    times = {
        case_id: np.quantile(own, [0, 0.5, 1])
        for case_id, own in ended.groupby("case_id")["estimate"]
    }
    return Interval(*map(float, sum(times.get(case.case_id, usual) for case in cases)))


def _timing(params: Mapping[str, Any]) -> list[Any]:
    return [params.get(name) for name in _TIMING]


def _title(name: str) -> str:
    unit = _UNITS.get(name)
    return name.replace("_", " ") + (f" ({unit})" if unit else "")


def _text(name: str, value: float | str) -> str:
    if isinstance(value, str):
        return value
    return format_number(value / 2**20 if name == "bytes" else value)
