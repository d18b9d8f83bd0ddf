"""Findings of a comparison, whoever made it: lines, their order, and what fails a gate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from nanolib.measurement import METRICS
from nanolib.numbers import format_number
from nanolib.stats.compare import THRESHOLD, Kind, Verdict

CHANGED, MISSING, FAILED, NEW = "changed", "missing", "failed", "new"
_WORST_FIRST = (
    Kind.REGRESSED,
    FAILED,
    MISSING,
    CHANGED,
    Kind.SUSPECT,
    Kind.INCONCLUSIVE,
    Kind.IMPROVED,
    NEW,
    Kind.EQUIVALENT,
)


@dataclass(frozen=True)
class Line:
    """One finding.

    Attributes:
        experiment: Which notebook.
        case: The case, for people.
        metric: What is compared, with its scope; empty if the case itself is the finding.
        finding: One of `Kind`, or `changed`, `missing`, `failed`, `new`.
        base: The estimate of the base, in the metric's unit.
        current: The current estimate; with a verdict, current / base is its ratio.
        verdict: The statistics of a timing.
        message: What the finding leaves open.
        machine: On which machine, if there are several.
    """

    experiment: str
    case: str
    metric: str
    finding: str
    base: float | None = None
    current: float | None = None
    verdict: Verdict | None = None
    message: str = ""
    machine: str = ""

    @property
    def name(self) -> str:
        """Its experiment, case and metric, as far as they are known."""
        return " ".join(filter(None, (self.experiment, self.case, self.metric)))

    @property
    def change(self) -> str:
        """The relative change, with its interval if it has one."""
        if self.verdict is not None:
            low, estimate, high = (f"{end - 1:+.1%}" for end in self.verdict.interval)
            return f"{estimate} [{low} … {high}]"
        if not self.base or self.current is None:
            return "—"
        return f"{self.current / self.base - 1:+.2%}"

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types."""
        found = vars(self) | {"finding": str(self.finding)}
        if verdict := found.pop("verdict"):
            low, ratio, high = verdict.interval
            found |= {"ratio": ratio, "low": low, "high": high, "p": verdict.p}
            found["minimum_detectable_effect"] = verdict.minimum_detectable_effect
        return found

    def to_row(self) -> dict[str, str]:
        """Return column → text, for people."""
        return {
            "machine": self.machine,
            "verdict": str(self.finding),
            "experiment": self.experiment,
            "case": self.case,
            "metric": with_unit(self.metric),
            "base": "" if self.base is None else format_number(self.base),
            "current": "" if self.current is None else format_number(self.current),
            "change": self.change,
            "note": self.message,
        }


@dataclass(frozen=True)
class Comparison:
    """All findings, the worst first.

    Attributes:
        lines: The findings.
        same_machine: Whether both sides ran on one machine.
        threshold: The share from which a change counts.
        noise: Notes about the runs: interference, and what was not compared.
        differ: Packages that differ between the interpreters of both sides.
        missing: Notebooks that only the base has; none of their cases is compared.
    """

    lines: tuple[Line, ...]
    same_machine: bool
    threshold: float = THRESHOLD
    noise: Sequence[str] = ()
    differ: Sequence[str] = ()
    missing: Sequence[str] = ()

    @classmethod
    def of(
        cls, lines: Iterable[Line], same_machine: bool, threshold: float, **rest: Sequence[str]
    ) -> Comparison:
        """Sort the findings, the worst first; `rest` are further attributes."""

        def badness(line: Line) -> tuple[int, float]:
            worse = line.verdict.worse if line.verdict else math.inf
            return _WORST_FIRST.index(line.finding), -worse

        return cls(tuple(sorted(lines, key=badness)), same_machine, threshold, **rest)

    @property
    def counts(self) -> dict[str, int]:
        """How many lines have each finding."""
        found = [line.finding for line in self.lines]
        return {str(name): found.count(name) for name in _WORST_FIRST if name in found}

    @property
    def regressed(self) -> bool:
        """Whether a gate fails: something regressed, on the same machine."""
        return self.same_machine and Kind.REGRESSED in self.counts

    @property
    def lost(self) -> bool:
        """Whether notebooks, cases or metrics of the base are missing or failed."""
        return bool(self.missing) or any(line.finding in (MISSING, FAILED) for line in self.lines)

    def table(self, everything: bool = True) -> pd.DataFrame:
        """Return one row per finding, as text; without `everything`, unchanged cases are left out."""
        lines = [line for line in self.lines if everything or line.finding != Kind.EQUIVALENT]
        frame = pd.DataFrame([line.to_row() for line in lines])
        return frame if any(line.machine for line in self.lines) else frame.iloc[:, 1:]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types, for CI."""
        lines = [line.to_dict() for line in self.lines]
        return vars(self) | {"regressed": self.regressed, "counts": self.counts, "lines": lines}


def with_unit(figure: str) -> str:
    """Return a metric, with its scope or without, and its unit if it has one: `latency forward, ms`."""
    metric = METRICS.get(figure.partition(" ")[0])
    return figure if metric is None or metric.unit == "1" else f"{figure}, {metric.unit}"
