"""What lies behind a point of the report: its samples in order, what was cut as warm-up, where it changed, what sticks out."""

from __future__ import annotations

import functools
from collections.abc import Set
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from nanolib.measurement import METRICS, case_name, format_with_interval
from nanolib.report.drawing import HEIGHT, WIDTH, coloured, theme
from nanolib.report.palette import FRAME, PALETTE
from nanolib.stats.outliers import fences

MOST_VALUES = 60_000  # of all points together: 0.4 MB of a page
KINDS = {"steady": PALETTE[0], "beyond 1.5 IQR": PALETTE[4], "beyond 3 IQR": PALETTE[1], "warm-up, cut": FRAME}


def behind(rows: pd.DataFrame, shown: Set[int]) -> dict[int, dict[str, Any]]:
    """Facts of each point, and its samples as far as there is room for them.

    Args:
        rows: Measurements with their samples.
        shown: Ids of those that a chart shows as a point.

    Returns:
        Id → `facts` (how it was measured, for a tooltip), and where it has several samples: `title`, `what`, `how`, `stop`, `unit`,
        `values` (block medians in order), `kinds` (of each, as indices into `KINDS`), `changes` (before which block), `ends` (low,
        estimate, high).
    """
    found: dict[int, dict[str, Any]] = {}
    left = MOST_VALUES
    for row in rows[rows["id"].isin(shown)].to_dict("records") if "id" in rows else []:
        point: dict[str, Any] = {"facts": _facts(row)}
        samples = row.get("samples")
        if samples is not None and 1 < len(samples) <= left:
            left -= len(samples)
            point |= _series(row, np.asarray(samples, dtype=float))
        found[int(row["id"])] = point
    return found


def _facts(row: dict[str, Any]) -> dict[str, Any]:
    details = row["details"]
    clock = details.get("clock_mhz")
    return {
        "n": int(row["n"]),
        "provenance": row["provenance"],
        "method": row["method"],
        "flags": ", ".join(row["flags"]) or "none",
        **({"clock": f"{clock:g} MHz" if isinstance(clock, int | float) else str(clock)} if clock else {}),
    }


def _series(row: dict[str, Any], samples: np.ndarray) -> dict[str, Any]:
    details, metric = row["details"], METRICS.get(row["metric"])
    each = max(1, int(details.get("calls_per_block", 1)))
    if each > len(samples):
        each = 1
    cut = int(details.get("warmup_cut", 0)) // each
    blocks = np.median(samples[: len(samples) // each * each].reshape(-1, each), axis=1)
    limits = fences(blocks[cut:]) if len(blocks) > cut else None
    title = f"{row['experiment']}: {case_name(row['factors'])} {row['scope']}".strip()
    ends = [row["low"], row["estimate"], row["high"]]
    return {
        "title": title,
        "what": f"{metric.title if metric else row['metric']}: {format_with_interval(*(ends[i] for i in (1, 0, 2)))}"
        + (f" {row['unit']}" if row["unit"] != "1" else ""),
        "how": f"{len(blocks)} blocks" + (f" of {each} calls" if each > 1 else "")
        if "calls_per_block" in details
        else "",
        "stop": f"{details['stop']}, after {details['elapsed_s']:.2g} s"
        if "elapsed_s" in details and "stop" in details
        else "",
        "unit": "" if row["unit"] == "1" else row["unit"],
        "values": [float(f"{value:.5g}") for value in blocks],
        "kinds": [_kind(value, at < cut, limits) for at, value in enumerate(blocks)],
        "changes": [int(at) // each for at in details.get("changes", [])],
        "ends": [None if end is None or end != end else float(end) for end in ends],
    }


def _kind(value: float, cut: bool, limits: Any) -> int:
    if cut or limits is None:
        return 3
    if not limits.severe_low <= value <= limits.severe_high:
        return 2
    return 0 if limits.mild_low <= value <= limits.mild_high else 1


@functools.cache
def samples_chart() -> dict[str, Any]:
    """The series of one point, whose data the page puts in: `samples` (block, value, kind), `changes` (block), `ends`."""
    x = alt.X("block:Q", title="Block, in the order of time", axis=alt.Axis(format="d", tickMinStep=1))
    y = alt.Y("value:Q", title=None, scale=alt.Scale(zero=False))
    series = alt.Chart(alt.NamedData("samples"))
    points = series.mark_point(filled=True, size=45, opacity=1).encode(
        x=x,
        y=y,
        color=coloured("kind", "Block", KINDS),
        shape=alt.Shape("kind:N", title="Block", scale=alt.Scale(domain=list(KINDS))),
        tooltip=[alt.Tooltip("block:Q"), alt.Tooltip("value:Q", format=",.5~g"), alt.Tooltip("kind:N")],
    )
    ends = alt.Chart(alt.NamedData("ends"))
    layers = [
        ends.mark_rect(color=PALETTE[0], opacity=0.12).encode(y=alt.Y("low:Q"), y2=alt.Y2("high:Q")),
        ends.mark_rule(color=PALETTE[0]).encode(y=alt.Y("estimate:Q")),
        alt.Chart(alt.NamedData("changes")).mark_rule(color=PALETTE[1], strokeDash=[4, 3]).encode(x=alt.X("block:Q")),
        series.mark_line(color=FRAME, strokeWidth=1).encode(x=x, y=y),
        points,
    ]
    return theme(alt.layer(*layers, width=2 * WIDTH, height=HEIGHT)).to_dict(validate=False)
