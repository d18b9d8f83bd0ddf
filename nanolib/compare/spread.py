"""Estimate the spread between runs of one revision, and scale latencies to another machine."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from nanolib.stats.compare import Spread

LEAST_RUNS = 3  # With fewer runs of the same code, the spread is unknown.
RECENT_RUNS = 60  # Largest number of runs per experiment and machine in charts and spreads.
UNKNOWN = "the spread between runs is unknown; use nano ab to decide"
KEY = ["machine_id", "experiment", "case_id", "scope", "method"]  # Columns that identify a timing.

Repeats = Mapping[tuple[str, ...], pd.DataFrame]


def repeats(figures: Iterable[pd.DataFrame]) -> dict[tuple[str, ...], pd.DataFrame]:
    """Group the runs of committed revisions by timing.

    Args:
        figures: A table from `Store.figures` per database. A run in several tables counts once.
    """
    rows = pd.concat(list(figures)).drop_duplicates(["run_id", *KEY])
    committed = (rows["git_revision"] != "") & ~rows["git_revision"].str.endswith("+")
    return dict(iter(rows[committed & (rows["estimate"] > 0)].groupby(KEY)))


def spread_between_runs(of: Repeats, timing: Mapping[str, Any]) -> Spread | None:
    """Return the spread of a timing between runs of the same code, pooled over all versions.

    The runs of a version have one revision and one fingerprint. The fingerprint covers the
    parameters, the packages, the settings of the environment, and the user's own functions.

    Args:
        of: Runs of each timing, from `repeats`.
        timing: Row of the timing to judge. The spread excludes the run of this row, because that
            run may be slow.

    Returns:
        The spread, or None if no version has three other runs.
    """
    runs = of.get(tuple(timing[name] for name in KEY))
    if runs is None:
        return None
    others = runs[runs["run_id"] != timing["run_id"]]
    version = others["git_revision"] + " " + others["fingerprint"]
    logs = np.log(others["estimate"].astype(float)).groupby(version)
    enough = logs.transform("size") >= LEAST_RUNS
    freedom = int(enough.sum()) - version[enough].nunique()
    if not freedom:
        return None
    squares = float(((logs.obj - logs.transform("mean"))[enough] ** 2).sum())
    return Spread(math.sqrt(squares / freedom), freedom)


_TIMES = ["estimate", "low", "high", "predicted", "samples"]


def scale_by_peaks(base: pd.DataFrame, current: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """Scale each latency of the base to another machine, by the peak rates of both machines.

    The scaling factor is the ratio of the predicted times of a case. A prediction is the time of
    the case at the measured peak rates of its run.

    Args:
        base: Measurements of the base, with their samples.
        current: Measurements of the other machine, with their samples.

    Returns:
        The base with scaled latencies, and the number of latencies that were excluded because they
        have no prediction.
    """
    _, *key = KEY  # The machines differ, so the key excludes their IDs.
    timed = current[current["metric"] == "latency"]
    predicted = timed.set_index(key)["predicted"].to_dict()
    rows, unknown = [], 0
    for row in base.to_dict("records"):
        timing = tuple(row[name] for name in key)
        if row["metric"] == "latency" and timing in predicted:
            ratio = predicted[timing] / row["predicted"] if row["predicted"] else np.nan
            if not ratio > 0:
                unknown += 1
                continue
            row |= {name: row[name] * ratio for name in _TIMES}
        rows.append(row)
    return pd.DataFrame(rows, columns=base.columns), unknown
