"""Does training in 8 bits reach the loss of bf16? Differences of pairs over the run, and what is said of them."""

from __future__ import annotations

import altair as alt
import pandas as pd

from nanolib.measurement import LEARNING_STEPS, SMOKE_TEST, Provenance
from nanolib.report.claim import Claim, Figure, comparing
from nanolib.report.linking import links
from nanolib.report.overview import cached, having, listed, why_empty
from nanolib.report.plot import plot
from nanolib.report.tables import CASE, Column, base, filled, known, titles, with_ends, with_state
from nanolib.report.theme import empty_chart

_PARITY = (
    Column("arm", "Recipe"),
    Column("verdict", "Against bf16", "parity", detail="verdict"),
    Column("difference", "Loss above bf16, nats/byte [95 %]", "parity", interval=True),
    Column("margin_nats", "Margin, nats", "parity", detail="margin_nats"),
    Column("control", "", "parity", detail="control"),
    Column("loss", "Loss, nats/byte [95 %]", "loss", interval=True),
    Column("seeds", "Seeds"),
    Column("steps", "Steps"),
    Column("provenance", "Products"),
    Column("state", "State"),
)
PARITY_COLUMNS = titles(_PARITY)


@cached
def parity_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per arm that was trained beside bf16.

    Returns:
        Columns: `run_id`, `case_id`, `seq_len`,
        `arm`, `control`, `verdict`, `difference` and `loss` (nats per byte) each with `_low` and `_high`, `margin_nats`,
        `seeds`, `steps`, `provenance`, `status`, `message`.
    """
    rows = having(rows, "fp8", "arm")
    rows = (
        rows[(rows["metric"] != "loss") | (rows["scope"] == rows["factor.arm"])]
        if len(rows)
        else rows
    )
    table = filled(base(rows, ["arm", "seq_len", "seeds", "steps"], "arm"), rows, _PARITY)
    if table.empty:
        return table
    pairs = rows[rows["metric"] == "parity"][[*CASE, "provenance", "message"]]
    table = table.merge(pairs, on=list(CASE), how="left", suffixes=("_of_case", ""))
    of_case = table.pop("message_of_case")
    table["message"] = table["message"].where(table["message"].fillna("") != "", of_case)
    smoke = (table["steps"] < LEARNING_STEPS) & table["verdict"].notna()
    return with_state(table.assign(verdict=table["verdict"].mask(smoke, "smoke test")))


def fp8_parity(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """The difference in loss of each arm at the end of the run, with the margin that was declared beforehand."""
    title = "Loss above bf16 after training"
    table = known(parity_table(rows), "difference")
    if table.empty:
        return empty_chart(title, why_empty(rows, "fp8"))
    controls = table["control"].eq(True)
    data = pd.DataFrame(
        {
            "series": table["arm"].str.replace("_", " ")
            + controls.map({True: " (control)", False: ""}),
            "x": table["difference"],
            "low": table["difference_low"],
            "high": table["difference_high"],
            "sure": (table["provenance"] == Provenance.MEASURED)
            & ~(table["steps"] < LEARNING_STEPS),
            "hue": controls.map({True: "c2", False: "c1"}),
            "text": table["verdict"],
            **links(table),
        }
    )
    margin = float(table["margin_nats"].dropna().iloc[0])
    return plot(
        data,
        title,
        "rows",
        subtitle=[
            "Same weights, text and order; mean over seeds, 95 % interval. Green: the margin, declared beforehand.",
            "Hollow: emulated, or too few steps. A control must be found worse.",
        ],
        unit="Loss above bf16 (nats per byte)",
        fmt="+.2~g",
        ref=0.0,
        band=(-margin, margin),
    )


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
    about = row["arm"].replace("_", " ") + (
        " (emulated)" if row["provenance"] == "emulated" else ""
    )
    if pd.isna(row["difference"]):
        return Claim("worse than bf16", row["message"], about=about)
    difference = Figure.of(row, "difference", "parity", name=row["arm"])
    sure = f"{with_ends(row, 'difference')} nats per byte above bf16, margin {row['margin_nats']:.4f}, {int(row['seeds'])} pairs"
    answer = f"{row['verdict']} after {int(row['steps'])} steps"
    if row["verdict"] in ("worse", "better"):
        return Claim(
            answer, sure, about=about, compared=comparing(difference, Figure.exactly(0.0, "bf16"))
        )
    return Claim(
        answer, sure, about=about, figures=(difference,)
    )  # equivalent goes by two one-sided tests, at 90 %
