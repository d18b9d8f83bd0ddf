"""Draw the charts that several notebooks share: a metric by sequence length, and the roofline.

Source: Williams, Waterman & Patterson (2009) for the roofline.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from nanolib.measurement import METRICS, Flag
from nanolib.numbers import scaled
from nanolib.report.finding import Estimate, Finding
from nanolib.report.overview import join_words, of_experiment, pick, why_empty
from nanolib.report.plot import links, plot, point_columns
from nanolib.report.tables import Column, IntervalColumn, add_metric_columns, percent, ratios
from nanolib.report.theme import Chart, Drawing, empty_chart, hues

KEY = "Points: measured, with 95 % intervals. Hollow: not settled. Dashed: predicted."
COUNTED_KEY = "Points: counted exactly. Dashed: predicted."
ROOFLINE_KEY = "The prediction is the roofline of the peak rates measured in the same run."
PLAN_KEY = "The prediction counts the bytes of tensors that have shapes but no data."


def scaling_chart(
    experiment: str,
    metric: str,
    title: str,
    subtitle: Sequence[str],
    scopes: Mapping[str, str],
    others: Sequence[str],
) -> Chart:
    """Return a function that draws a metric and its prediction over the sequence length.

    Args:
        experiment: Name of the experiment.
        metric: Key of `METRICS`. A share gets a linear axis that includes zero.
        title: Title of the chart.
        subtitle: Lines below the title.
        scopes: Maps each scope of the metric to the title of its panel.
        others: Factors that distinguish series with the same name.
    """

    def chart(rows: pd.DataFrame) -> Drawing:
        rows = of_experiment(rows, experiment)
        found = pd.concat([pick(rows, metric, scope) for scope in scopes])
        if found.empty:
            return empty_chart(title, why_empty(rows, experiment))
        found, shared = short_names(found)
        labels, alike = series_names(found, others)
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
        is_share = unit == "1"
        return plot(
            data,
            title + (shared or alike),
            subtitle=subtitle,
            unit=METRICS[metric].title + ("" if is_share else f" ({unit})"),
            xunit="Sequence length (tokens)",
            log="x" if is_share else "xy",
            fmt=".1~%" if is_share else ",.3~r",
        )

    return chart


def short_names(rows: pd.DataFrame, prefix: str = "factor.") -> tuple[pd.DataFrame, str]:
    """Name rows by optimization if all rows describe one model with several optimizations.

    Args:
        rows: Measurements, or lines of a table.
        prefix: Prefix of the columns `name` and `optimization`.

    Returns:
        The renamed rows and the name of the model, or the same rows and an empty name.
    """
    name, optimization = f"{prefix}name", f"{prefix}optimization"
    if optimization not in rows or rows[optimization].nunique() < 2:
        return rows, ""
    used = rows[optimization].str.replace("_", " ")
    names = zip(rows[name], used, strict=True)
    models = {full.removesuffix(f" ({which})") for full, which in names}
    if len(models) > 1:
        return rows, ""
    return rows.assign(**{name: used}), f": {models.pop()}"


_LABELS = {"batch_size": "batch {}", "causal": "causal {}", "run_id": "run {:.8}"}


def series_names(
    rows: pd.DataFrame, others: Sequence[str], prefix: str = "factor."
) -> tuple[pd.Series, str]:
    """Name the series of a chart by their `name`, and by the other columns that vary.

    Args:
        rows: Measurements, or lines of a table.
        others: Columns that distinguish series with the same name.
        prefix: Prefix of the columns.

    Returns:
        A label for each row, and the name if it is the same for all rows and not in the labels.
    """
    names = [*others, "name"]
    varying = [name for name in names if rows[f"{prefix}{name}"].astype(str).nunique() > 1]
    parts = []
    for name in varying or ["name"]:
        values = rows[f"{prefix}{name}"]
        words = values.map(lambda value: f"{value:g}" if isinstance(value, float) else str(value))
        parts.append(words.map(_LABELS.get(name, "{}").format))
    shared = f": {rows[f'{prefix}name'].iloc[0]}" if varying and "name" not in varying else ""
    return parts[0].str.cat(parts[1:], sep=", "), shared


_CASE = ["name", "optimization", "seq_len", "batch_size", "dtype"]
_TIMED = (
    IntervalColumn("achieved", "", "flops_per_second"),
    Column("flops", "", "flops"),
    Column("moved", "", "bytes"),
)
_PEAK = IntervalColumn("peak", "", "ceiling_flops")
_BANDWIDTH = IntervalColumn("bandwidth", "", "ceiling_bytes")


def roofline_table(rows: pd.DataFrame, experiment: str) -> pd.DataFrame:
    """Return a table with a line for each timing that has FLOPs, bytes and measured peak rates.

    Returns:
        A table with the columns `case`, `name`, `dtype` and `scope`, and these columns:

        intensity: Arithmetic intensity by formula, in FLOP per byte.
        achieved: Measured rate with its interval, in FLOP/s.
        peak, bandwidth: Peak rates of the same run, in FLOP/s and B/s.
        ridge: Intensity at which the roofline bends, in FLOP per byte.
        attainable: Rate of the roofline at this intensity, with its interval, in FLOP/s.
        share: Achieved over attainable rate, with the widest interval that both intervals allow.
        bound: Limit at this intensity, `compute` or `memory`.
    """
    rows = of_experiment(rows, experiment)
    achieved = pick(rows, "flops_per_second")
    if achieved.empty:
        return pd.DataFrame()
    key = ["run_id", "case_id", "scope"]
    factors = [f"factor.{name}" for name in _CASE if f"factor.{name}" in achieved]
    table = achieved[[*key, *factors]].rename(columns=lambda name: name.removeprefix("factor."))
    table = add_metric_columns(table, rows, _TIMED, key)
    # The scope of each peak rate in FLOP/s is the name of its dtype.
    by_dtype = rows.assign(dtype=rows["scope"])
    table = add_metric_columns(table, by_dtype, [_PEAK], ["run_id", "dtype"])
    table = add_metric_columns(table, rows, [_BANDWIDTH], ["run_id"])
    # The roofline needs FLOPs, bytes and peak rates that are greater than 0.
    known = table[["flops", "moved", "peak", "bandwidth"]].astype(float)
    table = table[(np.isfinite(known) & (known > 0)).all(axis=1)].reset_index(drop=True)
    table["case"] = table["name"] + " seq_len=" + table["seq_len"].astype(int).astype(str)
    if table["batch_size"].nunique() > 1:
        table["case"] += " batch=" + table["batch_size"].astype(int).astype(str)
    table["intensity"] = table["flops"] / table["moved"]
    table["ridge"] = table["peak"] / table["bandwidth"]
    # Without an interval, the estimate of the peak rate replaces both ends of the interval.
    for end in ("", "_low", "_high"):
        flops = table[f"peak{end}"].fillna(table["peak"])
        copied = table[f"bandwidth{end}"].fillna(table["bandwidth"])
        table[f"attainable{end}"] = np.minimum(flops, table["intensity"] * copied)
    table = table.assign(**ratios("share", table, "achieved", "attainable"))
    return table.assign(bound=np.where(table["intensity"] < table["ridge"], "memory", "compute"))


def roofline_chart(experiment: str) -> Chart:
    """Return a function that draws measured rates over the intensity, and the roofline."""

    def chart(rows: pd.DataFrame) -> Drawing:
        table = roofline_table(rows, experiment)
        if table.empty:
            return empty_chart("Roofline", "no timing has FLOPs, bytes and measured peak rates")
        table, shared = short_names(table, "")
        points = pd.DataFrame(
            {
                "panel": table["scope"].str.replace("_", " "),
                "series": table["name"],
                "x": table["intensity"],
                **point_columns(table, "achieved", "y"),
                "note": [
                    f"{case}, {share:.0%} of the roofline, {bound}-bound"
                    for case, share, bound in table[["case", "share", "bound"]].to_numpy()
                ],
            }
        )
        points["hue"] = points["series"].map(hues(points["series"]))
        return plot(
            pd.concat([points, _peaks(table, points)], ignore_index=True),
            f"Roofline{shared}",
            subtitle=[
                "Left of the bend: memory-bound. Right of the bend: compute-bound.",
                "The intensity counts only bytes that must move. With cached data, rates can exceed the roofline.",
                "Dashed: peak rates of the same run.",
            ],
            unit="Rate (FLOP/s)",
            xunit="Arithmetic intensity (FLOP per byte)",
            log="xy",
            fmt="~s",
            join=False,
        )

    return chart


def _peaks(table: pd.DataFrame, points: pd.DataFrame) -> pd.DataFrame:
    """Return the points of the roofline of each run and dtype. All panels show all rooflines."""
    lines = table[["dtype", "peak", "bandwidth", "ridge", "run_id"]].drop_duplicates()
    lines = lines.merge(points["panel"].drop_duplicates(), how="cross")
    left, right = points["x"].min() / 2, max(points["x"].max(), table["ridge"].max()) * 2
    ends = pd.concat([lines.assign(x=x) for x in (left, lines["ridge"], right)])
    return pd.DataFrame(
        {
            "panel": ends["panel"],
            "series": ends["dtype"] + " peak",
            "x": ends["x"],
            "pred": np.minimum(ends["peak"], ends["x"] * ends["bandwidth"]),
            "hue": "base",
            "link_run": ends["run_id"].str[:8],
        }
    )


def roofline_words(rows: pd.DataFrame, experiment: str) -> list[Finding]:
    """Return a finding per scope with the limits of the cases and the best roofline share."""
    table = roofline_table(rows, experiment)
    if table.empty:
        return []
    findings = []
    for scope, group in table.groupby("scope", sort=False):
        best = group.sort_values("share").iloc[-1]
        counts = group["bound"].value_counts().items()
        kinds = (f"{bound}-bound in {count} of {len(group)} cases" for bound, count in counts)
        roof, next_step = scaled(best["attainable"], "FLOP/s"), ""
        evidence = f"{best['case']} reaches {percent(best, 'share')} of the roofline's {roof}"
        if best["share_low"] > 1:
            why = "part of the data stays in a cache"
            if best["bound"] == "compute":
                why = "the measured peak rate is too low"
                next_step = "run nano doctor on an idle machine"
            reached = scaled(best["achieved"], "FLOP/s")
            evidence = f"{best['case']} reaches {reached}, above the roofline's {roof}: {why}"
        elif best["share"] > 1:
            evidence += " (the interval includes the roofline)"
        share = Estimate.of(best, "share", name=best["case"])
        answer = f"{scope.replace('_', ' ').capitalize()} is {join_words(kinds)}"
        findings.append(Finding(answer, evidence, next_step, figures=(share,)))
    return findings
