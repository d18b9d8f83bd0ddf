"""Rows of any experiment: choosing among them, and what they say as a whole."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pandas as pd

from nanolib.measurement import FLAG_TEXT, case_name
from nanolib.report.finding import MOST_FINDINGS, Finding

_Made = TypeVar("_Made", pd.DataFrame, list[Finding])


def cached(make: Callable[[pd.DataFrame], _Made]) -> Callable[[pd.DataFrame], _Made]:
    """Make a table or verdict of the same rows once; each caller gets a copy.

    Rows that were changed in place are the same rows to it. Of a verdict the first claims are shown, and none orders timings that
    other processes disturbed.
    """
    last: list[Any] = [(lambda: None, None)]

    @functools.wraps(make)
    def made(rows: pd.DataFrame) -> _Made:
        known, found = last[0]  # taken at once: panels draw in threads of their own
        if known() is not rows:
            found = _sound(make(rows))
            last[0] = weakref.ref(rows), found
        return found.copy()

    return made


def _sound(made: _Made) -> _Made:
    """A table as it is; of a verdict what may be said, in the order in which it was given."""
    if isinstance(made, list):
        busy: set[str] = set()  # once of each thing is enough
        kept = []
        for finding in made:
            sound = finding.without_busy_order()
            if sound is finding or finding.about not in busy:
                kept.append(sound)
            if sound is not finding:
                busy.add(finding.about)
        return kept[:MOST_FINDINGS]
    return made


def newest_machine(rows: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """The rows of each experiment on the machine of its newest run: numbers of two machines are never joined.

    Args:
        rows: Measurements of any experiments.
        runs: Their runs, with `experiment`, `machine_id` and `started`.
    """
    newest = (
        runs.sort_values("started", kind="stable")
        .drop_duplicates("experiment", keep="last")
        .set_index("experiment")["machine_id"]
    )
    return rows[rows["machine_id"] == rows["experiment"].map(newest)] if len(rows) else rows


def machine_name(machine_id: str) -> str:
    """What charts, tables and sentences call a machine where there are several; `run_facts` says what it is."""
    return f"machine {machine_id[:6]}"


def strip_shared_words(names: list[str]) -> list[str]:
    """The names without the factors (`dtype=float32`) that all of them share, since they tell nothing apart."""
    common = set.intersection(*(set(name.split()) for name in names)) if len(names) > 1 else set()
    return [
        " ".join(word for word in name.split() if word not in common or "=" not in word)
        for name in names
    ]


def of_experiment(rows: pd.DataFrame, experiment: str) -> pd.DataFrame:
    """The rows of one experiment, with factor columns that none of them uses left out."""
    chosen = rows[rows["experiment"] == experiment] if len(rows) else rows
    used = ~chosen.columns.str.startswith("factor.") | chosen.notna().any().to_numpy()
    return chosen.loc[:, used]


def rows_with_factor(rows: pd.DataFrame, experiment: str, factor: str) -> pd.DataFrame:
    """The rows of one experiment whose cases have a factor."""
    rows = of_experiment(rows, experiment)
    name = f"factor.{factor}"
    return rows[rows[name].notna()] if name in rows else rows.iloc[:0]


def pick(
    rows: pd.DataFrame, metric: str, scope: str | None = None, method: str | None = None
) -> pd.DataFrame:
    """The rows of one metric (and scope, and method) that hold a number."""
    if rows.empty:
        return rows
    mask = (rows["metric"] == metric) & rows["estimate"].notna()
    if scope is not None:
        mask &= rows["scope"] == scope
    if method is not None:
        mask &= rows["method"] == method
    return rows[mask]


def best_and_ties(cases: pd.DataFrame, column: str, ascending: bool = True) -> pd.DataFrame:
    """The first of the cases by a column, and all that cannot be told from it: their interval overlaps its own or is not known."""
    ordered = cases.sort_values(column, ascending=ascending, kind="stable")
    first = ordered.iloc[0]
    apart = (ordered[f"{column}_low"] > first[f"{column}_high"]) | (
        ordered[f"{column}_high"] < first[f"{column}_low"]
    )
    return ordered[~apart]


def join_words(names: Iterable[str]) -> str:
    """`a, b and c`, each once."""
    *others, last = dict.fromkeys(names)
    return f"{', '.join(others)} and {last}" if others else last


GPUS_SEEN: frozenset[str] = frozenset(
    {"NVIDIA H200"}
)  # on which `make gpu` has been run; see docs/gpu.md


def _gpus(run: pd.Series, machine: pd.Series) -> str:
    """The machine's GPUs, and whether what ran on them has been seen to work on such a one."""
    names = [gpu["name"] for gpu in machine["gpus"]]
    unseen = not run["device"].startswith("cpu") and not GPUS_SEEN.intersection(names)
    return (", ".join(names) or "no GPU") + (
        " (nanolib is not yet seen on this GPU: docs/gpu.md)" if unseen else ""
    )


def run_facts(runs: pd.DataFrame, machines: pd.DataFrame) -> pd.DataFrame:
    """One line per run, for people: what, where, when, which version."""
    by_id = machines.set_index("machine_id")
    lines = []
    for _, run in runs.iterrows():
        machine = by_id.loc[run["machine_id"]]
        gpus = _gpus(run, machine)
        lines.append(
            {
                "Run": run["run_id"][:8],
                "Experiment": run["experiment"],
                "Suite": run["suite"],
                "Label": run["label"],
                "Started": run["started"][:19].replace("T", " ") + " UTC",
                "Took": "—" if pd.isna(run["duration_s"]) else f"{run['duration_s']:.0f} s",
                "Status": run["status"],
                "Machine": f"{run['machine_id'][:6]}: {machine['cpu']}, {machine['cores']} cores, {machine['ram_gib']} GiB, {gpus}",
                "torch": run["versions"].get("torch", ""),
                "Revision": run["git_revision"],
                "Interference": "; ".join(run["interference"]) or "none found",
            }
        )
    return pd.DataFrame(lines)


def failures(rows: pd.DataFrame) -> pd.DataFrame:
    """Cases that did not end well: columns `experiment`, `case` (and its machine, of several), `status`, `message`."""
    columns = ["experiment", "case", "status", "message"]
    if rows.empty:
        return pd.DataFrame(columns=columns)
    bad = rows[(rows["metric"] == "case_duration") & (rows["status"] != "ok")]
    several = bad["machine_id"].nunique() > 1
    names = (case_name(factors) for factors in bad["factors"])
    places = (f"{machine_name(one)}: " if several else "" for one in bad["machine_id"])
    return bad.assign(case=[place + name for place, name in zip(places, names, strict=True)])[
        columns
    ]


def flag_lines(rows: pd.DataFrame) -> list[Finding]:
    """How many timings carry which label, and what it means."""
    timed = pick(rows, "latency")
    counts = timed["flags"].explode().value_counts() if len(timed) else {}
    return [
        Finding(f"{flag} ({count} of {len(timed)} timings)", FLAG_TEXT.get(flag, ""))
        for flag, count in counts.items()
    ]


def why_empty(rows: pd.DataFrame, experiment: str) -> str:
    """Why there is nothing to draw of an experiment: never run, or nothing but failures."""
    rows = of_experiment(rows, experiment)
    if rows.empty:
        return f"no {experiment} run is in the database; run: nano run quick {experiment}"
    bad = rows[(rows["metric"] == "case_duration") & (rows["status"] != "ok")]
    counts = ", ".join(
        f"{count} {status}" for status, count in bad["status"].value_counts().items()
    )
    return f"no case gave a number ({counts or 'none has ended'})"
