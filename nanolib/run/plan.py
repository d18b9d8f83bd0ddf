"""What an experiment would do: its cases with what formulas predict, before anything runs."""

from __future__ import annotations

from typing import Any

import pandas as pd
from tqdm import tqdm

from nanolib.measurement import format_number
from nanolib.run.case import Case
from nanolib.run.params import Params
from nanolib.run.workload import shortage
from nanolib.store import Store

_UNITS = {"flops": "FLOP", "bytes": "MiB", "peak_memory": "MiB", "footprint": "MiB", "latency": "ms"}

_NOT_LOOKED_AT = "told by running it: its model is code of yours"


def prediction_table(experiment: Any, params: Params, ceilings: dict[str, float] | None = None) -> pd.DataFrame:
    """One line per case that formulas speak of: the case, and each prediction with its unit.

    Args:
        experiment: A module of `nanolib.experiments`.
        params: Its parameters.
        ceilings: As `roofline_ms` takes them; without them no time is predicted, and the table is the same everywhere.
    """
    lines = []
    for case in experiment.cases(params):
        predicted = case.predict(ceilings)
        if predicted:
            lines.append({"case": str(case)} | {_title(name): _text(name, value) for name, value in predicted.items()})
    return pd.DataFrame(lines).fillna("")


def dry_run_table(experiment: Any, params: Params, ceilings: dict[str, float]) -> pd.DataFrame:
    """Every case with its predicted time and memory, and why it cannot run here."""
    lines = []
    for case in tqdm(experiment.cases(params), "planning", unit="case", leave=False, disable=None):
        predicted = {} if case.runs_code else case.predict(ceilings)
        reason = case.unsupported()
        lines.append(
            {
                "case": str(case),
                "predicted ms": _text("latency", predicted["latency"]) if "latency" in predicted else "—",
                "predicted MiB": _text("peak_memory", predicted["peak_memory"]) if "peak_memory" in predicted else "—",
                "here": _NOT_LOOKED_AT if case.runs_code else f"unsupported: {reason}" if reason else _fits(case),
            }
        )
    return pd.DataFrame(lines)


def _fits(case: Case) -> str:
    """`runs`, or why the case would not be started."""
    lacking = shortage(case.plan(), case.device)
    return f"oom_predicted: {lacking}" if lacking else "runs"


def known_ceilings(store: Store, machine_id: str) -> dict[str, float]:
    """The newest ceilings that the database holds for a machine."""
    query = (
        "SELECT scope, estimate FROM measurements WHERE machine_id = ?"
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
