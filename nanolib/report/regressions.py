"""Report changes between runs, and over all runs of each case."""

import math
from collections.abc import Sequence

import pandas as pd

from nanolib.compare.findings import (
    CHANGED,
    FAILED,
    MISSING,
    Comparison,
)
from nanolib.compare.history import History
from nanolib.measurement import METRICS
from nanolib.report.finding import Estimate, Finding, comparing
from nanolib.report.overview import machine_name, strip_shared_words
from nanolib.report.plot import plot
from nanolib.report.section import Part
from nanolib.report.theme import Drawing, hues
from nanolib.stats.changes import LEAST_HISTORY
from nanolib.stats.compare import MARGIN, Kind

_HUES = {
    Kind.REGRESSED: "c2",
    Kind.SUSPECT: "c4",
    Kind.EQUIVALENT: "c1",
    Kind.IMPROVED: "c3",
}
_MOST_SHOWN = 40  # Largest number of ratios in a chart.
_MOST_LINES = 80  # Largest number of histories in a chart.
_MOST_NAMED = 5  # Largest number of changes in a verdict.
# These findings get a sentence with a verb. nanolib only counts the other findings.
_VERBS = {
    Kind.REGRESSED: "regressed",
    Kind.IMPROVED: "improved",
    Kind.SUSPECT: "may have changed",
    CHANGED: "changed",
    FAILED: "failed",
    MISSING: "is missing",
}


def changes(since: Comparison | None, found: list[History]) -> Part:
    """Return the part of the report about changes.

    Args:
        since: Comparison of the newest runs with earlier runs, or None if there is no earlier run.
        found: Histories of all timings.
    """
    verdict, charts, tables = history_verdict(found), {}, {}
    if since is not None:
        compared = comparison_verdict(since)
        verdict = verdict + compared if found else compared + verdict
        words = "A: earlier runs. B: the newest runs, measured at another time."
        charts["since_the_run_before"] = comparison_chart(
            since, "Changes since earlier runs", words
        )
        table = since.table(everything=False)
        if len(table):
            tables["Changed and inconclusive cases"] = table, table
    if found:
        charts["history"] = history_chart(found)
    return Part("changes", "What changed?", verdict, charts, tables)


def comparison_verdict(found: Comparison) -> list[Finding]:
    """Return the findings of a comparison of the newest runs with the runs before."""
    drift = "The runs were measured at different times, so machine drift is not controlled"
    return [
        _counts(found, "The newest runs were compared with earlier runs"),
        *_changed(found),
        *(Finding("The comparison has a limitation", noise) for noise in found.noise),
        Finding(drift, next_step="run nano ab REV_A REV_B to measure the two revisions in turns"),
    ]


def _counts(found: Comparison, what: str) -> Finding:
    return Finding(what, ", ".join(f"{n} {finding}" for finding, n in found.counts.items()))


def _changed(found: Comparison) -> list[Finding]:
    """Return a finding for each of the first five timings or cases that changed."""
    findings = []
    for line in [one for one in found.lines if one.finding in _VERBS][:_MOST_NAMED]:
        compared, evidence = (), [line.message]
        if line.verdict:
            ratio = Estimate(*line.verdict.interval, name=line.name)
            compared, evidence = comparing(ratio, Estimate.exact(1.0)), [line.change, line.message]
        about = f"machine {line.machine}" if line.machine else ""
        words = ", ".join(filter(None, evidence))
        said = f"{line.name} {_VERBS[line.finding]}"
        findings.append(Finding(said, words, "", about, compared))
    return findings


