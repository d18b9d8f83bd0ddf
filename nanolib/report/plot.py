"""Draw every chart of nanolib: one function, three kinds, one theme, the same in a notebook, on the page and as a picture.

A chart is a tidy frame. `line` needs `series`, `x` and `y`; `rows` and `bars` need `series` and `x`. Further columns are optional:

- `low` and `high`: the ends of the interval.
- `pred`: the prediction.
- `sure`: False draws a hollow mark (estimated, emulated, or not settled).
- `hue`: the name of a color.
- `part`: the part of a bar.
- `panel`: a picture of its own.
- `text`: words at the right.
- `note`: words in the tooltip.
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

_HEIGHT = 260  # of a line chart, px
_LABEL_GAP = 14  # px between the names at the ends of lines
_SHORT_COUNT = (
    "datum.value < 16384 ? format(datum.value, ',~r') : datum.value < 1048576 ? datum.value / 1024 + 'K' : "
    "datum.value / 1048576 + 'M'"
)
_Layers = list[alt.Chart]


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
    width: int = 680,
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
        width: Of all panels together, px.
        empty: Why there is nothing to draw, if there is nothing.
    """
    if data is None or data.empty:
        return empty_chart(title, empty)
    if kind == "line" and join and data["x"].nunique() == 1:
        data = data.assign(x=data["y"]).drop(columns="y")
        kind, log = "rows", "x" if "y" in log else ""
    is_line = kind == "line"
    value = "y" if is_line else "x"
    data = data.reset_index(drop=True)
    defaults = {
        "sure": True,
        "text": "",
        "note": "",
        "hue": data["series"].map(hues(data["series"])),
    }
    data = pd.DataFrame(defaults | dict(data.items()))
    lines = [line for line in subtitle if line]
    if value in log:
        data, left_out = drop_unloggable(data, value)
        lines += [f"Not on the logarithmic axis: {left_out}."] if left_out else []
    guides = [*(band or ()), *([] if ref is None else [ref])]
    has_zero = value not in log and (kind != "rows" or ref is None)
    domain = domain_of(data, value, value in log, has_zero, guides)
    if domain is None:
        return empty_chart(title, " ".join(lines) or empty)
    axis = Axis(unit, value, value in log, domain, fmt)
    panels = dict(iter(data.groupby("panel", sort=False))) if "panel" in data else {"": data}
    if len(panels) == 1:
        title = ": ".join(filter(None, (title, *panels)))
    if is_line and data["series"].nunique() == 1:  # a title says it better than a label
        title = f"{title}: {data['series'].iloc[0]}"
        panels = {name: part.assign(text=" ") for name, part in panels.items()}

    def draw(part: pd.DataFrame) -> alt.LayerChart:
        size = {"width": width, "height": alt.Step(26)}
        if is_line:
            size = {"width": width // len(panels), "height": _HEIGHT}
            part, layers = _draw_lines(part, axis, xunit, "x" in log, join)
        elif kind == "bars":
            part, layers = _draw_bars(part, axis)
        else:
            layers = _draw_rows(part, axis)
        return alt.layer(*_draw_guides(axis, ref, ref_text, band), *layers, data=part, **size)

    charts = [draw(part) for part in panels.values()]
    (chart, *others) = charts
    if others:
        named = (
            one.properties(title=alt.Title(str(name), fontSize=13))
            for one, name in zip(charts, panels, strict=True)
        )
        chart = (alt.hconcat if is_line else alt.vconcat)(*named, spacing=28)
    words = {"subtitle": lines} if lines else {}
    return themed(chart.properties(title=alt.Title(title, **words)))


def _draw_guides(
    axis: Axis, ref: float | None, name: str, band: tuple[float, float] | None
) -> _Layers:
    """Draw the band in which a difference does not count, and the line to compare with, by its name."""
    layers = []
    if band is not None:
        ends = alt.Chart(pd.DataFrame({"from": [band[0]], "to": [band[1]]}))
        mark = ends.mark_rect(color=COLOURS["c3"], opacity=0.14)
        layers.append(mark.encode(**axis.encode("from", "to")))
    if ref is not None:
        at = alt.Chart(pd.DataFrame({"at": [ref]})).encode(**axis.encode("at"))
        layers.append(at.mark_rule(strokeWidth=1.2))
        if name:
            words = at.mark_text(text=name, align="left", dx=9)
            layers.append(words.encode(x=alt.value("width")))
    return layers


def _color() -> alt.Color:
    scale = alt.Scale(domain=HUES, range=[COLOURS[hue] for hue in HUES])
    return alt.Color("hue:N", scale=scale, legend=None)


def _tooltip(data: pd.DataFrame, axis: Axis, xunit: str = "") -> list[alt.Tooltip]:
    """List what a point shows: its name, place, value with its ends, prediction and note, as far as they are known."""
    fields = {name: (name, "") for name in ("series", "panel", "part")}
    if axis.channel == "y":
        fields["x"] = xunit or "x", ",.6~g"
    titles = {axis.channel: axis.title or "value", "low": "from", "high": "to", "pred": "predicted"}
    fields |= {name: (title, ",.4~g") for name, title in titles.items()}
    fields["note"] = "note", ""
    return [
        alt.Tooltip(f"{name}:{'Q' if form else 'N'}", title=title, format=form)
        for name, (title, form) in fields.items()
        if name in data and data[name].replace("", np.nan).notna().any()
    ]


def _draw_marks(
    base: alt.Chart, data: pd.DataFrame, axis: Axis, size: int, xunit: str = ""
) -> tuple[_Layers, alt.Chart]:
    """Draw the intervals, and the points: filled if a value was measured and settled, else hollow."""
    intervals = []
    if "low" in data:
        rules = base.mark_rule(strokeWidth=1.8, clip=True).encode(color=_color())
        rules = rules.transform_filter("isValid(datum.low) && isValid(datum.high)")
        intervals.append(rules.encode(**axis.encode("low", "high")))
    fill = alt.condition("datum.sure", _color(), alt.value(COLOURS["paper"]))
    points = base.transform_filter(f"isValid(datum.{axis.channel})")
    points = points.mark_point(size=size, strokeWidth=1.8, opacity=1)
    look = {"fill": fill, "stroke": _color(), "tooltip": _tooltip(data, axis, xunit)}
    return intervals, points.encode(**axis.encode(axis.channel), **look)


def _draw_lines(
    data: pd.DataFrame, axis: Axis, xunit: str, log: bool, join: bool
) -> tuple[pd.DataFrame, _Layers]:
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
    data = data.assign(label=label, end=_label_heights(data, axis))
    # points of two runs are not joined
    apart = [alt.Detail(f"{name}:N") for name in ("series", "link_run") if name in data]
    base = alt.Chart().encode(x=x)
    lines = base.encode(color=_color(), detail=apart)
    layers, points = _draw_marks(base, data, axis, 14 if len(data) > 200 else 46, xunit)
    if "pred" in data:
        dashed = lines.mark_line(strokeDash=[3, 3], strokeWidth=1.4, clip=True)
        dashed = dashed.transform_filter("isValid(datum.pred)").encode(**axis.encode("pred"))
        layers.insert(0, dashed)
    if join:
        joined = lines.mark_line(strokeWidth=2, clip=True).transform_filter("isValid(datum.y)")
        layers.append(joined.encode(**axis.encode("y")))
    names = base.transform_filter("isValid(datum.end)")
    names = names.transform_joinaggregate(last="max(x)", groupby=["series"])
    names = names.transform_filter("datum.x == datum.last").mark_text(align="left", dx=9)
    # the grey of a line is too pale for words
    ink = alt.condition("datum.hue == 'rest'", alt.value(COLOURS["muted"]), _color())
    named = names.encode(**axis.encode("end"), text="label:N", color=ink)
    return data, [*layers, points, named]


def _label_heights(data: pd.DataFrame, axis: Axis) -> pd.Series:
    """Place a name next to each point, in the value's unit, so that the names at one `x` do not cover each other."""
    scale, unscale = (math.log, math.exp) if axis.log else (float, float)
    px = _HEIGHT / (scale(axis.domain[1]) - scale(axis.domain[0]))
    drawn = data["y"].fillna(data["pred"]) if "pred" in data else data["y"]
    found = pd.Series(np.nan, index=data.index)
    for _, group in drawn.dropna().groupby(data["x"]):
        at = (group.map(scale) * px).sort_values()
        steps = _LABEL_GAP * np.arange(len(at))
        free = at.to_numpy() - steps
        # halfway between pushing names up and pushing them down, both of which keep the gap
        both = np.maximum.accumulate(free) + np.minimum.accumulate(free[::-1])[::-1]
        found[at.index] = [unscale(one / px) for one in both / 2 + steps]
    return found


def _in_rows(data: pd.DataFrame) -> alt.Chart:
    """Give each series a row, in the order of the data."""
    ink = alt.Axis(labelColor=COLOURS["ink"], grid=False)
    order = list(dict.fromkeys(data["series"]))
    return alt.Chart().encode(y=alt.Y("series:N", title=None, sort=order, axis=ink))


def _draw_words(base: alt.Chart) -> alt.Chart:
    words = base.transform_filter("datum.text != ''").mark_text(align="left", dx=8)
    return words.encode(x=alt.value("width"), text="text:N")


def _draw_rows(data: pd.DataFrame, axis: Axis) -> _Layers:
    base = _in_rows(data)
    is_crowded = data.groupby("series").size().max() > 3
    layers, points = _draw_marks(base, data, axis, 20 if is_crowded else 56)
    if "pred" in data:
        ticks = base.mark_tick(thickness=2, size=15).transform_filter("isValid(datum.pred)")
        layers.append(ticks.encode(**axis.encode("pred"), color=_color()))
    return [*layers, points, _draw_words(base)]


def _draw_bars(data: pd.DataFrame, axis: Axis) -> tuple[pd.DataFrame, _Layers]:
    parts = list(dict.fromkeys(data["part"]))
    once = data["text"].where(~data["series"].duplicated(), "")
    data = data.assign(place=data["part"].map(parts.index), text=once)
    colors = [COLOURS[HUES[min(at, len(HUES) - 1)]] for at in range(len(parts))]
    color = alt.Color("part:N", sort=parts, scale=alt.Scale(domain=parts, range=colors))
    base = _in_rows(data)
    bars = base.mark_bar(stroke=COLOURS["paper"], strokeWidth=1)
    look = {"color": color, "order": "place:Q", "tooltip": _tooltip(data, axis)}
    return data, [bars.encode(**axis.encode("x"), **look), _draw_words(base)]


# Column of a chart's data → where it comes from in rows, or in a table.
_SOURCES = {"link_run": ("run_id",), "link_n": ("factor.seq_len", "seq_len")}


def links(frame: pd.DataFrame, but: str = "") -> dict[str, Any]:
    """Return the columns `link_run` and `link_n`, as far as rows or a table have them, without the column `but`."""
    return {
        column: frame[source]
        for column, sources in _SOURCES.items()
        for source in sources
        if source in frame and column != but
    }


def link_columns(frame: pd.DataFrame) -> list[str]:
    """Return the names of the columns of `links` that a chart's data has."""
    return [name for name in _SOURCES if name in frame]


def followed(data: pd.DataFrame) -> pd.DataFrame:
    """Replace the columns of a chart's data by those of `links`."""
    known = [name for name in ("run_id", "name", "seq_len") if name in data]
    return data.assign(**links(data)).drop(columns=known)


def point_columns(table: pd.DataFrame, column: str, axis: str = "x") -> dict[str, Any]:
    """Return a column as the points of a chart, with its interval, and the columns of `links`."""
    ends = {end: table[f"{column}_{end}"] for end in ("low", "high")}
    return {axis: table[column]} | ends | links(table)
