"""Each case over the runs of one machine: its level, where it changed, and between which revisions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import ndtri

from nanolib.compare.findings import Comparison
from nanolib.compare.runs import compare_rows
from nanolib.compare.spread import RECENT_RUNS, repeats
from nanolib.measurement import METRICS, BadInput, Direction, case_name, format_number, with_unit
from nanolib.stats.changes import changes_of_level, sticks_out
from nanolib.stats.compare import MARGIN
from nanolib.store import Store
from nanolib.store.schema import DURING

TIMED = ("latency", "tokens_per_second")  # what nano ab times in turns
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
        runs: How many runs it rests on where they are too few for a change of level; else None.
    """

    at: int
    ratio: float
    worse: bool
    before: str
    after: str
    runs: int | None = None

    def __str__(self) -> str:
        """By how much, and where to look."""
        where = f"between {self.before or '?'} and {self.after or '?'}"
        if not (self.before or self.after):
            where = (
                "between runs that know no revision: look at the code, the machine or its versions"
            )
        elif self.before == self.after:
            where = f"at the same revision {self.after}: look at the machine or its versions"
        so_far = f", in {self.runs} run{'s' if self.runs > 1 else ''} so far" if self.runs else ""
        return f"{'from 0' if math.isinf(self.ratio) else f'{self.ratio - 1:+.1%}'} {where}{so_far}"


@dataclass(frozen=True)
class History:
    """One figure of one case over the runs of one machine.

    Attributes:
        machine_id: Which machine.
        experiment: Which notebook.
        case: The case, for people.
        metric: What was measured.
        scope: Of what.
        points: Oldest first: `run_id`, `started`, `git_revision`, `estimate`, `low`, `high`, `confidence`.
        changes: Where its level changed.
        case_id: The case.
        newest: The last one or two runs where they stick out: a change, or a spike, as further runs or `nano ab` will tell.
    """

    machine_id: str
    experiment: str
    case: str
    metric: str
    scope: str
    points: pd.DataFrame
    changes: tuple[Change, ...]
    case_id: str = ""
    newest: Change | None = None

    @property
    def figure(self) -> str:
        """Which figure of the case."""
        return f"{self.metric} {self.scope}".strip()

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        names = ("machine_id", "experiment", "case", "case_id", "metric", "scope")
        told = {name: getattr(self, name) for name in names}
        told |= {
            "changes": [asdict(change) for change in self.changes],
            "newest": self.newest and asdict(self.newest),
        }
        points = self.points.astype(object).where(self.points.notna(), None).to_dict("records")
        return told | {"points": points}

    @property
    def latest(self) -> Change | None:
        """Its latest step, whether it is a change already or not."""
        return self.newest or (self.changes[-1] if self.changes else None)

    @property
    def command(self) -> str:
        """What measures both revisions of its latest step in turns; empty where that step lies between no two commits."""
        step = self.latest
        if step is None or self.metric not in TIMED or step.before == step.after:
            return ""
        if not all(
            revision and not revision.endswith("+") for revision in (step.before, step.after)
        ):
            return ""
        metric = "" if self.metric == TIMED[0] else f" --metric {self.metric}"
        return f"nano ab {step.before} {step.after} {self.experiment}{metric}"


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
    for (machine_id, experiment, case_id, scope, _), group in figures.groupby(_KEY, sort=False):
        if len(group) < 2:
            continue
        columns = ["run_id", "started", "git_revision", "estimate", "low", "high", "confidence"]
        points = group[columns].reset_index(drop=True)
        factors = group["factors"].iloc[-1]
        case, changes, newest = (
            case_name(factors),
            _changes(points, metric),
            _newest(points, metric),
        )
        result.append(
            History(machine_id, experiment, case, metric, scope, points, changes, case_id, newest)
        )
    return result


def noise_of(store: Store, run_ids: Iterable[str]) -> dict[str, list[str]]:
    """What the noise checks of each run found when it began; runs on a quiet machine are left out.

    What came while cases were measured is left out too: the rows that it met carry a flag of their own.
    """
    found = {
        run["run_id"]: [line for line in run["disturbances"] if not line.startswith(DURING)]
        for _, run in store.runs_of(run_ids).iterrows()
    }
    return {run_id: lines for run_id, lines in found.items() if lines}


