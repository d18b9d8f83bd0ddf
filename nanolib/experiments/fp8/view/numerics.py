"""What casts to 8 bits do to the products of a model; emulated, so marks are hollow and lines dashed."""

from __future__ import annotations

import altair as alt
import pandas as pd

from nanolib.report.drawing import PALETTE, colour_and_shape, empty_chart, theme, why_empty
from nanolib.report.overview import cached, having, of_experiment, pick


@cached
def numerics_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Errors of emulated products, one line per way to cast, layer and product.

    Returns:
        Columns: `variant`, `layer`, `product`, `relative_error`, `sqnr` (dB).
    """
    rows = having(rows, "fp8", "variant")
    errors, noise = pick(rows, "relative_error"), pick(rows, "sqnr")
    if errors.empty:
        return pd.DataFrame()
    table = errors.assign(sqnr=noise["estimate"].to_numpy())
    parts = table["scope"].str.rsplit(" ", n=1)
    return pd.DataFrame(
        {
            "variant": table["factor.variant"],
            "layer": parts.str[0],
            "product": parts.str[1],
            "relative_error": table["estimate"],
            "sqnr": table["sqnr"],
        }
    ).reset_index(drop=True)


def _layer_axis(charts: list[alt.TopLevelMixin]) -> alt.Axis:
    """The layers' names, beside the first of several panels alone."""
    return alt.Axis(labelFontSize=10, labels=not charts, ticks=not charts)


def fp8_numerics(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Error of every layer's products by format and granularity."""
    title = "Error of products in 8 bits, layer by layer"
    table = numerics_table(rows)
    if table.empty:
        return empty_chart(title, why_empty(of_experiment(rows, "fp8"), "fp8"))
    table["product"] = table["product"].str.replace("_", " ")
    variants = list(dict.fromkeys(table["variant"]))
    colour, shape = colour_and_shape("variant", "Cast", table["variant"])
    charts = []
    for product, part in table.groupby("product", sort=False):
        x = alt.X(
            "relative_error:Q",
            title="Relative error (float32 is the reference)",
            scale=alt.Scale(type="log", nice=True),
            axis=alt.Axis(format=".1~e"),
        )
        y = alt.Y("layer:N", sort=list(dict.fromkeys(part["layer"])), title=None, axis=_layer_axis(charts))
        points = (
            alt.Chart(part)
            .mark_point(filled=False, size=45, strokeWidth=1.6)
            .encode(x=x, y=y, color=colour, shape=shape)
        )
        tooltip = [
            alt.Tooltip("layer:N"),
            alt.Tooltip("variant:N"),
            alt.Tooltip("relative_error:Q", format=".3~g"),
            alt.Tooltip("sqnr:Q", title="SQNR, dB", format=".1f"),
        ]
        charts.append(
            points.encode(tooltip=tooltip).properties(
                width=210, height=alt.Step(13), title=alt.Title(product, fontSize=12)
            )
        )
    subtitle = f"Emulated: hollow marks. {len(variants)} ways to cast, in a small decoder trained for a while in bf16."
    return theme(alt.hconcat(*charts, spacing=16, title=alt.Title(title, subtitle=subtitle)))


def fp8_losses(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Elements that vanish or saturate in each operand's cast."""
    title = "Elements that vanish in the cast"
    rows = having(rows, "fp8", "variant")
    found = pd.concat([pick(rows, "underflow"), pick(rows, "overflow")]) if len(rows) else rows
    if found.empty:
        return empty_chart(title, why_empty(of_experiment(rows, "fp8"), "fp8"))
    parts = found["scope"].str.rsplit(" ", n=1)
    data = pd.DataFrame(
        {
            "variant": found["factor.variant"],
            "layer": parts.str[0],
            "operand": parts.str[1],
            "share": found["estimate"],
            "what": found["metric"].map({"underflow": "vanish (underflow)", "overflow": "saturate (overflow)"}),
        }
    )
    charts = []
    for operand, part in data[data["what"].str.startswith("vanish")].groupby("operand", sort=False):
        colour, shape = colour_and_shape("variant", "Cast", part["variant"], data["variant"])
        x = alt.X("share:Q", title="Share that becomes zero", axis=alt.Axis(format=".2~p", tickCount=4))
        y = alt.Y("layer:N", sort=list(dict.fromkeys(part["layer"])), title=None, axis=_layer_axis(charts))
        points = alt.Chart(part).mark_point(filled=False, size=45, strokeWidth=1.6)
        tooltip = [
            alt.Tooltip("layer:N"),
            alt.Tooltip("operand:N"),
            alt.Tooltip("variant:N"),
            alt.Tooltip("share:Q", format=".3%"),
        ]
        chart = points.encode(x=x, y=y, color=colour, shape=shape, tooltip=tooltip)
        charts.append(chart.properties(width=210, height=alt.Step(13), title=alt.Title(operand, fontSize=12)))
    most = data[data["what"].str.startswith("saturate")]["share"].max()
    saturate = f"At most {most:.2g} of any operand saturates" if most > 0 else "Nothing saturates"
    subtitle = f"Emulated. {saturate}: scales follow each tensor's largest magnitude."
    return theme(alt.hconcat(*charts, spacing=16, title=alt.Title(title, subtitle=subtitle)))


def fp8_scales(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """How the scales of a tensorwise cast move while a model is trained."""
    title = "Scales over training"
    found = pick(having(rows, "fp8", "variant"), "fp8_scale")
    if found.empty or "samples" not in found:
        return empty_chart(title, why_empty(of_experiment(rows, "fp8"), "fp8"))
    lines = []
    for _, row in found.iterrows():
        layer, operand = row["scope"].rsplit(" ", 1)
        lines += [
            {"layer": layer, "operand": operand, "step": step, "scale": float(value)}
            for step, value in enumerate(row["samples"])
        ]
    data = pd.DataFrame(lines)
    step = max(1, data["step"].nunique() // 60)  # a chart needs no more points than that
    data = data[data["step"] % step == 0]
    charts = []
    for operand, part in data.groupby("operand", sort=False):
        lines_ = alt.Chart(part).mark_line(strokeWidth=1, opacity=0.65, color=PALETTE[0], strokeDash=[3, 2])
        chart = lines_.encode(
            x=alt.X("step:Q", title="Training step"),
            y=alt.Y("scale:Q", title="Scale", scale=alt.Scale(type="log"), axis=alt.Axis(format=".1~e")),
            detail=alt.Detail("layer:N"),
            tooltip=[alt.Tooltip("layer:N"), alt.Tooltip("step:Q"), alt.Tooltip("scale:Q", format=".3~g")],
        )
        charts.append(chart.properties(width=210, height=150, title=alt.Title(operand, fontSize=12)))
    subtitle = (
        "Emulated, a line per layer: format's largest value over the tensor's largest magnitude; e5m2 for gradients."
    )
    return theme(alt.hconcat(*charts, spacing=16, title=alt.Title(title, subtitle=subtitle)))


def numerics_words(table: pd.DataFrame) -> list[str]:
    """What the numerics table says, a sentence each."""
    if table.empty:
        return []
    medians = table.groupby("variant", sort=False)["sqnr"].median().sort_values(ascending=False)
    text = ", ".join(f"{name} {value:.1f} dB" for name, value in medians.items())
    return [f"Median signal to noise of the products, emulated: {text}."]


# What the report draws of it, in this order.
CHARTS = {
    "fp8_numerics": fp8_numerics,
    "fp8_losses": fp8_losses,
    "fp8_scales": fp8_scales,
}
