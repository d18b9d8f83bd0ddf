"""The chart that follows a model while it generates."""

from __future__ import annotations

import altair as alt
import pandas as pd

from nanolib.report.drawing import WIDTH, coloured, theme
from nanolib.report.frame import tooltips
from nanolib.report.palette import FRAME, PALETTE


def live_chart(points: pd.DataFrame, estimated: bool) -> alt.TopLevelMixin:
    """Power and throughput of the last minute, one above the other.

    Args:
        points: Columns `phase`, `seconds`, `watts`, `low`, `high`, `tokens_per_second`; empty before the first.
        estimated: Whether the power is a range and no reading: it is then a band without a line.
    """
    if points.empty:
        points = pd.DataFrame(columns=["seconds", "watts", "low", "high", "tokens_per_second"], dtype=float).assign(
            phase=""
        )
    seconds = points["seconds"]
    ends = [seconds.min() - 0.5, seconds.max() + 0.5] if len(points) else [0, 1]
    span = alt.Scale(domain=ends, nice=False)
    x = alt.X("seconds:Q", title=None, scale=span)
    base = alt.Chart(points).encode(x=x)
    colour = coloured("phase", "Phase", {"idle": FRAME, "prefill": PALETTE[2], "decode": PALETTE[0]})
    tooltip = tooltips("phase", "seconds low watts high tokens_per_second")
    y = alt.Y("low:Q", title="Power (W)" + (", estimated range" if estimated else ""), scale=alt.Scale(zero=True))
    band = base.mark_area(opacity=0.25, color=PALETTE[1]).encode(y=y, y2=alt.Y2("high:Q"))
    line = base.mark_line(color=PALETTE[1]).encode(y=alt.Y("watts:Q"))
    dots = base.mark_point(filled=True, opacity=1, size=50).encode(y=alt.Y("high:Q"), color=colour, tooltip=tooltip)
    power = (band + dots if estimated else band + line + dots.encode(y=alt.Y("watts:Q"))).properties(
        width=2 * WIDTH, height=110
    )
    speed = (
        alt.Chart(points[points["tokens_per_second"].notna()])  # an idle window makes none
        .mark_point(filled=True, opacity=1, size=50)
        .encode(
            x=alt.X("seconds:Q", title="Seconds", scale=span),
            y=alt.Y("tokens_per_second:Q", title="Tokens per second", scale=alt.Scale(type="log")),
            color=colour,
            tooltip=tooltip,
        )
        .properties(width=2 * WIDTH, height=110)
    )
    return theme(alt.vconcat(power, speed, spacing=8))
