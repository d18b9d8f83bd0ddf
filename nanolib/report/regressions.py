"""What changed: two versions side by side, the newest runs against those before, each case over all its runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import altair as alt
import pandas as pd

from nanolib.compare.compare import Comparison, Line
from nanolib.compare.history import History
from nanolib.measurement import METRICS, case_name, format_number, format_with_interval
from nanolib.report.claim import Claim, Figure, comparing
from nanolib.report.drawing import HEIGHT, WIDTH, coloured, empty_chart, theme
from nanolib.report.frame import tooltips
from nanolib.report.overview import cached, machine_name, of_experiment, pick
from nanolib.report.palette import FRAME, GUIDE, PALETTE, SERIES
from nanolib.report.section import CaseTable, Section
from nanolib.stats.changes import LEAST_HISTORY
from nanolib.stats.compare import MARGIN, THRESHOLD, Kind, paired_levels

_COLOURS = {
    Kind.REGRESSED: PALETTE[1],
    Kind.SUSPECT: PALETTE[4],
    Kind.INCONCLUSIVE: FRAME,
    Kind.EQUIVALENT: PALETTE[0],
    Kind.IMPROVED: PALETTE[2],
}
_MOST_SHOWN = 40
_ROW = 20

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


def ab_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per timing that `nano ab` compared.

    Returns:
        Columns: `case`, `scope`, `verdict`, `ratio` with `low` and `high`, `change` (text), `base_ms`, `current_ms` (of that
        ratio), `pairs`, `processes` (pairs of them), `threshold`, `a`, `b`.
    """
    found = pick(of_experiment(rows, "ab"), "ratio")
    lines = []
    for _, row in found.iterrows():
        told = row["details"]
        ends = (f"{row[end] - 1:+.1%}" for end in ("estimate", "low", "high"))
        estimate, low, high = ends
        base_ms, current_ms = paired_levels(told["base_ms"], told["current_ms"], row["estimate"])
        lines.append(
            {
                "case": case_name(row["factors"]),
                "scope": row["scope"],
                "verdict": told["kind"],
                "ratio": row["estimate"],
                "low": row["low"],
                "high": row["high"],
                "change": f"{estimate} [{low} … {high}]",
                "base_ms": base_ms,
                "current_ms": current_ms,
                "pairs": row["n"],
                "processes": len(told.get("generations", [])),
                "threshold": told["threshold"],
                "a": told["a"],
                "b": told["b"],
            }
        )
    return pd.DataFrame(lines)


@cached("ab")
def ab_verdict(rows: pd.DataFrame) -> list[Claim]:
    """What `nano ab` found."""
    table = ab_table(rows)
    if table.empty:
        return [Claim("No two versions were compared", advice="nano ab HEAD~1 .")]
    claims = [Claim(f"A is {table['a'].iloc[0]}, B is {table['b'].iloc[0]}", _counted(table["verdict"]))]
    for kind in (Kind.REGRESSED, Kind.SUSPECT, Kind.IMPROVED):
        for _, row in table[table["verdict"] == kind].head(5).iterrows():
            ratio = Figure(row["low"], row["ratio"], row["high"], "ratio", row["scope"], row["case"])
            sure = f"{row['change']}, in {row['processes']} pairs of processes"
            answer = f"{kind}, {row['case']} {row['scope']}".strip()
            claims.append(Claim(answer, sure, compared=comparing(ratio, Figure.exactly(1.0))))
    drift = "Blocks of A and B were interleaved and paired, so drift of the machine hits both alike"
    return [*claims, Claim(drift, advice="which commit? nano ab takes any two revisions")]


