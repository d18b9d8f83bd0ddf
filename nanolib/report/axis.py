"""The axis of a chart's values: its range, its ticks, and what a logarithmic one cannot show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

_MOST_NAMED = 4  # series that are named when a logarithmic axis cannot show a point


class Axis:
    """The axis of values, the same in every layer.

    Args:
        title: Its title.
        value: `x` or `y`.
        log: Whether it is logarithmic.
        domain: Its ends.
        fmt: How it writes numbers.
    """

    def __init__(self, title: str, value: str, log: bool, domain: list[float], fmt: str) -> None:
        self.title, self.value, self.log, self.domain = title, value, log, domain
        ticks: dict[str, Any] = {"values": log_ticks(*domain)} if log else {"tickCount": 5}
        scale = alt.Scale(type="log" if log else "linear", domain=domain, nice=False)
        self._of = {"title": title, "scale": scale, "axis": alt.Axis(format=fmt, **ticks)}

    def on(self, column: str) -> dict[str, Any]:
        """The encoding that puts a column's values along it."""
        channel = alt.Y if self.value == "y" else alt.X
        return {self.value: channel(f"{column}:Q", **self._of)}


def drop_unloggable(data: pd.DataFrame, value: str) -> tuple[pd.DataFrame, str]:
    """Take what a logarithmic axis cannot show out of the data: an end of an interval goes, a series with a point is named too."""
    columns = [name for name in (value, "low", "high", "pred") if name in data]
    numbers = data[columns].astype(float)
    fine = numbers.gt(0) & np.isfinite(numbers)
    cut = numbers.where(fine)
    if "low" in data:  # an interval that reaches zero is drawn to the axis
        cut["low"] = cut["low"].where(fine["low"] | numbers["low"].isna(), cut.min().min() / 1.5)
    lost = data.loc[~fine[value] & numbers[value].notna(), "series"].unique()
    return data.assign(**cut), ", ".join(lost[:_MOST_NAMED])


def domain_of(
    data: pd.DataFrame, value: str, log: bool, zero: bool, more: Sequence[float]
) -> list[float] | None:
    """The range of all values, predictions and ends, with some room, from zero if asked; None if there is none."""
    columns = [name for name in (value, "low", "high", "pred") if name in data]
    values = np.append(data[columns].to_numpy(dtype=float), more)
    if "part" in data:  # parts add up
        values = np.append(values, data.groupby("series")[value].sum())
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    low, high = float(values.min()), float(values.max())
    if log:
        room = max((high / low) ** 0.08, 1.1)
        return [low / room, high * room]
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    room = 0.06 * (high - low) or abs(low) * 0.1 or 1.0
    return [low - room * (low != 0 or not zero), high + room * (high != 0 or not zero)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of each decade, or the decades only if there are many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [m * 10.0**k for k in decades for m in (1, 2, 5) if low <= m * 10.0**k <= high]
    return found if len(found) <= 7 else [10.0**k for k in decades if low <= 10.0**k <= high]
