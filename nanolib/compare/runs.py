"""Two sets of stored runs, compared case by case.

They were measured at different times, so drift between them is not controlled. The verdicts are those of `nanolib.stats.compare`,
adjusted by Holm over all timings. A timing fails a gate only beyond the spread between runs of one revision. A deterministic
metric must be equal. A comparison of two machines never fails a gate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from nanolib.compare.findings import CHANGED, FAILED, MISSING, NEW, Comparison, Line, named
from nanolib.compare.spread import UNKNOWN, Repeats, count_unknown, spread_between_runs
from nanolib.measurement import METRICS, BadInput, Direction, Flag, Provenance, Status
from nanolib.stats.compare import THRESHOLD, Kind, compare, judge_together
from nanolib.stats.intervals import TooFewSamples

_EQUAL = [name for name, metric in METRICS.items() if metric.direction is Direction.EQUAL]
_COUNTED_MEMORY = ("peak_memory", "reserved_memory")
COUNTED = (*_COUNTED_MEMORY, *_EQUAL)
_CASE = ["experiment", "case_id"]
_KEY = [*_CASE, "metric", "scope", "method"]
BUSY = "machine was busy; measure again or use nano ab"


@dataclass(frozen=True)
class _Known:
    """What is known of the runs beside their rows.

    Attributes:
        threshold: The share from which a change counts.
        noise: Run → what its noise checks found.
        repeats: Each timing's earlier runs; None between two machines, where no gate fails.
    """

    threshold: float
    noise: Mapping[str, Sequence[str]]
    repeats: Repeats | None


def compare_rows(
    base: pd.DataFrame,
    current: pd.DataFrame,
    threshold: float = THRESHOLD,
    noise: Mapping[str, Sequence[str]] | None = None,
    repeats: Repeats | None = None,
) -> Comparison:
    """Compare the measurements of two sets of runs, for each notebook that both have.

    Args:
        base: Measurements with their samples, from `Store.measurements(samples=True)`.
        current: Likewise. Of a case that several runs have, the newest run counts on either side.
        threshold: The share from which a change counts.
        noise: Run → what its noise checks found, from `noise_of`; its timings are `suspect` at most.
        repeats: Each timing's runs, from `repeats`; a timing whose spread is unknown is `suspect` at most.

    Raises:
        BadInput: The machines of both sides differ, and one side has several.
    """
    noise = noise or {}
    notes = [
        f"run {run_id[:8]} began on a busy machine: {'; '.join(found)}"
        for run_id, found in noise.items()
    ]
    of_base, of_current = (set(rows["machine_id"]) for rows in (base, current))
    machines = sorted(of_base & of_current)
    if not machines and max(len(of_base), len(of_current)) > 1:
        raise BadInput(
            f"compare: the runs are from {len(of_base)} and {len(of_current)} different machines; name runs of one machine"
        )
    if machines and (others := sorted(of_base ^ of_current)):
        short = ", ".join(f"machine {one[:6]}" for one in others)
        notes.append(f"left out, since only one side has runs of it: {short}")
    known = _Known(threshold, noise, (repeats or {}) if machines else None)
    lines, missing = [], set()
    for machine in machines or [None]:  # without a common one, one machine is compared with another
        sides = [
            rows if machine is None else rows[rows["machine_id"] == machine]
            for rows in (base, current)
        ]
        place = machine[:6] if len(machines) > 1 else ""
        in_base, in_current = (set(rows["experiment"]) for rows in sides)
        on = f" on machine {place}" if place else ""
        for side, only in (("base", in_base - in_current), ("current", in_current - in_base)):
            if only:
                notes.append(
                    f"not compared, since only {side} has them{on}: {', '.join(sorted(only))}"
                )
        missing |= in_base - in_current
        then, now = (_newest(rows[rows["experiment"].isin(in_base & in_current)]) for rows in sides)
        lines += [replace(line, machine=place) for line in _lines(then, now, known)]
    notes += count_unknown([line.message for line in lines if line.verdict is not None])
    found = _adjusted(lines)
    return Comparison.of(found, bool(machines), threshold, noise=notes, missing=sorted(missing))


def _lines(base: pd.DataFrame, current: pd.DataFrame, known: _Known) -> Iterator[Line]:
    yield from _case_lines(base, current)
    yield from _missing_metrics(base, current)
    yield from exact_lines(base, current, known.threshold)
    for then, now in _pairs(base, current, ["latency"]):
        if Provenance.MODELLED not in (then["provenance"], now["provenance"]):
            yield _timing_line(then, now, known)


def _newest(rows: pd.DataFrame) -> pd.DataFrame:
    """For each case, the rows of the newest run that has it, also if that run failed."""
    newest = rows.groupby(_CASE)["run_id"].transform("last")
    return rows[rows["run_id"] == newest].drop_duplicates(_KEY, keep="last")


def _case_lines(base: pd.DataFrame, current: pd.DataFrame) -> Iterator[Line]:
    """Cases that are missing, failed, or are new."""
    then, now = (
        {tuple(row[_CASE]): row for _, row in rows[rows["metric"] == "case_time"].iterrows()}
        for rows in (base, current)
    )
    for key, row in then.items():
        if key not in now:
            yield _case_line(row, MISSING, "not in current")
        elif row["status"] == Status.OK != now[key]["status"]:
            message = f"{now[key]['status']}: {now[key]['message']}"
            yield _case_line(now[key], FAILED, message)
    for key, row in now.items():
        if key not in then:
            yield _case_line(row, NEW, "not in base")


def _case_line(row: pd.Series, finding: str, message: str) -> Line:
    experiment, case, _ = named(row)
    return Line(experiment, case, "", finding, message=message)


def _missing_metrics(base: pd.DataFrame, current: pd.DataFrame) -> Iterator[Line]:
    """Metrics that would be compared and are missing from a case that is ok on both sides."""
    ok = [
        rows.loc[(rows["metric"] == "case_time") & (rows["status"] == Status.OK), _CASE]
        for rows in (base, current)
    ]
    ok_in_both = set(map(tuple, ok[0].to_numpy())) & set(map(tuple, ok[1].to_numpy()))
    present = set(map(tuple, current.loc[current["estimate"].notna(), _KEY].to_numpy()))
    modelled = (base["metric"] == "latency") & (base["provenance"] == Provenance.MODELLED)
    compared = base["metric"].isin([*COUNTED, "latency"]) & base["estimate"].notna() & ~modelled
    for _, row in base[compared].iterrows():
        if tuple(row[_CASE]) in ok_in_both and tuple(row[_KEY]) not in present:
            message = f"not in current, by {row['method']}"
            yield replace(_line(row, row, MISSING, message=message), current=None)


def _pairs(
    base: pd.DataFrame, current: pd.DataFrame, metrics: Sequence[str]
) -> Iterator[tuple[pd.Series, pd.Series]]:
    """Rows of both sides that belong together; if several methods measured one, its scope names the method."""
    then, now = (
        rows[rows["metric"].isin(metrics) & rows["estimate"].notna()] for rows in (base, current)
    )
    others = {tuple(row[_KEY]): row for _, row in now.iterrows()}
    by_several_methods = then.duplicated(_KEY[:-1], keep=False)
    for (_, row), several in zip(then.iterrows(), by_several_methods, strict=True):
        other = others.get(tuple(row[_KEY]))
        if other is None:
            continue
        if several:
            row["scope"] += f" by {row['method']}"
        yield row, other


def _line(then: pd.Series, now: pd.Series, finding: str, **rest: Any) -> Line:
    return Line(*named(then), finding, float(then["estimate"]), float(now["estimate"]), **rest)


def exact_lines(base: pd.DataFrame, current: pd.DataFrame, threshold: float) -> Iterator[Line]:
    """Compare deterministic metrics, which must be equal, and counted memory, against the threshold."""
    for then, now in _pairs(base, current, _EQUAL):
        if then["estimate"] == now["estimate"]:
            yield _line(then, now, Kind.EQUIVALENT)
        else:
            yield _line(then, now, CHANGED, message="deterministic metric changed")
    for then, now in _pairs(base, current, _COUNTED_MEMORY):
        before, after = then["estimate"], now["estimate"]
        worse = after / before - 1 if before else math.inf if after else 0.0
        if worse > threshold:
            yield _line(then, now, Kind.REGRESSED)
        elif worse < -threshold:
            yield _line(then, now, Kind.IMPROVED)
        else:
            yield _line(then, now, CHANGED if worse else Kind.EQUIVALENT)


def block_medians(row: pd.Series) -> np.ndarray:
    """The block medians behind a latency, without the warm-up that was cut from it, shape [blocks]."""
    details = row["details"]
    samples, per_block = np.asarray(row["samples"], dtype=float), details.get("calls_per_block", 1)
    whole = samples[details.get("warmup_cut", 0) : len(samples) // per_block * per_block]
    return np.median(whole.reshape(-1, per_block), axis=1)


def _timing_line(then: pd.Series, now: pd.Series, known: _Known) -> Line:
    """A latency by its blocks, p not adjusted yet; one without a steady state gets no verdict."""
    if then["run_id"] == now["run_id"]:
        return _line(then, now, Kind.EQUIVALENT, message="the same run")
    if Flag.NO_STEADY_STATE in {*then["flags"], *now["flags"]}:
        message = "no steady state in one run; measure again"
        return _line(then, now, Kind.INCONCLUSIVE, message=message)
    if not (len(then["samples"]) and len(now["samples"])):
        return _line(then, now, Kind.INCONCLUSIVE, message="only one sample; no verdict")
    spread = None if known.repeats is None else spread_between_runs(known.repeats, now)
    blocks = block_medians(then), block_medians(now)
    try:
        verdict = compare(*blocks, threshold=known.threshold, spread=spread)
    except TooFewSamples as error:
        message = f"too few blocks: {error}; raise budget_s"
        return _line(then, now, Kind.INCONCLUSIVE, message=message)
    message = ""
    if any(
        row["run_id"] in known.noise or Flag.BUSY_MACHINE in row["flags"] for row in (then, now)
    ):
        message = BUSY
    elif spread is None and known.repeats is not None:
        message = UNKNOWN
    base, current = (float(np.exp(np.log(one).mean())) for one in blocks)  # whose ratio is shown
    line = _line(then, now, verdict.kind, verdict=verdict, message=message)
    return replace(line, base=base, current=current)


def _adjusted(lines: Sequence[Line]) -> Iterator[Line]:
    """The findings with p adjusted, over all timings that can fail a gate and over the others."""

    def is_capped(line: Line) -> bool:
        return line.message in (BUSY, UNKNOWN)

    timings = [line for line in lines if line.verdict is not None]
    yield from (line for line in lines if line.verdict is None)
    for capped in (False, True):
        chosen = [line for line in timings if is_capped(line) is capped]
        judged = judge_together([line.verdict for line in chosen])
        for line, verdict in zip(chosen, judged, strict=True):
            if capped and verdict.kind in (Kind.REGRESSED, Kind.IMPROVED):
                verdict = replace(verdict, kind=Kind.SUSPECT)
            message = verdict.open
            if verdict.kind is Kind.INCONCLUSIVE:
                effect = verdict.minimum_detectable_effect
                message = f"minimum detectable change: {effect:.1%}"
            elif verdict.kind is Kind.SUSPECT and capped:
                message = f"{message}; {line.message}"
            yield replace(line, finding=verdict.kind, verdict=verdict, message=message)
