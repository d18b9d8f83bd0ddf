"""Does training in 8 bits reach the loss of bf16? Differences of pairs over the run, and what is said of them."""

from __future__ import annotations

import altair as alt
import pandas as pd

from nanolib.measurement import LEARNING_STEPS, SMOKE_TEST
from nanolib.report.claim import Claim, Figure, comparing
from nanolib.report.drawing import HEIGHT, WIDTH, colour_and_shape
from nanolib.report.frame import Drawn, framed, panels, rule, tooltips, with_interval
from nanolib.report.linking import followed
from nanolib.report.overview import cached, having, listed
from nanolib.report.palette import PALETTE
from nanolib.report.tables import CASE, Column, base, filled, known, titles, with_ends

_PARITY = (
    Column("arm", "Arm"),
    Column("verdict", "Against bf16", "parity", detail="verdict"),
    Column("difference", "Loss above bf16, nats/byte [95 %]", "parity", interval=True),
    Column("margin_nats", "Margin, nats", "parity", detail="margin_nats"),
    Column("tenths", "", "parity", detail="tenths"),
    Column("control", "", "parity", detail="control"),
    Column("loss", "Loss, nats/byte [95 %]", "loss", interval=True),
    Column("seeds", "Seeds"),
    Column("steps", "Steps"),
    Column("provenance", "Products"),
    Column("status", "Status"),
    Column("message", "Why"),
)
PARITY_COLUMNS = titles(_PARITY)


@cached("fp8")
def parity_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per arm that was trained beside bf16.

    Returns:
        Columns: `run_id`, `case_id`, `seq_len`,
        `arm`, `control`, `verdict`, `difference` and `loss` (nats per byte) each with `_low` and `_high`, `margin_nats`,
        `tenths` (intervals), `seeds`, `steps`, `provenance`, `status`, `message`.
    """
    rows = having(rows, "fp8", "arm")
    rows = rows[(rows["metric"] != "loss") | (rows["scope"] == rows["factor.arm"])] if len(rows) else rows
    table = filled(base(rows, ["arm", "seq_len", "seeds", "steps"], "arm"), rows, _PARITY)
    if table.empty:
        return table
    pairs = rows[rows["metric"] == "parity"][[*CASE, "provenance", "message"]]
    table = table.merge(pairs, on=list(CASE), how="left", suffixes=("_of_case", ""))
    of_case = table.pop("message_of_case")
    table["message"] = table["message"].where(table["message"].fillna("") != "", of_case)
    smoke = (table["steps"] < LEARNING_STEPS) & table["verdict"].notna()
    return table.assign(verdict=table["verdict"].mask(smoke, "smoke test"))


@framed("Loss above bf16, in pairs of one seed", "fp8")
def fp8_parity(rows: pd.DataFrame) -> Drawn | None:
    """The difference in loss at each tenth of the run, the margin shaded; controls dashed."""
    table = known(parity_table(rows), "tenths")
    if table.empty:
        return None
    lines = [
        {
            "arm": row["arm"].replace("_", " "),
            "control": bool(row["control"]),
            "tenth": at + 1,
            "verdict": row["verdict"],
            **{name: row[name] for name in ("run_id", "seq_len")},
        }
        | dict(zip(("low", "difference", "high"), interval, strict=True))
        for _, row in table.iterrows()
        for at, interval in enumerate(row["tenths"])
    ]
    data = followed(pd.DataFrame(lines))
    data["panel"] = data["control"].map({False: "arms", True: "controls that must be found worse"})
    margin = float(table["margin_nats"].dropna().iloc[0])
    band = alt.Chart(pd.DataFrame({"low": [-margin], "high": [margin]})).mark_rect(color=PALETTE[2], opacity=0.12)
    x = alt.X(
        "tenth:Q",
        title="Tenth of the run",
        axis=alt.Axis(values=list(range(1, 11)), format="d"),
        scale=alt.Scale(domain=[0.7, 10.3]),
    )
    y = {"title": "Loss above bf16 (nats per byte)"}
    tooltip = tooltips("arm tenth verdict", "difference low high", "+.4f")

    def draw(part: pd.DataFrame) -> alt.TopLevelMixin:
        colour, shape = colour_and_shape("arm", "Arm", part["arm"], data["arm"])
        base = alt.Chart(part).encode(x=x, color=colour)
        dash = {"strokeDash": [4, 3]} if part["control"].any() else {}
        layers = [
            band.encode(y=alt.Y("low:Q", **y), y2=alt.Y2("high:Q")),
            rule("y", 0.0, y, "zero"),
            base.mark_line(strokeWidth=1.5, **dash).encode(y=alt.Y("difference:Q", **y)),
            *with_interval(base, "y", ("difference", "low", "high"), y, size=50, shape=shape, tooltip=tooltip),
        ]
        return alt.layer(*layers, width=WIDTH, height=HEIGHT)

    subtitle = (
        "Same weights, same text, same order; mean over seeds, 95 % interval. Green: the margin, declared beforehand."
    )
    shown = panels(data.sort_values("control", kind="stable"), draw, spacing=30)
    return shown.resolve_scale(color="independent", shape="independent"), subtitle


def parity_words(table: pd.DataFrame) -> list[Claim]:
    """The verdict of every arm against its pair."""
    if table.empty:
        return []
    claims = []
    ended = table[table["status"] == "ok"]
    short = ended[ended["steps"] < LEARNING_STEPS]
    if len(short):
        arms = listed(arm.replace("_", " ") for arm in short["arm"])
        trained = f"{arms}: trained beside bf16 for {int(short['steps'].max())} steps"
        claims.append(Claim(trained, SMOKE_TEST, "raise parity_steps"))
    long = ended[~(ended["steps"] < LEARNING_STEPS)]
    claims += [_parity(row) for _, row in long.iterrows()]
    controls = long[long["control"] == True]  # noqa: E712  a column, not a bool
    blind = [arm.replace("_", " ") for arm in controls[controls["verdict"] != "worse"]["arm"]]
    if blind:
        answer = f"The control {', '.join(blind)} was not found worse"
        why = "so these runs are too short or too few to trust an 'equivalent'"
        claims.append(Claim(f"{answer}, {why}", advice="raise parity_steps or parity_seeds"))
    return claims


def _parity(row: pd.Series) -> Claim:
    about = row["arm"].replace("_", " ") + (" (emulated)" if row["provenance"] == "emulated" else "")
    if pd.isna(row["difference"]):
        return Claim("worse than bf16", row["message"], about=about)
    difference = Figure.of(row, "difference", "parity", name=row["arm"])
    sure = f"{with_ends(row, 'difference')} nats per byte above bf16, margin {row['margin_nats']:.4f}, {int(row['seeds'])} pairs"
    answer = f"{row['verdict']} after {int(row['steps'])} steps"
    if row["verdict"] in ("worse", "better"):
        return Claim(answer, sure, about=about, compared=comparing(difference, Figure.exactly(0.0, "bf16")))
    return Claim(answer, sure, about=about, figures=(difference,))  # equivalent goes by two one-sided tests, at 90 %


# What the report draws of it, in this order.
CHARTS = {
    "fp8_parity": fp8_parity,
}
