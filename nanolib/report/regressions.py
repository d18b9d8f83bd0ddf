"""What changed: two versions side by side, the newest runs against those before, each case over all its runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import altair as alt
import pandas as pd

from nanolib.compare.findings import Comparison
from nanolib.compare.history import History
from nanolib.measurement import METRICS, case_name
from nanolib.report.finding import Estimate, Finding, comparing
from nanolib.report.overview import cached, machine_name, of_experiment, pick, strip_shared_words
from nanolib.report.plot import plot
from nanolib.report.section import CaseTable, Part, Section
from nanolib.report.tables import drop_missing
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
_MOST_NAMED = 5
_NOT_NAMED = [Kind.EQUIVALENT, Kind.INCONCLUSIVE, "new"]  # findings that a sentence only counts
_DRAWN = {"ratio": "x", "ratio_low": "low", "ratio_high": "high", "finding": "text"}

AB_COLUMNS = {
    "case": "Case",
    "metric": "Timing",
    "finding": "Verdict",
    "ratio": "B / A [95 %]",
    "base": "A (ms)",
    "current": "B (ms)",
    "pairs": "Pairs",
    "processes": "Pairs of processes",
}


def changes(since: Comparison | None, found: list[History]) -> Part:
    """Describe what `compare.history.what_changed` found."""
    verdict, charts, tables = [], {}, {}
    if since is not None:
        verdict += comparison_verdict(since, "Against the runs before")
        words = "The newest runs (B) against those before them (A), measured at different times."
        charts["since_the_run_before"] = comparison_chart(since, "Since the run before", words)
        table = since.table(everything=False)
        if len(table):
            tables["Changed and inconclusive cases"] = table, table
    if found:
        charts["history"] = history_chart(found)
    return Part("changes", "What changed?", verdict + history_verdict(found), charts, tables)


def ab_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per timing that `nano ab` compared.

    Returns:
        Columns: `case`, `metric` (what was timed), `finding`, `ratio` with `ratio_low` and `ratio_high`, `base` and `current`
        (ms, of that ratio), `pairs`, `processes` (pairs of them), `message`, `threshold`, `a`, `b`.
    """
    lines = []
    for row in pick(of_experiment(rows, "ab"), "ratio").to_dict("records"):
        details = row["details"]
        base, current = paired_levels(details["base_ms"], details["current_ms"], row["estimate"])
        processes = len(details.get("generations", []))
        lines.append(
            {
                "case": case_name(row["factors"]),
                "metric": row["scope"],
                "finding": details["kind"],
                "ratio": row["estimate"],
                "ratio_low": row["low"],
                "ratio_high": row["high"],
                "base": base,
                "current": current,
                "pairs": row["n"],
                "processes": processes,
                "message": f"in {processes} pairs of processes",
                **{name: details[name] for name in ("threshold", "a", "b")},
            }
        )
    return pd.DataFrame(lines)


@cached
def ab_verdict(rows: pd.DataFrame) -> list[Finding]:
    """What `nano ab` found."""
    table = ab_table(rows)
    if table.empty:
        return [Finding("No two versions were compared", next_step="nano ab HEAD~1 .")]
    counts = ", ".join(f"{n} {kind}" for kind, n in table["finding"].value_counts().items())
    versions = f"A is {table['a'].iloc[0]}, B is {table['b'].iloc[0]}"
    drift = "Blocks of A and B were interleaved and paired, so drift of the machine hits both alike"
    next_step = "which commit? nano ab takes any two revisions"
    return [Finding(versions, counts), *_changed(table), Finding(drift, next_step=next_step)]


