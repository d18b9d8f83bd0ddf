"""The roofline: each timing as a point under the ceilings that its own run measured, bound by arithmetic or by memory.

Source: Williams, Waterman & Patterson (2009).
"""

from __future__ import annotations

import altair as alt
import numpy as np
import pandas as pd

from nanolib.measurement import Flag
from nanolib.report.claim import Claim, Figure, comparing
from nanolib.report.drawing import HEIGHT, WIDTH, Chart, colour_and_shape, short_names
from nanolib.report.frame import Drawn, framed, tooltips, with_interval
from nanolib.report.linking import links
from nanolib.report.log_axes import drawable
from nanolib.report.overview import listed, pick, ranked
from nanolib.report.palette import QUIET
from nanolib.report.tables import Column, drawn_ends, filled, percent, ratios

_CASE = ["name", "optimisation", "seq_len", "batch_size", "dtype"]


def roofline_table(rows: pd.DataFrame, experiment: str = "") -> pd.DataFrame:
    """One line per timing whose work and traffic are known, in a run that measured its ceilings.

    Args:
        rows: Measurements of any experiments.
        experiment: Only this one's.

    Returns:
        Columns: `case`, `name`, `dtype`, `scope`, `intensity` (FLOP per byte: formulas alone), `achieved` with `low` and `high`,
        `attainable` (the lower of the two ceilings at this intensity) in FLOP/s and `share`, each with `low` and `high`
        (the widest that timing and ceilings allow), `bound` (`compute` or `memory`), `ridge` (the intensity at which the two
        ceilings meet), `peak`, `bandwidth`.
    """
    if experiment and len(rows):
        rows = rows[rows["experiment"] == experiment]
    achieved = pick(rows, "flops_per_second")
    achieved = achieved.assign(**links(achieved))
    if achieved.empty or "factor.dtype" not in rows:
        return pd.DataFrame()
    key = ["run_id", "case_id", "scope"]
    columns = {f"factor.{name}": name for name in _CASE} | {
        "estimate": "achieved",
        "low": "achieved_low",
        "high": "achieved_high",
    }
    followed = [name for name in achieved if name.startswith("link_")]
    table = achieved[[*key, *followed, *(name for name in columns if name in achieved)]].rename(columns=columns)
    table["achieved_busy"] = [Flag.BUSY_MACHINE in flags for flags in achieved["flags"]]
    table = filled(table, rows, (Column("flops", "", "flops"), Column("moved", "", "bytes")), key)
    peaks = rows.assign(dtype=rows["scope"])  # a ceiling is of a type, or of the copy
    table = filled(table, peaks, (Column("peak", "", "ceiling_flops", interval=True),), ["run_id", "dtype"])
    table = filled(table, rows, (Column("bandwidth", "", "ceiling_bytes", interval=True),), ["run_id"])
    table = table.dropna(subset=["flops", "moved", "peak", "bandwidth"]).reset_index(drop=True)
    table["case"] = table["name"] + " n=" + table["seq_len"].astype(int).astype(str)
    if table["batch_size"].nunique() > 1:
        table["case"] += " batch=" + table["batch_size"].astype(int).astype(str)
    table["intensity"] = table["flops"] / table["moved"]
    table["ridge"] = table["peak"] / table["bandwidth"]
    peak, bandwidth = drawn_ends(table, "peak"), drawn_ends(table, "bandwidth")
    table["attainable"] = np.minimum(table["peak"], table["intensity"] * table["bandwidth"])
    for end in ("low", "high"):
        table[f"attainable_{end}"] = np.minimum(peak[end], table["intensity"] * bandwidth[end])
    table = table.assign(**ratios("share", table, "achieved", "attainable"))
    table["bound"] = np.where(table["intensity"] < table["ridge"], "memory", "compute")
    ends = [f"{name}_{end}" for name in ("peak", "bandwidth") for end in ("low", "high", "predicted", "row", "busy")]
    return table.drop(columns=["flops", "moved", *ends])


def roofline_chart(experiment: str) -> Chart:
    """Points: measured rates over the intensity that formulas give. Dashed: the ceilings of the same run, a roof per type."""
    why = "no timing has its work, its bytes and its run's ceilings"
    return framed("Under the roofline", experiment, why)(lambda rows: _drawn(rows, experiment))


