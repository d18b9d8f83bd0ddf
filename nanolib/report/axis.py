"""The axis of a chart's values: its range, its ticks, and what a logarithmic one cannot show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

_MOST_NAMED = 4  # series that are named when a logarithmic axis cannot show a point


@dataclass(frozen=True)
class Axis:
    """The axis of values, the same in every layer.

    Attributes:
        title: Its title.
        channel: `x` or `y`.
        log: Whether it is logarithmic.
        domain: Its ends.
        fmt: How it writes numbers, as d3 takes it.
    """

    title: str
    channel: str
    log: bool
    domain: list[float]
    fmt: str

    def encode(self, column: str, end: str = "") -> dict[str, Any]:
        """Return the encoding that puts a column's values along the axis, or the ranges from it to another column."""
        ticks = {"values": log_ticks(*self.domain)} if self.log else {"tickCount": 5}
        scale = alt.Scale(type="log" if self.log else "linear", domain=self.domain, nice=False)
        channel = alt.Y if self.channel == "y" else alt.X
        look = {"title": self.title, "scale": scale, "axis": alt.Axis(format=self.fmt, **ticks)}
        found = {self.channel: channel(f"{column}:Q", **look)}
        return found | ({f"{self.channel}2": f"{end}:Q"} if end else {})


def _numbers(data: pd.DataFrame, value: str) -> pd.DataFrame:
    """Return the columns that are drawn along the axis: values, ends of intervals and predictions."""
    columns = [name for name in (value, "low", "high", "pred") if name in data]
    return data[columns].astype(float)


def drop_unloggable(data: pd.DataFrame, value: str) -> tuple[pd.DataFrame, str]:
    """Take what a logarithmic axis cannot show out of the data.

    Returns:
        The data, and the names of the series that lost a point.
    """
    numbers = _numbers(data, value)
    fine = numbers.gt(0) & np.isfinite(numbers)
    drawn = numbers.where(fine)
    if "low" in data:  # an interval that reaches zero is drawn to the axis
        drawn["low"] = drawn["low"].where(
            fine["low"] | numbers["low"].isna(), drawn.min().min() / 1.5
        )
    lost = data.loc[~fine[value] & numbers[value].notna(), "series"].unique()
    return data.assign(**drawn), ", ".join(lost[:_MOST_NAMED])


def domain_of(
    data: pd.DataFrame, value: str, log: bool, zero: bool, more: Sequence[float]
) -> list[float] | None:
    """Return the range of all that is drawn, with a margin; None if there is nothing to draw.

    Args:
        data: As `plot` takes it.
        value: The column of values.
        log: Whether the axis is logarithmic.
        zero: Whether it includes zero.
        more: Further values that it includes.
    """
    values = np.append(_numbers(data, value), more)
    if "part" in data:  # parts add up
        values = np.append(values, data.groupby("series")[value].sum())
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
    """Return 1, 2 and 5 of each decade; only the decades if there are many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [m * 10.0**k for k in decades for m in (1, 2, 5) if low <= m * 10.0**k <= high]
    return found if len(found) <= 7 else [10.0**k for k in decades if low <= 10.0**k <= high]
