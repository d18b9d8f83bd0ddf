"""One metric of cases over their sequence length: points with intervals, dashed predictions, and crosses for what failed."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import altair as alt
import numpy as np
import pandas as pd

from nanolib.measurement import METRICS
from nanolib.report.drawing import HEIGHT, WIDTH, Chart, colour_and_shape, domain_of, seq_axis, short_names
from nanolib.report.frame import Drawn, framed, panels, tooltips, with_interval
from nanolib.report.linking import ONLY_ALL, links
from nanolib.report.overview import of_experiment, pick
from nanolib.report.palette import FAILED, GUIDE, QUIET
from nanolib.report.tables import drawn_ends

KEY = "Points: measured, with 95 % intervals. Dashed: predicted. Grey: as n and as n² grow."
COUNTED_KEY = "Points: counted, exact. Dashed: predicted. Grey: as n and as n² grow."
ROOFLINE_KEY = "The prediction is the roofline of the ceilings measured in the same run."
PLAN_KEY = "The prediction counts the same bytes on tensors that have shapes and no data."


def over_length(
    experiment: str,
    metric: str,
    title: str,
    subtitle: Sequence[str],
    scopes: Mapping[str, str],
    others: Sequence[str],
    log: bool = True,
) -> Chart:
    """A chart of one metric of an experiment's cases over their sequence length, a panel per scope.

    Args:
        experiment: Whose.
        metric: Which.
        title: Of the chart.
        subtitle: Its lines.
        scopes: Scope → what its panel is called.
        others: Factors that tell series of one name apart.
        log: Whether the metric's axis is logarithmic, and cases that failed are marked.
    """

    @framed(title, experiment)
    def chart(rows: pd.DataFrame) -> Drawn | None:
        rows = of_experiment(rows, experiment)
        found = pick(rows, metric)
        found = found[found["scope"].isin(list(scopes))]
        if found.empty:
            return None
        found, more = short_names(found)
        data = _points(found, others, scopes)
        failed = _failed(rows, others) if log else pd.DataFrame()
        colour, shape = colour_and_shape("series", "Kind", data["series"])
        if alone := data["series"].nunique() == 1:  # a title says it better than a legend of one
            colour.legend = shape.legend = None
            more = f"{more}: {data['series'].iloc[0]}"
        domain = domain_of(data[["estimate", "low", "high", "predicted"]], log)
        said = METRICS[metric]
        name = said.title if said.unit == "1" else f"{said.title} ({said.unit})"
        # Plain dictionaries and named channels: Altair copies an `Axis` with its ninety unset fields each time that charts are
        # joined, and searches its whole schema for the class of a channel given as text.
        ends = {"title": name, "scale": {"type": "log" if log else "linear", "domain": domain, "nice": False}}
        axis = ends | {"axis": {"format": ",.3~r" if log else ".1~%", "minExtent": 42}}
        y = alt.Y("estimate:Q", **axis)
        tooltip = [
            *tooltips("series", series="kind"),
            alt.Tooltip("seq_len:Q", title="sequence length"),
            *tooltips("", "estimate low high", ",.4~g", estimate=name, low="interval from", high="to"),
            *tooltips("", "predicted", ",.4~g", predicted="predicted"),
            alt.Tooltip("n:Q", title="blocks"),
            *tooltips("method flags"),
        ]
        x = seq_axis(pd.concat([data["seq_len"], failed.get("seq_len", pd.Series(dtype=float))]))
        chosen = alt.selection_point(fields=["series"], bind="legend", name="picked")
        faded = alt.OpacityValue(1.0) if alone else alt.OpacityValue(0.12, condition={"param": "picked", "value": 1.0})

        def draw(part: pd.DataFrame) -> alt.TopLevelMixin:
            base = alt.Chart(part).encode(x=x, color=colour)
            dashed = base.mark_line(strokeDash=[4, 4], opacity=0.8, strokeWidth=1.2)
            shown = base.encode(opacity=faded)
            layers = [
                dashed.encode(y=alt.Y("predicted:Q", **ends)).transform_filter("isValid(datum.predicted)"),
                shown.mark_line(strokeWidth=2).encode(y=y),
                *with_interval(shown, "y", ("estimate", "low", "high"), axis, size=55, shape=shape, tooltip=tooltip),
            ]
            if len(failed):
                crosses = alt.Chart(failed).mark_text(text="✕", fontSize=15, color=FAILED, baseline="bottom", dy=-4)
                reasons = tooltips("series status message", series="kind")
                layers.append(crosses.encode(x=x, y=alt.value("height"), tooltip=reasons))  # a page draws it higher
            # Last, since a selection in the legend works on the first layer, and these have no colour to pick.
            layers += _slopes(part, domain, x, y) if log else []
            return alt.layer(*layers, width=WIDTH, height=HEIGHT)

        with warnings.catch_warnings():  # one selection for all panels is what we want, and what it warns of
            warnings.filterwarnings("ignore", message="Automatically deduplicated selection parameter")
            parts = [data[data["panel"] == panel] for panel in scopes.values()]
            joined = panels(pd.concat(parts), draw)
            if alone:
                return joined, subtitle, more
            return joined.add_params(chosen), [*subtitle, "Click a legend entry to pick it out."], more

    return chart


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


def _series(rows: pd.DataFrame, others: Sequence[str]) -> pd.Series:
    """A name per series: those other factors that vary, then the name, which may be so long that it is cut."""
    label = rows["factor.name"].astype(str)
    for name in [name for name in others if rows[f"factor.{name}"].astype(str).nunique() > 1]:
        short = "batch " if name == "batch_size" else ""
        values = rows[f"factor.{name}"].map(lambda value: f"{value:g}" if isinstance(value, float) else str(value))
        label = short + values + ", " + label
    return label


def _points(rows: pd.DataFrame, others: Sequence[str], scopes: Mapping[str, str]) -> pd.DataFrame:
    """What a chart carries, panel by panel: no samples, no JSON, text for the tooltip."""
    return pd.DataFrame(
        {
            "series": _series(rows, others),
            "panel": rows["scope"].map(scopes),
            "seq_len": rows["factor.seq_len"].astype(int),
            "estimate": rows["estimate"],
            **drawn_ends(rows),
            "predicted": rows["predicted"],
            "n": rows["n"],
            "method": rows["method"],
            "flags": [", ".join(flags) or "none" for flags in rows["flags"]],
            **links(rows),
        }
    )


def _failed(rows: pd.DataFrame, others: Sequence[str]) -> pd.DataFrame:
    """Cases that gave no number: columns `series`, `seq_len`, `status`, `message`."""
    bad = rows[(rows["metric"] == "case_time") & (rows["status"] != "ok") & rows["factor.name"].notna()]
    if bad.empty:
        return pd.DataFrame()
    return pd.DataFrame(
        {
            "series": _series(bad, others),
            "seq_len": bad["factor.seq_len"].astype(int),
            "status": bad["status"],
            "message": bad["message"],
            **links(bad),
        }
    )
