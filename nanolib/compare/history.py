"""Follow each case over the runs of one machine: its level, where it changed, and between which revisions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import ndtri

from nanolib.compare.findings import Comparison, with_unit
from nanolib.compare.runs import compare_rows
from nanolib.compare.spread import RECENT_RUNS, repeats
from nanolib.measurement import METRICS, BadInput, Direction, case_name
from nanolib.numbers import format_number
from nanolib.stats.changes import changes_of_level, find_recent_outlier
from nanolib.stats.compare import MARGIN
from nanolib.store import Store
from nanolib.store.schema import DURING

TIMED = ("latency", "tokens_per_second")  # what nano ab measures in turns
HISTORY_RUNS = 60  # of an experiment on a machine: what a chart over runs shows
_KEY = ["machine_id", "experiment", "case_id", "scope", "method"]
_POINTS = ["run_id", "started", "git_revision", "estimate", "low", "high", "confidence"]


@dataclass(frozen=True)
class Change:
    """One change of level.

    Attributes:
        at: Index of the first run after it.
        ratio: Level after over level before.
        worse: Whether it is a change for the worse.
        before: Revision of the last run before.
        after: Revision of the first run after.
        runs: On how many runs it rests if they are too few for a change of level; else None.
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
            where = "between runs without a revision: look at the code, the machine or its versions"
        elif self.before == self.after:
            where = f"at the same revision {self.after}: look at the machine or its versions"
        so_far = f", in {self.runs} run{'s' if self.runs > 1 else ''} so far" if self.runs else ""
        return f"{'from 0' if math.isinf(self.ratio) else f'{self.ratio - 1:+.1%}'} {where}{so_far}"


