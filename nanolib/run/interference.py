"""What others did to a run while its cases were measured: rows that carry it as flags, and lines of the run."""

from __future__ import annotations

from dataclasses import replace

from nanolib.measurement import METRICS, Flag, Measurement, Provenance
from nanolib.meters.cpu_load import CpuLoad
from nanolib.meters.time.turns import ROUNDS
from nanolib.run.outcome import Outcome
from nanolib.store import Store
from nanolib.store.schema import DURING

_NOT_OF_NOW = (Provenance.MODELLED, Provenance.REPLAYED)


class Interference:
    """What the cases of a run met.

    Args:
        store: Where the run is.
        run_id: Which; what is known of it already stays.
        cases: How many it has to measure.

    Attributes:
        lines: What is said of the cases so far, a line each.
    """

    def __init__(self, store: Store, run_id: str, cases: int) -> None:
        self._store, self._run_id, self._cases = store, run_id, cases
        self._known = list(store.runs_of([run_id]).disturbances.iloc[0])
        self._taken: list[float] = []
        self._held_back: list[str] = []

    @property
    def lines(self) -> list[str]:
        """See the class."""
        lines = []
        if self._taken:
            most = f"took up to {max(self._taken):.0%} of the CPUs"
            lines.append(
                f"{DURING}{len(self._taken)} of {self._cases} cases other processes, or a hypervisor, {most}"
            )
        if self._held_back:
            by = self._held_back[-1]
            lines.append(
                f"{DURING}{len(self._held_back)} of {self._cases} cases {by} held this process back"
            )
        return lines

    def met(self, load: CpuLoad, outcome: Outcome) -> None:
        """Flag what a case measured while others were at work, and keep with the run that it did.

        Args:
            load: What the CPUs did during the case.
            outcome: Its rows; those that watched their own span keep what they saw.
        """
        outcome.rows = flagged(outcome.rows, load)
        outcome.details, outcome.flags = outcome.details | load.details(), load.flags
        if load.is_busy:
            self._taken.append(load.taken or 0.0)
        if load.limited_by:
            self._held_back.append(load.limited_by)
        if load.flags:
            self._store.update_run(self._run_id, disturbances=[*self._known, *self.lines])


def flagged(rows: list[Measurement], load: CpuLoad) -> list[Measurement]:
    """The rows of a case, flagged by its load; what was made of a timing carries that timing's own flags."""
    watched = {
        row.scope: tuple(flag for flag in row.flags if flag in (Flag.BUSY_MACHINE, Flag.THROTTLED))
        for row in rows
        if row.details.get("others_share") is not None or row.method == ROUNDS
    }
    return [
        replace(row, flags=tuple(dict.fromkeys([*row.flags, *watched.get(row.scope, load.flags)])))
        if METRICS[row.metric].is_timed
        and row.estimate is not None
        and row.provenance not in _NOT_OF_NOW
        else row
        for row in rows
    ]
