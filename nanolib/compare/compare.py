"""Two sets of stored runs, compared case by case.

They were collected apart, so drift between the two is not controlled; the words are those of `nanolib.stats.compare`, adjusted by
Holm over all timings. A timing fails a gate only beyond the spread between runs of one revision. A deterministic metric must be
equal. Another machine is a comparison and never a gate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from nanolib.compare.spread import UNKNOWN, Repeats, said_of_unknown, spread_between_runs
from nanolib.measurement import (
    METRICS,
    BadInput,
    Direction,
    Flag,
    Provenance,
    Status,
    case_name,
    format_number,
    with_unit,
)
from nanolib.stats.compare import THRESHOLD, Kind, Verdict, compare, judge_together
from nanolib.stats.intervals import TooFewSamples

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
_EQUAL = [name for name, metric in METRICS.items() if metric.direction is Direction.EQUAL]
_EXACT_WITH_THRESHOLD = ("peak_memory", "reserved_memory")
COUNTED = (*_EXACT_WITH_THRESHOLD, *_EQUAL)
_KEY = ["experiment", "case_id", "metric", "scope", "method"]
BUSY = "busy machine: measure again, or nano ab"


@dataclass(frozen=True)
class Line:
    """One finding.

    Attributes:
        experiment: Which notebook.
        case: The case, for people.
        metric: What is compared; empty when the case itself is the finding.
        finding: One of `Kind`, or `changed`, `vanished`, `broke`, `new`.
        base: The estimate then, in the metric's unit; of a timing with a verdict a level of its blocks.
        current: The estimate now; with a verdict, current / base is its ratio.
        verdict: The statistics, where there are any.
        message: What the finding leaves open.
        machine: On which machine, where there are several.
    """

    experiment: str
    case: str
    metric: str
    finding: str
    base: float | None = None
    current: float | None = None
    verdict: Verdict | None = None
    message: str = ""
    machine: str = ""

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
        noise: What the noise checks of the runs found, for people.
        differ: What differs between the environments of both sides, where they have two.
        missing: Notebooks that only the base has; none of their cases is compared.
    """

    lines: tuple[Line, ...]
    same_machine: bool
    threshold: float = THRESHOLD
    noise: Sequence[str] = ()
    differ: Sequence[str] = ()
    missing: Sequence[str] = ()

    @classmethod
    def of(
        cls, lines: Iterable[Line], same_machine: bool, threshold: float, **rest: Sequence[str]
    ) -> Comparison:
        """The findings in order; `rest` is what else is known of both sides."""

        def badness(line: Line) -> tuple[int, float]:
            return _ORDER.index(line.finding), -(line.verdict.worse if line.verdict else math.inf)

        return cls(tuple(sorted(lines, key=badness)), same_machine, threshold, **rest)

    @property
    def counts(self) -> dict[str, int]:
        """How many lines have each finding."""
        return {
            str(name): n
            for name in _ORDER
            if (n := sum(line.finding == name for line in self.lines))
        }

    @property
    def regressed(self) -> bool:
        """Whether a gate should fail: something regressed, on one and the same machine."""
        return self.same_machine and any(line.finding == Kind.REGRESSED for line in self.lines)

    @property
    def lost(self) -> bool:
        """Whether notebooks, cases or figures of the base are gone, or fail now."""
        return bool(self.missing) or any(line.finding in (VANISHED, BROKE) for line in self.lines)

    def table(self, everything: bool = True) -> pd.DataFrame:
        """One row per finding as text, of whole case names; without `everything` the equivalent ones are left out."""
        shown = [line for line in self.lines if everything or line.finding != Kind.EQUIVALENT]
        return pd.DataFrame(
            [
                ({"machine": line.machine} if any(one.machine for one in shown) else {})
                | {
                    "verdict": str(line.finding),
                    "experiment": line.experiment,
                    "case": line.case,
                    "metric": with_unit(line.metric),
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
        names = ("experiment", "case", "metric", "base", "current", "message", "machine")
        lines = []
        for line in self.lines:
            exported = {"finding": str(line.finding)} | {
                name: getattr(line, name) for name in names
            }
            if verdict := line.verdict:
                low, _, high = verdict.interval
                exported |= {"ratio": verdict.ratio, "low": low, "high": high, "p": verdict.p}
                exported["minimum_detectable_effect"] = verdict.minimum_detectable_effect
            lines.append(exported)
        of_both = ("regressed", "same_machine", "threshold", "noise", "differ", "missing", "counts")
        return {name: getattr(self, name) for name in of_both} | {"lines": lines}


def compare_rows(
    base: pd.DataFrame,
    current: pd.DataFrame,
    threshold: float = THRESHOLD,
    noise: Mapping[str, Sequence[str]] | None = None,
    repeats: Repeats | None = None,
) -> Comparison:
    """Compare the measurements of two sets of runs, notebook by notebook that both have.

    Args:
        base: Measurements with their samples, from `Store.measurements(samples=True)`.
        current: Likewise; of a case that several runs hold, the newest alone counts on either side.
        threshold: The share from which a change counts.
        noise: Run → what its noise checks found, as `noise_of` gives them: its timings are `suspect` at most.
        repeats: Each timing's runs, as `repeats` gives them; a timing whose spread they do not tell is `suspect` at most.

    Raises:
        BadInput: The machines of both sides differ, and one side has several: it is not known which to compare.
    """
    noise, known = noise or {}, repeats or {}
    said = [
        f"run {run_id[:8]} began on a busy machine: {'; '.join(found)}"
        for run_id, found in noise.items()
    ]
    sides = [set(rows["machine_id"]) for rows in (base, current)]
    machines = sorted(sides[0] & sides[1])
    if not machines and max(map(len, sides)) > 1:
        raise BadInput(
            f"compare: the runs are of {len(sides[0])} and {len(sides[1])} machines that differ; name runs of one machine"
        )
    if machines and (alone := sorted(sides[0] ^ sides[1])):
        said.append(
            f"left out, since one side alone has runs of it: {', '.join(f'machine {one[:6]}' for one in alone)}"
        )
    lines, missing = [], set()
    for machine in machines or [
        ""
    ]:  # or one machine with another, where no spread is known and nothing is a gate
        pair = [
            rows[rows["machine_id"] == machine] if machines else rows for rows in (base, current)
        ]
        names = [set(rows["experiment"]) for rows in pair]
        then, now = (rows[rows["experiment"].isin(names[0] & names[1])] for rows in pair)
        place = machine[:6] if len(machines) > 1 else ""
        for side, only in (("base", names[0] - names[1]), ("current", names[1] - names[0])):
            on = f" on machine {place}" if place else ""
            said += (
                [f"not compared, since only {side} has them{on}: {', '.join(sorted(only))}"]
                if only
                else []
            )
        missing |= names[0] - names[1]
        found = _lines(then, now, threshold, noise, known if machines else None)
        lines += [replace(line, machine=place) for line in found]
    said += said_of_unknown([line.message for line in lines if line.verdict is not None])
    return Comparison.of(
        _adjusted(lines), bool(machines), threshold, noise=said, missing=sorted(missing)
    )


def _lines(
    base: pd.DataFrame,
    current: pd.DataFrame,
    threshold: float,
    noise: Mapping[str, Sequence[str]],
    repeats: Repeats | None,
) -> list[Line]:
    """The findings of one machine's runs, or of one machine's against another's."""
    base, current = (_newest(rows) for rows in (base, current))
    return [
        *_case_lines(base, current),
        *_vanished_figures(base, current),
        *exact_lines(base, current, threshold),
        *_timing_lines(base, current, threshold, noise, repeats),
    ]


def _newest(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each case the rows of the newest run that holds it, also where that run failed."""
    newest = rows.groupby(_KEY[:2])["run_id"].transform("last")
    return rows[rows["run_id"] == newest].drop_duplicates(_KEY, keep="last")


def block_medians(row: pd.Series) -> np.ndarray:
    """The block medians behind a latency, without the warm-up that was cut from it, shape [blocks]."""
    details = row["details"]
    samples, per_block = np.asarray(row["samples"], dtype=float), details.get("calls_per_block", 1)
    whole = samples[details.get("warmup_cut", 0) : len(samples) // per_block * per_block]
    return np.median(whole.reshape(-1, per_block), axis=1)


def _case_lines(base: pd.DataFrame, current: pd.DataFrame) -> Iterator[Line]:
    """Cases that vanished, broke, or are new."""
    sides = [
        rows[rows["metric"] == "case_time"].set_index(["experiment", "case_id"])
        for rows in (base, current)
    ]
    then, now = (side[~side.index.duplicated(keep="last")] for side in sides)
    for key, row in then.iterrows():
        case = case_name(row["factors"])
        if key not in now.index:
            yield Line(row.name[0], case, "", VANISHED, message="current does not hold this case")
        elif row["status"] == Status.OK and now.loc[key, "status"] != Status.OK:
            ended = now.loc[key]
            yield Line(
                row.name[0], case, "", BROKE, message=f"{ended['status']}: {ended['message']}"
            )
    for key, row in now.iterrows():
        if key not in then.index:
            yield Line(
                row.name[0],
                case_name(row["factors"]),
                "",
                NEW,
                message="base does not hold this case",
            )


def _vanished_figures(base: pd.DataFrame, current: pd.DataFrame) -> Iterator[Line]:
    """Figures that would be compared and are gone from a case that is fine on both sides."""
    ended = [
        rows[(rows["metric"] == "case_time") & (rows["status"] == Status.OK)]
        for rows in (base, current)
    ]
    fine = set.intersection(*({tuple(key) for key in rows[_KEY[:2]].to_numpy()} for rows in ended))
    held = {tuple(key) for key in current.loc[current["estimate"].notna(), _KEY].to_numpy()}
    modelled = (base["metric"] == "latency") & (base["provenance"] == Provenance.MODELLED)
    wanted = base["metric"].isin([*COUNTED, "latency"]) & base["estimate"].notna() & ~modelled
    for _, row in base[wanted].iterrows():
        if tuple(row[_KEY[:2]]) in fine and tuple(row[_KEY]) not in held:
            message = f"current does not hold this figure, by {row['method']}"
            yield replace(_line(row, row, VANISHED, message=message), current=None)


def _pairs(
    base: pd.DataFrame, current: pd.DataFrame, metrics: Sequence[str]
) -> Iterator[tuple[pd.Series, pd.Series]]:
    wanted = [
        rows[rows["metric"].isin(metrics) & rows["estimate"].notna()] for rows in (base, current)
    ]
    now = {tuple(row[_KEY]): row for _, row in wanted[1].iterrows()}
    for (_, row), several in zip(
        wanted[0].iterrows(), wanted[0].duplicated(_KEY[:-1], keep=False), strict=True
    ):
        if (other := now.get(tuple(row[_KEY]))) is not None:
            if several:  # by more than one method
                row["scope"] += f" by {row['method']}"
            yield row, other


def _line(then: pd.Series, now: pd.Series, finding: str, **rest: Any) -> Line:
    return Line(*named(then), finding, float(then["estimate"]), float(now["estimate"]), **rest)


def named(row: pd.Series) -> tuple[str, str, str]:
    """A figure for people: its experiment, its case, its metric with the scope."""
    return row["experiment"], case_name(row["factors"]), f"{row['metric']} {row['scope']}".strip()


def exact_lines(base: pd.DataFrame, current: pd.DataFrame, threshold: float) -> Iterator[Line]:
    """Deterministic metrics, which must be equal; memory, which is counted exactly, against the threshold."""
    for then, now in _pairs(base, current, _EQUAL):
        if then["estimate"] == now["estimate"]:
            yield _line(then, now, Kind.EQUIVALENT)
        else:
            yield _line(then, now, CHANGED, message="this must be equal")
    for then, now in _pairs(base, current, _EXACT_WITH_THRESHOLD):
        before, after = then["estimate"], now["estimate"]
        worse = after / before - 1 if before else math.inf if after else 0.0
        if worse > threshold:
            yield _line(then, now, Kind.REGRESSED)
        elif worse < -threshold:
            yield _line(then, now, Kind.IMPROVED)
        else:
            yield _line(then, now, CHANGED if worse else Kind.EQUIVALENT)


def _timing_lines(
    base: pd.DataFrame,
    current: pd.DataFrame,
    threshold: float,
    noise: Mapping[str, Sequence[str]],
    repeats: Repeats | None,
) -> Iterator[Line]:
    """Latencies by their blocks, p not adjusted yet; one that is unsteady gets no verdict.

    What was timed while others were at work, or has no known spread between runs, is `suspect` at most.
    """
    for then, now in _pairs(base, current, ["latency"]):
        if Provenance.MODELLED in (then["provenance"], now["provenance"]):
            continue
        if then["run_id"] == now["run_id"]:
            yield _line(then, now, Kind.EQUIVALENT, message="the same run")
            continue
        if Flag.NO_STEADY_STATE in {*then["flags"], *now["flags"]}:
            yield _line(
                then, now, Kind.INCONCLUSIVE, message="one side never settled; measure it again"
            )
            continue
        if not (len(then["samples"]) and len(now["samples"])):
            message = "timed once over a window, without blocks: no verdict"
            yield _line(then, now, Kind.INCONCLUSIVE, message=message)
            continue
        try:
            blocks = block_medians(then), block_medians(now)
            spread = None if repeats is None else spread_between_runs(repeats, now)
            verdict = compare(*blocks, threshold=threshold, spread=spread)
        except TooFewSamples as error:
            yield _line(
                then, now, Kind.INCONCLUSIVE, message=f"too few blocks: {error}; raise budget_s"
            )
            continue
        busy = any(
            row["run_id"] in noise or Flag.BUSY_MACHINE in row["flags"] for row in (then, now)
        )
        message = BUSY if busy else UNKNOWN if spread is None and repeats is not None else ""
        line = _line(then, now, verdict.kind, verdict=verdict, message=message)
        mean_base, mean_current = (float(np.exp(np.log(one).mean())) for one in blocks)
        yield replace(line, base=mean_base, current=mean_current)  # whose ratio is the change


def _adjusted(lines: Sequence[Line]) -> Iterator[Line]:
    """The findings with p adjusted over all timings that can fail a gate, and over the others."""
    caps = (BUSY, UNKNOWN)
    judged = {
        capped: iter(
            judge_together(
                [one.verdict for one in lines if one.verdict and (one.message in caps) is capped]
            )
        )
        for capped in (True, False)
    }
    for line in lines:
        if line.verdict is None:
            yield line
            continue
        capped, message = line.message in caps, ""
        verdict = next(judged[capped])
        if capped and verdict.kind in (Kind.REGRESSED, Kind.IMPROVED):
            verdict = replace(verdict, kind=Kind.SUSPECT)
        if verdict.kind is Kind.INCONCLUSIVE:
            message = f"sees changes from {verdict.minimum_detectable_effect:.1%}"
        elif verdict.kind in (Kind.SUSPECT, Kind.EQUIVALENT):
            message = verdict.open
        if capped and verdict.kind is Kind.SUSPECT:
            message = f"{message}; {line.message}"
        yield replace(line, finding=verdict.kind, verdict=verdict, message=message)


def _number(value: float | None) -> str:
    return "" if value is None else format_number(value)
