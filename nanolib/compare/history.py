"""Follow each case over the runs of a machine, and find the revisions that changed a metric."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import ndtri

from nanolib.compare.findings import Comparison, case_names, cases_in, with_unit
from nanolib.compare.runs import compare_rows
from nanolib.compare.spread import KEY, RECENT_RUNS, repeats
from nanolib.measurement import METRICS, BadInput, Direction
from nanolib.numbers import format_number
from nanolib.stats.changes import changes_of_level, find_recent_outlier
from nanolib.stats.compare import MARGIN
from nanolib.store import Store

_TIMED = ("latency", "tokens_per_second")  # Metrics whose change shows in the times of `nano ab`.

_POINTS = ["run_id", "started", "git_revision", "estimate", "low", "high", "confidence"]


@dataclass(frozen=True)
class Change:
    """Change of the level of a metric.

    Attributes:
        at: Index of the first run after the change.
        ratio: New level divided by old level.
        worse: Whether the new level is worse.
        before: Revision of the last run before the change.
        after: Revision of the first run after the change.
        runs: Number of runs after the change, or None if these runs confirm the change.
    """

    at: int
    ratio: float
    worse: bool
    before: str
    after: str
    runs: int | None = None

    def __str__(self) -> str:
        """Return the size of the change, and the revisions between which the metric changed."""
        where = f"between {self.before or '?'} and {self.after or '?'}"
        if not (self.before or self.after):
            where = "between runs without a revision; check the code, the machine and its packages"
        elif self.before == self.after:
            where = (
                f"at the same revision {self.after}; check your code, the machine and its packages"
            )
        so_far = f", in {self.runs} run{'s' if self.runs > 1 else ''} so far" if self.runs else ""
        return f"{'from 0' if math.isinf(self.ratio) else f'{self.ratio - 1:+.1%}'} {where}{so_far}"


@dataclass(frozen=True)
class History:
    """Metric of a case over the runs of a machine.

    Attributes:
        machine_id: ID of the machine.
        experiment: Name of the experiment.
        case: Readable name of the case.
        case_id: ID of the case.
        metric: Key of `METRICS`.
        scope: Scope of the metric.
        points: Table with a row per run, the oldest first, and the columns `run_id`, `started`,
            `git_revision`, `estimate`, `low`, `high` and `confidence`.
        changes: Confirmed changes of the metric's level.
        newest: Change in the last one or two runs, or None. The change may be a spike.
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
        """Return the history as JSON types."""
        points = self.points.astype(object).where(self.points.notna(), None).to_dict("records")
        return asdict(self) | {"points": points}

    @property
    def latest(self) -> Change | None:
        """Latest change, or None. The change may be a spike."""
        return self.newest or (self.changes[-1] if self.changes else None)

    @property
    def command(self) -> str:
        """Command to compare the commits before and after the latest change, or an empty text."""
        step = self.latest
        if step is None or self.metric not in _TIMED or step.before == step.after:
            return ""
        if any(not one or one.endswith("+") for one in (step.before, step.after)):
            return ""
        return f"nano ab {step.before} {step.after} {self.experiment}"


def histories(
    store: Store, metric: str = "latency", machine_ids: Iterable[str] = (), last: int | None = None
) -> list[History]:
    """Return a history for each case that at least two runs on one machine measured.

    Args:
        store: Store with the runs.
        metric: Key of `METRICS`.
        machine_ids: IDs of the machines.
        last: Number of newest runs to use per experiment and machine, or None for all runs.

    Raises:
        BadInput: The metric is unknown.
    """
    if metric not in METRICS:
        raise BadInput(f"--metric: {metric!r} is unknown; use one of {', '.join(METRICS)}")
    result = []
    figures = store.figures(metric, machine_ids, last)
    names = case_names(cases_in(figures))
    for (machine_id, experiment, case_id, scope, _), group in figures.groupby(KEY, sort=False):
        if len(group) > 1:
            case = names[experiment, case_id]
            points = group[_POINTS].reset_index(drop=True)
            steps = find_steps(points, metric)
            result.append(
                History(machine_id, experiment, case, case_id, metric, scope, points, *steps)
            )
    return result