def ab_ratio(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """The ratio of two versions with its interval, per case."""
    table, words, threshold = ab_table(rows), "", THRESHOLD
    if len(table):
        words = f"A: {table['a'].iloc[0]}. B: {table['b'].iloc[0]}."
        threshold = float(table["threshold"].iloc[0])
    empty = "no two versions were compared; run: nano ab HEAD~1 ."
    return ratio_chart(table, "Two versions side by side", words, threshold, empty)


def comparison_table(found: Comparison) -> pd.DataFrame:
    """Findings: columns as of `Line.to_dict`, the ends of the ratio as `ratio_low` and `ratio_high`."""
    table = pd.DataFrame([line.to_dict() for line in found.lines])
    return table.rename(columns={"low": "ratio_low", "high": "ratio_high"})


def comparison_chart(found: Comparison, title: str, subtitle: str) -> alt.TopLevelMixin:
    """Timings of two sets of runs, the worst first."""
    return ratio_chart(comparison_table(found), title, subtitle, found.threshold)


def comparison_verdict(found: Comparison, what: str) -> list[Finding]:
    """What a comparison of stored runs found."""
    drift = "The runs were measured at different times, so machine drift is not controlled"
    return [
        Finding(what, ", ".join(f"{n} {finding}" for finding, n in found.counts.items())),
        *(Finding("Take these times with care", noise) for noise in found.noise),
        *_changed(comparison_table(found)),
        Finding(drift, next_step="to be sure, nano ab REV_A REV_B"),
    ]


def _changed(table: pd.DataFrame) -> list[Finding]:
    """The first five of a table's lines that changed."""
    findings = []
    for line in table[~table["finding"].isin(_NOT_NAMED)].head(_MOST_NAMED).to_dict("records"):
        name, compared, evidence = _name(line), (), line["message"]
        if pd.notna(line.get("ratio")):
            ratio = Estimate.of(line, "ratio", name=name)
            change, low, high = (
                f"{end - 1:+.1%}" for end in (ratio.estimate, ratio.low, ratio.high)
            )
            evidence = f"{change} [{low} … {high}], {evidence}".rstrip(", ")
            compared = comparing(ratio, Estimate.exact(1.0))
        about = f"machine {line['machine']}" if line.get("machine") else ""
        findings.append(Finding(f"{line['finding']}, {name}", evidence, "", about, compared))
    return findings


def _name(line: Mapping[str, Any]) -> str:
    """What people call a line: its experiment, case and figure, as far as they are known."""
    parts = (line.get("experiment"), line["case"], line["metric"])
    return " ".join(filter(None, parts))


def ratio_chart(
    table: pd.DataFrame,
    title: str,
    subtitle: str,
    threshold: float,
    empty: str = "no timing is in both with enough blocks to compare",
) -> alt.TopLevelMixin:
    """Ratios with their intervals over the band that is taken for no change.

    Args:
        table: From `ab_table` or `comparison_table`; its first 40 ratios are drawn.
        title: The chart's.
        subtitle: What is compared with what.
        threshold: From where on a change counts.
        empty: Why there is none, if there is none.
    """
    table = drop_missing(table, "ratio")
    if table.empty:
        return plot(None, title, empty=empty)
    data = table.head(_MOST_SHOWN).rename(columns=_DRAWN)
    names = [f"{line.get('machine', '')} {_name(line)}".strip() for line in data.to_dict("records")]
    left_out = f" The first {_MOST_SHOWN} of {len(table)}." if len(table) > _MOST_SHOWN else ""
    hue = data["text"].map(_HUES).fillna("rest")
    data = data.assign(series=strip_shared_words(names), hue=hue)
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


def history_chart(found: list[History]) -> alt.TopLevelMixin:
    """Each case over its runs, relative to its first; those that changed in color, with a mark where."""
    ordered = sorted(_named(found).items(), key=lambda one: not one[1].changes)[:_MOST_LINES]
    short = strip_shared_words([name for name, _ in ordered])
    colored = hues(name for name, one in ordered if one.changes)
    parts = []
    for (name, one), label in zip(ordered, short, strict=True):
        points = one.points
        first = points["estimate"].iloc[0] or float("nan")  # what took no time has no ratio
        lines = {
            "series": name,
            "x": range(1, len(points) + 1),
            "y": points["estimate"] / first,
            "hue": colored.get(name, "rest"),
            "text": f"{label}: {one.changes[-1]}" if one.changes else " ",
            "note": points["git_revision"] + " " + points["started"].str[:16],
        }
        if one.changes:
            lines |= {end: points[end] / first for end in ("low", "high")}
        parts.append(pd.DataFrame(lines))
    what = METRICS[found[0].metric].title
    return plot(
        pd.concat(parts, ignore_index=True),
        "Over the runs",
        subtitle=[
            f"{what} of {len(found)} timings, each on one machine. In color: the level changed."
        ],
        unit="Relative to the first run",
        xunit="Run, oldest first",
        log="y",
        fmt=".2~f",
    )


def history_verdict(found: list[History]) -> list[Finding]:
    """Which cases changed, and between which revisions."""
    if not found:
        return [Finding("No case was run twice on one machine, so there is no history yet")]
    named = _named(found)
    changed = [(name, one.changes[-1]) for name, one in named.items() if one.changes]
    newest = [(name, one) for name, one in named.items() if one.newest]
    runs = max(len(history.points) for history in found)
    level = f"{len(changed)} of {len(found)} timings changed their level over up to {runs} runs"
    findings = [Finding(level)]
    if runs < LEAST_HISTORY:
        few = f"A change of level takes at least {LEAST_HISTORY} runs to be seen"
        findings.append(Finding(few, next_step="until then, nano compare latest~1 latest"))
    for name, last in sorted(changed, key=lambda one: -one[1].at)[:6]:
        findings.append(Finding(f"{'worse' if last.worse else 'better'}, {name}", str(last)))
    for name, one in sorted(newest, key=lambda found: -abs(math.log(found[1].newest.ratio)))[:3]:
        findings.append(Finding(f"sticks out, {name}", str(one.newest), one.command))
    return findings


def _named(found: list[History]) -> dict[str, History]:
    """What people call each history: of which machine, if there are several."""
    several = len({one.machine_id for one in found}) > 1
    return {
        (f"{machine_name(one.machine_id)}: " if several else "")
        + f"{one.experiment} {one.case} {one.scope}".strip(): one
        for one in found
    }


AB_SECTION = Section(
    "ab",
    "Which of two versions is slower?",
    {"ab_ratio": ab_ratio},
    {"All cases": CaseTable(ab_table, AB_COLUMNS)},
    ab_verdict,
)
