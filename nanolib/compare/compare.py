"""Two sets of stored runs, compared case by case.

They were collected apart, so drift between the two is not controlled; the words are those of `nanolib.stats.compare`, adjusted by
Holm over all timings. A deterministic metric must be equal. Another machine is a comparison and never a gate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from nanolib.compare.operations import WHY, is_float32_model, is_untuned, versions_of
from nanolib.measurement import METRICS, Direction, Flag, Status, case_name, format_number
from nanolib.stats.compare import THRESHOLD, Kind, Verdict, compare, judge_together
from nanolib.stats.intervals import TooFewSamples
from nanolib.store import Store

CHANGED, VANISHED, BROKE, NEW = "changed", "vanished", "broke", "new"
_ORDER = (
    Kind.REGRESSED,
    BROKE,
    VANISHED,
    CHANGED,
    Kind.SUSPECT,
    Kind.INCONCLUSIVE,
    Kind.IMPROVED,
    NEW,
    Kind.EQUIVALENT,
)
EXACT_WITH_THRESHOLD = ("peak_memory", "reserved_memory")
_KEY = ["experiment", "case_id", "metric", "scope", "method"]


@dataclass(frozen=True)
class Line:
    """One finding.

    Attributes:
        experiment: Which notebook.
        case: The case, for people.
        metric: What is compared; empty when the case itself is the finding.
        finding: One of `Kind`, or `changed`, `vanished`, `broke`, `new`.
        base: The estimate then, in the metric's unit.
        current: The estimate now.
        verdict: The statistics, where there are any.
        message: What the finding leaves open.
    """

    experiment: str
    case: str
    metric: str
    finding: str
    base: float | None = None
    current: float | None = None
    verdict: Verdict | None = None
    message: str = ""

    @property
    def change(self) -> str:
        """By how much, with the interval where there is one."""
        if self.verdict is not None:
            low, estimate, high = (f"{end - 1:+.1%}" for end in self.verdict.interval)
            return f"{estimate} [{low} … {high}]"
        if not self.base or self.current is None:
            return "—"
        return f"{self.current / self.base - 1:+.2%}"


@dataclass(frozen=True)
class Comparison:
    """All findings, the worst first.

    Attributes:
        lines: The findings.
        same_machine: Whether both sides ran on one machine.
        threshold: The share from which a change counts.
    """

    lines: tuple[Line, ...]
    same_machine: bool
    threshold: float = THRESHOLD
    counts: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, lines: Iterable[Line], same_machine: bool, threshold: float) -> Comparison:
        """The findings in order, counted."""

        def badness(line: Line) -> tuple[int, float]:
            return _ORDER.index(line.finding), -(line.verdict.worse if line.verdict else math.inf)

        ordered = tuple(sorted(lines, key=badness))
        counts = {str(finding): n for finding in _ORDER if (n := sum(line.finding == finding for line in ordered))}
        return cls(ordered, same_machine, threshold, counts)

    @property
    def regressed(self) -> bool:
        """Whether a gate should fail: something regressed, on one and the same machine."""
        return self.same_machine and any(line.finding == Kind.REGRESSED for line in self.lines)

    def table(self, everything: bool = True) -> pd.DataFrame:
        """One row per finding as text; without `everything` the equivalent ones are left out."""
        shown = [line for line in self.lines if everything or line.finding != Kind.EQUIVALENT]
        return pd.DataFrame(
            [
                {
                    "verdict": str(line.finding),
                    "experiment": line.experiment,
                    "case": line.case,
                    "metric": line.metric,
                    "base": _number(line.base),
                    "current": _number(line.current),
                    "change": line.change,
                    "p": "" if line.verdict is None else f"{line.verdict.p:.2g}",
                    "note": line.message,
                }
                for line in shown
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON types, for CI."""
        lines = []
        for line in self.lines:
            verdict = line.verdict
            numbers = (
                {}
                if verdict is None
                else {
                    "ratio": verdict.ratio,
                    "low": verdict.interval.low,
                    "high": verdict.interval.high,
                    "p": verdict.p,
                    "minimum_detectable_effect": verdict.minimum_detectable_effect,
                }
            )
            fields = ("experiment", "case", "metric", "base", "current", "message")
            lines.append({"finding": str(line.finding)} | {name: getattr(line, name) for name in fields} | numbers)
        return {
            "regressed": self.regressed,
            "same_machine": self.same_machine,
            "threshold": self.threshold,
            "counts": self.counts,
            "lines": lines,
        }


def compare_rows(
    base: pd.DataFrame, current: pd.DataFrame, threshold: float = THRESHOLD, versions: Mapping[str, str] | None = None
) -> Comparison:
    """Compare the measurements of two sets of runs.

    Args:
        base: Measurements with their samples, from `Store.measurements(samples=True)`.
        current: Likewise; of a case that several runs hold, the newest counts on either side.
        threshold: The share from which a change counts.
        versions: Run → the version of nanolib that made it, as `versions_of` gives them.
    """
    base, current = (rows.drop_duplicates(_KEY, keep="last") for rows in (base, current))
    lines = [
        *_case_lines(base, current),
        *exact_lines(base, current, threshold),
        *_timing_lines(base, current, threshold, versions or {}),
    ]
    machines = set(base["machine_id"]) | set(current["machine_id"])
    return Comparison.of(lines, len(machines) == 1, threshold)


