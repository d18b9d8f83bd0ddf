"""Select measurements of any experiment, and summarize runs, failures, flags and hardware."""

import functools
from collections.abc import Callable, Iterable

import pandas as pd

from nanolib.compare.findings import CASE_KEY, case_names, cases_in
from nanolib.measurement import METRICS, Flag
from nanolib.numbers import format_number
from nanolib.report.finding import Finding

_Maker = Callable[[pd.DataFrame], pd.DataFrame]


def table_of(experiment: str, factor: str) -> Callable[[_Maker], _Maker]:
    """Return a decorator for a function that makes a table of the cases that have a factor.

    The decorated function receives the rows of these cases. If no rows have the factor, the table
    is empty. nanolib keeps the last table, and gives each caller a copy. It compares `rows` by
    identity, so it does not notice changes within the same object.

    Args:
        experiment: Name of the experiment.
        factor: Name of the factor.
    """

    def decorate(make: _Maker) -> _Maker:
        last = None, None

        @functools.wraps(make)
        def table(rows: pd.DataFrame) -> pd.DataFrame:
            nonlocal last
            known, found = last  # One step, because explore draws in a thread of its own.
            if known is not rows:
                cases = rows_with_factor(rows, experiment, factor)
                found = pd.DataFrame() if cases.empty else make(cases)
                last = rows, found
            return found.copy()

        return table

    return decorate


def newest_machine(rows: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of each experiment from the machine of its newest run.

    Args:
        rows: Measurements of any experiments.
        runs: Runs with the columns `experiment` and `machine_id`, newest last.
    """
    newest = runs.groupby("experiment")["machine_id"].last()
    return rows[rows["machine_id"] == rows["experiment"].map(newest)]


def of_experiment(rows: pd.DataFrame, experiment: str) -> pd.DataFrame:
    """Return the rows of one experiment."""
    return rows[rows["experiment"] == experiment]


def rows_with_factor(rows: pd.DataFrame, experiment: str, factor: str) -> pd.DataFrame:
    """Return the rows of one experiment whose cases have a factor."""
    return drop_missing(of_experiment(rows, experiment), f"factor.{factor}")


def drop_missing(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return the lines that have a value in a column, or no line if the column is missing."""
    return table[table[column].notna()] if column in table else table.iloc[:0]


def pick(
    rows: pd.DataFrame, metric: str, scope: str | None = None, method: str | None = None
) -> pd.DataFrame:
    """Return the rows with a number for a metric. Filter by scope and method if they are given."""
    mask = (rows["metric"] == metric) & rows["estimate"].notna()
    if scope is not None:
        mask &= rows["scope"] == scope
    if method is not None:
        mask &= rows["method"] == method
    return rows[mask]


def join_words(names: Iterable[str]) -> str:
    """Join distinct names as in a sentence, such as `a, b and c`."""
    *others, last = dict.fromkeys(names)
    return f"{', '.join(others)} and {last}" if others else last


def run_facts(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a line per run for people, with start time, duration and versions."""
    seconds = runs["duration_s"].astype(float)
    return pd.DataFrame(
        {
            "Run": runs["run_id"].str[:8],
            "Experiment": runs["experiment"],
            "Suite": runs["suite"],
            "Label": runs["label"],
            "Started": runs["started"].str[:19].str.replace("T", " ") + " UTC",
            "Duration": seconds.map("{:.0f} s".format).replace("nan s", "—"),
            "Status": runs["status"],
            "Machine": runs["machine_id"].str[:6],
            "torch": [versions.get("torch", "") for versions in runs["versions"]],
            "Revision": runs["git_revision"],
            "Interference": runs["interference"].map("; ".join).replace("", "none found"),
        }
    )


def failures(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the failed cases, with the columns `experiment`, `case`, `status` and `message`."""
    bad = _failed_rows(rows)
    names = case_names(cases_in(bad))
    keys = bad[CASE_KEY].itertuples(index=False, name=None)
    return bad.assign(case=[names[key] for key in keys])[
        ["experiment", "case", "status", "message"]
    ]


def _failed_rows(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[(rows["metric"] == "case_duration") & (rows["status"] != "ok")]


def flag_lines(rows: pd.DataFrame) -> list[Finding]:
    """Return a finding per flag with the number of timings and the meaning of the flag."""
    timed = pick(rows, "latency")
    counts = timed["flags"].explode().value_counts()
    return [
        Finding(f"{count} of {len(timed)} timings have the flag {flag}", Flag(flag).text)
        for flag, count in counts.items()
    ]


def explain_empty(rows: pd.DataFrame, experiment: str, otherwise: str = "") -> str:
    """Return why cases have no data, such as the message of the first case that failed.

    Args:
        rows: Measurements of any experiments, or only those of the cases in question.
        experiment: Name of the experiment.
        otherwise: Reason to return if no case failed, or empty for a general reason.
    """
    rows = of_experiment(rows, experiment)
    failed = _failed_rows(rows)
    if len(failed):
        first = failed.iloc[0]
        return f"{first['status']}: {first['message']}" if first["message"] else first["status"]
    if rows.empty and not otherwise:
        return f"no {experiment} run is in the database; run: nano run quick {experiment}"
    return otherwise or "no case has this result"


def explain_missing(rows: pd.DataFrame, experiment: str, what: str) -> list[Finding]:
    """Return the finding of an experiment without a result.

    Args:
        rows: Measurements of any experiments.
        experiment: Name of the experiment.
        what: Subject of the finding, such as `Attention`.
    """
    text = f"{what} was not measured"
    if of_experiment(rows, experiment).empty:
        return [Finding(text, next_step=f"run nano run quick {experiment}")]
    return [Finding(text, explain_empty(rows, experiment))]


def hardware_table(rows: pd.DataFrame, machines: pd.DataFrame) -> pd.DataFrame:
    """Return the hardware table for people, with a line per machine.

    Args:
        rows: Measurements of any runs.
        machines: Table from `Store.machines`.

    Returns:
        A table with the capabilities of each machine of `rows`, and the measured peak rates.
    """
    lines = []
    used = machines["machine_id"].isin(rows["machine_id"])
    for machine in machines[used].to_dict("records"):
        gpus = machine["gpus"]
        gpu = gpus[0] if gpus else {}
        line = {
            "Machine": machine["machine_id"],
            "CPU": machine["cpu"],
            "Cores": machine["cores"],
            "RAM (GiB)": machine["ram_gib"],
            "GPU": gpu.get("name", "no GPU") + (f" × {len(gpus)}" if len(gpus) > 1 else ""),
            "GPU memory (GiB)": gpu.get("memory_gib"),
            "Compute capability": gpu.get("compute_capability"),
            "Native FP8": "yes" if gpu.get("fp8") else "no",
            "torch": machine["torch"],
            **machine["dtypes"],
        }
        own = rows[rows["machine_id"] == machine["machine_id"]]
        for metric in ("ceiling_flops", "ceiling_bytes"):
            # Rows are in order of time, so the newest peak rate replaces older peak rates.
            for row in pick(own, metric).to_dict("records"):
                line[f"{row['scope']} ({METRICS[metric].unit})"] = format_number(
                    row["estimate"], row["low"], row["high"]
                )
        lines.append(line)
    return pd.DataFrame(lines).astype(object).fillna("—")
