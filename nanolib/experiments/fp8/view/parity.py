"""Does training in 8 bits reach the loss of bf16? Differences of pairs over the run, and what is said of them."""

from __future__ import annotations

import altair as alt
import pandas as pd

from nanolib.measurement import format_with_interval, words_of
from nanolib.report.drawing import HEIGHT, WIDTH, colour_and_shape, empty_chart, theme, why_empty
from nanolib.report.overview import cached, ending_of, having, of_experiment, pick

PARITY_COLUMNS = {
    "arm": "Arm",
    "verdict": "Against bf16",
    "difference": "Loss above bf16, nats/byte [95 %]",
    "margin_nats": "Margin, nats",
    "loss": "Loss, nats/byte [95 %]",
    "seeds": "Seeds",
    "steps": "Steps",
    "provenance": "Products",
    "status": "Status",
    "message": "Why",
}


@cached
def parity_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per arm that was trained beside bf16.

    Returns:
        Columns: `arm`, `control`, `verdict`, `difference` and `loss` (nats per byte) each with `_low` and `_high`, `margin_nats`,
        `tenths` (intervals), `seeds`, `steps`, `provenance`, `status`, `message`.
    """
    rows = having(rows, "fp8", "arm")
    words = words_of("arm")
    lines = []
    for _, case in rows.groupby(["run_id", "case_id"], sort=False):
        first = case.iloc[0]
        line = {name: first[f"factor.{name}"] for name in ("arm", "seeds", "steps")}
        line |= ending_of(case)
        found = case[case["metric"] == "parity"]
        if len(found):
            row = found.iloc[0]
            details = row["details"]
            line |= {
                "verdict": details["verdict"],
                "margin_nats": details.get("margin_nats"),
                "tenths": details.get("tenths"),
            }
            line |= {"difference": row["estimate"], "difference_low": row["low"], "difference_high": row["high"]}
            line |= {
                "provenance": row["provenance"],
                "control": details["control"],
                "message": row["message"] or line["message"],
            }
        loss = pick(case, "loss", str(line["arm"]))
        if len(loss):
            row = loss.iloc[0]
            line |= {"loss": row["estimate"], "loss_low": row["low"], "loss_high": row["high"]}
        line["arm"] = words.get(str(line["arm"]), line["arm"])
        lines.append(line)
    columns = ["verdict", "margin_nats", "tenths", "control", "provenance", "loss", "loss_low", "loss_high"]
    columns += ["difference", "difference_low", "difference_high"]
    table = pd.DataFrame(lines)
    return table.assign(**{name: float("nan") for name in columns if name not in table}) if len(table) else table


def fp8_parity(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """The difference in loss at each tenth of the run, the margin shaded; controls dashed."""
    title = "Loss above bf16, in pairs of one seed"
    table = parity_table(rows)
    if table.empty or not any(isinstance(tenths, list) for tenths in table["tenths"]):
        return empty_chart(title, why_empty(of_experiment(rows, "fp8"), "fp8"))
    lines = [
        {
            "arm": row["arm"].replace("_", " "),
            "control": bool(row["control"]),
            "tenth": at + 1,
            "verdict": row["verdict"],
        }
        | dict(zip(("low", "difference", "high"), interval, strict=True))
        for _, row in table.iterrows()
        if isinstance(row["tenths"], list)
        for at, interval in enumerate(row["tenths"])
    ]
    data = pd.DataFrame(lines)
    charts = []
    for control, words in ((False, "arms"), (True, "controls that must be found worse")):
        part = data[data["control"] == control]
        if part.empty:
            continue
        colour, shape = colour_and_shape("arm", "Arm", part["arm"], data["arm"])
        margin = float(table["margin_nats"].dropna().iloc[0])
        band = alt.Chart(pd.DataFrame({"low": [-margin], "high": [margin]}))
        x = alt.X(
            "tenth:Q",
            title="Tenth of the run",
            axis=alt.Axis(values=list(range(1, 11)), format="d"),
            scale=alt.Scale(domain=[0.7, 10.3]),
        )
        y_title = "Loss above bf16 (nats per byte)"
        base = alt.Chart(part).encode(x=x, color=colour)
        dash = {"strokeDash": [4, 3]} if control else {}
        tooltip = [
            alt.Tooltip("arm:N"),
            alt.Tooltip("tenth:Q"),
            *(alt.Tooltip(f"{c}:Q", format="+.4f") for c in ("difference", "low", "high")),
            alt.Tooltip("verdict:N"),
        ]
        layers = alt.layer(
            band.mark_rect(color="#009E73", opacity=0.12).encode(y=alt.Y("low:Q", title=y_title), y2=alt.Y2("high:Q")),
            alt.Chart(pd.DataFrame({"zero": [0.0]})).mark_rule(color="#999").encode(y=alt.Y("zero:Q")),
            base.mark_line(strokeWidth=1.5, **dash).encode(y=alt.Y("difference:Q")),
            base.mark_rule(strokeWidth=2).encode(y=alt.Y("low:Q"), y2=alt.Y2("high:Q")),
            base.mark_point(filled=True, size=50, opacity=1).encode(
                y=alt.Y("difference:Q"), shape=shape, tooltip=tooltip
            ),
        )
        charts.append(layers.properties(width=WIDTH, height=HEIGHT, title=alt.Title(words, fontSize=12)))
    subtitle = (
        "Same weights, same text, same order; mean over seeds, 95 % interval. Green: the margin, declared beforehand."
    )
    joined = alt.hconcat(*charts, spacing=30).resolve_scale(color="independent", shape="independent")
    return theme(joined.properties(title=alt.Title(title, subtitle=subtitle)))


def parity_words(table: pd.DataFrame) -> list[str]:
    """The verdict of every arm against its pair, a sentence each."""
    lines = []
    for _, row in table[table["status"] == "ok"].iterrows() if len(table) else []:
        arm = row["arm"].replace("_", " ")
        emulated = " (emulated)" if row["provenance"] == "emulated" else ""
        if pd.isna(row["difference"]):
            lines.append(f"{arm}{emulated}: worse than bf16; {row['message']}.")
            continue
        figure = format_with_interval(row["difference"], row["difference_low"], row["difference_high"])
        lines.append(
            f"{arm}{emulated}: {row['verdict']} after {int(row['steps'])} steps, {figure} nats per byte above bf16, margin "
            f"{row['margin_nats']:.4f}, {int(row['seeds'])} pairs."
        )
    controls = table[(table["control"] == True) & (table["status"] == "ok")] if len(table) else table  # noqa: E712
    blind = [row["arm"].replace("_", " ") for _, row in controls.iterrows() if row["verdict"] != "worse"]
    if blind:
        lines.append(
            f"The control {', '.join(blind)} was not found worse, so these runs are too short or too few to trust an 'equivalent'. "
            "Raise parity_steps or parity_seeds."
        )
    return lines


# What the report draws of it, in this order.
CHARTS = {
    "fp8_parity": fp8_parity,
}
