"""Select measurements of any experiment, and summarize runs, failures, flags and hardware."""

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import pandas as pd

from nanolib.compare.findings import case_names, cases_in
from nanolib.measurement import FLAG_TEXT
from nanolib.numbers import format_number
from nanolib.report.finding import MOST_FINDINGS, Finding

_Made = TypeVar("_Made", pd.DataFrame, list[Finding])
_MOST_REASONS = 2  # Largest number of different messages that explain why cases have no data.


def cached(make: Callable[[pd.DataFrame], _Made]) -> Callable[[pd.DataFrame], _Made]:
    """Cache the last table or list of findings that a function made, and give each caller a copy.

    A list of findings has at most five findings, and ranks no timings of a busy machine. The cache
    compares `rows` by identity, so it does not notice changes within the same object.
    """
    last = [(lambda: None, None)]

    @functools.wraps(make)
    def made(rows: pd.DataFrame) -> _Made:
        # Several threads draw charts, so nanolib reads both values in one step.
        known, found = last[0]
        if known() is not rows:
            found = make(rows)
            if isinstance(found, list):
                found = _drop_busy_orders(found)
            last[0] = weakref.ref(rows), found
        return found.copy()

    return made


def table_of(experiment: str, factor: str) -> Callable[..., Any]:
    """Return a decorator that caches a table of the cases that have a factor.

    The decorated function receives the rows of these cases. If no rows have the factor, the table
    is empty.

    Args:
        experiment: Name of the experiment.
        factor: Name of the factor.
    """

    def decorate(make: Any) -> Any:
        @cached
        @functools.wraps(make)
        def table(rows: pd.DataFrame) -> pd.DataFrame:
            rows = rows_with_factor(rows, experiment, factor)
            return pd.DataFrame() if rows.empty else make(rows)

        return table

    return decorate


def _drop_busy_orders(findings: list[Finding]) -> list[Finding]:
    """Return the first five findings. A heading has at most one finding about a busy machine."""
    kept = {}
    for finding in findings:
        sound = finding.without_busy_order()
        kept.setdefault((sound.about, "" if sound is not finding else str(finding)), sound)
    return list(kept.values())[:MOST_FINDINGS]


