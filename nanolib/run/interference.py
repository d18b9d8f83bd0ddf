"""Interference by other processes while a run measures: flags of its rows, and lines of the run."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from nanolib.measurement import METRICS, Flag, Measurement, Provenance
from nanolib.meters.interference import CpuLoad
from nanolib.meters.time.turns import ROUNDS
from nanolib.run.timeout import Outcome
from nanolib.store import Store
from nanolib.store.schema import DURING

_OTHERS = "other processes, or a hypervisor, took up to {:.0%} of the CPUs"
_NOT_TIMED_NOW = (Provenance.MODELLED, Provenance.REPLAYED)


class Interference:
    """The interference during the cases of a run.

    Args:
        store: Where the run is.
        run_id: Which; its lines from an earlier start stay.
        cases: How many it has to measure.

    Attributes:
        lines: Findings about the cases so far.
    """

    def __init__(self, store: Store, run_id: str, cases: int) -> None:
        self.lines: list[str] = []
        self._store, self._run_id, self._cases = store, run_id, cases
        self._known = list(store.runs_of([run_id]).interference.iloc[0])
        # Finding → the shares of the CPUs that others took, by case.
        self._shares: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, load: CpuLoad, outcome: Outcome) -> None:
        """Flag the rows of a case that others disturbed, and store a line about it.

        Args:
            load: Of the CPUs during the case.
            outcome: Its rows; those that watched their own time keep their own flags.
        """
        outcome.rows = flagged(outcome.rows, load)
        outcome.details, outcome.flags = outcome.details | load.details(), load.flags
        if load.is_busy:
            self._shares[_OTHERS].append(load.taken or 0.0)
        if load.limited_by:
            self._shares[f"{load.limited_by} held this process back"].append(0.0)
        self.lines = [
            f"{DURING}{len(shares)} of {self._cases} cases {text.format(max(shares))}"
            for text, shares in self._shares.items()
        ]
        if load.flags:
            self._store.update_run(self._run_id, interference=[*self._known, *self.lines])


def flagged(rows: list[Measurement], load: CpuLoad) -> list[Measurement]:
    """Flag the timed rows of a case by its load.

    A row that is computed from a timing has that timing's own flags.
    """
    own = {
        row.scope: tuple(flag for flag in row.flags if flag in (Flag.BUSY_MACHINE, Flag.THROTTLED))
        for row in rows
        if row.details.get("others_share") is not None or row.method == ROUNDS
    }

    def with_flags(row: Measurement) -> Measurement:
        is_timed = METRICS[row.metric].is_timed and row.estimate is not None
        if not is_timed or row.provenance in _NOT_TIMED_NOW:
            return row
        flags = (*row.flags, *own.get(row.scope, load.flags))
        return replace(row, flags=tuple(dict.fromkeys(flags)))

    return [with_flags(row) for row in rows]
