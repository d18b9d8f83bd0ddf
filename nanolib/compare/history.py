"""Follow each case over the runs of a machine, and find the revisions that changed a metric."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pandas as pd

from nanolib.compare.findings import Comparison, case_names, cases_in, with_unit
from nanolib.compare.runs import compare_rows
from nanolib.compare.spread import KEY, RECENT_RUNS, repeats
from nanolib.measurement import METRICS, Direction
from nanolib.numbers import format_number
from nanolib.stats.changes import changes_of_level
from nanolib.stats.compare import MARGIN
from nanolib.store import Store

_POINTS = ["run_id", "started", "git_revision", "estimate", "low", "high"]


@dataclass(frozen=True)
class Change:
    """Change of the level of a metric.

    Attributes:
        at: Index of the first run after the change.
        ratio: New level divided by old level.
        worse: Whether the new level is worse.
        before: Revision of the last run before the change.
        after: Revision of the first run after the change.
    """

    at: int
    ratio: float
    worse: bool
    before: str
    after: str

    def __str__(self) -> str:
        """Return the size of the change, and the revisions between which the metric changed."""
        return f"{self.ratio - 1:+.1%} between {self.before or '?'} and {self.after or '?'}"


@dataclass(frozen=True)
class History:
    """Metric of a case over the runs of a machine.

    Attributes:
        experiment: Name of the experiment.
        case: Readable name of the case.
        metric: Key of `METRICS`.
        scope: Scope of the metric.
        points: Table with a row per run, the oldest first, and the columns `run_id`, `started`,
            `git_revision`, `estimate`, `low` and `high`. Values of 0 or less are left out.
        changes: Changes of the metric's level. A change needs three runs on each side.
    """

    experiment: str
    case: str
    metric: str
    scope: str
    points: pd.DataFrame
    changes: tuple[Change, ...] = ()

    @property
    def command(self) -> str:
        """Command to compare the commits before and after the latest change, or an empty text."""
        if not self.changes or self.metric != "latency":
            return ""
        a, b = self.changes[-1].before, self.changes[-1].after
        if a == b or any(not revision or revision.endswith("+") for revision in (a, b)):
            return ""
        return f"nano ab {a} {b} {self.experiment}"


def histories(
    store: Store, metric: str = "latency", machine_ids: Iterable[str] = (), last: int | None = None
) -> list[History]:
    """Return a history for each case that at least two runs on one machine measured.

    The history with the latest change comes first, and histories without a change come last.

    Args:
        store: Store with the runs.
        metric: Key of `METRICS`.
        machine_ids: IDs of the machines.
        last: Number of newest runs to use per experiment and machine, or None for all runs.
    """
    figures = store.figures(metric, machine_ids, last)
    figures = figures[figures["estimate"] > 0]  # Only values above 0 have ratios.
    names, result = case_names(cases_in(figures)), []
    for (machine_id, experiment, case_id, scope, _), group in figures.groupby(KEY, sort=False):
        if len(group) > 1:
            case = names[machine_id, experiment, case_id]
            points = group[_POINTS].reset_index(drop=True)
            steps = find_steps(points, metric)
            result.append(History(experiment, case, metric, scope, points, steps))
    return sorted(result, key=_age)


def _age(history: History) -> tuple[bool, int]:
    last = history.changes[-1].at if history.changes else 0
    return not history.changes, len(history.points) - last


def find_steps(points: pd.DataFrame, metric: str) -> tuple[Change, ...]:
    """Find the changes of a metric's level. Every change of a deterministic metric is worse."""
    widths = (points["high"] - points["low"]) / 2 / points["estimate"]
    direction, revisions = METRICS[metric].direction, list(points["git_revision"])
    found = []
    for at, ratio in changes_of_level(points["estimate"], widths.fillna(0.0), MARGIN):
        is_worse = (ratio > 1) is not (direction is Direction.HIGHER)
        is_worse = is_worse or direction is Direction.EQUAL
        found.append(Change(at, ratio, is_worse, revisions[at - 1], revisions[at]))
    return tuple(found)


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

    The comparison has the cases that both have.

    Args:
        store: Store with the runs.
        run_ids: IDs of the newer runs.

    Returns:
        The comparison, or None if there is no earlier run.
    """
    before = store.runs_before(run_ids)
    if not before:
        return None
    sides = [store.measurements(ids, samples=True) for ids in (before, run_ids)]
    case = ["machine_id", "experiment", "case_id"]
    common = sides[0][case].merge(sides[1][case]).drop_duplicates()
    base, current = (rows.merge(common) for rows in sides)
    known = repeats([store.figures("latency", sorted(set(current["machine_id"])), RECENT_RUNS)])
    return compare_rows(base, current, noise=noise_of(store, [*before, *run_ids]), repeats=known)


def table(found: Sequence[History]) -> pd.DataFrame:
    """Return a row of text per history."""
    lines = []
    for history in found:
        first, last = (history.points.iloc[end] for end in (0, -1))
        lines.append(
            {
                "experiment": history.experiment,
                "case": history.case,
                "metric": with_unit(f"{history.metric} {history.scope}".strip()),
                "runs": len(history.points),
                "first": format_number(first["estimate"], first["low"], first["high"]),
                "last": format_number(last["estimate"], last["low"], last["high"]),
                "last / first": f"{last['estimate'] / first['estimate'] - 1:+.1%}",
                "changes": "; ".join(map(str, history.changes)),
            }
        )
    return pd.DataFrame(lines)
