"""Set the colors, fonts, grid and axes of all charts, in notebooks, reports and pictures."""

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from nanolib.measurement import printable

# The curves of a long warm-up have more than the 5,000 points that Altair accepts by default.
alt.data_transformers.disable_max_rows()

Drawing = alt.TopLevelMixin  # One chart, or several charts next to each other.
Chart = Callable[[pd.DataFrame], Drawing]  # Function that draws a chart of measurements.

COLOURS = {
    "paper": "#FFFFFF",
    "wash": "#F5F7F9",  # Background color of findings.
    "line": "#DEE3E8",
    "ink": "#191D22",
    "muted": "#58626D",  # Color of the labels of axes.
    # Each color of a series has a contrast of at least 4.9 : 1 with the paper, enough for labels.
    "c1": "#0B62B0",
    "c2": "#C2480A",
    "c3": "#00785A",
    "c4": "#A4437F",
    "base": "#3B434D",  # Color of the baseline of a comparison.
    "rest": "#666F79",  # Color of the fifth series and of all further series.
}
HUES = ["c1", "c2", "c3", "c4", "base", "rest"]
_TEXT = 12  # Font size of labels, in pixels.
# A logarithmic axis has ticks without labels, which need no grid line.
_LABELED = alt.condition("datum.label", alt.value(1), alt.value(0))


def hues(names: Iterable[Any]) -> dict[Any, str]:
    """Return a color for each of the first four names, and gray for all further names."""
    return {
        name: f"c{index}" if index <= 4 else "rest"
        for index, name in enumerate(dict.fromkeys(names), 1)
    }


def empty_chart(title: str, why: str) -> Drawing:
    """Return a chart that shows only its title and the reason why it has no data."""
    why = printable(why)
    chart = alt.Chart(
        pd.DataFrame({"x": [0]}),
        width=640,
        height=1,
        title=alt.Title(title, subtitle=textwrap.wrap(why, 100)),
        usermeta={"empty": why},
    )
    return apply_theme(chart.mark_text(text=""))


def is_empty(chart: Drawing) -> bool:
    """Return whether `empty_chart` made the chart."""
    return isinstance(chart.usermeta, dict)


def apply_theme(chart: Drawing) -> Drawing:
    """Set the fonts, grid and colors of a finished chart, and return the chart."""
    words = {"fill": COLOURS["muted"], "fontSize": _TEXT}
    # Each `configure_…` method copies the chart, so nanolib assigns the configuration directly.
    chart.config = alt.Config.from_dict(
        {
            "style": {"guide-label": words, "guide-title": words},
            "axis": {
                "gridColor": COLOURS["line"],
                "domain": False,
                "ticks": False,
                "labelFlush": False,
                "labelPadding": 6,
                "titleFontWeight": "normal",
            },
            "axisY": {"labelLimit": 340},
            "title": {
                "fontSize": 14,
                "anchor": "start",
                "fontWeight": 600,
                "color": COLOURS["ink"],
                "subtitleFontSize": _TEXT,
                "subtitleColor": COLOURS["muted"],
                "subtitlePadding": 4,
                "offset": 10,
            },
            "legend": {"title": None, "orient": "top", "symbolLimit": 0},
            "background": COLOURS["paper"],
            "view": {"stroke": None},
            "text": {"color": COLOURS["muted"], "fontSize": _TEXT},
            "rule": {"color": COLOURS["rest"]},
        }
    )
    return chart


def variables() -> str:
    """Return the colors as CSS variables that follow the light or dark mode of the system."""
    # In dark mode, a color keeps its hue. Its lightness `l` is mirrored, from 0.2 for the paper.
    dark = "oklch(from {0} calc(1.2 - l) c h)"
    colors = (
        f"--{name}: light-dark({color}, {dark.format(color)}); " for name, color in COLOURS.items()
    )
    return f":root {{ color-scheme: light dark; {''.join(colors)}}}\n"


def use_color_variables(text: str) -> str:
    """Replace colors in the JSON of charts with CSS variables. Dark mode then needs no redraw."""
    for name, color in COLOURS.items():
        text = text.replace(f'"{color}"', f'"var(--{name})"')
    return text


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
        channel = alt.Y if self.channel == "y" else alt.X
        scale = "log" if self.log else "linear"
        encoding = {
            self.channel: channel(
                f"{column}:Q",
                title=self.title,
                scale=alt.Scale(type=scale, domain=self.domain, nice=False),
                axis=alt.Axis(format=self.fmt, tickCount=7, gridOpacity=_LABELED),
            )
        }
        if end:
            encoding[f"{self.channel}2"] = {"field": end}
        return encoding


def domain_of(
    data: pd.DataFrame, value: str, log: bool, more: Sequence[float]
) -> list[float] | None:
    """Return the lowest and highest drawn number with a margin, or None if there is no number.

    A linear axis includes zero.

    Args:
        data: Data of a chart, with the columns that `plot` describes.
        value: Name of the column with the values.
        log: Whether the axis is logarithmic.
        more: Further numbers that the axis includes.
    """
    numbers = [name for name in (value, "low", "high", "pred") if name in data]
    values = np.append(data[numbers].astype(float), more)
    if "part" in data:  # A bar is as long as the sum of its parts.
        values = np.append(values, data.groupby(["panel", "series"])[value].sum())
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    low, high = float(values.min()), float(values.max())
    if log:
        margin = max((high / low) ** 0.08, 1.1)
        return [low / margin, high * margin]
    low, high = min(low, 0.0), max(high, 0.0)
    margin = 0.06 * (high - low) or 1.0
    return [low - margin if low else 0.0, high + margin]