def _drawn(rows: pd.DataFrame, experiment: str) -> Drawn | None:
    table = roofline_table(rows, experiment)
    if table.empty:
        return None
    table, shared = short_names(table, "name", "optimisation")
    columns = ["name", "scope", "case", "dtype", "intensity", "achieved", "achieved_low", "achieved_high", "attainable"]
    columns += ["share", "share_low", "share_high", "bound", *(name for name in table if name.startswith("link_"))]
    data = table[columns].assign(scope=table["scope"].str.replace("_", " "))
    data = data.assign(**{f"achieved_{end}": values for end, values in drawn_ends(data, "achieved").items()})
    bends = drawable(table["ridge"])
    at = drawable(data["intensity"])
    low, high = (at if len(at) else bends).min() / 2, max([*at, *bends], default=1.0) * 2
    roofs = []
    for (dtype, peak, bandwidth, run), _ in table.groupby(["dtype", "peak", "bandwidth", "run_id"], sort=False):
        for x in (low, peak / bandwidth, high):
            roofs.append(
                {
                    "roof": f"ceiling {dtype}",
                    "intensity": x,
                    "attainable": min(peak, x * bandwidth),
                    "link_run": run[:8],
                }
            )
    roofs = pd.DataFrame(roofs)
    x = alt.X(
        "intensity:Q",
        title="Arithmetic intensity (FLOP per byte)",
        scale=alt.Scale(type="log", domain=[low, high], nice=False),
    )
    rates = pd.concat([data["achieved"], data["achieved_low"], roofs["attainable"]])
    bottom = drawable(rates).min() / 2
    scale = alt.Scale(type="log", domain=[bottom, roofs["attainable"].max() * 2], nice=False)
    y = {"title": "Rate (FLOP/s)", "scale": scale, "axis": alt.Axis(format="~s", tickCount=6)}
    colour, _ = colour_and_shape("name", "Kind", data["name"])
    _, shape = colour_and_shape("scope", "Of", data["scope"])
    several = data["name"].nunique() > 1
    chosen = alt.selection_point(fields=["name"], bind="legend", name="picked")
    faded = alt.OpacityValue(0.12, condition={"param": "picked", "value": 1.0}) if several else alt.OpacityValue(1.0)
    points = alt.Chart(data).encode(x=x, color=colour, opacity=faded)
    tooltip = [
        *tooltips("case scope bound"),
        *tooltips("", "intensity", ",.3~g", intensity="FLOP per byte"),
        *tooltips("", "achieved attainable", ".3s", achieved="achieved (FLOP/s)", attainable="attainable (FLOP/s)"),
        *tooltips("", "share share_low share_high", ".0%"),
    ]
    along = {"x": x, "y": alt.Y("attainable:Q", **y)}
    dashed = alt.Chart(roofs).mark_line(strokeDash=[6, 4], color=QUIET, strokeWidth=1.5, clip=True)
    named = alt.Chart(roofs.groupby(["roof", "link_run"], sort=False).tail(1)).mark_text(
        align="right", dy=-8, color=QUIET, fontSize=11
    )
    ends = ("achieved", "achieved_low", "achieved_high")
    layers = [  # the points first: a selection in the legend works on the first layer
        *with_interval(points, "y", ends, y, shape=shape, tooltip=tooltip),
        dashed.encode(**along, detail=[alt.Detail("roof:N"), alt.Detail("link_run:N")]),
        named.encode(**along, text=alt.Text("roof:N")),
    ]
    subtitle = [
        "Left of the bend memory is the limit, right of it arithmetic. Dashed: this machine's ceilings, measured in the same run.",
        "Bytes are those that must move at least once: what stays in a cache can lie above the slope.",
        *(["Click a legend entry to pick it out."] if several else []),
    ]
    drawn = alt.layer(*layers, width=2 * WIDTH, height=int(1.3 * HEIGHT))
    return drawn.add_params(chosen) if several else drawn, subtitle, shared


def roofline_words(rows: pd.DataFrame, experiment: str) -> list[Claim]:
    """What binds each kind of timing, and the best share of it that was reached."""
    table = roofline_table(rows, experiment)
    table = table[table["attainable"] > 0] if len(table) else table  # without work there is no share of a ceiling
    claims = []
    for scope, group in table.groupby("scope", sort=False) if len(table) else []:
        near, others = ranked(group, "share", ascending=False)
        best = near.iloc[0]
        counts = group["bound"].value_counts().items()
        answer = f"{scope.replace('_', ' ').capitalize()} is bound by "
        answer += listed(f"{bound} in {count} of {len(group)} cases" for bound, count in counts)
        also = f" (not told apart from {len(near) - 1} more)" if len(near) > 1 else ""
        sure, advice = f"{best['case']} comes nearest to its roof{also}", ""
        if best["share_low"] > 1:  # a share of more than all there is would be no share
            sure += f" and is above it, {best['achieved']:.3g} beside {best['attainable']:.3g} FLOP/s: "
            sure += "some of it stays in a cache" if best["bound"] == "memory" else "the ceiling was measured too low"
            advice = "" if best["bound"] == "memory" else "run nano doctor on an idle machine, for its ceiling"
        else:
            sure += f", {percent(best, 'share')} of {best['attainable']:.3g} FLOP/s"
        shares = (Figure.of(row, "share", name=row["case"]) for row in (best, *(row for _, row in others.iterrows())))
        compared = comparing(*shares)
        claims.append(Claim(answer, sure, advice, compared=compared))
    return claims
