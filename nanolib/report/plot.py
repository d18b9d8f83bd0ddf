"""Draw every chart of nanolib: one function, three kinds, one theme, the same in a notebook, on the page and as a picture.

A chart is a tidy frame. `line` needs `series`, `x` and `y`; `rows` and `bars` need `series` and `x`. Other columns may be missing:
`low` and `high` (the ends of the interval), `pred` (the prediction), `sure` (False draws a hollow mark: estimated, emulated, or
not settled), `hue` (the name of a color), `part` (of a bar), `panel` (a picture of its own), `text` (at the right), `note` (in
the tooltip).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from nanolib.report.axis import Axis, domain_of, drop_unloggable, log_ticks
from nanolib.report.theme import COLOURS, HUES, empty_chart, hues, themed

_LABEL_GAP = 14  # px between the names at the ends of lines
_SHORT_COUNT = (
    "datum.value < 16384 ? format(datum.value, ',~r') : datum.value < 1048576 ? datum.value / 1024 + 'K' : "
    "datum.value / 1048576 + 'M'"
)


def plot(
    data: pd.DataFrame | None,
    title: str,
    kind: str = "line",
    *,
    subtitle: Sequence[str] = (),
    unit: str = "",
    xunit: str = "",
    log: str = "",
    ref: float | None = None,
    ref_text: str = "",
    band: tuple[float, float] | None = None,
    fmt: str = ",.3~r",
    join: bool = True,
    width: int = 640,
    height: int = 260,
    empty: str = "nothing was measured",
) -> alt.TopLevelMixin:
    """Draw one chart, or one per `panel` next to each other.

    Args:
        data: See above. A line over a single `x` is drawn as rows.
        title: What the chart shows.
        kind: `line` (a value over something ordered), `rows` (a row per series) or `bars` (parts of a whole, a bar per series).
        subtitle: Lines under the title.
        unit: Title of the axis of values.
        xunit: Title of the axis that a line goes over.
        log: Which axes are logarithmic: `x`, `y` or `xy`.
        ref: A value to compare with, drawn as a line.
        ref_text: Its name, at the line's end.
        band: Two values between which a difference does not count.
        fmt: How the axis of values writes numbers, as d3 takes it.
        join: Whether a line joins the points of a series.
        width: Of each line chart or row of bars, px.
        height: Of a line chart, px; rows and bars take what they need.
        empty: Why there is nothing to draw, if there is nothing.
    """
    if data is None or data.empty:
        return empty_chart(title, empty)
    if kind == "line" and join and data["x"].nunique() == 1:
        data = data.assign(x=data["y"]).drop(columns="y")
        kind, log = "rows", "x" if "y" in log else ""
    data = data.reset_index(drop=True)
    known = {"sure": True, "text": "", "note": "", "hue": data["series"].map(hues(data["series"]))}
    data = pd.DataFrame(known | dict(data.items()))
    value = "y" if kind == "line" else "x"
    under = [line for line in subtitle if line]
    if kind == "line" and "x" in log:
        data = data[np.isfinite(data["x"].astype(float)) & (data["x"] > 0)]
    if value in log:
        data, left_out = drop_unloggable(data, value)
        under += [f"Not on the logarithmic axis: {left_out}."] if left_out else []
    more = [*(band or ()), *([] if ref is None else [ref])]
    zero = value not in log and (kind != "rows" or ref is None)
    domain = domain_of(data, value, value in log, zero, more)
    if domain is None:
        return empty_chart(title, " ".join(under) or empty)
    axis = Axis(unit, value, value in log, domain, fmt)
    panels = list(dict.fromkeys(data["panel"])) if "panel" in data else []
    if len(panels) == 1:
        title = f"{title}: {panels[0]}"
    if kind == "line" and data["series"].nunique() == 1:  # a title says it better than a label
        title, data = f"{title}: {data['series'].iloc[0]}", data.assign(text=" ")

    if kind == "line" and len(panels) > 1:
        width //= len(panels)

    def draw(part: pd.DataFrame) -> alt.LayerChart:
        if kind == "line":
            part, layers = _lines(part, axis, xunit, "x" in log, join, height)
        else:
            part, layers = _across(part, kind, axis)
        size = height if kind == "line" else alt.Step(26)
        guides = _guides(axis, ref, ref_text, band)
        return alt.layer(*guides, *layers, data=part, width=width, height=size)

    if len(panels) > 1:
        parts = [
            draw(data[data["panel"] == name]).properties(title=alt.Title(str(name), fontSize=13))
            for name in panels
        ]
        chart = (alt.hconcat if kind == "line" else alt.vconcat)(*parts, spacing=28)
    else:
        chart = draw(data)
    words = {"subtitle": under} if under else {}
    return themed(chart.properties(title=alt.Title(title, **words)))


def _guides(
    axis: Axis, ref: float | None, name: str, band: tuple[float, float] | None
) -> list[alt.Chart]:
    """The band in which a difference does not count, and the line to compare with, by its name."""
    found = []
    if band is not None:
        ends = alt.Chart(pd.DataFrame({"from": [band[0]], "to": [band[1]]}))
        mark = ends.mark_rect(color=COLOURS["c3"], opacity=0.14)
        found.append(mark.encode(**axis.on("from"), **{f"{axis.value}2": "to:Q"}))
    if ref is not None:
        at = alt.Chart(pd.DataFrame({"at": [ref]})).encode(**axis.on("at"))
        found.append(at.mark_rule(strokeWidth=1.2))
        if name:
            words = at.mark_text(text=name, align="left", dx=9)
            found.append(words.encode(x=alt.value("width")))
    return found


def _color() -> alt.Color:
    scale = alt.Scale(domain=HUES, range=[COLOURS[hue] for hue in HUES])
    return alt.Color("hue:N", scale=scale, legend=None)


def _tooltip(data: pd.DataFrame, axis: Axis, xunit: str = "") -> list[alt.Tooltip]:
    """What a point shows: its name, place, value with its ends, prediction and note, as far as they are known."""
    value, number = axis.value, ",.4~g"
    fields = [("series", "series", ""), ("panel", "panel", ""), ("part", "part", "")]
    fields += [("x", xunit or "x", ",.6~g")] if value == "y" else []
    fields += [(value, axis.title or "value", number), ("low", "from", number)]
    fields += [("high", "to", number), ("pred", "predicted", number), ("note", "note", "")]
    return [
        alt.Tooltip(f"{name}:{'Q' if form else 'N'}", title=title, format=form)
        for name, title, form in fields
        if name in data and data[name].replace("", np.nan).notna().any()
    ]


def _marks(
    base: alt.Chart, data: pd.DataFrame, axis: Axis, size: int, xunit: str = ""
) -> tuple[list[alt.Chart], alt.Chart]:
    """The intervals, and the points: filled where a value was measured and settled, else hollow."""
    ends = []
    if "low" in data:
        rules = base.mark_rule(strokeWidth=1.8, clip=True).encode(color=_color())
        rules = rules.transform_filter("isValid(datum.low) && isValid(datum.high)")
        ends.append(rules.encode(**axis.on("low"), **{f"{axis.value}2": "high:Q"}))
    fill = alt.condition("datum.sure", _color(), alt.value(COLOURS["paper"]))
    points = base.transform_filter(f"isValid(datum.{axis.value})")
    points = points.mark_point(size=size, strokeWidth=1.8, opacity=1)
    tooltip = _tooltip(data, axis, xunit)
    found = points.encode(**axis.on(axis.value), fill=fill, stroke=_color(), tooltip=tooltip)
    return ends, found


def _lines(
    data: pd.DataFrame, axis: Axis, xunit: str, log: bool, join: bool, height: int
) -> tuple[pd.DataFrame, list[alt.Chart]]:
    places = sorted(float(x) for x in data["x"].unique())
    ends = [places[0], places[-1]]
    ticks: dict[str, Any] = {"values": log_ticks(*ends)} if log else {"tickCount": 6}
    if join and len(places) <= 12:
        ticks = {"values": places}
    x = alt.X(
        "x:Q",
        title=xunit,
        scale=alt.Scale(type="log" if log else "linear", domain=ends, padding=8, nice=False),
        axis=alt.Axis(grid=False, labelExpr=_SHORT_COUNT, labelOverlap=True, **ticks),
    )
    label = data["text"].where(data["text"] != "", data["series"]).astype(str)
    data = data.assign(label=label, end=_label_heights(data, axis, height))
    # points of two runs are not joined
    apart = [alt.Detail(f"{name}:N") for name in ("series", "link_run") if name in data]
    base = alt.Chart().encode(x=x)
    lines = base.encode(color=_color(), detail=apart)
    ends, points = _marks(base, data, axis, 14 if len(data) > 200 else 46, xunit)
    layers = list(ends)
    if "pred" in data:
        dashed = lines.mark_line(strokeDash=[3, 3], strokeWidth=1.4, clip=True)
        dashed = dashed.transform_filter("isValid(datum.pred)").encode(**axis.on("pred"))
        layers.insert(0, dashed)
    if join:
        joined = lines.mark_line(strokeWidth=2, clip=True).transform_filter("isValid(datum.y)")
        layers.append(joined.encode(**axis.on("y")))
    names = base.transform_filter("isValid(datum.end)")
    names = names.transform_joinaggregate(last="max(x)", groupby=["series"])
    names = names.transform_filter("datum.x == datum.last").mark_text(align="left", dx=9)
    # the grey of a line is too pale for words
    ink = alt.condition("datum.hue == 'rest'", alt.value(COLOURS["muted"]), _color())
    named = names.encode(**axis.on("end"), text="label:N", color=ink)
    return data, [*layers, points, named]


def _label_heights(data: pd.DataFrame, axis: Axis, height: int) -> pd.Series:
    """Where a name next to each point goes, in the value's unit, so that the names at one `x` do not cover each other."""
    turn, back = (math.log, math.exp) if axis.log else (float, float)
    px = height / (turn(axis.domain[1]) - turn(axis.domain[0]))
    shown = data["y"].fillna(data["pred"]) if "pred" in data else data["y"]
    found = pd.Series(np.nan, index=data.index)
    for _, group in shown.dropna().groupby(data["x"]):
        at = (group.map(turn) * px).sort_values()
        steps = _LABEL_GAP * np.arange(len(at))
        free = at.to_numpy() - steps
        # halfway between pushing names up and pushing them down, both of which keep the gap
        both = np.maximum.accumulate(free) + np.minimum.accumulate(free[::-1])[::-1]
        found[at.index] = [back(one / px) for one in both / 2 + steps]
    return found