def comparison_chart(found: Comparison, title: str, subtitle: str) -> Drawing:
    """Draw ratios with their intervals, and the band of ratios that count as no change.

    Args:
        found: Comparison. The chart shows 40 timings, those that changed first.
        title: Title of the chart.
        subtitle: Sentence that names A and B.
    """
    timed = [line for line in found.lines if line.verdict]
    timed.sort(key=lambda line: line.finding not in _VERBS)
    drawn = timed[:_MOST_SHOWN]
    shown = f" The chart shows {_MOST_SHOWN} of {len(timed)} timings."
    left_out = shown if len(timed) > _MOST_SHOWN else ""
    ends = pd.DataFrame([line.verdict.interval for line in drawn], columns=["low", "x", "high"])
    # All timings are latencies, so their names do not need the metric.
    names = [f"{line.machine} {line.name.replace(' latency', '')}".strip() for line in drawn]
    data = ends.assign(
        series=_short_names(names, [line.experiment for line in drawn]),
        hue=[_HUES.get(line.finding, "rest") for line in drawn],
        text=[str(line.finding) for line in drawn],
    )
    return plot(
        data,
        title,
        "rows",
        subtitle=[
            f"{subtitle}{left_out}",
            f"Green: no change (±{MARGIN:.0%}). Changes below {found.threshold:.0%} do not count.",
        ],
        unit="Ratio B / A (higher is slower)",
        log="x",
        fmt=".2~f",
        ref=1.0,
        band=(1 - MARGIN, 1 + MARGIN),
        width=420,
        empty="no timing has enough blocks in both A and B",
    )


def _short_names(names: Sequence[str], experiments: Sequence[str]) -> list[str]:
    """Drop the factors that all names of an experiment share."""
    short = pd.Series(names, dtype=str)
    for _, group in short.groupby([*experiments]):
        short[group.index] = strip_shared_words(list(group))
    return list(short)


def history_chart(found: list[History]) -> Drawing:
    """Draw each timing over its runs, relative to the first run. Changed timings have colors."""
    ordered = sorted(_by_name(found).items(), key=lambda one: not one[1].changes)[:_MOST_LINES]
    short = _short_names([name for name, _ in ordered], [one.experiment for _, one in ordered])
    colored = hues(name for name, one in ordered if one.changes)
    parts = []
    for (name, one), label in zip(ordered, short, strict=True):
        points = one.points
        first = points["estimate"].iloc[0] or math.nan  # A time of 0 has no ratio.
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
        "Timings over the runs",
        subtitle=[
            f"{what} of {len(found)} timings, each on one machine. In color: the level changed."
        ],
        unit="Ratio to the first run",
        xunit="Run, oldest first",
        log="y",
        fmt=".2~f",
    )


def history_verdict(found: list[History]) -> list[Finding]:
    """Return findings about the cases that changed, with the revisions before and after."""
    if not found:
        return [Finding("No case was run twice on one machine, so there is no history yet")]
    named = _by_name(found)
    changed = [(name, one.changes[-1]) for name, one in named.items() if one.changes]
    newest = [(name, one) for name, one in named.items() if one.newest]
    runs = max(len(history.points) for history in found)
    level = f"{len(changed)} of {len(found)} timings changed their level over up to {runs} runs"
    findings = [Finding(level)]
    if runs < LEAST_HISTORY:
        few = f"nanolib needs at least {LEAST_HISTORY} runs to find a change of level"
        findings.append(Finding(few, next_step="run nano compare latest~1 latest until then"))
    for name, last in sorted(changed, key=lambda one: -one[1].at)[:6]:
        findings.append(Finding(f"{name} became {'worse' if last.worse else 'better'}", str(last)))
    for name, one in sorted(newest, key=lambda found: -abs(math.log(found[1].newest.ratio)))[:3]:
        next_step = f"run {one.command}" if one.command else ""
        findings.append(Finding(f"{name} may have changed recently", str(one.newest), next_step))
    return findings


def _by_name(found: list[History]) -> dict[str, History]:
    """Return the histories by name. With several machines, a name includes the machine."""
    several = len({one.machine_id for one in found}) > 1
    named = {}
    for one in found:
        machine = f"{machine_name(one.machine_id)}: " if several else ""
        named[machine + f"{one.experiment} {one.case} {one.scope}".strip()] = one
    return named
