"""Scale latencies of another machine to this one, by the peak rates that both have measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from nanolib.compare.findings import Line
from nanolib.numbers import format_with_interval
from nanolib.stats.intervals import TooFewSamples, median_interval

_KEY = ["experiment", "case_id", "scope", "method"]
_TIMES = ["estimate", "low", "high", "predicted", "samples"]


def scale_by_peaks(base: pd.DataFrame, current: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """Scale each latency of the base by what the peak rates of both machines predict for that case.

    A prediction is the case's time at its run's measured peak rates: its FLOPs if it is compute-bound, its bytes if it is
    memory-bound. Everything else stays as it is.

    Args:
        base: Measurements with their samples.
        current: Likewise, of the machine to which the base is scaled.

    Returns:
        The base as it would be on the other machine, and how many latencies were left out because they have no prediction.
    """
    timed = current[current["metric"] == "latency"]
    predicted = {
        tuple(row[name] for name in _KEY): row["predicted"] for row in timed.to_dict("records")
    }
    rows, unknown = [], 0
    for row in base.to_dict("records"):
        key = tuple(row[name] for name in _KEY)
        if row["metric"] == "latency" and key in predicted:
            ratio = predicted[key] / row["predicted"] if row["predicted"] else np.nan
            if not ratio > 0:
                unknown += 1
                continue
            row |= {name: row[name] * ratio for name in _TIMES}
        rows.append(row)
    return pd.DataFrame(rows, columns=base.columns), unknown


def overall_shift(lines: Sequence[Line]) -> str:
    """Return the ratio of all latencies together to the scaled ones, in one line."""
    ratios = [line.verdict.ratio for line in lines if line.verdict is not None]
    try:
        low, ratio, high = np.exp(median_interval(np.log(ratios)))
    except TooFewSamples:
        return f"{len(ratios)} latencies are too few for a ratio of all of them"
    shift = format_with_interval(ratio, low, high)
    return f"current / base, scaled by the peak rates of both machines: {shift} over {len(ratios)} latencies"
