"""What changed: two versions side by side, the newest runs against those before, each case over all its runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import altair as alt
import pandas as pd

from nanolib.compare.findings import Comparison, Line
from nanolib.compare.history import History
from nanolib.measurement import METRICS, case_name
from nanolib.report.claim import Claim, Figure, comparing
from nanolib.report.overview import cached, machine_name, of_experiment, pick, without_common
from nanolib.report.plot import plot
from nanolib.report.section import CaseTable, Section
from nanolib.report.theme import hues
from nanolib.stats.changes import LEAST_HISTORY
from nanolib.stats.compare import MARGIN, THRESHOLD, Kind, paired_levels

_HUES = {
    Kind.REGRESSED: "c2",
    Kind.SUSPECT: "c4",
    Kind.INCONCLUSIVE: "rest",
    Kind.EQUIVALENT: "c1",
    Kind.IMPROVED: "c3",
}
_MOST_SHOWN = 40
_MOST_LINES = 80  # of a chart of histories

AB_COLUMNS = {
    "case": "Case",
    "scope": "Timing",
    "verdict": "Verdict",
    "change": "B / A − 1",
    "base_ms": "A (ms)",
    "current_ms": "B (ms)",
    "pairs": "Pairs",
    "processes": "Pairs of processes",
}


@dataclass(frozen=True)
class Changes:
    """What changed since the runs before, and over all runs.

    Attributes:
        verdict: What changed.
        charts: By file name.
        table: The findings that are not equivalent.
    """

    verdict: list[Claim]
    charts: dict[str, alt.TopLevelMixin]
    table: pd.DataFrame = field(default_factory=pd.DataFrame)


def changes(since: Comparison | None, found: list[History]) -> Changes:
    """Describe what `compare.history.what_changed` found."""
    over_runs = {"history": history_chart(found)} if found else {}
    if since is None:
        return Changes(history_verdict(found), over_runs)
    title = "Since the run before"
    words = "The newest runs (B) against those before them (A), measured at different times."
    return Changes(
        comparison_verdict(since, "Against the runs before") + history_verdict(found),
        {"since_the_run_before": comparison_chart(since, title, words), **over_runs},
        since.table(everything=False),
    )


def ab_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per timing that `nano ab` compared.

    Returns:
        Columns: `case`, `scope`, `verdict`, `ratio` with `low` and `high`, `change` (text), `base_ms`, `current_ms` (of that
        ratio), `pairs`, `processes` (pairs of them), `threshold`, `a`, `b`.
    """
    lines = []
    for _, row in pick(of_experiment(rows, "ab"), "ratio").iterrows():
        details = row["details"]
        estimate, low, high = (f"{row[end] - 1:+.1%}" for end in ("estimate", "low", "high"))
        levels = paired_levels(details["base_ms"], details["current_ms"], row["estimate"])
        lines.append(
            {
                "case": case_name(row["factors"]),
                "scope": row["scope"],
                "verdict": details["kind"],
                "ratio": row["estimate"],
                "low": row["low"],
                "high": row["high"],
                "change": f"{estimate} [{low} … {high}]",
                "base_ms": levels[0],
                "current_ms": levels[1],
                "pairs": row["n"],
                "processes": len(details.get("generations", [])),
                **{name: details[name] for name in ("threshold", "a", "b")},
            }
        )
    return pd.DataFrame(lines)


@cached
def ab_verdict(rows: pd.DataFrame) -> list[Claim]:
    """What `nano ab` found."""
    table = ab_table(rows)
    if table.empty:
        return [Claim("No two versions were compared", advice="nano ab HEAD~1 .")]
    counts = ", ".join(f"{n} {kind}" for kind, n in table["verdict"].value_counts().items())
    claims = [Claim(f"A is {table['a'].iloc[0]}, B is {table['b'].iloc[0]}", counts)]
    for kind in (Kind.REGRESSED, Kind.SUSPECT, Kind.IMPROVED):
        for _, row in table[table["verdict"] == kind].head(5).iterrows():
            ratio = Figure(
                row["low"], row["ratio"], row["high"], "ratio", row["scope"], row["case"]
            )
            sure = f"{row['change']}, in {row['processes']} pairs of processes"
            answer = f"{kind}, {row['case']} {row['scope']}".strip()
            claims.append(Claim(answer, sure, compared=comparing(ratio, Figure.exactly(1.0))))
    drift = "Blocks of A and B were interleaved and paired, so drift of the machine hits both alike"
    return [*claims, Claim(drift, advice="which commit? nano ab takes any two revisions")]


