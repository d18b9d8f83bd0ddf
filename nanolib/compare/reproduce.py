"""Somebody's results beside one's own: row by row, and whether all of them are shifted by one factor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from nanolib.compare.compare import COUNTED, named
from nanolib.measurement import Flag, Provenance, Status, case_name, format_number
from nanolib.stats.intervals import Interval, TooFewSamples, median_interval

CONFIDENCE = 0.95  # of what decides; the range of fewer than 6 blocks has less
MARGIN = 0.10  # what lies within is the same
REPRODUCED, DIFFERS, UNDECIDED, CANNOT_RUN = "reproduced", "differs", "undecided", "cannot run"
_ORDER = (DIFFERS, CANNOT_RUN, UNDECIDED, REPRODUCED)
_SHIFT = "latency"  # the figure that all rows together are judged by
_TIMED = (_SHIFT, "tokens_per_second")
_CASE = ["experiment", "case_id"]
_KEY = [*_CASE, "metric", "scope", "method"]


@dataclass(frozen=True)
class Row:
    """One figure of the reference, and what became of it here.

    Attributes:
        verdict: `reproduced`, `differs`, `undecided` or `cannot run`.
        experiment: Which notebook.
        case: The case, for people.
        metric: Which figure, with its scope; empty for a whole case.
        there: The reference's estimate.
        here: This machine's.
        low: Lower end of the 95 % interval of here / there, scaled by the ceilings on another machine.
        ratio: Here over there, so scaled.
        high: Upper end.
        message: Why it is not known.
    """

    verdict: str
    experiment: str
    case: str
    metric: str = ""
    there: float | None = None
    here: float | None = None
    low: float = math.nan
    ratio: float = math.nan
    high: float = math.nan
    message: str = ""


@dataclass(frozen=True)
class Reproduction:
    """What became of a reference's rows.

    Attributes:
        rows: The rows, those that differ first.
        shift: Median of here / there over the latencies, with its interval; None of too few.
        same_machine: Whether both are of one machine; else latencies are scaled by the ceilings.
    """

    rows: tuple[Row, ...]
    shift: Interval | None
    same_machine: bool

    @property
    def shifted(self) -> bool:
        """Whether the whole is slower or faster here, beyond the margin."""
        return self.shift is not None and _verdict(*self.shift) == DIFFERS

    @property
    def counts(self) -> dict[str, int]:
        """How many rows have each verdict."""
        return {name: n for name in _ORDER if (n := sum(row.verdict == name for row in self.rows))}

    @property
    def sentence(self) -> str:
        """What is to be said of the whole."""
        scaled = "" if self.same_machine else ", scaled by the ceilings of both machines"
        if self.shift is None:
            return f"too few latencies to say whether all are shifted{scaled}"
        low, ratio, high = self.shift
        if ratio < 1:  # a factor is said as a number above 1
            low, ratio, high = 1 / high, 1 / ratio, 1 / low
        told = f"{ratio:.2f} [{low:.2f} … {high:.2f}]"
        way = "slower here" if self.shift.estimate > 1 else "faster here"
        match _verdict(*self.shift):
            case "differs":
                return f"shifted by {told}: {way}{scaled}"
            case "reproduced":
                return f"not shifted: {told}, {way}, within ±{MARGIN:.0%}{scaled}"
        return f"whether all are shifted is undecided: {told}, {way}{scaled}"

    def table(self, everything: bool = True) -> pd.DataFrame:
        """One line per row as text; without `everything` what was reproduced is left out."""
        return pd.DataFrame(
            [
                {
                    "verdict": row.verdict,
                    "experiment": row.experiment,
                    "case": row.case,
                    "metric": row.metric,
                    "there": "" if row.there is None else format_number(row.there),
                    "here": "" if row.here is None else format_number(row.here),
                    "ratio": _with_interval(row),
                    "note": row.message,
                }
                for row in self.rows
                if everything or row.verdict != REPRODUCED
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        rows = [
            {
                name: None if isinstance(value, float) and math.isnan(value) else value
                for name, value in asdict(row).items()
            }
            for row in self.rows
        ]
        shift = None if self.shift is None else dict(zip(("low", "ratio", "high"), self.shift, strict=True))
        return {
            "said": self.sentence,
            "shifted": self.shifted,
            "shift": shift,
            "same_machine": self.same_machine,
            "counts": self.counts,
            "rows": rows,
        }


def reproduction(there: pd.DataFrame, here: pd.DataFrame, refused: Mapping[str, str] | None = None) -> Reproduction:
    """Hold a reference's rows against this machine's.

    Args:
        there: Measurements of the reference, one run of each experiment.
        here: Those of the same cases here.
        refused: Experiment → why it was not run.
    """
    refused = refused or {}
    same = set(there["machine_id"]) == set(here["machine_id"]) if len(here) else False
    mine = {tuple(row[_KEY]): row for _, row in here.iterrows()}
    endings = {tuple(row[_CASE]): row for _, row in here[here["metric"] == "case_time"].iterrows()}
    rows: list[Row] = []
    ratios: list[float] = []
    for case, group in there.groupby(_CASE, sort=False):
        if why := _why_not(case, group, endings, refused):
            rows.append(Row(CANNOT_RUN, case[0], case_name(group["factors"].iloc[0]), message=why))
            continue
        found = list(_compared(group, mine, same))
        rows += found
        ratios += [row.ratio for row in found if row.metric.split()[0] == _SHIFT and not math.isnan(row.ratio)]
    rows.sort(key=lambda row: _ORDER.index(row.verdict))
    return Reproduction(tuple(rows), _shift(ratios), same)


def _shift(ratios: list[float]) -> Interval | None:
    try:
        return Interval(*np.exp(median_interval(np.log(ratios)))) if ratios else None
    except TooFewSamples:
        return None


def _why_not(
    case: tuple[str, str], group: pd.DataFrame, endings: Mapping[tuple[str, str], pd.Series], refused: Mapping[str, str]
) -> str:
    """Why a case of the reference gave nothing here; empty where it did, or gave nothing there either."""
    if case[0] in refused:
        return refused[case[0]]
    if case not in endings:
        return "this version has no such case"
    ended = endings[case]
    there = group.loc[group["metric"] == "case_time", "status"]
    if ended["status"] != Status.OK and (there == Status.OK).any():
        return f"{ended['status']}: {ended['message']}"
    return ""


def _compared(group: pd.DataFrame, mine: Mapping[tuple[Any, ...], pd.Series], same: bool) -> Iterator[Row]:
    """The rows of one case that hold a figure to be reproduced."""
    wanted = group["metric"].isin((*_TIMED, *COUNTED)) & group["estimate"].notna()
    for _, then in group[wanted & (group["provenance"] != Provenance.MODELLED)].iterrows():
        told = (*named(then), float(then["estimate"]))
        now = mine.get(tuple(then[_KEY]))
        if now is None or pd.isna(now["estimate"]):
            yield Row(CANNOT_RUN, *told, message="it is not measured here")
            continue
        yield _row(told, then, now, same)


def _row(told: tuple[str, str, str, float], then: pd.Series, now: pd.Series, same: bool) -> Row:
    here = float(now["estimate"])
    if then["metric"] in COUNTED:
        ratio = here / told[3] if told[3] else 1.0 if here == told[3] else math.inf
        return Row(_verdict(ratio, ratio, ratio), *told, here, ratio, ratio, ratio)
    scale = 1.0
    if not same:
        if not ((then["predicted"] or 0) > 0 and (now["predicted"] or 0) > 0):
            return Row(UNDECIDED, *told, here, message="another machine, and no prediction by its ceilings to scale by")
        scale = now["predicted"] / then["predicted"]
    if not (told[3] > 0 and here > 0):
        return Row(UNDECIDED, *told, here, message="no ratio can be made of it")
    ratio = here / told[3] / scale
    half = math.hypot(*(_log_half_width(row) for row in (then, now)))
    if math.isnan(half):
        return Row(UNDECIDED, *told, here, ratio=ratio, message="one side has no interval")
    if min(then["confidence"], now["confidence"]) < CONFIDENCE:
        message = "too few blocks for a 95 % interval; raise budget_s"
        return Row(UNDECIDED, *told, here, ratio=ratio, message=message)
    low, high = ratio * math.exp(-half), ratio * math.exp(half)
    if Flag.NO_STEADY_STATE in {*then["flags"], *now["flags"]}:
        return Row(UNDECIDED, *told, here, low, ratio, high, "one side never settled")
    return Row(_verdict(low, ratio, high), *told, here, low, ratio, high)


def _with_interval(row: Row) -> str:
    if math.isnan(row.ratio):
        return ""
    return f"{row.ratio:.2f}" + ("" if math.isnan(row.low) else f" [{row.low:.2f} … {row.high:.2f}]")


def _log_half_width(row: pd.Series) -> float:
    """Of a row's 95 % interval, in logarithms; nan without one."""
    low, high = row["low"], row["high"]
    return math.log(high / low) / 2 if low > 0 and high > 0 else math.nan


def _verdict(low: float, ratio: float, high: float) -> str:
    least, most = 1 / (1 + MARGIN), 1 + MARGIN
    if least <= low and high <= most:
        return REPRODUCED
    return DIFFERS if high < least or low > most else UNDECIDED
