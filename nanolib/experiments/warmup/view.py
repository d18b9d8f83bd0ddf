"""Warm-up: the curve from the first step, what each setting would report, and how many steps are enough."""

from __future__ import annotations

import altair as alt
import pandas as pd

from nanolib.measurement import format_number
from nanolib.report import overview
from nanolib.report.claim import Claim, Figure, Order, comparing
from nanolib.report.drawing import HEIGHT, WIDTH, coloured
from nanolib.report.frame import Drawn, framed, panels, tooltips, with_interval
from nanolib.report.linking import links
from nanolib.report.overview import cached, having, pick
from nanolib.report.palette import FRAME, GUIDE, PALETTE
from nanolib.report.section import CaseTable, Section
from nanolib.report.tables import Column, base, filled, known, titles
from nanolib.stats.steady import MOVED

_WARMUP = (
    Column("direction", "Direction"),
    Column("warmup_steps", "Warm-up steps"),
    Column("mean", "Mean, ms", "latency", detail="mean"),
    Column("sd", "SD, ms", "latency", detail="sd"),
    Column("cv", "CV", "latency", detail="cv"),
    Column("median", "Median, ms [95 %]", "latency", interval=True),
    Column("difference", "Mean against 5 steps"),
    Column("status", "Status"),
)
WARMUP_COLUMNS = titles(_WARMUP)


@cached("warmup")
def warmup_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per direction and warm-up setting.

    Returns:
        Columns: `run_id`, `case_id`, `seq_len`,
        `direction`, `warmup_steps`, `mean`, `sd`, `cv`, `median` with `_low` and `_high` (ms), `difference` of the
        mean to that of warmup = 5 (a share; missing where 5 was not measured), `status`, `message`.
    """
    rows = having(rows, "warmup", "curve")
    if rows.empty:
        return pd.DataFrame()
    settings = rows[rows["factor.curve"] == False]  # noqa: E712  a column, not a bool
    table = filled(base(settings, ["seq_len", "direction", "warmup_steps"], "warmup_steps"), settings, _WARMUP)
    table["warmup_steps"] = table["warmup_steps"].astype(int)
    reference = table[table["warmup_steps"] == 5].set_index(["run_id", "direction"])["mean"]
    keys = pd.MultiIndex.from_frame(table[["run_id", "direction"]])
    table["difference"] = table["mean"] / reference.reindex(keys).to_numpy() - 1
    return table


def curve_table(rows: pd.DataFrame) -> pd.DataFrame:
    """The per-step curve: `direction`, `step`, `ms`, `phase` (`warm-up` or `steady`), `run_id`, `seq_len`; needs samples."""
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
        part = {"direction": row["scope"], "step": steps, "ms": row["samples"], "phase": phase}
        parts.append(pd.DataFrame(part | {"run_id": row["run_id"], "seq_len": row.get("factor.seq_len")}))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["direction", "step", "ms", "phase"])


@framed("From the first step of a fresh process", "warmup")
def warmup_curve(rows: pd.DataFrame) -> Drawn | None:
    """Each step's time from the first one of a fresh process, warm-up and steady state told apart; needs samples."""
    data = curve_table(rows)
    if data.empty:
        return None
    colour = coloured("phase", "Phase", {"warm-up": PALETTE[1], "steady": PALETTE[0], "not settled": FRAME})

    def draw(part: pd.DataFrame) -> alt.TopLevelMixin:
        base = alt.Chart(part).encode(
            x=alt.X("step:Q", title="Step", axis=alt.Axis(format="d", tickMinStep=1)),
            y=alt.Y("ms:Q", title="Time of the step (ms)", scale=alt.Scale(zero=True)),
        )
        line = base.mark_line(color=GUIDE, strokeWidth=1)
        points = base.mark_point(filled=True, size=45, opacity=1).encode(
            color=colour, tooltip=tooltips("phase", "step ms", ",.4~g")
        )
        return alt.layer(line, points, width=WIDTH, height=HEIGHT)

    return panels(_followed(data), draw), ""


