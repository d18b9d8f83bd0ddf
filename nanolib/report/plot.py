"""Draw every chart of nanolib with one function, so that all charts have the same look.

The table of a chart has one line per mark. `line` charts need the columns `series`, `x` and `y`.
`rows` and `bars` charts need `series` and `x`. All other columns are optional:

low, high: Ends of the interval.
pred: Predicted value.
sure: Whether the value is measured and settled. If not, the mark is hollow.
hue: Name of a color in `theme.COLOURS`.
part: Name of the part of a bar.
panel: Name of the panel that shows the mark.
text: Label at the right end of the series. Without this column, the label of a line is its series.
note: Last line of the tooltip.
"""

import math
from collections.abc import Sequence
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from nanolib.measurement import printable
from nanolib.numbers import format_number
from nanolib.report.theme import (
    COLOURS,
    HUES,
    Axis,
    Drawing,
    apply_theme,
    domain_of,
    empty_chart,
    hues,
)

_HEIGHT = 260  # Height of a line chart, in pixels.
_WIDTH = 680  # Width of a line chart, in pixels. Its panels share this width.
# Rows share a width with their names and labels, so that JupyterLab cuts no label off.
_ROW_WIDTH, _LEAST_ROW_WIDTH, _CHARACTER = 800, 300, 6  # in pixels
_LABEL_GAP = 14  # Smallest distance between two labels, in pixels.
# Columns with names, whose control characters would crash vl-convert.
_TEXTS = {"series", "panel", "part", "text", "note"}
_SHORT_COUNT = (
    "datum.value < 16384 ? format(datum.value, ',~r') : "
    "datum.value < 1048576 ? datum.value / 1024 + 'K' : datum.value / 1048576 + 'M'"
)
_HUES = alt.Scale(domain=HUES, range=[COLOURS[hue] for hue in HUES])
_COLOR = alt.Color("hue:N", scale=_HUES, legend=None)
_Layers = list[alt.Chart]
_Encoding = dict[str, Any]


