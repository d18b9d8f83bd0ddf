"""What an experiment would do: its cases with what formulas predict, before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from nanolib.measurement import format_number
from nanolib.run.case import Case
from nanolib.run.params import Params
from nanolib.run.workload import shortage
from nanolib.store import Store

_UNITS = {
    "flops": "FLOP",
    "bytes": "MiB",
    "peak_memory": "MiB",
    "footprint": "MiB",
    "latency": "ms",
}

Prediction = tuple[Case, dict[str, Any]]
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


@dataclass(frozen=True)
class Foreseen:
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


def known_ceilings(store: Store, machine_id: str) -> dict[str, float]:
    """The newest ceilings that the database holds for a machine."""
    query = (
        "SELECT scope, estimate FROM results WHERE machine_id = ?"
        " AND metric IN ('ceiling_flops', 'ceiling_bytes')"
        " AND typeof(scope) = 'text' AND typeof(estimate) = 'real' AND estimate > 0 AND estimate < 9e999 ORDER BY id"
    )
    return dict(store.connection.execute(query, (machine_id,)).fetchall())


def _title(name: str) -> str:
    unit = _UNITS.get(name)
    return name.replace("_", " ") + (f" ({unit})" if unit else "")


def _text(name: str, value: float | str) -> str:
    if isinstance(value, str):
        return value
    return format_number(value / 2**20 if name == "bytes" else value)