def what_changed(store: Store, runs: pd.DataFrame) -> tuple[Comparison | None, list[History]]:
    """The newest of the runs, of each suite on each machine, against those before them; and all timings of their machines.

    Args:
        store: Where the runs are.
        runs: Of them, oldest first.
    """
    newest = runs.drop_duplicates(["experiment", "machine_id", "suite"], keep="last")
    found = histories(store, machine_ids=sorted(set(runs["machine_id"])), last=HISTORY_RUNS)
    return since_before(store, list(newest["run_id"])), found


def since_before(store: Store, run_ids: Sequence[str]) -> Comparison | None:
    """Runs against those before them, of the same experiment, suite and machine; None when there are none.

    What `nano ab` stored is left out: each of its runs is a comparison already.
    """
    before = store.runs_before(run_ids, but="ab")
    if not before:
        return None
    base, current = (store.measurements(ids, samples=True) for ids in (before, run_ids))
    current = current[current["experiment"].isin(base["experiment"])]
    known = repeats([store.figures("latency", sorted(set(current["machine_id"])), RECENT_RUNS)])
    return compare_rows(base, current, noise=noise_of(store, [*before, *run_ids]), repeats=known)


def _changes(points: pd.DataFrame, metric: str) -> tuple[Change, ...]:
    values = points["estimate"].to_numpy(dtype=float)
    if METRICS[metric].direction is Direction.EQUAL:
        return tuple(_change(points, metric, at, ratio) for at, ratio in _steps(values))
    if (values <= 0).any():
        return ()
    return tuple(
        _change(points, metric, *step)
        for step in changes_of_level(values, _half_widths(points), MARGIN)
    )


def _newest(points: pd.DataFrame, metric: str) -> Change | None:
    """The last run or two, where they stick out from those before."""
    values = points["estimate"].to_numpy(dtype=float)
    if METRICS[metric].direction is Direction.EQUAL or (values <= 0).any():
        return None
    step = sticks_out(values, _half_widths(points), MARGIN)
    return step and _change(points, metric, *step, runs=len(points) - step[0])


def _half_widths(points: pd.DataFrame) -> np.ndarray:
    """Of the 95 % intervals, as shares; the range of a few blocks, which holds less, is widened to one."""
    widening = 1.96 / ndtri((1 + points["confidence"].astype(float).fillna(0.95)) / 2)
    return (
        (widening * (points["high"] - points["low"]) / 2 / points["estimate"])
        .fillna(0.0)
        .to_numpy(dtype=float)
    )


def _change(
    points: pd.DataFrame, metric: str, at: int, ratio: float, runs: int | None = None
) -> Change:
    direction, revisions = METRICS[metric].direction, points["git_revision"]
    worse = direction is Direction.EQUAL or (ratio > 1) is not (direction is Direction.HIGHER)
    return Change(
        int(points.index[at]), ratio, worse, revisions.iloc[at - 1], revisions.iloc[at], runs
    )


def _steps(values: np.ndarray) -> list[tuple[int, float]]:
    """Of a deterministic figure every difference is a change."""
    places = np.flatnonzero(np.diff(values)) + 1
    with np.errstate(divide="ignore"):  # from nothing to something is an infinite ratio
        return [(int(at), float(values[at] / values[at - 1])) for at in places]


def table(found: Sequence[History]) -> pd.DataFrame:
    """One row per history, those that changed first, the latest change first."""
    ordered = sorted(
        found,
        key=lambda one: (not one.changes, len(one.points) - (one.latest.at if one.latest else 0)),
    )
    lines = []
    several = len({history.machine_id for history in found}) > 1
    for history in ordered:
        first, last = (history.points.iloc[end] for end in (0, -1))
        lines.append(
            ({"machine": history.machine_id[:6]} if several else {})
            | {
                "experiment": history.experiment,
                "case": history.case,
                "metric": with_unit(history.figure),
                "runs": len(history.points),
                "first": format_number(first["estimate"], first["low"], first["high"]),
                "last": format_number(last["estimate"], last["low"], last["high"]),
                "last / first": f"{last['estimate'] / first['estimate'] - 1:+.1%}"
                if first["estimate"]
                else "",
                "changes": "; ".join(map(str, filter(None, [*history.changes, history.newest]))),
            }
        )
    return pd.DataFrame(lines)
