"""How charts look: measured values are solid marks with their intervals, predictions dashed lines without marks."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from nanolib.measurement import METRICS
from nanolib.report.linking import ONLY_ALL, links
from nanolib.report.overview import by_machine, of_experiment, pick
from nanolib.report.palette import FAILED, FRAME, GRID, GUIDE, INK, PAPER, QUIET, SERIES, TEXT

_SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right"]
WIDTH, HEIGHT = 340, 260
KEY = "Points: measured, with 95 % intervals. Dashed: predicted. Grey: as n and as n² grow."
COUNTED_KEY = "Points: counted, exact. Dashed: predicted. Grey: as n and as n² grow."
ROOFLINE_KEY = "The prediction is the roofline of the ceilings measured in the same run."
PLAN_KEY = "The prediction counts the same bytes on tensors that have shapes and no data."
Chart = Callable[..., alt.TopLevelMixin]


def axis_title(metric: str) -> str:
    """`Latency (ms)`: title and unit as the vocabulary has them."""
    m = METRICS[metric]
    return m.title if m.unit == "1" else f"{m.title} ({m.unit})"


def theme(chart: alt.TopLevelMixin) -> alt.TopLevelMixin:
    """Fonts, grid and frame, the same for every chart."""
    # Set, not by `configure_…`: each of those copies the whole chart.
    chart.config = alt.Config(
        axis=alt.AxisConfig(
            labelFontSize=12,
            labelFlush=False,  # or the last label leans on the one before it
            titleFontSize=12,
            titleFontWeight="normal",
            labelColor=TEXT,
            titleColor=TEXT,
            gridColor=GRID,
            domainColor=FRAME,
            tickColor=FRAME,
        ),
        axisX=alt.AxisConfig(labelSeparation=6),
        legend=alt.LegendConfig(
            labelFontSize=12,
            titleFontSize=12,
            symbolStrokeWidth=2,
            symbolLimit=0,  # or the names beyond thirty are left out
            symbolBaseFillColor=TEXT,  # where shapes alone are told; black is on no dark page
            labelLimit=260,
            labelColor=TEXT,
            titleColor=TEXT,
        ),
        title=alt.TitleConfig(
            fontSize=14, anchor="start", fontWeight="bold", color=INK, subtitleFontSize=12, subtitleColor=QUIET
        ),
        header=alt.HeaderConfig(labelFontSize=13, titleFontSize=0, labelFontWeight="bold", labelColor=INK),
        background=PAPER,
        view=alt.ViewConfig(stroke=GUIDE),
    )
    return chart


def empty_chart(title: str, why: str) -> alt.TopLevelMixin:
    """A chart that says that there is nothing to draw, and why."""
    text = alt.Chart(pd.DataFrame({"why": [why]})).mark_text(fontSize=13, color=QUIET).encode(text=alt.Text("why:N"))
    return theme(text.properties(width=2 * WIDTH, height=60, title=title, usermeta={"empty": why}))


def is_empty(chart: alt.TopLevelMixin) -> bool:
    """Whether it is one that says that there is nothing to draw."""
    return isinstance(getattr(chart, "usermeta", None), dict)


def each_machine(experiment: str = "") -> Callable[[Chart], Chart]:
    """Draw a chart once per machine, one under the other: points of two machines are in no one picture.

    Args:
        experiment: Whose rows it is of; without it, the one named by the chart's second argument.
    """

    def decorate(chart: Chart) -> Chart:
        @functools.wraps(chart)
        def drawn(rows: pd.DataFrame, *more: Any, **named: Any) -> alt.TopLevelMixin:
            parts = by_machine(rows, experiment or (more[0] if more else ""))
            charts = [chart(part, *more, **named) for _, part in parts]
            if len(parts) == 1:
                return charts[0]
            drawable = [(name, one) for (name, _), one in zip(parts, charts, strict=True) if not is_empty(one)]
            if not drawable:
                return charts[0]
            title, charts = drawable[0][1].title, [one for _, one in drawable]
            for name, one in drawable:
                one.title, one.config = alt.Title(f"On {name}", fontSize=13), alt.Undefined
            with warnings.catch_warnings():  # one choice in the legend for all machines is what we want
                warnings.filterwarnings("ignore", message="Automatically deduplicated selection parameter")
                return theme(alt.vconcat(*charts, spacing=32).properties(title=title))

        return drawn

    return decorate


def seq_axis(values: pd.Series, title: str = "Sequence length (tokens)") -> alt.X:
    """A logarithmic axis for the column `seq_len`, with a tick at each of the lengths in `values`."""
    ticks = sorted(int(value) for value in values.dropna().unique())
    low, high = (min(ticks), max(ticks)) if ticks else (1, 2)
    return alt.X(
        "seq_len:Q",
        title=title,
        scale={"type": "log", "base": 2, "domain": [low / 1.15, high * 1.15], "nice": False},
        axis={"values": ticks, "format": "d", "grid": False},
    )


def colour_and_shape(
    field: str, title: str, values: pd.Series, everything: pd.Series | None = None
) -> tuple[alt.Color, alt.Shape]:
    """A colour and a shape per name; with `everything` a name looks as it does in the chart of all of them.

    Where colours come again they come with other shapes, so that 98 names look different.
    """
    places = {name: i for i, name in enumerate(dict.fromkeys(values if everything is None else everything))}
    names = [name for name in places if name in set(values)]
    colours = [SERIES[places[name] % len(SERIES)] for name in names]
    shapes = [_SHAPES[(places[name] + places[name] // len(_SHAPES)) % len(_SHAPES)] for name in names]
    return (
        alt.Color(f"{field}:N", title=title, sort=names, scale=alt.Scale(domain=names, range=colours)),
        alt.Shape(f"{field}:N", title=title, sort=names, scale=alt.Scale(domain=names, range=shapes)),
    )


def _series(rows: pd.DataFrame, first: str, others: list[str]) -> pd.Series:
    """A name per series: those other factors that vary, then the first one, which may be so long that it is cut."""
    varying = [name for name in others if rows[f"factor.{name}"].astype(str).nunique() > 1]
    label = rows[f"factor.{first}"].astype(str)
    for name in varying:
        short = {"batch_size": "batch "}.get(name, "")
        values = rows[f"factor.{name}"].map(lambda value: f"{value:g}" if isinstance(value, float) else str(value))
        label = short + values + ", " + label
    return label


def short_names(
    rows: pd.DataFrame, name: str = "factor.name", optimisation: str = "factor.optimisation"
) -> tuple[pd.DataFrame, str]:
    """Where one model was measured with several optimisations, they are what tells its rows apart.

    Returns:
        The rows, named by their optimisation alone in that case; and the name that they share, empty in others.
    """
    if optimisation not in rows or rows[optimisation].nunique() < 2:
        return rows, ""
    used = rows[optimisation].str.replace("_", " ")
    shared = {full.removesuffix(f" ({which})") for full, which in zip(rows[name], used, strict=True)}
    return (rows.assign(**{name: used}), f": {shared.pop()}") if len(shared) == 1 else (rows, "")


def tidy(rows: pd.DataFrame, first: str, others: list[str], panel: str) -> pd.DataFrame:
    """What a chart carries: no samples, no JSON, text for the tooltip."""
    return pd.DataFrame(
        {
            "series": _series(rows, first, others),
            "panel": rows[panel],
            "seq_len": rows["factor.seq_len"].astype(int),
            "estimate": rows["estimate"],
            "low": rows["low"].fillna(rows["estimate"]),
            "high": rows["high"].fillna(rows["estimate"]),
            "predicted": rows["predicted"],
            "n": rows["n"],
            "method": rows["method"],
            "flags": [", ".join(flags) or "none" for flags in rows["flags"]],
            **links(rows),
        }
    )


@each_machine()
def over_length(
    rows: pd.DataFrame,
    experiment: str,
    metric: str,
    title: str,
    subtitle: list[str],
    panels: Mapping[str, str],
    others: list[str],
    log: bool = True,
) -> alt.TopLevelMixin:
    """One metric of an experiment's cases over their sequence length, a panel per scope.

    Args:
        rows: Measurements of any experiments.
        experiment: Whose.
        metric: Which.
        title: Of the chart.
        subtitle: Its lines.
        panels: Scope → what its panel is called.
        others: Factors that tell series of one name apart.
        log: Whether the metric's axis is logarithmic, and cases that failed are marked.
    """
    rows = of_experiment(rows, experiment)
    found = pick(rows, metric)
    found = found[found["scope"].isin(list(panels))] if len(found) else found
    if found.empty:
        return empty_chart(title, why_empty(rows, experiment))
    found, shared = short_names(found)
    data = tidy(found, "name", others, "scope").assign(panel=found["scope"].map(panels))
    failed = failed_cases(rows, "name", others) if log else pd.DataFrame()
    return measured_and_predicted(data, failed, metric, title + shared, subtitle, list(panels.values()), log)


def measured_and_predicted(
    data: pd.DataFrame,
    failed: pd.DataFrame,
    metric: str,
    title: str,
    subtitle: list[str],
    panels: list[str],
    log: bool = True,
) -> alt.TopLevelMixin:
    """Panels side by side over sequence length: points with intervals, dashed predictions, crosses for what failed."""
    colour, shape = colour_and_shape("series", "Kind", data["series"])
    if alone := data["series"].nunique() == 1:  # a title says it better than a legend of one
        colour.legend = shape.legend = None
        title = f"{title}: {data['series'].iloc[0]}"
    else:
        subtitle = [*subtitle, "Click a legend entry to pick it out."]
    domain = domain_of(data[["estimate", "low", "high", "predicted"]], log)
    # Plain dictionaries and named channels: Altair copies an `Axis` with its ninety unset fields each time that charts are
    # joined, and searches its whole schema for the class of a channel given as text.
    scale = {"type": "log" if log else "linear", "domain": domain, "nice": False}
    axis = {"format": ",.3~r" if log else ".1~%", "minExtent": 42}
    y = alt.Y("estimate:Q", title=axis_title(metric), scale=scale, axis=axis)
    tooltip = [
        alt.Tooltip("series:N", title="kind"),
        alt.Tooltip("seq_len:Q", title="sequence length"),
        alt.Tooltip("estimate:Q", title=axis_title(metric), format=",.4~g"),
        alt.Tooltip("low:Q", title="interval from", format=",.4~g"),
        alt.Tooltip("high:Q", title="to", format=",.4~g"),
        alt.Tooltip("predicted:Q", title="predicted", format=",.4~g"),
        alt.Tooltip("n:Q", title="blocks"),
        alt.Tooltip("method:N"),
        alt.Tooltip("flags:N"),
    ]
    x = seq_axis(pd.concat([data["seq_len"], failed.get("seq_len", pd.Series(dtype=float))]))
    # One chart per panel with the data of that panel: faceting layered charts by a field breaks in older Vega.
    charts = []
    chosen = alt.selection_point(fields=["series"], bind="legend", name="picked")
    faded = alt.OpacityValue(1.0) if alone else alt.OpacityValue(0.12, condition={"param": "picked", "value": 1.0})
    for panel in panels:
        part = data[data["panel"] == panel]
        if part.empty:
            continue
        base = alt.Chart(part).encode(x=x, color=colour)
        layers = [
            base.mark_line(strokeDash=[4, 4], opacity=0.8, strokeWidth=1.2)
            .encode(y=alt.Y("predicted:Q", scale=scale, title=axis_title(metric)))
            .transform_filter("isValid(datum.predicted)"),
            base.mark_line(strokeWidth=2).encode(y=y, opacity=faded),
            base.mark_rule(strokeWidth=2).encode(
                y=alt.Y("low:Q", scale=scale, title=axis_title(metric)), y2=alt.Y2("high:Q"), opacity=faded
            ),
            base.mark_point(filled=True, size=55, opacity=1).encode(y=y, shape=shape, tooltip=tooltip, opacity=faded),
        ]
        if len(failed):
            reasons = [alt.Tooltip("series:N", title="kind"), alt.Tooltip("status:N"), alt.Tooltip("message:N")]
            layers.append(
                alt.Chart(failed)
                .mark_text(text="✕", fontSize=15, color=FAILED, baseline="bottom", dy=-4)
                .encode(x=x, y=alt.value("height"), tooltip=reasons)  # a page draws it higher
            )
        # Last, since a selection in the legend works on the first layer, and these have no colour to pick.
        layers += _slopes(part, domain, x, y) if log else []
        charts.append(alt.layer(*layers, width=WIDTH, height=HEIGHT, title=alt.Title(panel, fontSize=12)))
    with warnings.catch_warnings():  # one selection for all panels is what we want, and what it warns of
        warnings.filterwarnings("ignore", message="Automatically deduplicated selection parameter")
        joined = alt.hconcat(*charts, spacing=24)
        if not alone:
            joined = joined.add_params(chosen)
    return theme(joined.properties(title=alt.Title(title, subtitle=subtitle)))


def _slopes(data: pd.DataFrame, domain: list[float], x: alt.X, y: alt.Y) -> list[alt.Chart]:
    """Thin lines that grow as n and as n², from the middle of what was measured at the shortest length; none for one length."""
    first, last = float(data["seq_len"].min()), float(data["seq_len"].max())
    at_first = data.loc[(data["seq_len"] == first) & (data["estimate"] > 0), "estimate"]
    if first == last or at_first.empty:
        return []
    begin, ends = float(np.exp(np.log(at_first).mean())), []
    for power, name in ((1, "n"), (2, "n²")):
        end = min(last, first * (domain[1] / begin) ** (1 / power))  # where it would leave the chart
        ends += [(name, first, begin, ""), (name, end, begin * (end / first) ** power, name)]
    guides = pd.DataFrame(ends, columns=["slope", "seq_len", "estimate", "text"])
    drawn = alt.Chart(guides.assign(link_n=ONLY_ALL)).encode(x=x, y=y, detail=alt.Detail("slope:N"))
    return [
        drawn.mark_line(color=GUIDE, strokeWidth=1),
        drawn.mark_text(color=QUIET, align="right", baseline="top", dx=-3, dy=2, fontSize=11).encode(
            text=alt.Text("text:N")
        ),
    ]


def domain_of(values: pd.DataFrame, log: bool) -> list[float]:
    """One range for all panels, with room at both ends."""
    numbers = values.to_numpy(dtype=float)
    numbers = numbers[numbers > 0] if log else numbers[~pd.isna(numbers)]
    if not len(numbers):
        return [0.1, 1]
    return [float(numbers.min()) / 1.3, float(numbers.max()) * 1.3] if log else [0, float(numbers.max()) * 1.08]


def failed_cases(rows: pd.DataFrame, first: str, others: list[str]) -> pd.DataFrame:
    """Cases that gave no number: columns `series`, `seq_len`, `status`, `message`; arguments as in `tidy`."""
    bad = rows[(rows["metric"] == "case_time") & (rows["status"] != "ok") & rows[f"factor.{first}"].notna()]
    if bad.empty:
        return pd.DataFrame()
    return pd.DataFrame(
        {
            "series": _series(bad, first, others),
            "seq_len": bad["factor.seq_len"].astype(int),
            "status": bad["status"],
            "message": bad["message"],
            **links(bad),
        }
    )


def why_empty(rows: pd.DataFrame, experiment: str) -> str:
    """Why there is nothing to draw: never run, or nothing but failures."""
    if rows.empty:
        return f"no {experiment} run is in the database; run: nano run quick {experiment}"
    bad = rows[(rows["metric"] == "case_time") & (rows["status"] != "ok")]
    counts = ", ".join(f"{count} {status}" for status, count in bad["status"].value_counts().items())
    return f"no case gave a number ({counts or 'none has ended'})"
