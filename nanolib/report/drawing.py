"""How charts look: measured values are solid marks with their intervals, predictions dashed lines without marks."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from nanolib.report.log_axes import leave_out
from nanolib.report.overview import by_machine
from nanolib.report.palette import FRAME, GRID, GUIDE, INK, PAPER, QUIET, SERIES, TEXT

_SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right"]
WIDTH, HEIGHT = 340, 260
Chart = Callable[[pd.DataFrame], alt.TopLevelMixin]


def theme(chart: alt.TopLevelMixin) -> alt.TopLevelMixin:
    """Fonts, grid and frame, the same for every chart; what no logarithmic axis can show is left out of it, and named."""
    leave_out(chart)
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
            symbolBaseFillColor=TEXT,  # where shapes alone are told
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


def each_machine(experiment: str) -> Callable[[Chart], Chart]:
    """Draw a chart of an experiment's rows, or of all, once per machine: points of two machines are in no one picture."""

    def decorate(chart: Chart) -> Chart:
        @functools.wraps(chart)
        def drawn(rows: pd.DataFrame) -> alt.TopLevelMixin:
            parts = by_machine(rows, experiment)
            charts = [chart(part) for _, part in parts]
            if len(parts) == 1:
                return charts[0]
            drawable = [(name, one) for (name, _), one in zip(parts, charts, strict=True) if not is_empty(one)]
            if not drawable:
                return charts[0]
            charts, titles = [one for _, one in drawable], [_title_of(one) for _, one in drawable]
            # What depends on the rows of one machine stands over its own picture.
            shared = [line for line in titles[0][1] if all(line in lines for _, lines in titles)]
            heads = {text.partition(": ")[0] for text, _ in titles}
            alike = len({text for text, _ in titles}) == 1 or len(heads) > 1
            title = alt.Title(titles[0][0] if alike else heads.pop(), **({"subtitle": shared} if shared else {}))
            for (name, one), (text, lines) in zip(drawable, titles, strict=True):
                more = "" if alike else text.partition(": ")[2]
                own = [line for line in lines if line not in shared]
                under = {"subtitle": own} if own else {}
                one.title = alt.Title(f"On {name}{more and f': {more}'}", fontSize=13, **under)
                one.config = alt.Undefined
            with warnings.catch_warnings():  # one choice in the legend for all machines is what we want
                warnings.filterwarnings("ignore", message="Automatically deduplicated selection parameter")
                drawn = alt.vconcat(*charts, spacing=32).properties(title=title)
                # one machine's single series needs no legend, which would take that of the other's
                return theme(drawn.resolve_legend(color="independent", shape="independent"))

        return drawn

    return decorate


def _title_of(chart: alt.TopLevelMixin) -> tuple[str, list[str]]:
    """A chart's title and the lines under it."""
    if isinstance(chart.title, str):
        return chart.title, []
    told = chart.title.to_dict()
    lines = told.get("subtitle", [])
    return told["text"], [lines] if isinstance(lines, str) else list(lines)


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


def coloured(field: str, title: str | None, colours: Mapping[str, str], **more: Any) -> alt.Color:
    """A colour per name, as given: name → colour."""
    scale = alt.Scale(domain=list(colours), range=list(colours.values()))
    return alt.Color(f"{field}:N", title=title, scale=scale, **more)


def colour_and_shape(
    field: str, title: str, values: pd.Series, everything: pd.Series | None = None
) -> tuple[alt.Color, alt.Shape]:
    """A colour and a shape per name; with `everything` a name looks as it does in the chart of all of them.

    Where colours come again they come with other shapes, so that 98 names look different.
    """
    places = {name: i for i, name in enumerate(dict.fromkeys(values if everything is None else everything))}
    names = [name for name in places if name in set(values)]
    colours = {name: SERIES[places[name] % len(SERIES)] for name in names}
    shapes = [_SHAPES[(places[name] + places[name] // len(_SHAPES)) % len(_SHAPES)] for name in names]
    return (
        coloured(field, title, colours, sort=names),
        alt.Shape(f"{field}:N", title=title, sort=names, scale=alt.Scale(domain=names, range=shapes)),
    )


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


def domain_of(values: pd.DataFrame, log: bool) -> list[float]:
    """One range for all panels, with room at both ends."""
    numbers = values.to_numpy(dtype=float)
    numbers = numbers[np.isfinite(numbers) & ((numbers > 0) | (not log))]
    if not len(numbers):
        return [0.1, 1]
    return [float(numbers.min()) / 1.3, float(numbers.max()) * 1.3] if log else [0, float(numbers.max()) * 1.08]


def why_empty(rows: pd.DataFrame, experiment: str) -> str:
    """Why there is nothing to draw: never run, or nothing but failures."""
    if rows.empty:
        return f"no {experiment} run is in the database; run: nano run quick {experiment}"
    bad = rows[(rows["metric"] == "case_time") & (rows["status"] != "ok")]
    counts = ", ".join(f"{count} {status}" for status, count in bad["status"].value_counts().items())
    return f"no case gave a number ({counts or 'none has ended'})"
