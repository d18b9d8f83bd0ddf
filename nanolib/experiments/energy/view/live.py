"""The chart that follows a model while it generates."""

from __future__ import annotations

import altair as alt
import pandas as pd

from nanolib.report.drawing import WIDTH, theme
from nanolib.report.palette import PALETTE


def live_chart(points: pd.DataFrame, estimated: bool) -> alt.TopLevelMixin:
    """Power and throughput of the last minute, one above the other.

    Args:
        points: Columns `seconds`, `watts`, `low`, `high`, `tokens_per_second`; empty before the first.
        estimated: Whether the power is a range and no reading: it is then a band without a line.
    """
    if points.empty:
        points = pd.DataFrame(columns=["seconds", "watts", "low", "high", "tokens_per_second"], dtype=float)
    x = alt.X("seconds:Q", title=None, scale=alt.Scale(zero=False, nice=False))
    base = alt.Chart(points).encode(x=x)
    y = alt.Y("low:Q", title="Power (W)" + (", estimated range" if estimated else ""), scale=alt.Scale(zero=True))
    band = base.mark_area(opacity=0.25, color=PALETTE[1]).encode(y=y, y2=alt.Y2("high:Q"))
    line = base.mark_line(color=PALETTE[1]).encode(y=alt.Y("watts:Q"))
    power = (band if estimated else band + line).properties(width=2 * WIDTH, height=110)
    speed = (
        base.mark_line(color=PALETTE[0])
        .encode(
            x=alt.X("seconds:Q", title="Seconds", scale=alt.Scale(zero=False, nice=False)),
            y=alt.Y("tokens_per_second:Q", title="Tokens per second"),
        )
        .properties(width=2 * WIDTH, height=110)
    )
    return theme(alt.vconcat(power, speed, spacing=8))
