"""Set the range of a value axis."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

# A logarithmic axis has ticks without labels, which need no grid line.
_LABELED = alt.condition("datum.label", alt.value(1), alt.value(0))


@dataclass(frozen=True)
class Axis:
    """Value axis that all layers of a chart share.

    Attributes:
        title: Title of the axis.
        channel: Direction of the axis, `x` or `y`.
        log: Whether the axis is logarithmic.
        domain: Lowest and highest value on the axis.
        fmt: Number format of the axis labels, in the syntax of d3.
    """

    title: str
    channel: str
    log: bool
    domain: list[float]
    fmt: str

    def encode(self, column: str, end: str = "") -> dict[str, Any]:
        """Return the encoding of the column `column`, or of ranges that end at the column `end`."""
        channel = alt.Y if self.channel == "y" else alt.X
        along = channel(
            f"{column}:Q",
            title=self.title,
            scale=alt.Scale(type="log" if self.log else "linear", domain=self.domain, nice=False),
            axis=alt.Axis(format=self.fmt, tickCount=7, gridOpacity=_LABELED),
        )
        second = alt.Y2 if self.channel == "y" else alt.X2
        return {self.channel: along} | ({f"{self.channel}2": second(f"{end}:Q")} if end else {})


def domain_of(
    data: pd.DataFrame, value: str, log: bool, more: Sequence[float]
) -> list[float] | None:
    """Return the lowest and highest drawn number with a margin, or None if there is no number.

    A linear axis includes zero.

    Args:
        data: Data of a chart, with the columns that `plot` describes.
        value: Name of the column with the values.
        log: Whether the axis is logarithmic.
        more: Further numbers that the axis includes.
    """
    numbers = [name for name in (value, "low", "high", "pred") if name in data]
    values = np.append(data[numbers].astype(float), more)
    if "part" in data:  # A bar is as long as the sum of its parts.
        values = np.append(values, data.groupby(["panel", "series"])[value].sum())
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    low, high = float(values.min()), float(values.max())
    if log:
        margin = max((high / low) ** 0.08, 1.1)
        return [low / margin, high * margin]
    low, high = min(low, 0.0), max(high, 0.0)
    margin = 0.06 * (high - low) or 1.0
    return [low - margin if low else 0.0, high + margin]