def ab_ratio(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """The ratio of two versions with its interval, per case."""
    table, words, threshold = ab_table(rows), "", THRESHOLD
    if len(table):
        table["label"] = (table["case"] + " " + table["scope"]).str.strip()
        words = f"A: {table['a'].iloc[0]}. B: {table['b'].iloc[0]}."
        threshold = float(table["threshold"].iloc[0])
    empty = "no two versions were compared; run: nano ab HEAD~1 ."
    return ratio_chart(table, "Two versions side by side", words, threshold, empty)


def comparison_table(found: Comparison) -> pd.DataFrame:
    """Findings with a ratio: columns `label`, `verdict`, `ratio`, `low`, `high`."""
    return pd.DataFrame(
        {
            "label": f"{_place(line)}{line.experiment}: {line.case} {line.metric}",
            "verdict": str(line.finding),
            "ratio": line.verdict.ratio,
            "low": line.verdict.interval.low,
            "high": line.verdict.interval.high,
        }
        for line in found.lines
        if line.verdict is not None
    )


def _place(line: Line) -> str:
    """On which machine, where there are several."""
    return f"machine {line.machine}: " if line.machine else ""


def comparison_chart(found: Comparison, title: str, subtitle: str) -> alt.TopLevelMixin:
    """Timings of two sets of runs, the worst first."""
    return ratio_chart(comparison_table(found), title, subtitle, found.threshold)


def ratio_chart(
    table: pd.DataFrame,
    title: str,
    subtitle: str,
    threshold: float,
    empty: str = "no timing is in both with enough blocks to compare",
) -> alt.TopLevelMixin:
    """Ratios with their intervals over the band that is taken for no change.

    Args:
        table: Columns `label`, `verdict`, `ratio`, `low`, `high`; the first 40 are drawn.
        title: The chart's.
        subtitle: What is compared with what.
        threshold: From where on a change counts.
        empty: Why there is none, if there is none.
    """
    if table.empty:
        return plot(None, title, empty=empty)
    data = table.head(_MOST_SHOWN).rename(columns={"ratio": "x", "verdict": "text"})
    data = data.assign(
        series=without_common(list(data["label"])), hue=data["text"].map(_HUES).fillna("rest")
    )
    left_out = f" The first {_MOST_SHOWN} of {len(table)}." if len(table) > _MOST_SHOWN else ""
    return plot(
        data[["series", "x", "low", "high", "hue", "text"]],
        title,
        "rows",
        subtitle=[
            f"{subtitle}{left_out}",
            f"Green: no change (±{MARGIN:.0%}). From {threshold:.0%} on a change counts.",
        ],
        unit="B / A (right: slower)",
        log="x",
        fmt=".2~f",
        ref=1.0,
        band=(1 - MARGIN, 1 + MARGIN),
        width=420,
    )


def comparison_verdict(found: Comparison, what: str) -> list[Claim]:
    """What a comparison of stored runs found."""
    claims = [Claim(what, ", ".join(f"{n} {finding}" for finding, n in found.counts.items()))]
    claims += [Claim("Take these times with care", noise) for noise in found.noise]
    for line in found.lines[:5]:
        if line.finding in (Kind.EQUIVALENT, Kind.INCONCLUSIVE, "new"):
            continue
        answer = f"{line.finding}, {line.experiment} {line.case} {line.metric}".strip()
        sure = line.change if line.current is not None else line.message
        compared = ()
        if line.verdict is not None:
            ratio = Figure(*line.verdict.interval, name=line.case)
            compared = comparing(ratio, Figure.exactly(1.0))
        claims.append(Claim(answer, sure, about=_place(line).removesuffix(": "), compared=compared))
    drift = "The runs were measured at different times, so machine drift is not controlled"
    return [*claims, Claim(drift, advice="to be sure, nano ab REV_A REV_B")]


def history_chart(found: list[History]) -> alt.TopLevelMixin:
    """Each case over its runs, relative to its first; those that changed in colour, with a mark where."""
    title = "Over the runs"
    if not found:
        empty = "no case was run twice on one machine; run the suite again after a change"
        return plot(None, title, empty=empty)
    names = _history_names(found)
    short = without_common(names)
    ordered = sorted(range(len(found)), key=lambda at: not found[at].changes)
    coloured = hues(at for at in ordered if found[at].changes)
    parts = []
    for at in ordered[:_MOST_LINES]:
        points = found[at].points
        first = points["estimate"].iloc[0] or float("nan")  # what took no time has no ratio
        last = found[at].changes[-1] if found[at].changes else None
        lines = {
            "series": names[at],
            "x": range(1, len(points) + 1),
            "y": points["estimate"] / first,
            "hue": coloured.get(at, "rest"),
            "text": f"{short[at]}: {last}" if last else " ",
            "note": points["git_revision"] + " " + points["started"].str[:16],
        }
        ends = {end: points[end] / first if last else float("nan") for end in ("low", "high")}
        parts.append(pd.DataFrame(lines | ends))
    what = METRICS[found[0].metric].title
    return plot(
        pd.concat(parts, ignore_index=True),
        title,
        subtitle=[
            f"{what} of {len(found)} timings, each on one machine. In colour: the level changed."
        ],
        unit="Relative to the first run",
        xunit="Run, oldest first",
        log="y",
        fmt=".2~f",
    )


def history_verdict(found: list[History]) -> list[Claim]:
    """Which cases changed, and between which revisions."""
    if not found:
        return [Claim("No case was run twice on one machine, so there is no history yet")]
    named = dict(zip(_history_names(found), found, strict=True))
    changed = {name: history for name, history in named.items() if history.changes}
    runs = max(len(history.points) for history in found)
    claims = [
        Claim(f"{len(changed)} of {len(found)} timings changed their level over up to {runs} runs")
    ]
    if runs < LEAST_HISTORY:
        few = f"A change of level takes at least {LEAST_HISTORY} runs to be seen"
        claims.append(Claim(few, advice="until then, nano compare latest~1 latest"))
    for name, history in sorted(changed.items(), key=lambda one: -one[1].changes[-1].at)[:6]:
        last = history.changes[-1]
        claims.append(Claim(f"{'worse' if last.worse else 'better'}, {name}", str(last)))
    newest = [(name, history) for name, history in named.items() if history.newest]
    for name, history in sorted(newest, key=lambda one: -abs(math.log(one[1].newest.ratio)))[:3]:
        claims.append(Claim(f"sticks out, {name}", str(history.newest), history.command))
    return claims


def _history_names(found: Sequence[History]) -> list[str]:
    several = len({history.machine_id for history in found}) > 1
    return [
        (f"{machine_name(one.machine_id)}: " if several else "")
        + f"{one.experiment} {one.case} {one.scope}".strip()
        for one in found
    ]


AB_SECTION = Section(
    "ab",
    "Which of two versions is slower?",
    {"ab_ratio": ab_ratio},
    {"All cases": CaseTable(ab_table, AB_COLUMNS)},
    ab_verdict,
)
