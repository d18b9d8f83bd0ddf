"""Warm-up: the curve from the first step, what each setting would report, and how many steps are enough."""

from __future__ import annotations

import altair as alt
import pandas as pd

from nanolib.measurement import format_number
from nanolib.report import overview
from nanolib.report.drawing import (
    HEIGHT,
    PALETTE,
    WIDTH,
    empty_chart,
    theme,
    why_empty,
)
from nanolib.report.overview import cached, having, of_experiment, pick
from nanolib.report.section import Section

WARMUP_COLUMNS = {
    "direction": "Direction",
    "warmup_steps": "Warm-up steps",
    "mean": "Mean, ms",
    "sd": "SD, ms",
    "cv": "CV",
    "median": "Median, ms",
    "difference": "Mean against 5 steps",
    "status": "Status",
}


@cached
def warmup_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per direction and warm-up setting.

    Returns:
        Columns: `direction`, `warmup_steps`, `mean`, `sd`, `cv`, `median` with `low` and `high` (ms), `difference` of the
        mean to that of warmup = 5 (a share; missing where 5 was not measured), `status`, `message`.
    """
    rows = having(rows, "warmup", "curve")
    if rows.empty:
        return pd.DataFrame()
    settings = rows[rows["factor.curve"] == False]  # noqa: E712  a column, not a bool
    ends = settings[settings["metric"] == "case_time"]
    table = ends[["run_id", "case_id", "factor.direction", "factor.warmup_steps", "status", "message"]]
    found = pick(settings, "latency")
    spread = ["mean", "sd", "cv"]
    described = pd.DataFrame([[d[key] for key in spread] for d in found["details"]], index=found.index, columns=spread)
    columns = {"estimate": "median", "low": "low", "high": "high"}
    found = pd.concat([found[["run_id", "case_id", *columns]].rename(columns=columns), described], axis=1)
    table = table.merge(found, on=["run_id", "case_id"], how="left").drop(columns="case_id")
    table = table.rename(columns=lambda name: name.removeprefix("factor."))
    table["warmup_steps"] = table["warmup_steps"].astype(int)
    reference = table[table["warmup_steps"] == 5].set_index(["run_id", "direction"])["mean"]
    keys = pd.MultiIndex.from_frame(table[["run_id", "direction"]])
    table["difference"] = table["mean"] / reference.reindex(keys).to_numpy() - 1
    return table


def curve_table(rows: pd.DataFrame) -> pd.DataFrame:
    """The per-step curve: columns `direction`, `step`, `ms`, `phase` (`warm-up` or `steady`); needs samples."""
    rows = having(rows, "warmup", "curve")
    if rows.empty:
        return pd.DataFrame(columns=["direction", "step", "ms", "phase"])
    curves = rows[rows["factor.curve"] == True]  # noqa: E712  a column, not a bool
    needed = curves[curves["metric"] == "warmup_needed"].set_index(["run_id", "case_id"])["estimate"]
    parts = []
    for _, row in pick(curves, "latency").iterrows():
        cut = needed.get((row["run_id"], row["case_id"]))
        steps = range(1, len(row["samples"]) + 1)
        phase = ["not settled" if pd.isna(cut) else "warm-up" if step <= cut else "steady" for step in steps]
        parts.append(pd.DataFrame({"direction": row["scope"], "step": steps, "ms": row["samples"], "phase": phase}))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["direction", "step", "ms", "phase"])


def warmup_curve(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Each step's time from the first one of a fresh process, warm-up and steady state told apart; needs samples."""
    data = curve_table(rows)
    title = "From the first step of a fresh process"
    if data.empty:
        return empty_chart(title, why_empty(of_experiment(rows, "warmup"), "warmup"))
    phases = ["warm-up", "steady", "not settled"]
    colours = alt.Scale(domain=phases, range=[PALETTE[1], PALETTE[0], "#888888"])
    charts = []
    for direction in dict.fromkeys(data["direction"]):
        base = alt.Chart(data[data["direction"] == direction])
        x = alt.X("step:Q", title="Step", axis=alt.Axis(format="d", tickMinStep=1))
        y = alt.Y("ms:Q", title="Time of the step (ms)", scale=alt.Scale(zero=True))
        line = base.mark_line(color="#bbb", strokeWidth=1).encode(x=x, y=y)
        points = base.mark_point(filled=True, size=45, opacity=1).encode(
            x=x,
            y=y,
            color=alt.Color("phase:N", title="Phase", scale=colours),
            tooltip=[alt.Tooltip("step:Q"), alt.Tooltip("ms:Q", format=",.4~g"), alt.Tooltip("phase:N")],
        )
        title_ = alt.Title(str(direction).replace("_", " + "), fontSize=12)
        charts.append(alt.layer(line, points, width=WIDTH, height=HEIGHT, title=title_))
    return theme(alt.hconcat(*charts, spacing=24, title=title))