def has_ratios(points: pd.DataFrame, metric: str) -> bool:
    """Return whether nanolib searches a series. A ratio needs values above 0 if the metric varies."""
    is_exact = METRICS[metric].direction is Direction.EQUAL
    return is_exact or bool((points["estimate"] > 0).all())


def find_steps(points: pd.DataFrame, metric: str) -> tuple[tuple[Change, ...], Change | None]:
    """Find the changes of a metric's level, and a possible change in the last one or two runs."""
    values, direction = points["estimate"].to_numpy(dtype=float), METRICS[metric].direction
    revisions = list(points["git_revision"])

    def change(at: int, ratio: float, runs: int | None = None) -> Change:
        worse = direction is Direction.EQUAL or (ratio > 1) is not (direction is Direction.HIGHER)
        return Change(int(at), float(ratio), worse, revisions[at - 1], revisions[at], runs)

    if direction is Direction.EQUAL:  # Every difference of a deterministic metric is a change.
        places = np.flatnonzero(np.diff(values)) + 1
        with np.errstate(divide="ignore"):  # The ratio to a level of 0 is infinite.
            ratios = values[places] / values[places - 1]
        return tuple(change(*step) for step in zip(places, ratios, strict=True)), None
    if not has_ratios(points, metric):
        return (), None
    # The interval of a few blocks has a lower confidence, so all intervals are scaled to 95 %.
    widening = 1.96 / ndtri((1 + points["confidence"].astype(float).fillna(0.95)) / 2)
    shares = widening * (points["high"] - points["low"]) / 2 / points["estimate"]
    widths = shares.fillna(0.0).to_numpy(dtype=float)
    changes = tuple(change(*step) for step in changes_of_level(values, widths, MARGIN))
    newest = find_recent_outlier(values, widths, MARGIN)
    return changes, newest and change(*newest, runs=len(points) - newest[0])


def noise_of(store: Store, run_ids: Iterable[str]) -> dict[str, list[str]]:
    """Map the ID of each run that began on a busy machine to lines about the interference."""
    runs = store.runs_of(run_ids)
    found = zip(runs["run_id"], runs["interference"], strict=True)
    return {run_id: lines for run_id, lines in found if lines}


def what_changed(store: Store, runs: pd.DataFrame) -> tuple[Comparison | None, list[History]]:
    """Compare the newest runs with earlier runs, and return the histories on the same machines.

    Args:
        store: Store with the runs.
        runs: Runs to report, the oldest first.

    Returns:
        Comparison of the newest run of each experiment, suite and machine with the previous run,
        and the history of each latency. The comparison is None if there is no earlier run.
    """
    newest = runs.drop_duplicates(["experiment", "machine_id", "suite"], keep="last")
    found = histories(store, machine_ids=sorted(set(runs["machine_id"])), last=RECENT_RUNS)
    return since_before(store, list(newest["run_id"])), found


def since_before(store: Store, run_ids: Sequence[str]) -> Comparison | None:
    """Compare runs with earlier runs of the same experiment, suite and machine.

    A case is missing only if an earlier run with the same parameters has the case.

    Args:
        store: Store with the runs.
        run_ids: IDs of the newer runs.

    Returns:
        The comparison, or None if there is no earlier run.
    """
    before = store.runs_before(run_ids)
    if not before:
        return None
    base, current = (store.measurements(ids, samples=True) for ids in (before, run_ids))
    then, now = (store.runs_of(ids)[["run_id", "params"]].to_numpy() for ids in (before, run_ids))
    chosen = [_chosen(params) for _, params in now]
    planned = [run_id for run_id, params in then if _chosen(params) in chosen]
    is_common = base["case_id"].isin(current["case_id"])
    base = base[is_common | base["run_id"].isin(planned)]
    current = current[current["experiment"].isin(base["experiment"])]
    known = repeats([store.figures("latency", sorted(set(current["machine_id"])), RECENT_RUNS)])
    return compare_rows(base, current, noise=noise_of(store, [*before, *run_ids]), repeats=known)


def _chosen(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that choose and measure cases."""
    return {name: value for name, value in params.items() if name not in ("label", "resume")}


def table(found: Sequence[History]) -> pd.DataFrame:
    """Return a row of text per history, the latest change first and unchanged histories last."""

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