@framed("What each setting would report", "warmup")
def warmup_settings(rows: pd.DataFrame) -> Drawn | None:
    """What each warm-up setting would report: mean with its standard deviation, each in a fresh process."""
    data = known(warmup_table(rows), "mean")
    if data.empty:
        return None
    data = data.assign(upper=lambda t: t["mean"] + t["sd"], lower=lambda t: t["mean"] - t["sd"])

    def draw(part: pd.DataFrame) -> alt.TopLevelMixin:
        x = alt.X("warmup_steps:O", title="Warm-up steps", axis=alt.Axis(labelAngle=0))
        base = alt.Chart(part).encode(x=x, color=alt.value(PALETTE[0]))
        y = {"title": "Mean ± standard deviation (ms)", "scale": alt.Scale(zero=True)}
        tooltip = tooltips("warmup_steps", "mean sd cv median difference", ",.4~g")
        marks = with_interval(base, "y", ("mean", "lower", "upper"), y, size=70, tooltip=tooltip)
        return alt.layer(*marks, width=WIDTH, height=HEIGHT)

    return panels(_followed(data), draw), ""


def _followed(table: pd.DataFrame) -> pd.DataFrame:
    """A panel per direction, and what a page's choice goes by in the place of ids."""
    ids = [name for name in ("run_id", "case_id") if name in table]
    return table.assign(panel=table["direction"].str.replace("_", " + "), **links(table)).drop(columns=ids)


@cached("warmup")
def verdict(rows: pd.DataFrame) -> list[Claim]:
    """How many warm-up steps are enough on this machine."""
    found = overview.of_experiment(rows, "warmup")
    curves = found[found["metric"] == "warmup_needed"]
    if curves.empty:
        return [Claim("No warm-up curve was measured, so there is no verdict", advice="nano run quick warmup")]
    table = warmup_table(rows)
    cold = table[(table["warmup_steps"] == 0) & table["difference"].notna()]
    claims = [_enough(curve, cold) for _, curve in curves.iterrows()]
    claims += [_without(row, table) for _, row in cold.iterrows()]
    question = "is the answer the same in a second run? Repeat it before you rely on it"
    return [*claims, Claim("Fresh processes differ", advice=question)]


def _enough(curve: pd.Series, cold: pd.DataFrame) -> Claim:
    """What the curve says, unless another fresh process says otherwise."""
    about = curve["scope"].replace("_", " + ")
    if pd.isna(curve["estimate"]):
        advice = "raise curve_steps, or repeat it on a quieter machine"
        return Claim("no clear answer", curve["message"], advice, about)
    needed, steady = int(curve["estimate"]), f"a step then takes {curve['details']['steady_median']:.3g} ms"
    figures = (Figure.exactly(float(needed)),)
    if needed:
        answer = f"{needed} warm-up step{'s are' if needed > 1 else ' is'} enough in this one fresh process"
        return Claim(answer, steady, about=about, figures=figures)
    others = cold[(cold["run_id"] == curve["run_id"]) & (cold["direction"] == curve["scope"])]
    if (others["difference"] > MOVED).any():
        most = others["difference"].max()
        sure = f"the curve's process shows no warm-up, but in another the mean without it was {most:+.0%}; {steady}"
        return Claim(
            "no clear answer: two fresh processes differ", sure, "use 5 steps, or measure again", about, figures=figures
        )
    return Claim("no warm-up was detected in this one fresh process", steady, about=about, figures=figures)


def _without(row: pd.Series, table: pd.DataFrame) -> Claim:
    """What no warm-up does to the mean, and to the median as far as the two intervals tell."""
    same = (table["run_id"] == row["run_id"]) & (table["direction"] == row["direction"])
    warm = table[same & (table["warmup_steps"] == 5)].iloc[0]
    medians = [
        Figure.of(line, "median", "latency", row["direction"], f"after {int(line['warmup_steps'])} steps")
        for line in (row, warm)
    ]
    moved = "cannot be told from that after 5"
    if medians[0].against(medians[1]) is not Order.ALIKE:
        moved = f"is {row['median'] / warm['median'] - 1:+.0%} against that after 5"
    answer = (
        f"without warm-up the mean is {row['difference']:+.0%} against that after 5 steps, with a CV of {row['cv']:.0%}"
    )
    sure = f"the median, {format_number(row['median'])} ms, {moved}"
    return Claim(answer, sure, about=row["direction"].replace("_", " + "), compared=comparing(*medians))


SECTION = Section(
    "warmup",
    "How much warm-up is enough?",
    {"warmup_curve": warmup_curve, "warmup_settings": warmup_settings},
    {"All cases": CaseTable(warmup_table, WARMUP_COLUMNS)},
    verdict,
)
