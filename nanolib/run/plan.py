"""What an experiment would do: its cases with what formulas predict, before anything runs."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from nanolib.numbers import format_number
from nanolib.run.case import Case
from nanolib.run.params import Params
from nanolib.run.workload import shortage
from nanolib.stats.intervals import Interval
from nanolib.store import Store

_UNITS = {
    "flops": "FLOP",
    "bytes": "MiB",
    "peak_memory": "MiB",
    "footprint": "MiB",
    "latency": "ms",
}

Prediction = tuple[Case, dict[str, Any]]
_TIMING = ("budget_s", "rel_ci", "device")  # parameters that change how long a case takes
_NOT_LOOKED_AT = "told by running it: its model is code of yours"


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


class Foreseen(NamedTuple):
    """What is known of a case before it runs; texts for people."""

    case: str
    ms: str
    mib: str
    here: str


def foreseen(case: Case, ceilings: dict[str, float]) -> Foreseen:
    """The case by its formulas and its plan; a model of the user's own is not built for that."""
    if case.runs_code:
        return Foreseen(str(case), "—", "—", _NOT_LOOKED_AT)
    latency = case.predict(ceilings).get("latency")
    ms = "—" if latency is None else _text("latency", latency)
    if reason := case.unsupported():
        return Foreseen(str(case), ms, "—", f"unsupported: {reason}")
    plan = case.plan()
    lacking = shortage(plan, case.device)
    mib = "—" if plan.most is None else format_number(plan.most / 2**20)
    return Foreseen(str(case), ms, mib, f"oom_predicted: {lacking}" if lacking else "runs")


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
    alike = [
        run_id for run_id, of in zip(runs.run_id, runs.params, strict=True) if _timing(of) == asked
    ]
    times: defaultdict[str, list[float]] = defaultdict(list)
    query = (
        "SELECT case_id, estimate FROM measurements"
        " WHERE metric = 'case_time' AND estimate IS NOT NULL AND run_id = ?"
    )
    for run_id in alike:
        for case_id, seconds in store.connection.execute(query, (run_id,)):
            times[case_id].append(seconds)
    if not times:
        return None
    usual = np.quantile([*itertools.chain(*times.values())], [0.25, 0.5, 0.75])
    each = [
        np.quantile(times[case.case_id], [0, 0.5, 1]) if case.case_id in times else usual
        for case in cases
    ]
    return Interval(*map(float, np.sum(each, axis=0)))


def known_ceilings(store: Store, machine_id: str) -> dict[str, float]:
    """The newest ceilings that the database holds for a machine."""
    query = (
        "SELECT scope, estimate FROM results WHERE machine_id = ?"
        " AND metric IN ('ceiling_flops', 'ceiling_bytes') AND estimate > 0 ORDER BY id"
    )
    return dict(store.connection.execute(query, (machine_id,)).fetchall())


def _timing(params: Mapping[str, Any]) -> list[Any]:
    return [params.get(name) for name in _TIMING]


def _title(name: str) -> str:
    unit = _UNITS.get(name)
    return name.replace("_", " ") + (f" ({unit})" if unit else "")


def _text(name: str, value: float | str) -> str:
    if isinstance(value, str):
        return value
    return format_number(value / 2**20 if name == "bytes" else value)