def newest_machine(rows: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of each experiment from the machine of its newest run.

    Args:
        rows: Measurements of any experiments.
        runs: Runs with the columns `experiment`, `machine_id` and `started`.
    """
    ordered = runs.sort_values("started", kind="stable")
    newest = ordered.groupby("experiment")["machine_id"].last()
    return rows[rows["machine_id"] == rows["experiment"].map(newest)]


def machine_name(machine_id: str) -> str:
    """Return the short name of a machine for charts, tables and sentences."""
    return f"machine {machine_id[:6]}"


def strip_shared_words(names: list[str]) -> list[str]:
    """Drop the factors that all names share, such as `dtype=float32`."""
    common = set.intersection(*(set(name.split()) for name in names)) if len(names) > 1 else set()
    return [
        " ".join(word for word in name.split() if word not in common or "=" not in word)
        for name in names
    ]


def of_experiment(rows: pd.DataFrame, experiment: str) -> pd.DataFrame:
    """Return the rows of one experiment, without the factor columns that have no value.

    If cases with different options have one name, the options follow the name.
    """
    chosen = rows[rows["experiment"] == experiment]
    used = ~chosen.columns.str.startswith("factor.") | chosen.notna().any().to_numpy()
    return _tell_apart(chosen.loc[:, used])


def _tell_apart(rows: pd.DataFrame) -> pd.DataFrame:
    """Add to names that several cases have the options in which these cases differ."""
    cases = drop_missing(rows.drop_duplicates("case_id").set_index("case_id"), "factor.options")
    names = {}
    for name, found in cases.groupby("factor.name")["factor.options"] if len(cases) else ():
        table = pd.DataFrame([*found], found.index, dtype=object).map(str)
        for case_id, options in table.loc[:, table.nunique() > 1].iterrows():
            words = (f"{option} {value}" for option, value in options.items() if value != "nan")
            names[case_id] = ", ".join([name, *words])
    if not names:
        return rows
    pairs = zip(rows["case_id"], rows["factor.name"], strict=True)
    return rows.assign(**{"factor.name": [names.get(case_id, name) for case_id, name in pairs]})


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


# GPUs on which the tests of `make gpu` passed (docs/gpu.md).
GPUS_SEEN = frozenset({"NVIDIA H200"})


def _gpus(run: Mapping[str, Any], machine: pd.Series) -> str:
    names = [gpu["name"] for gpu in machine["gpus"]]
    is_untested = not run["device"].startswith("cpu") and not GPUS_SEEN.intersection(names)
    note = " (nanolib is not yet tested on this GPU, see docs/gpu.md)" if is_untested else ""
    return (", ".join(names) or "no GPU") + note


def run_facts(runs: pd.DataFrame, machines: pd.DataFrame) -> pd.DataFrame:
    """Return a line per run for people, with machine, start time, duration and versions."""
    by_id = machines.set_index("machine_id")
    lines = []
    for run in runs.to_dict("records"):
        machine = by_id.loc[run["machine_id"]]
        gpus = _gpus(run, machine)
        lines.append(
            {
                "Run": run["run_id"][:8],
                "Experiment": run["experiment"],
                "Suite": run["suite"],
                "Label": run["label"],
                "Started": run["started"][:19].replace("T", " ") + " UTC",
                "Duration": "—" if pd.isna(run["duration_s"]) else f"{run['duration_s']:.0f} s",
                "Status": run["status"],
                "Machine": f"{run['machine_id'][:6]}: {machine['cpu']}, {machine['cores']} cores, {machine['ram_gib']} GiB, {gpus}",
                "torch": run["versions"].get("torch", ""),
                "Revision": run["git_revision"],
                "Interference": "; ".join(run["interference"]) or "none found",
            }
        )
    return pd.DataFrame(lines)


def failures(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the failed cases, with the columns `experiment`, `case`, `status` and `message`."""
    bad = _failed(rows)
    names = case_names(cases_in(bad))
    keys = zip(bad["experiment"], bad["case_id"], strict=True)
    case = pd.Series([names[key] for key in keys], index=bad.index, dtype=str)
    if bad["machine_id"].nunique() > 1:
        case = bad["machine_id"].map(machine_name) + ": " + case
    return bad.assign(case=case)[["experiment", "case", "status", "message"]]


def _failed(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[(rows["metric"] == "case_duration") & (rows["status"] != "ok")]


def flag_lines(rows: pd.DataFrame) -> list[Finding]:
    """Return a finding per flag with the number of timings and the meaning of the flag."""
    timed = pick(rows, "latency")
    counts = timed["flags"].explode().value_counts()
    return [
        Finding(f"{count} of {len(timed)} timings have the flag {flag}", FLAG_TEXT.get(flag, ""))
        for flag, count in counts.items()
    ]


def why_empty(rows: pd.DataFrame, experiment: str, otherwise: str = "") -> str:
    """Return why cases have no data, such as no run or the messages of failed cases.

    Args:
        rows: Measurements of any experiments, or only those of the cases in question.
        experiment: Name of the experiment.
        otherwise: Reason to return if no case failed, or empty for a general reason.
    """
    rows = of_experiment(rows, experiment)
    failed = _failed(rows)
    if failed.empty and otherwise:
        return otherwise
    if rows.empty:
        return f"no {experiment} run is in the database; run: nano run quick {experiment}"
    reasons = []
    for status, group in failed.groupby("status", sort=False):
        messages = "; ".join(filter(None, group["message"].unique()[:_MOST_REASONS]))
        reasons.append(f"{len(group)} {status}" + (f": {messages}" if messages else ""))
    ended = rows[rows["metric"] == "case_duration"]
    peaks = drop_missing(ended, "factor.ceiling")["case_id"]  # Peak rates are not results.
    if (ended["status"].eq("ok") & ~ended["case_id"].isin(peaks)).any():
        return "no case has this result" + (f" ({', '.join(reasons)})" if reasons else "")
    return f"no case has a result ({', '.join(reasons) or 'no case has ended'})"


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
    return [Finding(text, why_empty(rows, experiment))]


_PEAKS = {"ceiling_flops": "FLOP/s", "ceiling_bytes": "B/s"}


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
            "GPU": gpu.get("name", "—") + (f" × {len(gpus)}" if len(gpus) > 1 else ""),
            "GPU memory (GiB)": gpu.get("memory_gib"),
            "Compute capability": gpu.get("compute_capability"),
            "Native FP8": "yes" if gpu.get("fp8") else "no",
            "torch": machine["torch"],
            **machine["dtypes"],
        }
        own = rows[rows["machine_id"] == machine["machine_id"]]
        for metric, unit in _PEAKS.items():
            # Rows are in order of time, so the newest peak rate replaces older peak rates.
            for row in pick(own, metric).to_dict("records"):
                value = format_number(row["estimate"], row["low"], row["high"])
                line[f"{row['scope']} ({unit})"] = value
        lines.append(line)
    return pd.DataFrame(lines).fillna("—")