def ab_ratio(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """The ratio of two versions with its interval, per case."""
    table = ab_table(rows)
    title = "Two versions side by side"
    if table.empty:
        return empty_chart(title, "no two versions were compared; run: nano ab HEAD~1 .")
    label = (table["case"] + " " + table["scope"]).str.strip()
    subtitle = f"A: {table['a'].iloc[0]}. B: {table['b'].iloc[0]}."
    return ratio_chart(table.assign(label=label), title, subtitle, float(table["threshold"].iloc[0]))


def comparison_table(found: Comparison) -> pd.DataFrame:
    """Findings with a ratio: columns `label`, `verdict`, `ratio`, `low`, `high`."""
    return pd.DataFrame(
        [
            {
                "label": f"{_place(line)}{line.experiment}: {line.case} {line.metric}",
                "verdict": str(line.finding),
                "ratio": line.verdict.ratio,
                "low": line.verdict.interval.low,
                "high": line.verdict.interval.high,
            }
            for line in found.lines
            if line.verdict is not None
        ]
    )


def _place(line: Line) -> str:
    """On which machine, where there are several."""
    return f"machine {line.machine}: " if line.machine else ""


def comparison_chart(found: Comparison, title: str, subtitle: str) -> alt.TopLevelMixin:
    """Timings of two sets of runs, the worst first."""
    table = comparison_table(found)
    if table.empty:
        return empty_chart(title, "no timing is in both with enough blocks to compare")
    return ratio_chart(table, title, subtitle, found.threshold)


def ratio_chart(table: pd.DataFrame, title: str, subtitle: str, threshold: float = THRESHOLD) -> alt.TopLevelMixin:
    """Ratios with their intervals over the band that is taken for no change.

    Args:
        table: Columns `label`, `verdict`, `ratio`, `low`, `high`; the first 40 are drawn.
        title: The chart's.
        subtitle: What is compared with what.
        threshold: From where on a change counts.
    """
    shown = table.head(_MOST_SHOWN)[["label", "verdict", "ratio", "low", "high"]]
    shown = shown.assign(label=without_common(list(shown["label"])))
    left_out = f" The first {_MOST_SHOWN} of {len(table)}." if len(table) > _MOST_SHOWN else ""
    kinds = set(shown["verdict"])
    colour = coloured("verdict", "Verdict", {kind: _COLOURS[kind] for kind in _COLOURS if kind in kinds})
    reach = max(1.12, float(shown["high"].max()) * 1.02, 1.02 / float(shown["low"].min()))
    scale = alt.Scale(type="log", domain=[1 / reach, reach], nice=False)
    x = alt.X("ratio:Q", scale=scale, title="B / A (right: slower)", axis=alt.Axis(format=".2~f", tickCount=8))
    order = alt.Y(
        "label:N",
        sort=list(shown["label"]),
        title=None,
        axis=alt.Axis(labelLimit=430, labelFontSize=11, grid=False),
    )
    band = pd.DataFrame({"from": [1 - MARGIN], "to": [1 + MARGIN]})
    limit = pd.DataFrame({"limit": [1 + threshold]})
    tooltip = tooltips("label verdict", "ratio low high", ".4f", label="case")
    base = alt.Chart(shown).encode(y=order, color=colour)
    layers = [
        alt.Chart(band)
        .mark_rect(color=PALETTE[0], opacity=0.08)
        .encode(x=alt.X("from:Q", scale=scale, title="B / A (right: slower)"), x2=alt.X2("to:Q")),
        alt.Chart(limit)
        .mark_rule(color=PALETTE[1], strokeDash=[4, 4])
        .encode(x=alt.X("limit:Q", scale=scale, title="")),
        base.mark_rule(strokeWidth=2).encode(x=alt.X("low:Q", scale=scale, title=""), x2=alt.X2("high:Q")),
        base.mark_point(filled=True, size=60, opacity=1).encode(x=x, tooltip=tooltip),
    ]
    told = [subtitle + left_out, f"Band: no change (±{MARGIN:.0%}). Dashed: the threshold, {threshold:.0%}."]
    chart = alt.layer(*layers, width=WIDTH, height=max(60, _ROW * len(shown)), title=alt.Title(title, subtitle=told))
    return theme(chart)


def since_chart(since: Comparison | None) -> alt.TopLevelMixin:
    """The newest runs against those before them."""
    title = "Since the run before"
    if since is None:
        return empty_chart(title, "there is no earlier run of the same suite on this machine")
    return comparison_chart(since, title, "The newest runs (B) against those before them (A), collected apart.")


def changes_verdict(since: Comparison | None, found: list[History]) -> list[Claim]:
    """What changed since the run before and over all runs."""
    claims = comparison_verdict(since, "Against the runs before") if since is not None else []
    return claims + history_verdict(found)


def comparison_verdict(found: Comparison, what: str) -> list[Claim]:
    """What a comparison of stored runs found."""
    claims = [Claim(what, ", ".join(f"{n} {finding}" for finding, n in found.counts.items()))]
    claims += [Claim("Take these times with care", said) for said in found.noise]
    for line in found.lines[:5]:
        if line.finding not in (Kind.EQUIVALENT, Kind.INCONCLUSIVE, "new"):
            answer = f"{line.finding}, {line.experiment} {line.case} {line.metric}".strip()
            compared = ()
            if line.verdict is not None:
                compared = comparing(Figure(*line.verdict.interval, name=line.case), Figure.exactly(1.0))
            sure = line.change if line.current is not None else line.message
            claims.append(Claim(answer, sure, compared=compared, machine=_place(line).removesuffix(": ")))
    drift = "The runs were collected apart, so drift between them is not controlled"
    return [*claims, Claim(drift, advice="to be sure, nano ab REV_A REV_B")]


def history_chart(found: list[History]) -> alt.TopLevelMixin:
    """Each case over its runs, relative to its first; those that changed in colour, with a mark where."""
    title = "Over the runs"
    if not found:
        return empty_chart(title, "no case was run twice on one machine; run the suite again after a change")
    changed = [history for history in found if history.changes]
    told = changed[: len(SERIES)]
    names = dict(zip(map(id, found), _history_names(found), strict=True))
    short = without_common([names[id(history)] for history in told])
    words = [name.split() for name in short]  # a legend cuts long names: without the first ones, which all may share
    alike = next((at for at, column in enumerate(zip(*words, strict=False)) if len(set(column)) > 1), 0)
    short = [" ".join(name[alike:]) for name in words]
    named = {id(history): name for history, name in zip(told, short, strict=True)}
    parts = [
        pd.DataFrame(
            {
                "series": named.get(id(history), "others that changed" if history.changes else "no change of level"),
                "line": str(index),
                "case": names[id(history)],
                "run": range(1, len(history.points) + 1),
                "revision": history.points["git_revision"],
                "started": history.points["started"].str[:16],
                "relative": history.points["estimate"] / history.points["estimate"].iloc[0],
                "low": history.points["low"].fillna(history.points["estimate"]) / history.points["estimate"].iloc[0],
                "high": history.points["high"].fillna(history.points["estimate"]) / history.points["estimate"].iloc[0],
                "change": [
                    next((str(c) for c in history.changes if c.at == place), "") for place in range(len(history.points))
                ],
            }
        )
        for index, history in enumerate(found[: 5 * _MOST_SHOWN])
        if history.points["estimate"].iloc[0]
    ]
    data = pd.concat(parts, ignore_index=True)
    others = ["others that changed"] if len(changed) > len(told) else []
    names = [*named.values(), *others, "no change of level"]
    shades = [*SERIES[: len(named)], *([FRAME] if others else []), GUIDE]
    colour = coloured("series", "Case", dict(zip(names, shades, strict=True)), sort=names)
    runs = int(data["run"].max())
    ticks = list(range(1, runs + 1, math.ceil(runs / 20)))
    x = alt.X("run:Q", title="Run, oldest first", axis=alt.Axis(values=ticks, format="d", grid=False))
    domain = [float(data["low"].min()) / 1.05, float(data["high"].max()) * 1.05]
    scale = alt.Scale(type="log", domain=domain, nice=False)
    y = alt.Y("relative:Q", title="Relative to the first run", scale=scale, axis=alt.Axis(format=".2~f"))
    tooltip = [
        *tooltips("case"),
        alt.Tooltip("run:Q"),
        *tooltips("revision started", "relative", ".3f"),
        *tooltips("change"),
    ]
    base = alt.Chart(data).encode(x=x, color=colour, detail=alt.Detail("line:N"))
    layers = [
        base.mark_line(strokeWidth=1.5).encode(y=y),
        base.transform_filter("datum.series != 'no change of level'")
        .mark_rule(strokeWidth=1.5)
        .encode(y=alt.Y("low:Q", scale=scale, title="Relative to the first run"), y2=alt.Y2("high:Q")),
        base.mark_point(filled=True, size=25, opacity=1).encode(y=y, tooltip=tooltip),
        base.transform_filter("datum.change != ''")
        .mark_point(shape="triangle-down", size=160, filled=False, strokeWidth=2.5, yOffset=-12)
        .encode(y=y, tooltip=tooltip),
    ]
    subtitle = [
        f"{METRICS[found[0].metric].title} of {len(found)} timings, each on one machine. Triangles: the level changed."
    ]
    chart = alt.layer(*layers, width=2 * WIDTH, height=HEIGHT, title=alt.Title(title, subtitle=subtitle))
    return theme(chart)


def history_verdict(found: list[History]) -> list[Claim]:
    """Which cases changed, and between which revisions."""
    changed = [history for history in found if history.changes]
    if not found:
        return [Claim("No case was run twice on one machine, so there is no history yet")]
    runs = max(len(history.points) for history in found)
    claims = [Claim(f"{len(changed)} of {len(found)} timings changed their level over up to {runs} runs")]
    if runs < LEAST_HISTORY:
        few = f"A change of level takes at least {LEAST_HISTORY} runs to be seen"
        claims.append(Claim(few, advice="until then, nano compare latest~1 latest"))
    names = dict(zip(map(id, found), _history_names(found), strict=True))
    for history in sorted(changed, key=lambda h: -h.changes[-1].at)[:6]:
        last = history.changes[-1]
        word = "worse" if last.worse else "better"
        claims.append(Claim(f"{word}, {names[id(history)]}", str(last)))
    newest = [history for history in found if history.newest]
    for history in sorted(newest, key=lambda h: -abs(math.log(h.newest.ratio)))[:3]:
        claims.append(Claim(f"sticks out, {names[id(history)]}", str(history.newest), history.command))
    return claims


def without_common(names: list[str]) -> list[str]:
    """The names without the factors (`dtype=float32`) that all of them share, since they tell nothing apart."""
    common = set.intersection(*(set(name.split()) for name in names)) if len(names) > 1 else set()
    return [" ".join(word for word in name.split() if word not in common or "=" not in word) for name in names]


def _history_names(found: Sequence[History]) -> list[str]:
    several = len({history.machine_id for history in found}) > 1
    return [
        (f"{machine_name(one.machine_id)}: " if several else "") + f"{one.experiment} {one.case} {one.scope}".strip()
        for one in found
    ]


def _counted(kinds: pd.Series) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in kinds.value_counts().items())


