"""What changed: two versions side by side, the newest runs against those before, each case over all its runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import altair as alt
import pandas as pd

from nanolib.compare.findings import Comparison, Line
from nanolib.compare.history import History
from nanolib.measurement import METRICS, case_name, format_number, format_with_interval
from nanolib.report.claim import Claim, Figure, comparing
from nanolib.report.overview import cached, machine_name, of_experiment, pick
from nanolib.report.plot import plot
from nanolib.report.section import CaseTable, Section
from nanolib.report.theme import empty_chart, hues
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
_MOST_LINES = 200  # of a chart of histories

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


@cached
def ab_verdict(rows: pd.DataFrame) -> list[Claim]:
    """What `nano ab` found."""
    table = ab_table(rows)
    if table.empty:
        return [Claim("No two versions were compared", advice="nano ab HEAD~1 .")]
    claims = [
        Claim(f"A is {table['a'].iloc[0]}, B is {table['b'].iloc[0]}", _counted(table["verdict"]))
    ]
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
    table = ab_table(rows)
    title = "Two versions side by side"
    if table.empty:
        return empty_chart(title, "no two versions were compared; run: nano ab HEAD~1 .")
    label = (table["case"] + " " + table["scope"]).str.strip()
    subtitle = f"A: {table['a'].iloc[0]}. B: {table['b'].iloc[0]}."
    return ratio_chart(
        table.assign(label=label), title, subtitle, float(table["threshold"].iloc[0])
    )


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


def ratio_chart(
    table: pd.DataFrame, title: str, subtitle: str, threshold: float = THRESHOLD
) -> alt.TopLevelMixin:
    """Ratios with their intervals over the band that is taken for no change.

    Args:
        table: Columns `label`, `verdict`, `ratio`, `low`, `high`; the first 40 are drawn.
        title: The chart's.
        subtitle: What is compared with what.
        threshold: From where on a change counts.
    """
    shown = table.head(_MOST_SHOWN)
    left_out = f" The first {_MOST_SHOWN} of {len(table)}." if len(table) > _MOST_SHOWN else ""
    data = pd.DataFrame(
        {
            "series": without_common(list(shown["label"])),
            "x": shown["ratio"],
            "low": shown["low"],
            "high": shown["high"],
            "hue": shown["verdict"].map(_HUES).fillna("rest"),
            "text": shown["verdict"],
        }
    )
    return plot(
        data,
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


def since_chart(since: Comparison | None) -> alt.TopLevelMixin:
    """The newest runs against those before them."""
    title = "Since the run before"
    if since is None:
        return empty_chart(title, "there is no earlier run of the same suite on this machine")
    return comparison_chart(
        since, title, "The newest runs (B) against those before them (A), collected apart."
    )


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
                compared = comparing(
                    Figure(*line.verdict.interval, name=line.case), Figure.exactly(1.0)
                )
            sure = line.change if line.current is not None else line.message
            claims.append(
                Claim(answer, sure, about=_place(line).removesuffix(": "), compared=compared)
            )
    drift = "The runs were collected apart, so drift between them is not controlled"
    return [*claims, Claim(drift, advice="to be sure, nano ab REV_A REV_B")]


def history_chart(found: list[History]) -> alt.TopLevelMixin:
    """Each case over its runs, relative to its first; those that changed in colour, with a mark where."""
    title = "Over the runs"
    if not found:
        return empty_chart(
            title, "no case was run twice on one machine; run the suite again after a change"
        )
    names = _history_names(found)
    short = without_common(names)
    changed = [at for at, history in enumerate(found) if history.changes]
    coloured = hues(changed)
    parts = []
    for at in [*changed, *(at for at, history in enumerate(found) if not history.changes)][
        :_MOST_LINES
    ]:
        history = found[at]
        points, first = history.points, history.points["estimate"].iloc[0]
        if not first:
            continue
        last = history.changes[-1] if history.changes else None
        parts.append(
            pd.DataFrame(
                {
                    "series": names[at],
                    "x": range(1, len(points) + 1),
                    "y": points["estimate"] / first,
                    "low": points["low"] / first if last else float("nan"),
                    "high": points["high"] / first if last else float("nan"),
                    "hue": coloured.get(at, "rest"),
                    "text": f"{short[at]}: {last}" if last else " ",
                    "note": points["git_revision"] + " " + points["started"].str[:16],
                }
            )
        )
    return plot(
        pd.concat(parts, ignore_index=True) if parts else None,
        title,
        subtitle=[
            f"{METRICS[found[0].metric].title} of {len(found)} timings, each on one machine. In colour: the level changed."
        ],
        unit="Relative to the first run",
        xunit="Run, oldest first",
        log="y",
        fmt=".2~f",
        empty="no case took any time",
    )


def history_verdict(found: list[History]) -> list[Claim]:
    """Which cases changed, and between which revisions."""
    changed = [history for history in found if history.changes]
    if not found:
        return [Claim("No case was run twice on one machine, so there is no history yet")]
    runs = max(len(history.points) for history in found)
    claims = [
        Claim(f"{len(changed)} of {len(found)} timings changed their level over up to {runs} runs")
    ]
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
        claims.append(
            Claim(f"sticks out, {names[id(history)]}", str(history.newest), history.command)
        )
    return claims


def without_common(names: list[str]) -> list[str]:
    """The names without the factors (`dtype=float32`) that all of them share, since they tell nothing apart."""
    common = set.intersection(*(set(name.split()) for name in names)) if len(names) > 1 else set()
    return [
        " ".join(word for word in name.split() if word not in common or "=" not in word)
        for name in names
    ]


def _history_names(found: Sequence[History]) -> list[str]:
    several = len({history.machine_id for history in found}) > 1
    return [
        (f"{machine_name(one.machine_id)}: " if several else "")
        + f"{one.experiment} {one.case} {one.scope}".strip()
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
            "GPU": gpu.get("name", "—")
            + (f" × {len(machine['gpus'])}" if len(machine["gpus"]) > 1 else ""),
            "GPU memory (GiB)": gpu.get("memory_gib", "—"),
            "Compute capability": gpu.get("compute_capability", "—"),
            "Native FP8": "yes" if gpu.get("fp8") else "no",
            "torch": machine["torch"],
        } | {dtype: unit for dtype, unit in units.items()}
        own = rows[rows["machine_id"] == machine["machine_id"]]
        for metric, unit in (("ceiling_flops", "FLOP/s"), ("ceiling_bytes", "B/s")):
            newest = pick(own, metric).drop_duplicates("scope", keep="last")
            line |= {
                f"{'copy' if metric == 'ceiling_bytes' else scope} ({unit})": format_number(
                    value, low, high
                )
                for scope, value, low, high in newest[
                    ["scope", "estimate", "low", "high"]
                ].itertuples(index=False)
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
            for experiment, factors, scope in newest[["experiment", "factors", "scope"]].itertuples(
                index=False
            )
        ],
        text=[
            format_with_interval(*ends)
            for ends in newest[["estimate", "low", "high"]].itertuples(index=False)
        ],
    )
    wide = newest.pivot_table(
        index="Case", columns="machine_id", values="text", aggfunc="last", sort=False
    )
    return wide.dropna(thresh=2).fillna("—").reset_index().rename_axis(columns=None)


AB_SECTION = Section(
    "ab",
    "Which of two versions is slower?",
    {"ab_ratio": ab_ratio},
    {"All cases": CaseTable(ab_table, AB_COLUMNS)},
    ab_verdict,
)