def since_before(store: Store, run_ids: Sequence[str]) -> Comparison | None:
    """Runs against those before them, of the same experiment, suite and machine; None when there are none.

    What `nano ab` stored is left out: each of its runs is a comparison already.
    """
    before = store.runs_before(run_ids, but="ab")
    if not before:
        return None
    base, current = (store.measurements(ids, samples=True) for ids in (before, run_ids))
    made_by = versions_of(store, [*before, *run_ids])
    return compare_rows(base, current[current["experiment"].isin(base["experiment"])], versions=made_by)


def block_medians(row: pd.Series) -> np.ndarray:
    """The block medians behind a latency, without the warm-up that was cut from it, shape [blocks]."""
    details = row["details"]
    samples, per_block = np.asarray(row["samples"], dtype=float), details.get("calls_per_block", 1)
    whole = samples[details.get("warmup_cut", 0) : len(samples) // per_block * per_block]
    return np.median(whole.reshape(-1, per_block), axis=1)


def _case_lines(base: pd.DataFrame, current: pd.DataFrame) -> Iterator[Line]:
    """Cases that vanished, broke, or are new."""
    sides = [rows[rows["metric"] == "case_time"].set_index(["experiment", "case_id"]) for rows in (base, current)]
    then, now = (side[~side.index.duplicated(keep="last")] for side in sides)
    for key, row in then.iterrows():
        case = case_name(row["factors"])
        if key not in now.index:
            yield Line(row.name[0], case, "", VANISHED, message="current does not hold this case")
        elif row["status"] == Status.OK and now.loc[key, "status"] != Status.OK:
            ended = now.loc[key]
            yield Line(row.name[0], case, "", BROKE, message=f"{ended['status']}: {ended['message']}")
    for key, row in now.iterrows():
        if key not in then.index:
            yield Line(row.name[0], case_name(row["factors"]), "", NEW, message="base does not hold this case")


def _pairs(base: pd.DataFrame, current: pd.DataFrame, metrics: list[str]) -> Iterator[tuple[pd.Series, pd.Series]]:
    wanted = [rows[rows["metric"].isin(metrics) & rows["estimate"].notna()] for rows in (base, current)]
    now = {tuple(row[_KEY]): row for _, row in wanted[1].iterrows()}
    for _, row in wanted[0].iterrows():
        if tuple(row[_KEY]) in now:
            yield row, now[tuple(row[_KEY])]


def _line(then: pd.Series, now: pd.Series, finding: str, **rest: Any) -> Line:
    metric = " ".join(part for part in (then["metric"], then["scope"]) if part)
    case = case_name(then["factors"])
    return Line(then["experiment"], case, metric, finding, float(then["estimate"]), float(now["estimate"]), **rest)


def exact_lines(base: pd.DataFrame, current: pd.DataFrame, threshold: float) -> Iterator[Line]:
    """Deterministic metrics, which must be equal; memory, which is counted exactly, against the threshold."""
    equal = [name for name, metric in METRICS.items() if metric.direction is Direction.EQUAL]
    for then, now in _pairs(base, current, equal):
        if then["estimate"] == now["estimate"]:
            yield _line(then, now, Kind.EQUIVALENT)
        else:
            yield _line(then, now, CHANGED, message="this must be equal")
    for then, now in _pairs(base, current, list(EXACT_WITH_THRESHOLD)):
        before, after = then["estimate"], now["estimate"]
        worse = after / before - 1 if before else math.inf if after else 0.0
        if worse > threshold:
            yield _line(then, now, Kind.REGRESSED)
        elif worse < -threshold:
            yield _line(then, now, Kind.IMPROVED)
        else:
            yield _line(then, now, CHANGED if worse else Kind.EQUIVALENT)


def _timing_lines(
    base: pd.DataFrame, current: pd.DataFrame, threshold: float, versions: Mapping[str, str]
) -> Iterator[Line]:
    """Latencies by their blocks, p adjusted over all of them; one that is unsteady, or of other operations, gets no verdict."""
    judged: list[tuple[pd.Series, pd.Series]] = []
    verdicts: list[Verdict] = []
    for then, now in _pairs(base, current, ["latency"]):
        if then["run_id"] == now["run_id"]:
            yield _line(then, now, Kind.EQUIVALENT, message="the same run")
            continue
        untuned = {is_untuned(versions.get(row["run_id"], "")) for row in (then, now)}
        if len(untuned) == 2 and is_float32_model(then["experiment"], then["factors"]):
            yield _line(then, now, Kind.INCONCLUSIVE, message=WHY)
            continue
        if Flag.NO_STEADY_STATE in {*then["flags"], *now["flags"]}:
            yield _line(then, now, Kind.INCONCLUSIVE, message="one side never settled; measure it again")
            continue
        try:
            verdicts.append(compare(block_medians(then), block_medians(now), threshold=threshold))
        except TooFewSamples as error:
            yield _line(then, now, Kind.INCONCLUSIVE, message=f"{error}; raise budget_s")
            continue
        judged.append((then, now))
    for (then, now), verdict in zip(judged, judge_together(verdicts), strict=True):
        seen = f"a change of {verdict.minimum_detectable_effect:.1%} would have been seen"
        message = seen if verdict.kind is Kind.INCONCLUSIVE else ""
        yield _line(then, now, verdict.kind, verdict=verdict, message=message)


def _number(value: float | None) -> str:
    return "" if value is None else format_number(value)