def hardware_table(rows: pd.DataFrame, machines: pd.DataFrame) -> pd.DataFrame:
    """The hardware matrix: what each machine of the rows is, can, and reached.

    Args:
        rows: Measurements of any runs.
        machines: From the store.

    Returns:
        One line per machine for people: the capability columns, then the measured ceilings.
    """
    if rows.empty:
        return pd.DataFrame()
    lines = []
    for _, machine in machines[machines["machine_id"].isin(rows["machine_id"])].iterrows():
        gpu = machine["gpus"][0] if machine["gpus"] else {}
        units = machine["dtypes"]
        line = {
            "Machine": machine["machine_id"],
            "CPU": machine["cpu"],
            "Cores": machine["cores"],
            "RAM (GiB)": machine["ram_gib"],
            "GPU": gpu.get("name", "—") + (f" × {len(machine['gpus'])}" if len(machine["gpus"]) > 1 else ""),
            "GPU memory (GiB)": gpu.get("memory_gib", "—"),
            "Compute capability": gpu.get("compute_capability", "—"),
            "Native FP8": "yes" if gpu.get("fp8") else "no",
            "torch": machine["torch"],
        } | {dtype: unit for dtype, unit in units.items()}
        own = rows[rows["machine_id"] == machine["machine_id"]]
        for metric, unit in (("ceiling_flops", "FLOP/s"), ("ceiling_bytes", "B/s")):
            newest = pick(own, metric).drop_duplicates("scope", keep="last")
            line |= {
                f"{'copy' if metric == 'ceiling_bytes' else scope} ({unit})": format_number(value, low, high)
                for scope, value, low, high in newest[["scope", "estimate", "low", "high"]].itertuples(index=False)
            }
        lines.append(line)
    return pd.DataFrame(lines).fillna("—")


def machine_ratios(rows: pd.DataFrame) -> pd.DataFrame:
    """The same timings on several machines, side by side; empty with one machine.

    Returns:
        One line per timing that at least two machines hold: `Case`, and per machine its latency with the interval, ms.
    """
    found = pick(rows, "latency")
    if found.empty or found["machine_id"].nunique() < 2:
        return pd.DataFrame()
    key = ["experiment", "case_id", "scope", "machine_id"]
    newest = found.drop_duplicates(key, keep="last")
    newest = newest.assign(
        Case=[
            f"{experiment} {case_name(factors)} {scope}".strip()
            for experiment, factors, scope in newest[["experiment", "factors", "scope"]].itertuples(index=False)
        ],
        text=[format_with_interval(*ends) for ends in newest[["estimate", "low", "high"]].itertuples(index=False)],
    )
    wide = newest.pivot_table(index="Case", columns="machine_id", values="text", aggfunc="last", sort=False)
    return wide.dropna(thresh=2).fillna("—").reset_index().rename_axis(columns=None)


AB_SECTION = Section(
    "ab",
    "Which of two versions is slower?",
    {"ab_ratio": ab_ratio},
    {"All cases": CaseTable(ab_table, AB_COLUMNS)},
    ab_verdict,
)
