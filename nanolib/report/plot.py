"""Draw every chart of nanolib: one function, three kinds, one theme, the same in a notebook, on the page and as a picture.

A chart is a tidy frame. `line` needs `series`, `x` and `y`; `rows` and `bars` need `series` and `x`. Other columns may be missing:
`low` and `high` (the ends of the interval), `pred` (the prediction), `sure` (False draws a hollow mark: estimated, emulated, or
not settled), `hue` (the name of a colour), `part` (of a bar), `panel` (a picture of its own), `text` (at the right), `note` (in
the tooltip).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from nanolib.measurement import format_number
from nanolib.report.theme import COLOURS, HUES, empty_chart, hues, themed

_LABEL_GAP = 14  # px between the names at the ends of lines
_MOST_NAMED = 4  # points that are named when a logarithmic axis cannot show them
_HAS_ENDS = "isValid(datum.low) && isValid(datum.high)"
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
        data, kind, log = (
            data.assign(x=data["y"]).drop(columns="y"),
            "rows",
            "x" if "y" in log else "",
        )
    defaults = {"sure": True, "text": "", "note": ""}
    data = data.assign(
        **{name: value for name, value in defaults.items() if name not in data}
    ).reset_index(drop=True)
    if "hue" not in data:
        data = data.assign(hue=data["series"].map(hues(data["series"])))
    value = "y" if kind == "line" else "x"
    left_out: list[str] = []
    if value in log:
        data, left_out = _drop_unloggable(data, value)
    if kind == "line" and "x" in log:
        data = data[np.isfinite(data["x"].astype(float)) & (data["x"] > 0)]
        if data.empty:
            return empty_chart(title, empty)
    zero = value not in log and (kind != "rows" or ref is None)
    domain = _domain(
        data, value, value in log, zero, [*(band or ()), *([] if ref is None else [ref])]
    )
    if domain is None:
        return empty_chart(
            title, f"no value can be drawn on a logarithmic axis ({', '.join(left_out)})"
        )

    def draw(part: pd.DataFrame) -> alt.LayerChart:
        guides = _guides(value, ref, band)
        if kind == "line":
            named = part if ref is None or not ref_text else _with_named_ref(part, ref, ref_text)
            return _lines(named, unit, xunit, log, fmt, domain, join, guides, width, height)
        return _across(part, kind, unit, log, fmt, domain, guides, width)

    panels = list(dict.fromkeys(data["panel"])) if "panel" in data else []
    if len(panels) == 1:
        title = f"{title}: {panels[0]}"
    if kind == "line" and data["series"].nunique() == 1:  # a title says it better than a label
        title, data = f"{title}: {data['series'].iloc[0]}", data.assign(text=" ")
    if len(panels) > 1:
        width = width // len(panels) if kind == "line" else width
        parts = [
            draw(data[data["panel"] == name]).properties(title=alt.Title(str(name), fontSize=13))
            for name in panels
        ]
        chart = (
            alt.hconcat(*parts, spacing=36) if kind == "line" else alt.vconcat(*parts, spacing=20)
        )
    else:
        chart = draw(data)
    more = [f"Not on the logarithmic axis: {', '.join(left_out)}."] if left_out else []
    under = [line for line in (*subtitle, *more) if line]
    return themed(
        chart.properties(title=alt.Title(title, **({"subtitle": under} if under else {})))
    )


def _drop_unloggable(data: pd.DataFrame, value: str) -> tuple[pd.DataFrame, list[str]]:
    """Take what a logarithmic axis cannot show out of the data: an end of an interval goes, a point is named too."""
    columns = [name for name in (value, "low", "high", "pred") if name in data]
    numbers = data[columns].astype(float)
    fine = numbers.gt(0) & np.isfinite(numbers)
    bad = data[~fine[value] & numbers[value].notna()]
    named = [f"{row['series']} ({format_number(float(row[value]))})" for _, row in bad.iterrows()]
    more = [f"{len(named) - _MOST_NAMED} more"] if len(named) > _MOST_NAMED else []
    lowest = numbers[fine].min().min()
    cut = numbers.where(fine)
    if "low" in data:  # an interval that reaches zero is drawn to the axis
        cut["low"] = cut["low"].where(fine["low"] | numbers["low"].isna(), lowest / 1.5)
    return data.assign(**{name: cut[name] for name in columns}), [*named[:_MOST_NAMED], *more]


def _with_named_ref(data: pd.DataFrame, ref: float, name: str) -> pd.DataFrame:
    """With the name of the line to compare with among those at the ends of lines."""
    row = {
        "series": name,
        "text": name,
        "note": "",
        "x": data["x"].max(),
        "pred": ref,
        "hue": "rest",
        "sure": True,
    }
    return pd.concat([data, pd.DataFrame([row])], ignore_index=True)


def _domain(
    data: pd.DataFrame, value: str, log: bool, zero: bool, more: Sequence[float]
) -> list[float] | None:
    """The range of all values, predictions and ends, with some room, from zero if asked; None if there is none."""
    columns = [name for name in (value, "low", "high", "pred") if name in data]
    values = np.append(data[columns].to_numpy(dtype=float), more)
    values = values[np.isfinite(values)]
    if "part" in data:  # parts add up
        values = np.append(values, data.groupby("series")[value].sum().to_numpy(dtype=float))
    if not len(values):
        return None
    low, high = float(values.min()), float(values.max())
    if log:
        room = max((high / low) ** 0.08, 1.1)
        return [low / room, high * room]
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    room = 0.06 * (high - low) or abs(low) * 0.1 or 1.0
    return [
        low - room if low < 0 or not zero else low,
        high + room if high > 0 or not zero else high,
    ]


def _guides(
    value: str, ref: float | None, band: tuple[float, float] | None
) -> list[tuple[alt.Chart, dict[str, Any]]]:
    """The line to compare with and the band around it, to be given the axis's encoding."""
    found: list[tuple[alt.Chart, dict[str, Any]]] = []
    if band is not None:
        frame = pd.DataFrame({value: [band[0]], f"{value}2": [band[1]]})
        found.append(
            (
                alt.Chart(frame).mark_rect(color=COLOURS["c3"], opacity=0.14),
                {f"{value}2": f"{value}2:Q"},
            )
        )
    if ref is not None:
        found.append((alt.Chart(pd.DataFrame({value: [ref]})).mark_rule(strokeWidth=1.2), {}))
    return found