def warmup_settings(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """What each warm-up setting would report: mean with its standard deviation, each in a fresh process."""
    data = warmup_table(rows)
    title = "What each setting would report"
    if data.empty or not data["mean"].notna().any():
        return empty_chart(title, why_empty(of_experiment(rows, "warmup"), "warmup"))
    data = data[data["mean"].notna()].assign(upper=lambda t: t["mean"] + t["sd"], lower=lambda t: t["mean"] - t["sd"])
    charts = []
    for direction in dict.fromkeys(data["direction"]):
        part = data[data["direction"] == direction].drop(columns=["run_id"])
        base = alt.Chart(part).encode(x=alt.X("warmup_steps:O", title="Warm-up steps", axis=alt.Axis(labelAngle=0)))
        rule = base.mark_rule(strokeWidth=2, color=PALETTE[0]).encode(y=alt.Y("lower:Q"), y2=alt.Y2("upper:Q"))
        points = base.mark_point(filled=True, size=70, color=PALETTE[0], opacity=1).encode(
            y=alt.Y("mean:Q", title="Mean ± standard deviation (ms)", scale=alt.Scale(zero=True)),
            tooltip=[
                alt.Tooltip("warmup_steps:O"),
                *(alt.Tooltip(f"{c}:Q", format=",.4~g") for c in ("mean", "sd", "cv", "median", "difference")),
            ],
        )
        title_ = alt.Title(str(direction).replace("_", " + "), fontSize=12)
        charts.append(alt.layer(rule, points, width=WIDTH, height=HEIGHT, title=title_))
    return theme(alt.hconcat(*charts, spacing=24, title=title))


@cached
def verdict(rows: pd.DataFrame) -> list[str]:
    """How many warm-up steps are enough on this machine."""
    found = overview.of_experiment(rows, "warmup")
    curves = found[found["metric"] == "warmup_needed"] if len(found) else found
    if curves.empty:
        return ["No warm-up curve was measured, so there is no verdict. Run: nano run quick warmup."]
    lines = []
    for _, curve in curves.iterrows():
        direction = curve["scope"].replace("_", " + ")
        if pd.isna(curve["estimate"]):
            lines.append(f"{direction}: {curve['message']}.")
            continue
        needed = int(curve["estimate"])
        steady = curve["details"]["steady_median"]
        if needed:
            steps = (
                f"{needed} warm-up step{'s are' if needed > 1 else ' is'} enough in this one fresh process, then a step"
            )
        else:
            steps = "no warm-up was detected in this one fresh process; a step"
        lines.append(f"{direction}: {steps} takes {steady:.3g} ms.")
    table = warmup_table(rows)
    cold = table[(table["warmup_steps"] == 0) & table["difference"].notna()]
    for _, row in cold.iterrows():
        lines.append(
            f"{row['direction'].replace('_', ' + ')}: without warm-up the mean is {row['difference']:+.0%} against that after 5 "
            f"steps, with a CV of {row['cv']:.0%}; the median, {format_number(row['median'])} ms, {_median_moved(row, table)}."
        )
    lines.append(
        "Fresh processes differ. Next question: is the answer the same in a second run? Repeat it before you rely on it."
    )
    return lines


def _median_moved(row: pd.Series, table: pd.DataFrame) -> str:
    """What the same does to the median, as far as the two intervals tell."""
    same = (table["run_id"] == row["run_id"]) & (table["direction"] == row["direction"])
    after = table[same & table["warmup_steps"].isin([row["warmup_steps"], 5])]
    if len(overview.leaders(after.rename(columns={"low": "median_low", "high": "median_high"}), "median")) > 1:
        return "cannot be told from that after 5"
    warm = after[after["warmup_steps"] == 5].iloc[0]
    return f"is {row['median'] / warm['median'] - 1:+.0%} against that after 5"


SECTION = Section(
    "warmup",
    "How much warm-up is enough?",
    {"warmup_curve": warmup_curve, "warmup_settings": warmup_settings},
    warmup_table,
    WARMUP_COLUMNS,
    verdict,
)
