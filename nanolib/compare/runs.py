"""Compare two sets of stored runs case by case.

The machine may have changed between the two sets of runs. A timing fails a gate only if its change
exceeds the spread between runs of one revision. nanolib reports every difference of a deterministic
metric as `changed`. A comparison of two machines never fails a gate.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
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
    case_names,
    cases_in,
    worst_first,
)
from nanolib.compare.spread import UNKNOWN, Repeats, spread_between_runs
from nanolib.measurement import METRICS, BadInput, Direction, Flag, Provenance, Status
from nanolib.stats.compare import THRESHOLD, Kind, compare, judge_together
from nanolib.stats.intervals import TooFewSamples

_EQUAL = [name for name, metric in METRICS.items() if metric.direction is Direction.EQUAL]
_MEMORY = ("peak_memory", "reserved_memory")
# Metrics without blocks: the smallest change that counts as a share, or None for the threshold, the
# finding if the value rises and if it falls, and a message.
_RULES = dict.fromkeys(_EQUAL, (0.0, CHANGED, CHANGED, "deterministic metric changed"))
_RULES |= dict.fromkeys(_MEMORY, (None, Kind.REGRESSED, Kind.IMPROVED, ""))
_RULES |= dict.fromkeys(
    ("energy_per_token", "loss", "relative_error", "sqnr"),
    # Such a change may still be a spread between runs.
    (None, Kind.SUSPECT, Kind.SUSPECT, "the intervals do not overlap; repeat both runs to confirm"),
)
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

    Returns:
        The comparison. If the sets have machines in common, it has the cases of these machines.
    """
    noise, repeats = noise or {}, repeats or {}
    notes = [
        f"run {run_id[:8]} began on a busy machine: {'; '.join(found)}"
        for run_id, found in noise.items()
    ]
    of_base, of_current = (set(rows["machine_id"]) for rows in (base, current))
    machines = of_base & of_current
    if machines:
        base, current = (rows[rows["machine_id"].isin(machines)] for rows in (base, current))
    elif len(of_base) == len(of_current) == 1:  # The same case of two machines needs one key.
        base, current = (rows.assign(machine_id="") for rows in (base, current))
    then, now = _newest_cases(base), _newest_cases(current)
    names = case_names([*cases_in(base), *cases_in(current)])
    in_base, in_current = ({key[:2] for key in cases} for cases in (then, now))
    only = {"base": in_base - in_current, "current": in_current - in_base}
    for side, keys in only.items():
        if keys:
            experiments = ", ".join(sorted({experiment for _, experiment in keys}))
            notes.append(f"experiments only in {side} are not compared: {experiments}")
    lines = []
    for key in dict.fromkeys((*then, *now)):
        if key[:2] in in_base & in_current:
            found = list(_case_lines(then.get(key), now.get(key), threshold))
            if key in then and key in now:
                for pair in _pairs(then[key].figures, now[key].figures, ["latency"]):
                    found.append(
                        _timing_line(*pair, threshold, noise, repeats if machines else None)
                    )
            lines += [replace(line, case=names[key]) for line in found]
    missing = sorted({experiment for _, experiment in only["base"]})
    lines = worst_first(_adjusted(lines))
    return Comparison(lines, bool(machines), threshold, notes, missing=missing)


def _newest_cases(rows: pd.DataFrame) -> dict[tuple[str, str, str], _Case]:
    """Return the newest run of each case by machine, experiment and case ID.

    The newest run counts even if the run failed. nanolib excludes times that are only modelled.
    """
    key = ["machine_id", "experiment", "case_id"]
    newest = rows.groupby(key)["run_id"].transform("last")
    cases: dict[tuple[str, str, str], _Case] = defaultdict(_Case)
    for row in rows[rows["run_id"] == newest].to_dict("records"):
        case = cases[tuple(row[name] for name in key)]
        is_modelled_time = row["metric"] == "latency" and row["provenance"] == Provenance.MODELLED
        if row["metric"] == "case_duration":
            case.ending = row
        elif not (is_modelled_time or math.isnan(row["estimate"])):
            case.figures[row["metric"], row["scope"], row["method"]] = row
    return cases


