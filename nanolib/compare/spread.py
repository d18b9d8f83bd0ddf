"""Estimate the spread between runs of one revision on one machine, beyond which a gate may fail."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from nanolib.stats.compare import Spread

LEAST_RUNS = 3  # of one revision on one machine; fewer do not show what the next one may be
RECENT_RUNS = 60  # of an experiment on a machine, from which the spread is estimated
UNKNOWN = "spread between runs unknown; nano ab decides"
_KEY = ["machine_id", "experiment", "case_id", "scope", "method"]

Repeats = Mapping[tuple[str, ...], pd.DataFrame]


def repeats(figures: Iterable[pd.DataFrame]) -> dict[tuple[str, ...], pd.DataFrame]:
    """Return the runs of committed revisions for each timing.

    Args:
        figures: As `Store.figures` gives them, of one database or two that may share runs.
    """
    rows = pd.concat(list(figures)).drop_duplicates(["run_id", *_KEY])
    committed = (rows["git_revision"] != "") & ~rows["git_revision"].str.endswith("+")
    return dict(iter(rows[committed & (rows["estimate"] > 0)].groupby(_KEY)))


def spread_between_runs(of: Repeats, timing: Mapping[str, Any]) -> Spread | None:
    """Return the standard deviation of a timing between runs, pooled over revisions; None if no revision has three runs.

    Args:
        of: The known runs.
        timing: A row of the run that is judged. That run is left out, because it may be the slow one.
    """
    runs = of.get(tuple(timing[name] for name in _KEY))
    if runs is None:
        return None
    others = runs[runs["run_id"] != timing["run_id"]]
    logs = np.log(others["estimate"].astype(float)).groupby(others["git_revision"])
    enough = logs.transform("size") >= LEAST_RUNS
    freedom = int(enough.sum()) - others["git_revision"][enough].nunique()
    if not freedom:
        return None
    squares = float(((logs.obj - logs.transform("mean"))[enough] ** 2).sum())
    return Spread(math.sqrt(squares / freedom), freedom)
