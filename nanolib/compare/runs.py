"""Compare two sets of stored runs case by case.

The machine may have changed between the two sets of runs. A timing fails a gate only if its change
exceeds the spread between runs of one revision. nanolib reports every difference of a deterministic
metric as `changed`. A comparison of two machines never fails a gate.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from nanolib.compare.findings import (
    CASE_KEY,
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
from nanolib.compare.history import KEY, Repeats, spread_between_runs
from nanolib.measurement import METRICS, BadInput, Direction, Flag, Status
from nanolib.stats.compare import THRESHOLD, Kind, compare, judge_together
from nanolib.stats.intervals import TooFewSamples

# Metrics without blocks: the smallest change that counts as a share, or None for the threshold, the
# finding if the value rises and if it falls, and a message.
_RULES = dict.fromkeys(
    [name for name, metric in METRICS.items() if metric.direction is Direction.EQUAL],
    (0.0, CHANGED, CHANGED, "deterministic metric changed"),
)
_RULES |= dict.fromkeys(
    ("peak_memory", "reserved_memory"), (None, Kind.REGRESSED, Kind.IMPROVED, "")
)
_RULES |= dict.fromkeys(
    ("energy_per_token", "loss", "relative_error", "sqnr"),
    # Such a change may still be a spread between runs.
    (None, Kind.SUSPECT, Kind.SUSPECT, "the intervals do not overlap; repeat both runs to confirm"),
)
BUSY = "the machine was busy; measure again or use nano ab"
UNKNOWN = "the spread between runs is unknown; use nano ab to decide"

Row = Mapping[str, Any]
Figures = dict[tuple[str, str, str], Row]  # The keys are metric, scope and method.
_ENDING = "case_duration", "", ""  # Key of the row with the status of the case.
_OK = {"status": Status.OK}  # Ending of a case without such a row.


def compare_rows(
    base: pd.DataFrame,
    current: pd.DataFrame,
    threshold: float = THRESHOLD,
    runs: Iterable[pd.DataFrame] = (),
    repeats: Repeats | None = None,
) -> Comparison:
    """Compare the measurements of two sets of runs, for each experiment that both sets have.

    If several runs of a set have a case, the newest run counts.

    Args:
        base: Measurements of the base, from `Store.measurements(samples=True)`.
        current: Current measurements, from `Store.measurements(samples=True)`.
        threshold: Smallest change that counts, as a share.
        runs: Tables of the runs, from `Store.runs_of`. Timings of a run that began on a busy
            machine are `suspect` at most.
        repeats: Earlier runs of each timing, from `history.repeats`. A timing with an unknown
            spread is `suspect` at most.

    Returns:
        The comparison. If the sets have machines in common, it has the cases of these machines.
    """
    noise = {}
    for table in runs:
        noise |= table.set_index("run_id")["interference"].to_dict()
    notes = [
        f"run {run_id[:8]} began on a busy machine: {'; '.join(found)}"
        for run_id, found in noise.items()
        if found
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
    only = {
        "base": sorted({experiment for _, experiment in in_base - in_current}),
        "current": sorted({experiment for _, experiment in in_current - in_base}),
    }
    for side, experiments in only.items():
        if experiments:
            notes.append(f"experiments only in {side} are not compared: {', '.join(experiments)}")
    lines = []
    for key in dict.fromkeys((*then, *now)):
        if key[:2] in in_base & in_current:
            before, after = then.get(key, {}), now.get(key, {})
            found = [*_case_lines(before, after, threshold)]
            for pair in _pairs(before, after, ["latency"]):
                found.append(_timing_line(*pair, threshold, noise, repeats or {}))
            lines += [replace(line, experiment=key[1], case=names[key]) for line in found]
    lines = worst_first(_adjust_p_values(lines))
    return Comparison(lines, bool(machines), threshold, notes, missing=only["base"])


def _newest_cases(rows: pd.DataFrame) -> dict[tuple[str, str, str], Figures]:
    """Return the newest run of each case by machine, experiment and case ID.

    The newest run counts even if the run failed. nanolib excludes times without blocks: modelled
    times and compile times.
    """
    newest = rows.groupby(CASE_KEY)["run_id"].transform("last")
    cases = defaultdict(dict)
    for row in rows[rows["run_id"] == newest].to_dict("records"):
        case, metric = cases[tuple(row[name] for name in CASE_KEY)], row["metric"]
        # These times have at most n = 1 and no samples. A block has both.
        has_no_blocks = metric == "latency" and row["n"] + len(row["samples"]) < 2
        if metric == "case_duration":
            case[_ENDING] = row
        elif not (has_no_blocks or math.isnan(row["estimate"])):
            case[metric, row["scope"], row["method"]] = row
    return cases


def _case_lines(then: Figures, now: Figures, threshold: float) -> Iterator[Line]:
    """Yield the findings about a case, without its name and the comparison of its timings."""
    if not then:
        yield _case_line(NEW, "not in base")
        return
    if not now:
        yield _case_line(MISSING, "not in current")
        return
    was_ok, ending = then.get(_ENDING, _OK)["status"] == Status.OK, now.get(_ENDING, _OK)
    if ending["status"] != Status.OK:
        why = ending["message"] or "the process ended during the case"
        message = f"{ending['status']}: {why}"
        if was_ok:
            yield _case_line(FAILED, message)
        elif ending["status"] != Status.UNSUPPORTED:
            yield _case_line(Kind.INCONCLUSIVE, f"{message}; not measured in base")
    elif not was_ok:
        yield _case_line(NEW, "not measured in base")
    yield from figure_lines(then, now, threshold)


def _case_line(finding: str, message: str) -> Line:
    return Line("", "", "", finding, message=message)


def _line(then: Row, now: Row, finding: str, **rest) -> Line:
    metric = f"{then['metric']} {then['scope']}".strip()
    ends = float(then["estimate"]), float(now["estimate"])
    return Line("", "", metric, finding, *ends, **rest)


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

    The findings lack the names of the experiment and the case. The interval of a deterministic
    metric has no width, so every difference counts.
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
    repeats: Repeats,
) -> Line:
    """Compare a latency by block medians. The machine ID is empty if the machines differ."""
    if then["run_id"] == now["run_id"]:
        return _line(then, now, Kind.EQUIVALENT, message="the same run")
    spread = spread_between_runs(repeats, now)
    blocks = [block_medians(row) for row in (then, now)]
    try:
        if Flag.NO_STEADY_STATE in {*then["flags"], *now["flags"]}:
            raise BadInput("no steady state in one run; measure again")
        verdict = compare(*blocks, threshold=threshold, spread=spread)
    except (TooFewSamples, BadInput) as error:
        return _line(then, now, Kind.INCONCLUSIVE, message=str(error))
    message = UNKNOWN if spread is None and now["machine_id"] else ""
    if any(noise.get(row["run_id"]) or Flag.BUSY_MACHINE in row["flags"] for row in (then, now)):
        message = BUSY
    line = _line(then, now, verdict.kind, verdict=verdict, message=message)
    # The verdict compares geometric means. The current time follows from the ratio of the verdict.
    return replace(line, current=line.base * verdict.ratio)


def _adjust_p_values(lines: Sequence[Line]) -> Iterator[Line]:
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


def scale_by_peaks(base: pd.DataFrame, current: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """Scale each latency of the base to another machine, by the peak rates of both machines.

    The scaling factor is the ratio of the predicted times of a case. A prediction is the time of
    the case at the measured peak rates of its run.

    Args:
        base: Measurements of the base, with their samples.
        current: Measurements of the other machine, with their samples.

    Returns:
        The base with scaled latencies, and the number of latencies that were excluded because they
        have no prediction.
    """
    _, *key = KEY  # The machines differ, so the key excludes their IDs.
    timed = current[current["metric"] == "latency"]
    predicted = timed.set_index(key)["predicted"].to_dict()
    rows, unknown = [], 0
    for row in base.to_dict("records"):
        timing = tuple(row[name] for name in key)
        if row["metric"] == "latency" and timing in predicted:
            ratio = predicted[timing] / (row["predicted"] or np.nan)
            if not ratio > 0:
                unknown += 1
                continue
            times = ("estimate", "low", "high", "predicted", "samples")
            row |= {name: row[name] * ratio for name in times}
        rows.append(row)
    return pd.DataFrame(rows, columns=base.columns), unknown
