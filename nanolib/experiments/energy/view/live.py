"""The chart that follows a model while it generates."""

from __future__ import annotations

import altair as alt
import pandas as pd

from nanolib.measurement import Provenance
from nanolib.report.plot import plot
from nanolib.report.theme import empty_chart, side_by_side


def live_chart(points: pd.DataFrame, provenance: Provenance) -> alt.TopLevelMixin:
    """Power and throughput of the last minute, next to each other.

    Args:
        points: Columns `phase`, `seconds`, `watts`, `low`, `high`, `tokens_per_second`; empty before the first.
        provenance: Of the power: its marks are hollow unless it is measured.
    """
    title = "Power and throughput of the last minute"
    if points.empty:
        return empty_chart(title, "the first call runs")
    data = points.assign(series=points["phase"], x=points["seconds"])
    power = plot(
        data.assign(y=data["watts"], sure=provenance is Provenance.MEASURED)[
            ["series", "x", "y", "low", "high", "sure"]
        ],
        f"Power, {provenance}",
        unit="Power (W)",
        xunit="Seconds",
        join=False,
        width=320,
        height=150,
    )
    made = data[data["tokens_per_second"].notna()]  # an idle window makes none
    speed = plot(
        made.assign(y=made["tokens_per_second"])[["series", "x", "y"]],
        "Throughput",
        unit="Tokens per second",
        xunit="Seconds",
        log="y",
        join=False,
        width=320,
        height=150,
        empty="no token yet",
    )
    return side_by_side(power, speed)
