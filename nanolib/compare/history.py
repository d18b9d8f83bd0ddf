"""Each case over the runs of one machine: its level, where it changed, and between which revisions."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from nanolib.compare.compare import Comparison, since_before
from nanolib.compare.operations import WHY, is_float32_model, is_untuned, versions_of
from nanolib.measurement import METRICS, BadInput, Direction, case_name, format_number
from nanolib.stats.changes import changes_of_level
from nanolib.stats.compare import MARGIN
from nanolib.store import Store

HISTORY_RUNS = 60  # of an experiment on a machine: what a chart over runs shows
_KEY = ["machine_id", "experiment", "case_id", "scope", "method"]


@dataclass(frozen=True)
class Change:
    """One change of level.

    Attributes:
        at: Index of the first run after it.
        ratio: Level after over level before.
        worse: Whether that is the wrong way.
        before: Revision of the last run before.
        after: Revision of the first run after.
    """

    at: int
    ratio: float
    worse: bool
    before: str
    after: str

    def __str__(self) -> str:
        """By how much, and where to look."""
        where = f"between {self.before or '?'} and {self.after or '?'}"
        if self.before == self.after:
            where = f"at the same revision {self.after or '?'}: look at the machine or its versions"
        return f"{'from 0' if math.isinf(self.ratio) else f'{self.ratio - 1:+.1%}'} {where}"


@dataclass(frozen=True)
class History:
    """One figure of one case over the runs of one machine.

    Attributes:
        machine_id: Which machine.
        experiment: Which notebook.
        case: The case, for people.
        metric: What was measured.
        scope: Of what.
        points: Oldest first: `run_id`, `started`, `git_revision`, `estimate`, `low`, `high`.
        changes: Where its level changed.
        note: Why a step in it is no change.
    """

    machine_id: str
    experiment: str
    case: str
    metric: str
    scope: str
    points: pd.DataFrame
    changes: tuple[Change, ...]
    note: str = ""


def histories(
    store: Store, metric: str = "latency", machine_ids: Iterable[str] = (), last: int | None = None
) -> list[History]:
    """The histories of all cases that at least two runs of one machine hold.

    Args:
        store: Where the runs are.
        metric: Which figure.
        machine_ids: Of which machines.
        last: Of each experiment on each machine only so many runs, the newest; None means all.

    Raises:
        BadInput: An unknown metric.
    """
    if metric not in METRICS:
        raise BadInput(f"--metric: {metric!r} is unknown; use one of {', '.join(METRICS)}")
    result = []
    figures = store.figures(metric, machine_ids, last)
    made_by = versions_of(store, figures["run_id"].unique())
    for (machine_id, experiment, _, scope, _), group in figures.groupby(_KEY, sort=False):
        if len(group) < 2:
            continue
        columns = ["run_id", "started", "git_revision", "estimate", "low", "high"]
        points = group[columns].reset_index(drop=True)
        factors = json.loads(group["factors"].iloc[-1])
        untuned = [is_untuned(made_by.get(run_id, "")) for run_id in points["run_id"]]
        parts = [points]
        if is_float32_model(experiment, factors) and METRICS[metric].direction is not Direction.EQUAL:
            parts = [part for _, part in points.groupby(untuned)]
        changes = tuple(change for part in parts for change in _changes(part, metric))
        note = WHY if len(parts) > 1 else ""
        result.append(History(machine_id, experiment, case_name(factors), metric, scope, points, changes, note))
    return result


def what_changed(store: Store, runs: pd.DataFrame) -> tuple[Comparison | None, list[History]]:
    """The newest of the runs, of each suite on each machine, against those before them; and all timings of their machines.

    Args:
        store: Where the runs are.
        runs: Of them, oldest first.
    """
    newest = runs.drop_duplicates(["experiment", "machine_id", "suite"], keep="last")
    found = histories(store, machine_ids=sorted(set(runs["machine_id"])), last=HISTORY_RUNS)
    return since_before(store, list(newest["run_id"])), found


def _changes(points: pd.DataFrame, metric: str) -> tuple[Change, ...]:
    values = points["estimate"].to_numpy(dtype=float)
    exact = METRICS[metric].direction is Direction.EQUAL
    if (values <= 0).any() and not exact:
        return ()
    half = ((points["high"] - points["low"]) / 2 / points["estimate"]).fillna(0.0).to_numpy(dtype=float)
    revisions = list(points["git_revision"])
    found = _steps(values) if exact else changes_of_level(values, half, MARGIN)
    better = METRICS[metric].direction is Direction.HIGHER
    return tuple(
        Change(int(points.index[at]), ratio, exact or (ratio > 1) is not better, revisions[at - 1], revisions[at])
        for at, ratio in found
    )


def _steps(values: np.ndarray) -> list[tuple[int, float]]:
    """Of a deterministic figure every difference is a change."""
    places = np.flatnonzero(np.diff(values)) + 1
    with np.errstate(divide="ignore"):  # from nothing to something is an infinite ratio
        return [(int(at), float(values[at] / values[at - 1])) for at in places]


def table(found: list[History]) -> pd.DataFrame:
    """One row per history, those that changed first, the latest change first."""
    ordered = sorted(found, key=lambda h: (not h.changes, len(h.points) - (h.changes[-1].at if h.changes else 0)))
    lines = []
    several = len({history.machine_id for history in found}) > 1
    for history in ordered:
        first, last = (history.points.iloc[end] for end in (0, -1))
        lines.append(
            ({"machine": history.machine_id[:6]} if several else {})
            | {
                "experiment": history.experiment,
                "case": history.case,
                "metric": f"{history.metric} {history.scope}".strip(),
                "runs": len(history.points),
                "first": format_number(first["estimate"], first["low"], first["high"]),
                "last": format_number(last["estimate"], last["low"], last["high"]),
                "last / first": f"{last['estimate'] / first['estimate'] - 1:+.1%}" if first["estimate"] else "",
                "changes": "; ".join([*map(str, history.changes), *filter(None, [history.note])]),
            }
        )
    return pd.DataFrame(lines)