def _axis(title: str, log: bool, domain: Sequence[float], fmt: str) -> dict[str, Any]:
    """Title, scale and axis of values, the same in every layer."""
    ticks: dict[str, Any] = {"values": _log_ticks(*domain)} if log else {"tickCount": 5}
    scale = alt.Scale(type="log" if log else "linear", domain=list(domain), nice=False)
    return {"title": title, "scale": scale, "axis": alt.Axis(format=fmt, **ticks)}


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of each decade, or the decades only if there are many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [m * 10.0**k for k in decades for m in (1, 2, 5) if low <= m * 10.0**k <= high]
    return found if len(found) <= 7 else [10.0**k for k in decades if low <= 10.0**k <= high]


def _colour() -> alt.Color:
    return alt.Color(
        "hue:N", scale=alt.Scale(domain=HUES, range=[COLOURS[hue] for hue in HUES]), legend=None
    )


def _points(
    base: alt.Chart, along: Mapping[str, Any], tooltip: list[alt.Tooltip], size: int
) -> alt.Chart:
    """Filled where a value was measured and settled, else hollow."""
    fill = alt.condition("datum.sure", _colour(), alt.value(COLOURS["paper"]))
    mark = base.mark_point(size=size, strokeWidth=1.8, opacity=1)
    return mark.encode(**along, fill=fill, stroke=_colour(), tooltip=tooltip)


def _tooltip(data: pd.DataFrame, value: str, unit: str, xunit: str = "") -> list[alt.Tooltip]:
    """What a point shows: its name, place, value with its ends, prediction and note, as far as they are known."""
    fields = [("series", "", ""), ("panel", "", ""), ("part", "", "")]
    fields += [("x", xunit or "x", ",.6~g")] if value == "y" else []
    fields += [(value, unit or "value", ",.4~g"), ("low", "from", ",.4~g"), ("high", "to", ",.4~g")]
    fields += [("pred", "predicted", ",.4~g"), ("note", "", "")]
    return [
        alt.Tooltip(
            f"{name}:{'Q' if form else 'N'}",
            **({"title": title} if title else {}),
            **({"format": form} if form else {}),
        )
        for name, title, form in fields
        if name in data and data[name].replace("", np.nan).notna().any()
    ]


