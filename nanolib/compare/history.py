"""Follow each case over the runs of a machine: level changes, and the spread between runs."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from nanolib.compare.findings import CASE_KEY, add_unit, case_names, cases_in
from nanolib.measurement import METRICS, Direction
from nanolib.numbers import format_number
from nanolib.stats.changes import changes_of_level
from nanolib.stats.compare import MARGIN, Spread

LEAST_RUNS = 3  # With fewer runs of the same code, the spread is unknown.
RECENT_RUNS = 60  # Largest number of runs per experiment and machine in charts and spreads.
KEY = [*CASE_KEY, "scope", "method"]  # Columns that identify a timing.

Repeats = Mapping[tuple[str, ...], pd.DataFrame]


@dataclass(frozen=True)
class Change:
    """Change of the level of a metric.

    Attributes:
        index: Index of the first run after the change.
        ratio: New level divided by old level.
        worse: Whether the new level is worse.
        before: Revision of the last run before the change.
        after: Revision of the first run after the change.
    """

    index: int
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
    def age(self) -> float:
        """Number of runs since the latest change, or infinity if the metric did not change."""
        return len(self.points) - self.changes[-1].index if self.changes else math.inf

    @property
    def command(self) -> str:
        """Command to compare the commits before and after the latest change, or an empty text."""
        if not self.changes or self.metric != "latency":
            return ""
        a, b = self.changes[-1].before, self.changes[-1].after
        if a == b or any(not revision or revision.endswith("+") for revision in (a, b)):
            return ""
        return f"nano ab {a} {b} {self.experiment}"


def histories(figures: pd.DataFrame, metric: str = "latency") -> list[History]:
    """Return a history for each case that at least two runs on one machine measured.

    The history with the latest change comes first, and histories without a change come last.

    Args:
        figures: Values of the metric, from `Store.figures`.
        metric: Key of `METRICS`.
    """
    figures = figures[figures["estimate"] > 0]  # Only values above 0 have ratios.
    names, result = case_names(cases_in(figures)), []
    for (machine_id, experiment, case_id, scope, _), group in figures.groupby(KEY, sort=False):
        if len(group) > 1:
            case = names[machine_id, experiment, case_id]
            points = group[
                ["run_id", "started", "git_revision", "estimate", "low", "high"]
            ].reset_index(drop=True)
            result.append(
                History(experiment, case, metric, scope, points, find_steps(points, metric))
            )
    return sorted(result, key=lambda history: history.age)


def find_steps(points: pd.DataFrame, metric: str) -> tuple[Change, ...]:
    """Find the changes of a metric's level. Every change of a deterministic metric is worse."""
    widths = (points["high"] - points["low"]) / 2 / points["estimate"]
    direction, revisions = METRICS[metric].direction, list(points["git_revision"])
    found = []
    for index, ratio in changes_of_level(points["estimate"], widths.fillna(0.0), MARGIN):
        is_worse = (ratio > 1) is not (direction is Direction.HIGHER)
        is_worse = is_worse or direction is Direction.EQUAL
        found.append(Change(index, ratio, is_worse, revisions[index - 1], revisions[index]))
    return tuple(found)


def table(found: Sequence[History]) -> pd.DataFrame:
    """Return a row of text per history."""
    lines = []
    for history in found:
        first, last = (history.points.iloc[end] for end in (0, -1))
        lines.append(
            {
                "experiment": history.experiment,
                "case": history.case,
                "metric": add_unit(f"{history.metric} {history.scope}".strip()),
                "runs": len(history.points),
                "first": format_number(first["estimate"], first["low"], first["high"]),
                "last": format_number(last["estimate"], last["low"], last["high"]),
                "last / first": f"{last['estimate'] / first['estimate'] - 1:+.1%}",
                "changes": "; ".join(map(str, history.changes)),
            }
        )
    return pd.DataFrame(lines)


def repeats(figures: Iterable[pd.DataFrame]) -> Repeats:
    """Group the runs of committed revisions by timing.

    Args:
        figures: A table from `Store.figures` per database. A run in several tables counts once.
    """
    rows = pd.concat(figures).drop_duplicates(["run_id", *KEY])
    committed = (rows["git_revision"] != "") & ~rows["git_revision"].str.endswith("+")
    return dict(iter(rows[committed & (rows["estimate"] > 0)].groupby(KEY)))


def spread_between_runs(of: Repeats, timing: Mapping[str, Any]) -> Spread | None:
    """Return the spread of a timing between runs of the same code, pooled over all versions.

    The runs of a version have one revision and one fingerprint. The fingerprint covers the
    parameters, the packages, the settings of the environment, and the user's own functions.

    Args:
        of: Runs of each timing, from `repeats`.
        timing: Row of the timing to judge. The spread excludes the run of this row, because that
            run may be slow.

    Returns:
        The spread, or None if no version has three other runs.
    """
    runs = of.get(tuple(timing[name] for name in KEY))
    if runs is None:
        return None
    others = runs[runs["run_id"] != timing["run_id"]]
    version = [others["git_revision"], others["fingerprint"]]
    versions = np.log(others["estimate"]).groupby(version).agg(["size", "var"])
    enough = versions[versions["size"] >= LEAST_RUNS]
    if enough.empty:
        return None
    freedom = enough["size"] - 1
    variance = (enough["var"] * freedom).sum() / freedom.sum()
    return Spread(math.sqrt(variance), int(freedom.sum()))
