"""Latencies of another machine, scaled to this one by the peaks that both have measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from nanolib.compare.findings import Line
from nanolib.measurement import format_with_interval
from nanolib.stats.intervals import TooFewSamples, median_interval

_KEY = ["experiment", "case_id", "scope", "method"]
_TIMES = ("estimate", "low", "high", "predicted", "samples")


def scale_by_peaks(base: pd.DataFrame, current: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """Scale each latency of the base by what the peaks of both machines predict for that case.

    A prediction is the case's time at its run's measured peaks: its FLOPs where it is compute-bound, its bytes where it is
    memory-bound. Everything else stays as it is.

    Args:
        base: Measurements with their samples.
        current: Likewise, of the machine that the base is scaled to.

    Returns:
        The base as it would be on the other machine, and how many of its latencies were left out for want of a prediction.
    """
    timed = current[current["metric"] == "latency"]
    predicted = {tuple(row[_KEY]): row["predicted"] for _, row in timed.iterrows()}
    scaled, unknown = base.copy(), []
    for place, row in base[base["metric"] == "latency"].iterrows():
        key = tuple(row[_KEY])
        if key not in predicted:
            continue
        ratio = predicted[key] / row["predicted"] if row["predicted"] else np.nan
        if not ratio > 0:
            unknown.append(place)
            continue
        for name in _TIMES:
            scaled.at[place, name] = row[name] * ratio
    return scaled.drop(index=unknown), len(unknown)


def overall_shift(lines: Sequence[Line]) -> str:
    """Say how far all latencies together lie from the scaled ones."""
    ratios = [line.verdict.ratio for line in lines if line.verdict is not None]
    try:
        low, ratio, high = np.exp(median_interval(np.log(ratios)))
    except TooFewSamples:
        return f"{len(ratios)} latencies are too few for a ratio of all of them"
    shift = format_with_interval(ratio, low, high)
    return f"current / base, scaled by the peaks of both machines: {shift} over {len(ratios)} latencies"
