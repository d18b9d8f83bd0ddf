"""Compare two sets of stored runs case by case.

The machine may have changed between the two sets of runs. A timing fails a gate only if its change
exceeds the spread between runs of one revision. nanolib reports every difference of a deterministic
metric as `changed`. A comparison of two machines never fails a gate.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from nanolib.compare.findings import (
    CHANGED,
    FAILED,
    MISSING,
    NEW,
    Comparison,
    Line,
    case_name,
    case_names,
    cases_in,
    worst_first,
)
from nanolib.compare.spread import LEAST_RUNS, UNKNOWN, Repeats, spread_between_runs
from nanolib.measurement import METRICS, BadInput, Direction, Flag, Provenance, Status
from nanolib.stats.compare import THRESHOLD, Kind, compare, judge_together
from nanolib.stats.intervals import TooFewSamples

_EQUAL = [name for name, metric in METRICS.items() if metric.direction is Direction.EQUAL]
_COUNTED_MEMORY = ("peak_memory", "reserved_memory")
COUNTED = (*_COUNTED_MEMORY, *_EQUAL)
# These metrics have no blocks, so nanolib compares their intervals.
_BY_INTERVAL = ("energy_per_token", "loss", "relative_error", "sqnr")
BUSY = "the machine was busy; measure again or use nano ab"

Row = Mapping[str, Any]
Figures = dict[tuple[str, str, str], Row]  # The keys are metric, scope and method.


@dataclass
class _Case:
    ending: Row | None = None
    figures: Figures = field(default_factory=dict)

    @property
    def is_ok(self) -> bool:
        return self.ending is not None and self.ending["status"] == Status.OK


def compare_rows(
    base: pd.DataFrame,
    current: pd.DataFrame,
    threshold: float = THRESHOLD,
    noise: Mapping[str, Sequence[str]] | None = None,
    repeats: Repeats | None = None,
) -> Comparison:
    """Compare the measurements of two sets of runs, for each experiment that both sets have.

    If several runs of a set have a case, the newest run counts.

    Args:
        base: Measurements of the base, from `Store.measurements(samples=True)`.
        current: Current measurements, from `Store.measurements(samples=True)`.
        threshold: Smallest change that counts, as a share.
        noise: Maps the ID of a run to its interference, from `noise_of`. Timings of a run with
            interference are `suspect` at most.
        repeats: Earlier runs of each timing, from `spread.repeats`. A timing with an unknown spread
            is `suspect` at most.

    Raises:
        BadInput: The sets have no machine in common, and one set has several machines.
    """
    noise, repeats = noise or {}, repeats or {}
    notes = [
        f"run {run_id[:8]} began on a busy machine: {'; '.join(found)}"
        for run_id, found in noise.items()
    ]
    of_base, of_current = (set(rows["machine_id"]) for rows in (base, current))
    machines = of_base & of_current
    if not machines and max(len(of_base), len(of_current)) > 1:
        raise BadInput(
            f"compare: base has {len(of_base)} machine(s), current has {len(of_current)} other(s); name runs of one machine"
        )
    if machines and (others := sorted(of_base ^ of_current)):
        short = ", ".join(f"machine {one[:6]}" for one in others)
        notes.append(f"not compared, because only one side has runs: {short}")
    then, now = (_newest_cases(rows, machines) for rows in (base, current))
    names = case_names([*cases_in(base), *cases_in(current)])
    in_base, in_current = ({key[:2] for key in cases} for cases in (then, now))
    notes += _only_in("base", in_base - in_current)
    notes += _only_in("current", in_current - in_base)
    lines = []
    for key in dict.fromkeys((*then, *now)):
        machine, experiment, case_id = key
        if (machine, experiment) in in_base & in_current:
            found = list(_case_lines(then.get(key), now.get(key), threshold))
            if key in then and key in now:
                for pair in _pairs(then[key].figures, now[key].figures, ["latency"]):
                    found.append(
                        _timing_line(*pair, threshold, noise, repeats if machines else None)
                    )
            case = names[experiment, case_id]
            lines += [replace(line, machine=machine, case=case) for line in found]
    both = ({name for case in cases.values() for name, *_ in case.figures} for cases in (then, now))
    if others := sorted(set.intersection(*both).difference(COUNTED, _BY_INTERVAL, ["latency"])):
        notes.append(f"not compared: {', '.join(others)}; see nano history --metric NAME")
    timings = [line.message for line in lines if line.verdict is not None]
    if unknown := timings.count(UNKNOWN):
        few = f"{unknown} of {len(timings)} timings have fewer than {LEAST_RUNS} earlier runs of one revision"
        notes.append(f"{few}, so they are suspect at most; use nano ab to decide")
    missing = sorted({experiment for _, experiment in in_base - in_current})
    lines = worst_first(_adjusted(lines))
    return Comparison(lines, bool(machines), threshold, notes, missing=missing)


def _newest_cases(
    rows: pd.DataFrame, machines: Collection[str]
) -> dict[tuple[str, str, str], _Case]:
    """Return the newest run of each case by machine, experiment and case ID.

    The newest run counts even if the run failed. nanolib excludes times that are only modelled.

    Args:
        rows: Measurements of a set of runs.
        machines: Machines that both sets have. A key names the machine if there are several.
    """
    if machines:
        rows = rows[rows["machine_id"].isin(machines)]
    newest = rows.groupby(["machine_id", "experiment", "case_id"])["run_id"].transform("last")
    cases: dict[tuple[str, str, str], _Case] = {}
    for row in rows[rows["run_id"] == newest].to_dict("records"):
        machine = row["machine_id"][:6] if len(machines) > 1 else ""
        case = cases.setdefault((machine, row["experiment"], row["case_id"]), _Case())
        is_modelled_time = row["metric"] == "latency" and row["provenance"] == Provenance.MODELLED
        if row["metric"] == "case_duration":
            case.ending = row
        elif not (is_modelled_time or math.isnan(row["estimate"])):
            case.figures[row["metric"], row["scope"], row["method"]] = row
    return cases


def _only_in(side: str, only: Iterable[tuple[str, str]]) -> list[str]:
    """Return a note about the experiments that only one side has."""
    names = [f"{name} on machine {machine}" if machine else name for machine, name in sorted(only)]
    return [f"experiments only in {side} are not compared: {', '.join(names)}"] if names else []


def _case_lines(then: _Case | None, now: _Case | None, threshold: float) -> Iterator[Line]:
    """Yield the findings about a case, without the comparison of its timings."""
    if then is None or now is None:
        one, finding, message = then or now, MISSING, "not in current"
        if then is None:
            finding, message = NEW, "not in base"
        if one.ending is not None:
            yield _case_line(one.ending, finding, message)
        return
    if now.ending is not None and not now.is_ok:
        why = now.ending["message"] or "the process ended during the case"
        message = f"{now.ending['status']}: {why}"
        if then.is_ok:
            yield _case_line(now.ending, FAILED, message)
        elif now.ending["status"] != Status.UNSUPPORTED:
            yield _case_line(now.ending, Kind.INCONCLUSIVE, f"{message}; not measured in base")
    elif then.ending is not None and not then.is_ok:
        yield _case_line(now.ending or then.ending, NEW, "not measured in base")
    for key, row in then.figures.items() if then.is_ok and now.is_ok else ():
        if row["metric"] in (*COUNTED, *_BY_INTERVAL, "latency") and key not in now.figures:
            message = f"not in current with method {row['method']}"
            yield replace(_line(row, row, MISSING, message=message), current=None)
    yield from exact_lines(then.figures, now.figures, threshold)
    yield from _moved_lines(then.figures, now.figures, threshold)


def _case_line(row: Row, finding: str, message: str) -> Line:
    return Line(row["experiment"], case_name(row["factors"]), "", finding, message=message)


def _line(then: Row, now: Row, finding: str, **rest: Any) -> Line:
    metric, case = f"{then['metric']} {then['scope']}".strip(), case_name(then["factors"])
    ends = float(then["estimate"]), float(now["estimate"])
    return Line(then["experiment"], case, metric, finding, *ends, **rest)


def _pairs(then: Figures, now: Figures, metrics: Sequence[str]) -> Iterator[tuple[Row, Row]]:
    """Yield the rows that both sides have, and add the method to a scope with several methods."""
    methods = Counter(key[:2] for key in then)
    for key, row in then.items():
        if row["metric"] in metrics and key in now:
            if methods[key[:2]] > 1:
                row = {**row, "scope": f"{row['scope']} by {row['method']}"}
            yield row, now[key]


def exact_lines(then: Figures, now: Figures, threshold: float) -> Iterator[Line]:
    """Yield the findings about deterministic metrics and about counted memory."""
    for before, after in _pairs(then, now, _EQUAL):
        if before["estimate"] == after["estimate"]:
            yield _line(before, after, Kind.EQUIVALENT)
        else:
            yield _line(before, after, CHANGED, message="deterministic metric changed")
    for before, after in _pairs(then, now, _COUNTED_MEMORY):
        worse = math.inf if after["estimate"] else 0.0
        if before["estimate"]:
            worse = after["estimate"] / before["estimate"] - 1
        finding = CHANGED if worse else Kind.EQUIVALENT
        if abs(worse) > threshold:
            finding = Kind.REGRESSED if worse > 0 else Kind.IMPROVED
        yield _line(before, after, finding)


def _moved_lines(then: Figures, now: Figures, threshold: float) -> Iterator[Line]:
    """Yield the values that changed by more than the threshold, and whose intervals do not overlap.

    Such a change may still be a spread between runs, so it is `suspect` at most.
    """
    for before, after in _pairs(then, now, _BY_INTERVAL):
        (low, high), (new_low, new_high) = (
            [row["estimate"] if math.isnan(row[end]) else row[end] for end in ("low", "high")]
            for row in (before, after)
        )
        step = after["estimate"] - before["estimate"]
        is_apart = new_low > high or new_high < low
        if is_apart and abs(step) > threshold * abs(before["estimate"]):
            way = "higher" if step > 0 else "lower"
            message = f"{way}; the intervals do not overlap; repeat both runs to confirm the change"
            yield _line(before, after, Kind.SUSPECT, message=message)


def block_medians(row: Row) -> np.ndarray:
    """Return the median latency of each block after the warm-up, in ms, shape [blocks]."""
    details = row["details"]
    samples, per_block = np.asarray(row["samples"], dtype=float), details.get("calls_per_block", 1)
    whole = samples[details.get("warmup_cut", 0) : len(samples) // per_block * per_block]
    return np.median(whole.reshape(-1, per_block), axis=1)


def _timing_line(
    then: Row,
    now: Row,
    threshold: float,
    noise: Mapping[str, Sequence[str]],
    repeats: Repeats | None,
) -> Line:
    """Compare a latency by block medians. `repeats` is None if the machines differ."""
    if then["run_id"] == now["run_id"]:
        return _line(then, now, Kind.EQUIVALENT, message="the same run")
    spread = None if repeats is None else spread_between_runs(repeats, now)
    blocks = [block_medians(row) for row in (then, now)]
    reason = ""
    if Flag.NO_STEADY_STATE in {*then["flags"], *now["flags"]}:
        reason = "no steady state in one run; measure again"
    elif not (len(then["samples"]) and len(now["samples"])):
        reason = "a time without samples; no verdict"
    elif 1 in (len(then["samples"]), len(now["samples"])):
        reason = "a single time; no verdict"
    elif not all((medians > 0).all() for medians in blocks):
        reason = "a time that is not above 0; no verdict"
    else:
        try:
            verdict = compare(*blocks, threshold=threshold, spread=spread)
        except TooFewSamples as error:
            reason = f"{error} with a larger budget_s"
    if reason:
        return _line(then, now, Kind.INCONCLUSIVE, message=reason)
    message = "" if spread is not None or repeats is None else UNKNOWN
    if any(row["run_id"] in noise or Flag.BUSY_MACHINE in row["flags"] for row in (then, now)):
        message = BUSY
    line = _line(then, now, verdict.kind, verdict=verdict, message=message)
    # The ratio of the verdict is the ratio of the geometric means, so the table shows geometric
    # means.
    base, current = (float(np.exp(np.log(one).mean())) for one in blocks)
    return replace(line, base=base, current=current)


def _adjusted(lines: Sequence[Line]) -> Iterator[Line]:
    """Adjust the p-values of two groups: timings that can fail a build, and all other timings."""
    yield from (line for line in lines if line.verdict is None)
    timings = [line for line in lines if line.verdict is not None]
    for capped in (False, True):
        chosen = [line for line in timings if (line.message in (BUSY, UNKNOWN)) is capped]
        judged = judge_together([line.verdict for line in chosen])
        for line, verdict in zip(chosen, judged, strict=True):
            if capped and verdict.kind in (Kind.REGRESSED, Kind.IMPROVED):
                verdict = replace(verdict, kind=Kind.SUSPECT)
            message = verdict.open
            if capped and verdict.kind is Kind.SUSPECT:
                message += f"; {line.message}"
            yield replace(line, finding=verdict.kind, verdict=verdict, message=message)
