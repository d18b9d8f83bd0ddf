"""Give charts their look: colors, fonts and grid, the same in a notebook, on the page and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import altair as alt
import pandas as pd

Chart = Callable[[pd.DataFrame], alt.TopLevelMixin]

COLOURS = {
    "paper": "#FFFFFF",
    "wash": "#F5F7F9",  # behind words
    "line": "#DEE3E8",  # the grid
    "ink": "#191D22",
    "muted": "#58626D",  # labels
    "c1": "#0B62B0",  # at most four series have a color, at least 4.9 : 1 against the paper
    "c2": "#C2480A",
    "c3": "#00785A",
    "c4": "#A4437F",
    "base": "#3B434D",  # what others are compared with
    "rest": "#89929C",  # every further series
}
DARK = {
    "paper": "#15181C",
    "wash": "#1D2126",
    "line": "#333A42",
    "ink": "#EDF0F3",
    "muted": "#A9B2BC",
    "c1": "#62B2F5",
    "c2": "#FF9A5C",
    "c3": "#45CFA4",
    "c4": "#F0A6CF",
    "base": "#D5DAE0",
    "rest": "#7C8692",
}
HUES = ["c1", "c2", "c3", "c4", "base", "rest"]
_TEXT = 12  # px


def hues(names: Iterable[Any]) -> dict[Any, str]:
    """Return a color for each of the first four names, in order; the further ones are grey."""
    distinct = dict.fromkeys(names)
    return {name: f"c{at}" if at <= 4 else "rest" for at, name in enumerate(distinct, 1)}


def empty_chart(title: str, why: str) -> alt.TopLevelMixin:
    """Return a chart that says that there is nothing to draw, and why."""
    text = alt.Chart(pd.DataFrame({"why": [why]})).mark_text(
        fontSize=13, align="left", x=0, color=COLOURS["muted"]
    )
    return themed(
        text.encode(text="why:N").properties(
            width=640, height=40, title=alt.Title(title), usermeta={"empty": why}
        )
    )


def is_empty(chart: alt.TopLevelMixin) -> bool:
    """Whether a chart is an `empty_chart`."""
    return isinstance(getattr(chart, "usermeta", None), dict)


def side_by_side(*charts: alt.TopLevelMixin) -> alt.TopLevelMixin:
    """Join several charts in one picture."""
    for chart in charts:  # only the whole has a configuration, and is said to be empty
        chart.config = chart.usermeta = alt.Undefined
    return themed(alt.hconcat(*charts, spacing=28))


def themed(chart: alt.TopLevelMixin) -> alt.TopLevelMixin:
    """Give a finished chart its fonts, grid and colors."""
    words = {"fill": COLOURS["muted"], "fontSize": _TEXT}
    # set, since each `configure_…` copies the whole chart
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
    """Return the colors as CSS variables, which follow what the reader's system prefers."""
    colors = "".join(f"--{name}: light-dark({COLOURS[name]}, {DARK[name]}); " for name in COLOURS)
    return f":root {{ color-scheme: light dark; {colors}}}\n"


def with_variables(text: str) -> str:
    """Replace the colors in the JSON of charts by the page's `variables`: one drawing for light, dark and print."""
    for name, color in COLOURS.items():
        text = text.replace(f'"{color}"', f'"var(--{name})"')
    return text