@dataclass(frozen=True)
class History:
    """One metric of one case over the runs of one machine.

    Attributes:
        machine_id: The machine.
        experiment: The notebook.
        case: The name of the case.
        case_id: Its id.
        metric: What was measured.
        scope: Of what.
        points: Oldest first: `run_id`, `started`, `git_revision`, `estimate`, `low`, `high`, `confidence`.
        changes: Where its level changed.
        newest: The last one or two runs if they stick out: a change or a spike, as further runs or `nano ab` will show.
    """

    machine_id: str
    experiment: str
    case: str
    case_id: str
    metric: str
    scope: str
    points: pd.DataFrame
    changes: tuple[Change, ...] = ()
    newest: Change | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types."""
        points = self.points.astype(object).where(self.points.notna(), None).to_dict("records")
        return vars(self) | {
            "points": points,
            "changes": [asdict(change) for change in self.changes],
            "newest": self.newest and asdict(self.newest),
        }

    @property
    def latest(self) -> Change | None:
        """Its latest step, whether it counts as a change already or not."""
        return self.newest or (self.changes[-1] if self.changes else None)

    @property
    def command(self) -> str:
        """The `nano ab` command that measures both revisions of its latest step; empty if the step is not between two commits."""
        step = self.latest
        if step is None or self.metric not in TIMED or step.before == step.after:
            return ""
        if any(not one or one.endswith("+") for one in (step.before, step.after)):
            return ""
        metric = "" if self.metric == TIMED[0] else f" --metric {self.metric}"
        return f"nano ab {step.before} {step.after} {self.experiment}{metric}"


def histories(
    store: Store, metric: str = "latency", machine_ids: Iterable[str] = (), last: int | None = None
) -> list[History]:
    """Return the histories of all cases that at least two runs of one machine have.

    Args:
        store: Where the runs are.
        metric: The metric.
        machine_ids: The machines.
        last: Use only the newest N runs of each experiment on each machine; None means all.

    Raises:
        BadInput: An unknown metric.
    """
    if metric not in METRICS:
        raise BadInput(f"--metric: {metric!r} is unknown; use one of {', '.join(METRICS)}")
    result = []
    figures = store.figures(metric, machine_ids, last)
    for (machine_id, experiment, case_id, scope, _), group in figures.groupby(_KEY, sort=False):
        if len(group) > 1:
            case = case_name(group["factors"].iloc[-1])
            points = group[_POINTS].reset_index(drop=True)
            steps = find_steps(points, metric)
            result.append(
                History(machine_id, experiment, case, case_id, metric, scope, points, *steps)
            )
    return result


def find_steps(points: pd.DataFrame, metric: str) -> tuple[tuple[Change, ...], Change | None]:
    """Find where the level changed, and the last one or two runs if they stick out from those before."""
    values, direction = points["estimate"].to_numpy(dtype=float), METRICS[metric].direction
    revisions = list(points["git_revision"])

    def change(at: int, ratio: float, runs: int | None = None) -> Change:
        worse = direction is Direction.EQUAL or (ratio > 1) is not (direction is Direction.HIGHER)
        return Change(int(at), float(ratio), worse, revisions[at - 1], revisions[at], runs)

    if direction is Direction.EQUAL:  # every difference of a deterministic metric is a change
        places = np.flatnonzero(np.diff(values)) + 1
        with np.errstate(divide="ignore"):  # the ratio to nothing is infinite
            ratios = values[places] / values[places - 1]
        return tuple(change(*step) for step in zip(places, ratios, strict=True)), None
    if (values <= 0).any():
        return (), None
    # Half-widths of 95 % intervals, as shares. The range of a few blocks has a lower confidence and is widened.
    widening = 1.96 / ndtri((1 + points["confidence"].astype(float).fillna(0.95)) / 2)
    shares = widening * (points["high"] - points["low"]) / 2 / points["estimate"]
    widths = shares.fillna(0.0).to_numpy(dtype=float)
    changes = tuple(change(*step) for step in changes_of_level(values, widths, MARGIN))
    newest = find_recent_outlier(values, widths, MARGIN)
    return changes, newest and change(*newest, runs=len(points) - newest[0])


def noise_of(store: Store, run_ids: Iterable[str]) -> dict[str, list[str]]:
    """Return what the noise checks of each run found when it began, without runs on a quiet machine.

    Interference during cases is left out, because the rows that it affected have a flag of their own.
    """
    found = {
        run["run_id"]: [line for line in run["interference"] if not line.startswith(DURING)]
        for _, run in store.runs_of(run_ids).iterrows()
    }
    return {run_id: lines for run_id, lines in found.items() if lines}


def what_changed(store: Store, runs: pd.DataFrame) -> tuple[Comparison | None, list[History]]:
    """Compare the newest run of each suite on each machine with the one before; return all timings of their machines too.

    Args:
        store: Where the runs are.
        runs: The runs to look at, oldest first.
    """
    newest = runs.drop_duplicates(["experiment", "machine_id", "suite"], keep="last")
    found = histories(store, machine_ids=sorted(set(runs["machine_id"])), last=HISTORY_RUNS)
    return since_before(store, list(newest["run_id"])), found


def since_before(store: Store, run_ids: Sequence[str]) -> Comparison | None:
    """Compare runs with those before them, of the same experiment, suite and machine; None if there are none.

    Runs of `nano ab` are left out, because each of them is a comparison already.
    """
    before = store.runs_before(run_ids, but="ab")
    if not before:
        return None
    base, current = (store.measurements(ids, samples=True) for ids in (before, run_ids))
    current = current[current["experiment"].isin(base["experiment"])]
    known = repeats([store.figures("latency", sorted(set(current["machine_id"])), RECENT_RUNS)])
    return compare_rows(base, current, noise=noise_of(store, [*before, *run_ids]), repeats=known)


def table(found: Sequence[History]) -> pd.DataFrame:
    """Return one row per history, those that changed first, the latest change first."""

    def age(one: History) -> tuple[bool, int]:
        return not one.changes, len(one.points) - (one.latest.at if one.latest else 0)

    lines = []
    for history in sorted(found, key=age):
        first, last = (history.points.iloc[end] for end in (0, -1))
        ratio = f"{last['estimate'] / first['estimate'] - 1:+.1%}" if first["estimate"] else ""
        steps = filter(None, [*history.changes, history.newest])
        lines.append(
            {
                "machine": history.machine_id[:6],
                "experiment": history.experiment,
                "case": history.case,
                "metric": with_unit(f"{history.metric} {history.scope}".strip()),
                "runs": len(history.points),
                "first": format_number(first["estimate"], first["low"], first["high"]),
                "last": format_number(last["estimate"], last["low"], last["high"]),
                "last / first": ratio,
                "changes": "; ".join(map(str, steps)),
            }
        )
    several = len({history.machine_id for history in found}) > 1
    return pd.DataFrame(lines).drop(columns=[] if several else ["machine"], errors="ignore")