def _across(data: pd.DataFrame, kind: str, axis: Axis) -> tuple[pd.DataFrame, list[alt.Chart]]:
    ink = alt.Axis(labelColor=COLOURS["ink"], grid=False)
    y = alt.Y("series:N", title=None, sort=list(dict.fromkeys(data["series"])), axis=ink)
    if kind == "bars":
        parts = list(dict.fromkeys(data["part"]))
        data = data.assign(
            place=data["part"].map(parts.index),
            text=data["text"].where(~data["series"].duplicated(), ""),
        )
        colors = [COLOURS[HUES[min(at, len(HUES) - 1)]] for at in range(len(parts))]
        part = alt.Color("part:N", sort=parts, scale=alt.Scale(domain=parts, range=colors))
    base = alt.Chart().encode(y=y)
    if kind == "bars":
        bars = base.mark_bar(stroke=COLOURS["paper"], strokeWidth=1)
        tooltip = _tooltip(data, axis)
        layers = [bars.encode(**axis.on("x"), color=part, order="place:Q", tooltip=tooltip)]
    else:
        crowded = data.groupby("series").size().max() > 3
        ends, points = _marks(base, data, axis, 20 if crowded else 56)
        layers = [*ends, points]
    if "pred" in data:
        ticks = base.mark_tick(thickness=2, size=15).transform_filter("isValid(datum.pred)")
        layers.insert(-1, ticks.encode(**axis.on("pred"), color=_color()))
    words = base.transform_filter("datum.text != ''").mark_text(align="left", dx=8)
    return data, [*layers, words.encode(x=alt.value("width"), text="text:N")]