def _case_lines(then: _Case | None, now: _Case | None, threshold: float) -> Iterator[Line]:
    """Yield the findings about a case, without its name and the comparison of its timings."""
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
    yield from figure_lines(then.figures, now.figures, threshold)


def _case_line(row: Row, finding: str, message: str) -> Line:
    return Line(row["experiment"], "", "", finding, message=message)


def _line(then: Row, now: Row, finding: str, **rest: Any) -> Line:
    metric = f"{then['metric']} {then['scope']}".strip()
    ends = float(then["estimate"]), float(now["estimate"])
    return Line(then["experiment"], "", metric, finding, *ends, **rest)


def _pairs(then: Figures, now: Figures, metrics: Container[str]) -> Iterator[tuple[Row, Row]]:
    """Yield the rows that both sides have, and add the method to a scope with several methods."""
    methods = Counter(key[:2] for key in then)
    for key, row in then.items():
        if row["metric"] in metrics and key in now:
            if methods[key[:2]] > 1:
                row = {**row, "scope": f"{row['scope']} by {row['method']}"}
            yield row, now[key]


def figure_lines(then: Figures, now: Figures, threshold: float) -> Iterator[Line]:
    """Yield the findings about metrics without blocks, whose intervals nanolib compares.

    The findings lack the name of the case. The interval of a deterministic metric has no width, so
    every difference counts.
    """
    for before, after in _pairs(then, now, _RULES):
        least, higher, lower, message = _RULES[before["metric"]]
        (low, high), (new_low, new_high) = _ends(before), _ends(after)
        step = after["estimate"] - before["estimate"]
        limit = abs(before["estimate"]) * (threshold if least is None else least)
        if (new_low > high or new_high < low) and abs(step) > limit:
            yield _line(before, after, higher if step > 0 else lower, message=message)
        elif higher is not Kind.SUSPECT:
            yield _line(before, after, CHANGED if step else Kind.EQUIVALENT)


def _ends(row: Row) -> list[float]:
    """Return the ends of the interval, or the estimate in place of an unknown end."""
    return [row["estimate"] if pd.isna(row[end]) else row[end] for end in ("low", "high")]


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
    try:
        if Flag.NO_STEADY_STATE in {*then["flags"], *now["flags"]}:
            raise BadInput("no steady state in one run; measure again")
        verdict = compare(*blocks, threshold=threshold, spread=spread)
    except (TooFewSamples, BadInput) as error:
        return _line(then, now, Kind.INCONCLUSIVE, message=str(error))
    message = "" if spread is not None or repeats is None else UNKNOWN
    if any(row["run_id"] in noise or Flag.BUSY_MACHINE in row["flags"] for row in (then, now)):
        message = BUSY
    line = _line(then, now, verdict.kind, verdict=verdict, message=message)
    # The verdict compares geometric means. The current time follows from the ratio of the verdict.
    return replace(line, current=line.base * verdict.ratio)


def _adjusted(lines: Sequence[Line]) -> Iterator[Line]:
    """Adjust the p-values of all timings together. Some timings are `suspect` at most."""
    judged = iter(judge_together([line.verdict for line in lines if line.verdict is not None]))
    for line in lines:
        if line.verdict is None:
            yield line
            continue
        verdict, reason = next(judged), line.message
        if reason and verdict.kind in (Kind.REGRESSED, Kind.IMPROVED):
            verdict = replace(verdict, kind=Kind.SUSPECT)
        message = verdict.open
        if reason and verdict.kind is Kind.SUSPECT:
            message += f"; {reason}"
        yield replace(line, finding=verdict.kind, verdict=verdict, message=message)
