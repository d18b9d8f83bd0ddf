"""What casts to 8 bits do to the products of a model; emulated, so marks are hollow and lines dashed."""

from __future__ import annotations

import altair as alt
import pandas as pd

from nanolib.report.claim import Claim
from nanolib.report.drawing import colour_and_shape
from nanolib.report.frame import Drawn, framed, panels, tooltips
from nanolib.report.linking import followed, links
from nanolib.report.overview import cached, having, pick
from nanolib.report.palette import PALETTE


@cached("fp8")
def numerics_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Errors of emulated products, one line per way to cast, layer and product.

    Returns:
        Columns: `variant`, `layer`, `product`, `relative_error`, `sqnr` (dB), and those by which a page's choice is followed.
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
            **links(table),
        }
    ).reset_index(drop=True)


def _by_layer(part: pd.DataFrame, first: bool) -> alt.Chart:
    """Hollow marks over the layers, whose names stand beside the first of several panels alone."""
    axis = alt.Axis(labelFontSize=10, labels=first, ticks=first)
    y = alt.Y("layer:N", sort=list(dict.fromkeys(part["layer"])), title=None, axis=axis)
    return (
        alt.Chart(part, width=210, height=alt.Step(13)).mark_point(filled=False, size=45, strokeWidth=1.6).encode(y=y)
    )


@framed("Error of products in 8 bits, layer by layer", "fp8")
def fp8_numerics(rows: pd.DataFrame) -> Drawn | None:
    """Error of every layer's products by format and granularity."""
    table = numerics_table(rows)
    if table.empty:
        return None
    table["product"] = table["product"].str.replace("_", " ")
    variants = list(dict.fromkeys(table["variant"]))
    colour, shape = colour_and_shape("variant", "Cast", table["variant"])
    x = alt.X(
        "relative_error:Q",
        title="Relative error (float32 is the reference)",
        scale=alt.Scale(type="log", nice=True),
        axis=alt.Axis(format=".1~e"),
    )
    tooltip = [*tooltips("layer variant", "relative_error"), *tooltips("", "sqnr", ".1f", sqnr="SQNR, dB")]

    def draw(part: pd.DataFrame) -> alt.TopLevelMixin:
        return _by_layer(part, table["product"].iloc[0] == part["product"].iloc[0]).encode(
            x=x, color=colour, shape=shape, tooltip=tooltip
        )

    subtitle = f"Emulated: hollow marks. {len(variants)} ways to cast, in a small decoder trained for a while in bf16."
    return panels(table, draw, "product", spacing=16), subtitle


@framed("Elements that vanish in the cast", "fp8")
def fp8_losses(rows: pd.DataFrame) -> Drawn | None:
    """Elements that vanish or saturate in each operand's cast."""
    rows = having(rows, "fp8", "variant")
    found = pd.concat([pick(rows, "underflow"), pick(rows, "overflow")])
    if found.empty:
        return None
    parts = found["scope"].str.rsplit(" ", n=1)
    data = pd.DataFrame(
        {
            "variant": found["factor.variant"],
            "layer": parts.str[0],
            "operand": parts.str[1],
            "share": found["estimate"],
            **links(found),
            "what": found["metric"].map({"underflow": "vanish (underflow)", "overflow": "saturate (overflow)"}),
        }
    )
    vanish = data[data["what"].str.startswith("vanish")]
    x = alt.X("share:Q", title="Share that becomes zero", axis=alt.Axis(format=".2~p", tickCount=4))
    tooltip = tooltips("layer operand variant", "share", ".3%")

    def draw(part: pd.DataFrame) -> alt.TopLevelMixin:
        colour, shape = colour_and_shape("variant", "Cast", part["variant"], data["variant"])
        return _by_layer(part, vanish["operand"].iloc[0] == part["operand"].iloc[0]).encode(
            x=x, color=colour, shape=shape, tooltip=tooltip
        )

    most = data[data["what"].str.startswith("saturate")]["share"].max()
    saturate = f"At most {most:.2g} of any operand saturates" if most > 0 else "Nothing saturates"
    subtitle = f"Emulated. {saturate}: scales follow each tensor's largest magnitude."
    return panels(vanish, draw, "operand", spacing=16), subtitle


@framed("Scales over training", "fp8")
def fp8_scales(rows: pd.DataFrame) -> Drawn | None:
    """How the scales of a tensorwise cast move while a model is trained."""
    found = pick(having(rows, "fp8", "variant"), "fp8_scale")
    if found.empty or "samples" not in found:
        return None
    lines = []
    for _, row in found.iterrows():
        layer, operand = row["scope"].rsplit(" ", 1)
        lines += [
            {"layer": layer, "operand": operand, "step": step, "scale": float(value)}
            | {"run_id": row["run_id"], "seq_len": row.get("factor.seq_len")}
            for step, value in enumerate(row["samples"])
        ]
    data = followed(pd.DataFrame(lines))
    step = max(1, data["step"].nunique() // 60)  # a chart needs no more points than that
    data = data[data["step"] % step == 0]
    tooltip = tooltips("layer step", "scale")

    def draw(part: pd.DataFrame) -> alt.TopLevelMixin:
        drawn = alt.Chart(part, width=210, height=150)
        return drawn.mark_line(strokeWidth=1, opacity=0.65, color=PALETTE[0], strokeDash=[3, 2]).encode(
            x=alt.X("step:Q", title="Training step"),
            y=alt.Y("scale:Q", title="Scale", scale=alt.Scale(type="log"), axis=alt.Axis(format=".1~e")),
            detail=alt.Detail("layer:N"),
            tooltip=tooltip,
        )

    subtitle = (
        "Emulated, a line per layer: format's largest value over the tensor's largest magnitude; e5m2 for gradients."
    )
    return panels(data, draw, "operand", spacing=16), subtitle


def numerics_words(table: pd.DataFrame) -> list[Claim]:
    """What the numerics table says: signal to noise by cast, without an order."""
    if table.empty:
        return []
    medians = table.groupby("variant", sort=False)["sqnr"].median().sort_values(ascending=False)
    text = ", ".join(f"{name} {value:.1f} dB" for name, value in medians.items())
    return [Claim("Median signal to noise of the products, emulated", text)]


# What the report draws of it, in this order.
CHARTS = {
    "fp8_numerics": fp8_numerics,
    "fp8_losses": fp8_losses,
    "fp8_scales": fp8_scales,
}
