"""One prediction among what was measured: a hollow dashed point that moves without the chart being drawn anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from nanolib.measurement import case_name, format_number, format_with_interval
from nanolib.report.drawing import HEIGHT, colour_and_shape, theme
from nanolib.report.frame import tooltips, with_interval
from nanolib.report.overview import pick
from nanolib.report.palette import GUIDE, INK
from nanolib.report.tables import drawn_ends

_WIDTH = 560
_TICKS = [2**power for power in range(4, 21)]
MOST = 8  # predictions that one setting of the controls may have: a model's inference, its training
_APART = ("num_heads", "causal")  # that a panel's controls change, and a case's name does not tell
_COLUMNS = ["case", "what", "n", "ms", "low", "high", "predicted", "here", "run_id"]
_DASHED = {"filled": False, "strokeDash": [3, 2], "strokeWidth": 1.6, "size": 130}


def timed_points(rows: pd.DataFrame, scopes: Sequence[str], here: bool) -> pd.DataFrame:
    """The times that formulas predict, in the order measured.

    Args:
        rows: Of one experiment.
        scopes: Of the latencies.
        here: Whether they were measured in this panel.

    Returns:
        Columns: `case`, `what`, `n` (tokens), `ms`, `low`, `high`, `predicted`, `here`, `run_id`.
    """
    found = pick(rows, "latency")
    found = found[found["scope"].isin(scopes)] if len(found) else found
    if found.empty:
        return pd.DataFrame(columns=_COLUMNS)
    ends = {"run_id": found["run_id"], "ms": found["estimate"], "predicted": found["predicted"], "here": here}
    ends |= drawn_ends(found)
    what = found["scope"].str.replace("_", " ") if len(scopes) > 1 else found["factor.name"]
    apart = [name for name in _APART if found.get(f"factor.{name}", pd.Series()).nunique() > 1]
    case = [
        " ".join([case_name(of), *(f"{name}={of[name]}" for name in apart if name in of)]) for of in found["factors"]
    ]
    return pd.DataFrame({"case": case, "what": what, "n": found["factor.seq_len"].astype(int), **ends})[_COLUMNS]


def foreseen_chart(points: pd.DataFrame, foreseen: Sequence[Mapping[str, Any]]) -> alt.TopLevelMixin:
    """What was measured over the length of the sequence, and what is predicted of the next case.

    Args:
        points: From `timed_points`.
        foreseen: The value of the parameter `foreseen`: of each prediction its `what`, `n` and `ms`; it can be set anew.
    """
    known = alt.param(name="foreseen", value=list(foreseen))
    x = alt.X(
        "n:Q", title="Sequence length (tokens)", scale=alt.Scale(type="log", base=2, nice=False, padding=115)
    )  # for the words at a point
    x = x.axis(grid=False, format=",d", values=_TICKS, labelOverlap=True)
    axis = {"title": "Time (ms)", "scale": alt.Scale(type="log", nice=False, padding=30)}
    y = alt.Y("ms:Q", **axis)
    names = points.loc[points["here"].astype(bool), "what"]
    colour, shape = colour_and_shape("what", "Measured here", names if len(names) else pd.Series([""]))
    if names.empty:
        colour.legend = shape.legend = None
    base = alt.Chart(points).encode(x=x)
    tooltip = tooltips("case what", "ms low high predicted")
    ends = ("ms", "low", "high")
    before = base.transform_filter("!datum.here").encode(color=alt.value(GUIDE))
    here = base.transform_filter("datum.here").encode(color=colour, shape=shape)
    next_ = (
        alt.Chart(alt.sequence(0, MOST, as_="at"))
        .transform_filter("datum.at < length(foreseen)")
        .transform_calculate(**{name: f"foreseen[datum.at].{name}" for name in ("what", "n", "ms")})
        .transform_calculate(words="datum.what + ': ' + format(datum.ms, ',.3~r') + ' ms predicted'")
        .encode(x=x, y=y, tooltip=tooltips("what", "ms"))
    )
    layers = [
        *with_interval(before, "y", ends, axis, tooltip=tooltip),
        here.mark_point(**_DASHED).encode(y=alt.Y("predicted:Q", **axis), tooltip=tooltip),
        *with_interval(here, "y", ends, axis, size=80, tooltip=tooltip),
        next_.mark_point(color=INK, **_DASHED),
        next_.mark_text(dy=-15, fontSize=12, color=INK).encode(text="words:N"),
    ]
    title = alt.Title(
        "Predicted and measured",
        subtitle="Hollow, dashed: predicted. Filled: measured, with 95 % intervals. Grey: measured by the notebook.",
    )
    chart = alt.layer(*layers, width=_WIDTH, height=HEIGHT, title=title).add_params(known)
    chart.autosize = alt.AutoSizeParams(type="pad", resize=True)  # longer labels need room when a prediction moves
    return theme(chart)


def timed_table(points: pd.DataFrame, most: int = 10) -> pd.DataFrame:
    """The last points as people read them, the newest first."""
    last = points.iloc[::-1].head(most)
    return pd.DataFrame(
        {
            "Measured": last["what"],
            "Predicted, ms": ["—" if pd.isna(one) else format_number(one) for one in last["predicted"]],
            "Measured, ms [95 %]": [
                format_with_interval(*of) for of in zip(last["ms"], last["low"], last["high"], strict=True)
            ],
            "Over predicted": [
                "—" if pd.isna(one) else format_number(one) for one in last["ms"] / last["predicted"].astype(float)
            ],
            "Case": last["case"],
        }
    )
