"""Set the range and the ticks of a value axis, and drop points that the axis cannot show."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

_MOST_NAMED = 4  # Largest number of series that the subtitle names.


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
        ticks = {"values": log_ticks(*self.domain)} if self.log else {"tickCount": 5}
        channel = alt.Y if self.channel == "y" else alt.X
        along = channel(
            f"{column}:Q",
            title=self.title,
            scale=alt.Scale(type="log" if self.log else "linear", domain=self.domain, nice=False),
            axis=alt.Axis(format=self.fmt, **ticks),
        )
        second = alt.Y2 if self.channel == "y" else alt.X2
        return {self.channel: along} | ({f"{self.channel}2": second(f"{end}:Q")} if end else {})


def _numbers(data: pd.DataFrame, value: str) -> pd.DataFrame:
    """Return the columns that have values, ends of intervals or predictions."""
    return data[[name for name in (value, "low", "high", "pred") if name in data]].astype(float)


def drop_unloggable(data: pd.DataFrame, value: str) -> tuple[pd.DataFrame, str]:
    """Remove the numbers that a logarithmic axis cannot show.

    Returns:
        The remaining data, and the names of up to four series that lost a point.
    """
    numbers = _numbers(data, value)
    drawn = numbers.where(numbers.gt(0) & np.isfinite(numbers))
    lost = data.loc[drawn[value].isna() & numbers[value].notna(), "series"].unique()
    if "low" in data:
        # If an interval reaches zero, its line begins at the lower end of the logarithmic axis.
        drawn["low"] = drawn["low"].where(~numbers["low"].le(0), drawn.min().min() / 1.5)
    return data.assign(**drawn), ", ".join(lost[:_MOST_NAMED])


def domain_of(
    data: pd.DataFrame, value: str, log: bool, zero: bool, more: Sequence[float]
) -> list[float] | None:
    """Return the lowest and highest drawn number with a margin, or None if there is no number.

    Args:
        data: Data of a chart, with the columns that `plot` describes.
        value: Name of the column with the values.
        log: Whether the axis is logarithmic.
        zero: Whether the axis includes zero.
        more: Further numbers that the axis includes.
    """
    values = np.append(_numbers(data, value), more)
    if "part" in data:  # A bar is as long as the sum of its parts.
        values = np.append(values, data.groupby(["panel", "series"])[value].sum())
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    low, high = float(values.min()), float(values.max())
    if log:
        margin = max((high / low) ** 0.08, 1.1)
        return [low / margin, high * margin]
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    margin = 0.06 * (high - low) or abs(low) * 0.1 or 1.0
    return [low - margin * (low != 0 or not zero), high + margin * (high != 0 or not zero)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return ticks at 1, 2 and 5 of each decade, or only at decades if there are many decades.

    If fewer than three such ticks are in the range, the ticks have equal distances.
    """
    decades = [10.0**k for k in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    found = [m * decade for decade in decades for m in (1, 2, 5) if low <= m * decade <= high]
    if len(found) < 3 and high > low:
        most = (high - low) / 3
        decade = 10.0 ** math.floor(math.log10(most))
        step = max(m * decade for m in (1, 2, 5) if m * decade <= most)
        count = range(math.ceil(low / step), math.floor(high / step) + 1)
        return [float(f"{at * step:.9g}") for at in count]
    inside = [decade for decade in decades if low <= decade <= high]
    return inside if len(found) > 7 and len(inside) > 2 else found
