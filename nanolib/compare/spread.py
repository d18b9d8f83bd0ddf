"""How far runs of one revision lie apart on one machine: what two runs must differ by before a gate may fail."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from nanolib.stats.compare import Spread

LEAST_RUNS = 3  # of one revision on one machine: fewer say too little of what the next one may be
RECENT_RUNS = 60  # of an experiment on a machine: what the spread is sought in
UNKNOWN = "spread between runs unknown; nano ab decides"
_KEY = ["machine_id", "experiment", "case_id", "scope", "method"]

Repeats = Mapping[tuple[str, ...], pd.DataFrame]


def repeats(figures: Iterable[pd.DataFrame]) -> dict[tuple[str, ...], pd.DataFrame]:
    """Each timing's runs of committed revisions.

    Args:
        figures: As `Store.figures` gives them, of one database or two that may share runs.
    """
    rows = pd.concat(list(figures)).drop_duplicates(["run_id", *_KEY])
    committed = (rows["git_revision"] != "") & ~rows["git_revision"].str.endswith("+")
    return dict(iter(rows[committed & (rows["estimate"] > 0)].groupby(_KEY)))


def spread_between_runs(of: Repeats, timing: pd.Series) -> Spread | None:
    """The standard deviation from run to run of a timing, pooled over revisions; None where no revision has three runs.

    Args:
        of: The runs that are known.
        timing: A row of the run that is judged, which does not count itself: it may be the slow one.
    """
    runs = of.get(tuple(timing[_KEY]))
    if runs is None:
        return None
    others = runs[runs["run_id"] != timing["run_id"]]
    groups = [
        np.log(group.to_numpy(float)) for _, group in others.groupby("git_revision")["estimate"]
    ]
    groups = [logs for logs in groups if len(logs) >= LEAST_RUNS]
    freedom = sum(len(logs) - 1 for logs in groups)
    if not freedom:
        return None
    squares = sum(float(((logs - logs.mean()) ** 2).sum()) for logs in groups)
    return Spread(float(np.sqrt(squares / freedom)), freedom)


def count_unknown(messages: Sequence[str]) -> list[str]:
    """The line for timings whose spread is not known, from the messages of all timings."""
    if not (unknown := sum(message == UNKNOWN for message in messages)):
        return []
    few = f"{unknown} of {len(messages)} timings: fewer than {LEAST_RUNS} earlier runs of one revision here"
    return [f"{few}, so suspect at most; nano ab decides"]