def plot(
    data: pd.DataFrame,
    title: str,
    kind: str = "line",
    *,
    subtitle: Sequence[str] = (),
    unit: str = "",
    xunit: str = "",
    log: str = "",
    ref: float | None = None,
    band: tuple[float, float] | None = None,
    fmt: str = ",.3~r",
    empty: str = "nothing was measured",
) -> Drawing:
    """Draw a chart with one panel for each value of the column `panel`.

    Args:
        data: Table with the columns that this module describes. A line chart with a single `x`
            becomes a `rows` chart with the `x` in its subtitle.
        title: Title of the chart.
        kind: Layout of the chart. A `line` chart has an ordered horizontal axis, a `rows` chart has
            one row per series, and a `bars` chart has bars with parts.
        subtitle: Lines below the title.
        unit: Title of the value axis.
        xunit: Title of the horizontal axis of a line chart.
        log: Logarithmic axes, given as `x`, `y`, `xy` or an empty text.
        ref: Value of the reference line.
        band: Lowest and highest value that count as no change. The chart shades this range.
        fmt: Number format of the value axis, in the syntax of d3.
        empty: Reason to show if there is no data.
    """
    if data.empty:
        return empty_chart(title, empty)
    lines = [printable(line) for line in subtitle if line]
    if kind == "line" and data["x"].nunique() == 1:
        position = float(data["x"].iloc[0])
        lines = [line.replace("Dashed", "Tick") for line in lines]
        lines.append(f"{xunit}: {format_number(position)}.")
        data = data.assign(x=data["y"]).drop(columns="y")
        kind, log = "rows", "x" if "y" in log else ""
    is_line = kind == "line"
    value = "y" if is_line else "x"
    data = data.reset_index(drop=True)
    defaults = {
        "sure": True,
        "note": "",
        "panel": "",
        "hue": data["series"].map(hues(data["series"])),
        "text": data["series"] if is_line else "",
    }
    data = pd.DataFrame(defaults | dict(data.items()))
    for name in _TEXTS.intersection(data):
        data[name] = data[name].map(lambda text: printable(str(text)), na_action="ignore")
    is_log = value in log
    if is_log:  # A logarithmic axis shows only numbers above 0.
        for name in {value, "low", "high", "pred"}.intersection(data):
            numbers = data[name].astype(float)
            data[name] = numbers.where((numbers > 0) & np.isfinite(numbers))
    guides = [*(band or ()), *([] if ref is None else [ref])]
    domain = domain_of(data, value, is_log, guides)
    if domain is None:
        return empty_chart(title, "no value can be drawn on this axis")
    if is_log and "low" in data:  # The line of an interval that reaches 0 begins at the axis.
        data["low"] = data["low"].fillna(domain[0]).where(data["high"].notna())
    axis = Axis(unit, value, is_log, domain, fmt)
    panels = data["panel"].unique()
    if len(panels) == 1 and panels[0]:
        title = f"{title}: {panels[0]}"
    if is_line and data["series"].nunique() == 1:  # The title replaces the label of a single line.
        title = f"{title}: {data['series'].iloc[0]}"
        data["text"] = " "
    charts = []
    for name, part in data.groupby("panel", sort=False):
        if is_line:
            size = {"width": _WIDTH // len(panels), "height": _HEIGHT}
            part, layers = _draw_lines(part, axis, xunit, "x" in log)
        else:
            words = _CHARACTER * sum(data[name].str.len().max() for name in ("series", "text"))
            size = {"width": max(_LEAST_ROW_WIDTH, _ROW_WIDTH - words), "height": alt.Step(26)}
            part, layers = (_draw_bars if kind == "bars" else _draw_rows)(part, axis)
        chart = alt.layer(*_draw_guides(axis, ref, band), *layers, data=part, **size)
        if len(panels) > 1:
            chart.title = alt.Title(str(name), fontSize=13)
        charts.append(chart)
    if len(charts) > 1:
        chart = (alt.hconcat if is_line else alt.vconcat)(*charts, spacing=28)
    chart.title = alt.Title(printable(title), subtitle=lines or alt.Undefined)
    return apply_theme(chart)


def _layer(mark: str, encoding: _Encoding, data=alt.Undefined, **look) -> alt.Chart:
    # Each method of `alt.Chart` copies the chart, so nanolib passes everything to the constructor.
    encoding = alt.FacetedEncoding(**encoding)
    return alt.Chart(data, mark=alt.MarkDef(type=mark, **look), encoding=encoding)


def _draw_guides(axis: Axis, ref: float | None, band: tuple[float, float] | None) -> _Layers:
    layers = []
    if band:
        data = pd.DataFrame([band], columns=["from", "to"])
        along = axis.encode("from", "to")
        layers.append(_layer("rect", along, data, color=COLOURS["c3"], opacity=0.14))
    if ref is not None:
        layers.append(
            _layer("rule", axis.encode("at"), pd.DataFrame({"at": [ref]}), strokeWidth=1.2)
        )
    return layers


def _tooltip(data: pd.DataFrame, axis: Axis, xunit: str = "") -> list[alt.Tooltip]:
    """Return the lines of the tooltip for the columns that have a value."""
    fields = {name: (name, "") for name in ("series", "panel", "part")}
    fields["x"] = xunit, ",.7~g"  # A sequence length may have seven digits.
    titles = {axis.channel: axis.title, "low": "from", "high": "to", "pred": "predicted"}
    fields |= {name: (title, ",.4~g") for name, title in titles.items()}
    fields["note"] = "note", ""
    return [
        alt.Tooltip(f"{name}:{'Q' if form else 'N'}", title=title, format=form)
        for name, (title, form) in fields.items()
        if name in data and data[name].replace("", np.nan).notna().any()
    ]


def _draw_marks(base: _Encoding, data: pd.DataFrame, axis: Axis, xunit: str = "") -> _Layers:
    """Return a layer of points and, if there are intervals, a layer of intervals."""
    layers = []
    if "low" in data:
        along = base | axis.encode("low", "high") | {"color": _COLOR}
        layers.append(_layer("rule", along, strokeWidth=1.8))
    look = {
        "fill": alt.condition("datum.sure", _COLOR, alt.value(COLOURS["paper"])),
        "stroke": _COLOR,
        "tooltip": _tooltip(data, axis, xunit),
    }
    along = base | axis.encode(axis.channel) | look
    size = 14 if len(data) > 200 else 46
    return [*layers, _layer("point", along, size=size, strokeWidth=1.8, opacity=1)]


def _draw_lines(
    data: pd.DataFrame, axis: Axis, xunit: str, log: bool
) -> tuple[pd.DataFrame, _Layers]:
    places = sorted({*data["x"].astype(float)})
    ticks = {"values": places} if len(places) <= 12 else {"tickCount": 6}
    base = {
        "x": alt.X(
            "x:Q",
            title=xunit,
            scale=alt.Scale(
                type="log" if log else "linear",
                domain=[places[0], places[-1]],
                padding=8,
                nice=False,
            ),
            axis=alt.Axis(grid=False, labelOverlap=True, labelExpr=_SHORT_COUNT, **ticks),
        )
    }
    data = data.assign(end=_label_heights(data[data["text"].str.strip() != ""], axis))
    # A line must not join points of different runs.
    apart = [alt.Detail(f"{name}:N") for name in ("series", "link_run") if name in data]
    lines = base | {"color": _COLOR, "detail": apart}
    looks = {"pred": {"strokeDash": [3, 3], "strokeWidth": 1.4}, "y": {"strokeWidth": 2}}
    layers = [
        _layer("line", lines | axis.encode(name), **look)
        for name, look in looks.items()
        if name in data
    ]
    layers += _draw_marks(base, data, axis, xunit)
    along = base | axis.encode("end") | {"text": alt.Text("text:N"), "color": _COLOR}
    names = _layer("text", along, align="left", dx=9).transform_filter("isValid(datum.end)")
    # The report page can hide sequence lengths, so the browser finds the last point of a series.
    names = names.transform_joinaggregate(last="max(x)", groupby=["series"])
    return data, [*layers, names.transform_filter("datum.x == datum.last")]


def _label_heights(data: pd.DataFrame, axis: Axis) -> pd.Series:
    """Return heights, in the unit of the values, at which labels overlap nothing."""
    scale, unscale = (math.log, math.exp) if axis.log else (float, float)
    bottom, top = map(scale, axis.domain)
    px = _HEIGHT / (top - bottom)
    drawn = data["y"].fillna(data["pred"]) if "pred" in data else data["y"]
    found = pd.Series(np.nan, index=data.index)
    # The page can hide the last points, so the labels at each earlier x have heights too.
    for _, group in drawn.dropna().groupby(data["x"]):
        heights = (group.map(scale) * px).sort_values()
        steps = _LABEL_GAP * np.arange(len(heights))
        free = heights.to_numpy() - steps
        # Moving labels only up or only down makes the gaps. The mean of both positions keeps them.
        both = np.maximum.accumulate(free) + np.minimum.accumulate(free[::-1])[::-1]
        above_axis = np.maximum(both / 2, bottom * px + _LABEL_GAP / 2) + steps
        found[heights.index] = [unscale(height / px) for height in above_axis]
    return found


def _place_in_rows(data: pd.DataFrame) -> tuple[_Encoding, alt.Chart]:
    """Return an encoding with one row per series, and the layer of the labels."""
    ink = alt.Axis(labelColor=COLOURS["ink"], grid=False)
    base = {"y": alt.Y("series:N", title=None, sort=[*data["series"].unique()], axis=ink)}
    right = base | {"x": alt.value("width"), "text": alt.Text("text:N")}
    return base, _layer("text", right, align="left", dx=8)


def _draw_rows(data: pd.DataFrame, axis: Axis) -> tuple[pd.DataFrame, _Layers]:
    base, words = _place_in_rows(data)
    layers = _draw_marks(base, data, axis)
    if "pred" in data:
        along = base | axis.encode("pred") | {"color": _COLOR}
        layers.insert(0, _layer("tick", along, thickness=2, size=15))
    return data, [*layers, words]


def _draw_bars(data: pd.DataFrame, axis: Axis) -> tuple[pd.DataFrame, _Layers]:
    parts = [*data["part"].unique()]
    once = data["text"].where(~data["series"].duplicated(), "")
    data = data.assign(place=data["part"].map(parts.index), text=once)
    colors = [COLOURS[HUES[min(index, len(HUES) - 1)]] for index in range(len(parts))]
    base, words = _place_in_rows(data)
    look = {
        "color": alt.Color("part:N", sort=parts, scale=alt.Scale(domain=parts, range=colors)),
        "order": alt.Order("place:Q"),
        "tooltip": _tooltip(data, axis),
    }
    along = base | axis.encode("x") | look
    return data, [_layer("bar", along, stroke=COLOURS["paper"], strokeWidth=1), words]


# The columns of measurements and tables that the report page filters by.
_LINKS = {"run_id": "link_run", "factor.seq_len": "link_n", "seq_len": "link_n"}
_LINKS |= {"factor.name": "link_model", "name": "link_model", "model": "link_model"}
_LINKS |= {"machine_id": "link_machine", "Machine": "link_machine"}


def links(frame: pd.DataFrame) -> dict[str, Any]:
    """Return machines, runs, names and sequence lengths as the columns that the page filters by.

    Args:
        frame: Measurements, or a table of cases.
    """
    return {name: frame[source] for source, name in _LINKS.items() if source in frame}


def point_columns(table: pd.DataFrame, column: str, axis: str = "x") -> dict[str, Any]:
    """Return columns for the points of a chart: values, intervals and the columns of `links`."""
    ends = {end: table[f"{column}_{end}"] for end in ("low", "high")}
    return {axis: table[column]} | ends | links(table)
