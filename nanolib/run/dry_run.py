"""Predict the results and the duration of an experiment's cases before anything runs."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from tqdm import tqdm

from nanolib.measurement import Status, Unsupported
from nanolib.numbers import MIB, format_number
from nanolib.params import Values
from nanolib.run.case import Case, Ceilings, Plan
from nanolib.run.memory_plan import check_case
from nanolib.run.params import Params
from nanolib.stats.intervals import Interval
from nanolib.store import Store

_TITLES = {
    "flops": "flops (FLOP)",
    "bytes": "bytes (MiB)",
    "latency": "latency (ms)",
    "peak_memory": "peak memory (MiB)",
    "weight_memory": "weight memory (MiB)",
}


def prediction_table(experiment, params: Params, ceilings: Ceilings | None = None) -> pd.DataFrame:
    """Return a table of predictions for each case to which a formula applies.

    Args:
        experiment: Module of `nanolib.experiments`.
        params: Parameters of the experiment.
        ceilings: Peak rates, as for `roofline_ms`. Without peak rates, the table has no times and
            is the same on every machine.

    Returns:
        A table with one line per case that has predictions.
    """
    cases = experiment.cases(params)
    params.look(cases)
    found = ((case, _predictions(case, ceilings)) for case in cases)
    lines = [{"case": str(case)} | texts for case, texts in found if texts]
    return pd.DataFrame(lines).fillna("")


def _predictions(case: Case, ceilings: Ceilings | None) -> dict[str, str]:
    """Return the predictions of a case as texts, by the title of their column."""
    texts = {}
    for name, value in case.predict(ceilings).items():
        if not isinstance(value, str):
            value = format_number(value / MIB if name == "bytes" else value)
        texts[_TITLES.get(name, name.replace("_", " "))] = value
    return texts


def dry_run_table(cases: Sequence[Case], ceilings: Ceilings) -> pd.DataFrame:
    """Return a table with the predicted time and memory of each case, and whether it runs here.

    nanolib does not build a user's model. Cases of one kind with equal predictions and no
    plan share a line.

    Args:
        cases: Cases to predict.
        ceilings: Peak rates, as for `roofline_ms`.
    """
    lines = {}  # what a line shows → names of its cases
    for case in tqdm(cases, "planning", leave=False, disable=None, unit="case"):
        ms, mib, here = "—", "—", "known after a run, because the model is your own code"
        if not case.runs_code:
            ms = _predictions(case, ceilings).get("latency (ms)", ms)
            status, here = Status.OK, "runs"
            try:
                check_case(case)
            except Unsupported as error:
                status, here = error.status, f"{error.status}: {error}"
            plan = Plan() if status == Status.UNSUPPORTED else case.plan()
            if plan.most is not None:
                mib = format_number(plan.most / MIB)
            elif plan.reason:
                here = f"runs ({plan.reason})"
        own_line = type(case).__name__ if mib == "—" else str(case)
        lines.setdefault((own_line, ms, mib, here), []).append(str(case))
    return pd.DataFrame(
        {
            "case": name + (f" and {len(others)} more" if others else ""),
            "predicted ms": ms,
            "predicted MiB": mib,
            "here": here,
        }
        for (_, ms, mib, here), (name, *others) in lines.items()
    )


def expected_s(
    params: Params, cases: Sequence[Case], store: Store, machine_id: str
) -> Interval | None:
    """Estimate how long the cases take, from earlier runs of this notebook on this machine.

    The estimate of a case is the median of its earlier durations with the same timing parameters,
    and the interval covers all of these durations. For a case that was never measured, nanolib uses
    the durations of all of the notebook's cases.

    Args:
        params: Parameters of the notebook.
        cases: Cases to estimate.
        store: Database with the earlier runs.
        machine_id: ID of this machine.

    Returns:
        Total duration of the cases, in s, or None if no earlier run has the same timing parameters.
    """
    timing = _timing(params.model_dump(mode="json"))
    runs = store.runs("experiment = ? AND machine_id = ?", (params.NAME, machine_id))
    alike = [run.run_id for run in runs.itertuples() if _timing(run.params) == timing]
    rows = store.measurements(alike)
    # A peak rate that was copied from another run of its command has a duration of 0 s.
    ended = rows[(rows["metric"] == "case_duration") & (rows["estimate"] > 0)]
    if ended.empty:
        return None
    by_case = dict(iter(ended.groupby("case_id")["estimate"]))
    times = (by_case.get(case.case_id, ended["estimate"]) for case in cases)
    return Interval(*map(float, sum(np.quantile(own, [0, 0.5, 1]) for own in times)))


def _timing(params: Values):
    """Return the parameters that change the duration of a case."""
    return [params.get(name) for name in ("budget_s", "rel_ci", "device")]