def _lines(
    data: pd.DataFrame,
    unit: str,
    xunit: str,
    log: str,
    fmt: str,
    domain: Sequence[float],
    join: bool,
    guides: list[tuple[alt.Chart, dict[str, Any]]],
    width: int,
    height: int,
) -> alt.LayerChart:
    logx, logy = "x" in log, "y" in log
    places = sorted(float(x) for x in data["x"].unique())
    room = (places[-1] / places[0]) ** 0.04 if logx else (places[-1] - places[0]) * 0.03
    reach = (
        [places[0] / room, places[-1] * room**0.2]
        if logx
        else [places[0] - room, places[-1] + 0.2 * room]
    )
    few: dict[str, Any] = {"values": _log_ticks(*reach)} if logx else {"tickCount": 6}
    if join and len(places) <= 12:
        few = {"values": places}
    axis = alt.Axis(grid=False, labelExpr=_SHORT_COUNT, labelOverlap=True, **few)
    x = alt.X(
        "x:Q",
        title=xunit,
        scale=alt.Scale(type="log" if logx else "linear", domain=reach, nice=False),
        axis=axis,
    )
    at = _axis(unit, logy, domain, fmt)
    y = alt.Y("y:Q", **at)
    label = data["text"].where(data["text"] != "", data["series"]).astype(str)
    data = data.assign(label=label, end=_label_heights(data, domain, logy, height))
    base = alt.Chart(data).encode(x=x)
    apart = [
        name for name in ("series", "link_run") if name in data
    ]  # points of two runs are not joined
    coloured = base.encode(color=_colour(), detail=[alt.Detail(f"{name}:N") for name in apart])
    layers = [guide.encode(y=alt.Y("y:Q", **at), **more) for guide, more in guides]
    if "pred" in data:
        dashed = coloured.mark_line(strokeDash=[3, 3], strokeWidth=1.4, clip=True)
        layers.append(
            dashed.transform_filter("isValid(datum.pred)").encode(y=alt.Y("pred:Q", **at))
        )
    if "low" in data:
        ends = coloured.mark_rule(strokeWidth=1.8, clip=True).transform_filter(_HAS_ENDS)
        layers.append(ends.encode(y=alt.Y("low:Q", **at), y2="high:Q"))
    measured = "isValid(datum.y)"
    if join:
        layers.append(
            coloured.mark_line(strokeWidth=2, clip=True).transform_filter(measured).encode(y=y)
        )
    small = len(data) > 200
    points = base.transform_filter(measured)
    layers.append(_points(points, {"y": y}, _tooltip(data, "y", unit, xunit), 14 if small else 46))
    last = base.transform_filter("isValid(datum.end)")
    last = last.transform_joinaggregate(last="max(x)", groupby=["series"]).transform_filter(
        "datum.x == datum.last"
    )
    for grey in (True, False):  # the grey of a line is too pale for words
        words = last.transform_filter(f"(datum.hue == 'rest') == {str(grey).lower()}").mark_text(
            align="left", dx=9
        )
        words = words if grey else words.encode(color=_colour())
        layers.append(words.encode(y=alt.Y("end:Q", **at), text="label:N"))
    return alt.layer(*layers, width=width, height=height)


def _label_heights(
    data: pd.DataFrame, domain: Sequence[float], log: bool, height: int
) -> pd.Series:
    """Where a name next to each point goes, in the value's unit, so that the names at one `x` do not cover each other."""
    turn, back = (math.log, math.exp) if log else (float, float)
    px = height / (turn(domain[1]) - turn(domain[0]))
    shown = data["y"].fillna(data["pred"]) if "pred" in data else data["y"]
    found = pd.Series(np.nan, index=data.index)
    for _, group in data[shown.notna()].groupby("x"):
        at = (shown[group.index].map(turn) * px).sort_values()
        heights = at.to_numpy(copy=True)
        for _ in range(40):
            for lower in range(len(heights) - 1):
                if (lack := _LABEL_GAP - (heights[lower + 1] - heights[lower])) > 0.01:
                    heights[lower : lower + 2] += (-lack / 2, lack / 2)
        found[at.index] = [back(height_px / px) for height_px in heights]
    return found


def _across(
    data: pd.DataFrame,
    kind: str,
    unit: str,
    log: str,
    fmt: str,
    domain: Sequence[float],
    guides: list[tuple[alt.Chart, dict[str, Any]]],
    width: int,
) -> alt.LayerChart:
    at = _axis(unit, "x" in log, domain, fmt)
    x = alt.X("x:Q", **at)
    rows = list(dict.fromkeys(data["series"]))
    if kind == "bars":
        parts = list(dict.fromkeys(data["part"]))
        data = data.assign(
            place=data["part"].map(parts.index),
            text=data["text"].where(~data["series"].duplicated(), ""),
        )
    y = alt.Y(
        "series:N",
        title=None,
        sort=rows,
        axis=alt.Axis(labelColor=COLOURS["ink"], grid=False),
    )
    base = alt.Chart(data).encode(y=y)
    layers = [guide.encode(x=x, **more) for guide, more in guides]
    if kind == "bars":
        colours = [COLOURS[HUES[min(at, len(HUES) - 1)]] for at in range(len(parts))]
        part = alt.Color("part:N", sort=parts, scale=alt.Scale(domain=parts, range=colours))
        bars = base.mark_bar(stroke=COLOURS["paper"], strokeWidth=1)
        layers.append(
            bars.encode(x=x, color=part, order="place:Q", tooltip=_tooltip(data, "x", unit))
        )
    else:
        coloured = base.encode(color=_colour())
        if "low" in data:
            ends = coloured.mark_rule(strokeWidth=2).transform_filter(_HAS_ENDS)
            layers.append(ends.encode(x=alt.X("low:Q", **at), x2="high:Q"))
        if "pred" in data:
            ticks = coloured.mark_tick(thickness=2, size=15).transform_filter("isValid(datum.pred)")
            layers.append(ticks.encode(x=alt.X("pred:Q", **at)))
        crowded = data.groupby("series").size().max() > 3
        points = base.transform_filter("isValid(datum.x)")
        layers.append(_points(points, {"x": x}, _tooltip(data, "x", unit), 20 if crowded else 56))
    words = base.transform_filter("datum.text != ''").mark_text(align="left", dx=8)
    layers.append(words.encode(x=alt.value("width"), text="text:N"))
    return alt.layer(*layers, width=width, height=alt.Step(26))
