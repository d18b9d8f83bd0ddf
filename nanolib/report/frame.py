"""What charts have in common: a frame with a title that says why it is empty, panels, marks with their intervals, tooltips."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import altair as alt
import pandas as pd

from nanolib.report.drawing import Chart, each_machine, empty_chart, theme, why_empty
from nanolib.report.overview import of_experiment
from nanolib.report.palette import FRAME

# What is drawn, the lines under its title, and where they depend on the rows, words after the title.
Drawn = tuple[alt.TopLevelMixin, str | Sequence[str]] | tuple[alt.TopLevelMixin, str | Sequence[str], str]

HOLLOW = {"filled": False, "strokeWidth": 2}  # the mark of a point that a condition fills


def framed(
    title: str, experiment: str = "", why: str = ""
) -> Callable[[Callable[[pd.DataFrame], Drawn | str | None]], Chart]:
    """Make a chart of what draws its marks.

    Args:
        title: Of the chart.
        experiment: Whose rows it is of: where there is nothing to draw they say why.
        why: Why there is nothing to draw, in the place of that; what draws may give a reason of its own.
    """

    def decorate(draw: Callable[[pd.DataFrame], Drawn | str | None]) -> Chart:
        @each_machine(experiment)
        @functools.wraps(draw)
        def chart(rows: pd.DataFrame) -> alt.TopLevelMixin:
            drawn = draw(rows)
            if isinstance(drawn, str):
                return empty_chart(title, drawn)
            if drawn is None:
                return empty_chart(title, why or why_empty(of_experiment(rows, experiment), experiment))
            marks, subtitle, *more = drawn
            under = {"subtitle": subtitle} if subtitle else {}
            return theme(marks.properties(title=alt.Title(title + "".join(more), **under)))

        return chart

    return decorate


def panels(
    data: pd.DataFrame,
    draw: Callable[[pd.DataFrame], alt.TopLevelMixin],
    by: str = "panel",
    *,
    columns: int = 0,
    spacing: int = 24,
) -> alt.TopLevelMixin:
    """One chart per value of a column, each of its own rows: faceting layered charts by a field breaks in older Vega.

    Args:
        data: Of all panels.
        draw: Draws one.
        by: The column; its values are the panels' titles.
        columns: How many stand side by side; 0 for all.
        spacing: Between them, px.
    """
    parts = [(str(name), data[data[by] == name]) for name in dict.fromkeys(data[by])]
    charts = [draw(part).properties(title=alt.Title(name, fontSize=12)) for name, part in parts]
    return alt.concat(*charts, columns=columns, spacing=spacing) if columns else alt.hconcat(*charts, spacing=spacing)


def with_interval(
    base: alt.Chart,
    channel: str,
    fields: tuple[str, str, str],
    axis: dict[str, Any],
    *,
    size: int = 60,
    stroke: int = 2,
    mark: dict[str, Any] | None = None,
    **encodings: Any,
) -> list[alt.Chart]:
    """A rule from one end of an interval to the other, and a point on the estimate.

    Args:
        base: With what both share.
        channel: `x` or `y`, along which the interval lies.
        fields: Columns of the estimate and the two ends.
        axis: Title and scale of the channel; both have the same, or Vega joins two titles.
        size: Of the point.
        stroke: Width of the rule.
        mark: More of the point's mark.
        encodings: Of the point alone: shape, tooltip, fill.
    """
    estimate, low, high = fields
    along = {"x": alt.X, "y": alt.Y}[channel]
    to = {"x": alt.X2, "y": alt.Y2}[channel]
    ends = {name: value for name, value in axis.items() if name != "axis"}
    point = {"filled": True} | (mark or {})
    return [
        base.mark_rule(strokeWidth=stroke).encode(
            **{channel: along(f"{low}:Q", **ends), f"{channel}2": to(f"{high}:Q")}
        ),
        base.mark_point(size=size, opacity=1, **point).encode(**{channel: along(f"{estimate}:Q", **axis)}, **encodings),
    ]


def rule(channel: str, value: float, axis: dict[str, Any], name: str, **mark: Any) -> alt.Chart:
    """A line across a chart, where the channel `x` or `y` has a value; `name` is what its column is called."""
    at = {"x": alt.X, "y": alt.Y}[channel](f"{name}:Q", **axis)
    return alt.Chart(pd.DataFrame({name: [value]})).mark_rule(**{"color": FRAME} | mark).encode(**{channel: at})


def tooltips(names: str, numbers: str = "", format: str = ".3~g", **titles: str) -> list[alt.Tooltip]:
    """A tooltip of texts, then of numbers.

    Args:
        names: Columns of text, with spaces between them.
        numbers: Columns of numbers likewise.
        format: How the numbers are written, as d3 takes it.
        titles: Column → what it is called, where its own name is not for people.
    """

    def tooltip(name: str, kind: str, **form: str) -> alt.Tooltip:
        title = {"title": titles[name]} if name in titles else {}
        return alt.Tooltip(f"{name}:{kind}", **title, **form)

    return [
        *(tooltip(name, "N") for name in names.split()),
        *(tooltip(name, "Q", format=format) for name in numbers.split()),
    ]
