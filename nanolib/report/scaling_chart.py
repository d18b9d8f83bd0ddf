"""Draw one metric of cases over their sequence length: points with intervals, predictions dashed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import altair as alt
import pandas as pd

from nanolib.measurement import METRICS, Flag
from nanolib.report.filters import links
from nanolib.report.overview import of_experiment, pick, why_empty
from nanolib.report.plot import plot
from nanolib.report.tables import short_names
from nanolib.report.theme import Chart, empty_chart

KEY = "Points: measured, with 95 % intervals. Hollow: not settled. Dashed: predicted."
COUNTED_KEY = "Points: counted, exact. Dashed: predicted."
ROOFLINE_KEY = "The prediction is the roofline of the peak rates measured in the same run."
PLAN_KEY = "The prediction counts the same bytes on tensors that have shapes and no data."


def scaling_chart(
    experiment: str,
    metric: str,
    title: str,
    subtitle: Sequence[str],
    scopes: Mapping[str, str],
    others: Sequence[str],
    share: bool = False,
) -> Chart:
    """Return what draws one metric of an experiment's cases over their sequence length.

    Args:
        experiment: Whose cases.
        metric: Which metric.
        title: Of the chart.
        subtitle: Its lines.
        scopes: Scope → the title of its panel.
        others: Factors in which series of one name may differ.
        share: Whether the metric is a share, on an axis from zero.
    """

    def chart(rows: pd.DataFrame) -> alt.TopLevelMixin:
        rows = of_experiment(rows, experiment)
        measured = pick(rows, metric)
        if measured.empty:
            return empty_chart(title, why_empty(rows, experiment))
        found = pd.concat([measured[measured["scope"] == scope] for scope in scopes])
        if found.empty:
            return empty_chart(title, why_empty(rows, experiment))
        found, shared = short_names(found)
        labels, alike = _series(found, others)
        data = pd.DataFrame(
            {
                "panel": found["scope"].map(scopes),
                "series": labels,
                "x": found["factor.seq_len"].astype(int),
                "y": found["estimate"],
                "low": found["low"],
                "high": found["high"],
                "pred": found["predicted"],
                "sure": [Flag.NO_STEADY_STATE not in flags for flags in found["flags"]],
                "note": [", ".join(flags) for flags in found["flags"]],
                **links(found),
            }
        )
        unit = METRICS[metric].unit
        axis = METRICS[metric].title + ("" if unit == "1" else f" ({unit})")
        return plot(
            data,
            title + (shared or alike),
            subtitle=subtitle,
            unit=axis,
            xunit="Sequence length (tokens)",
            log="x" if share else "xy",
            fmt=".1~%" if share else ",.3~r",
            width=680,
        )

    return chart


def _series(rows: pd.DataFrame, others: Sequence[str]) -> tuple[pd.Series, str]:
    """Name each series by the factors that vary, its own name last; return the name that all share too, for the title."""
    names = [*others, "name"]
    varying = [name for name in names if rows[f"factor.{name}"].astype(str).nunique() > 1]
    parts = [_words(name, rows[f"factor.{name}"]) for name in varying or ["name"]]
    shared = f": {rows['factor.name'].iloc[0]}" if varying and "name" not in varying else ""
    return parts[0].str.cat(parts[1:], sep=", "), shared


def _words(name: str, values: pd.Series) -> pd.Series:
    words = values.map(lambda value: f"{value:g}" if isinstance(value, float) else str(value))
    return "batch " + words if name == "batch_size" else words
