"""Describe the findings of a comparison, sort them, and decide whether a gate fails."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from nanolib.measurement import METRICS, quote
from nanolib.numbers import format_number, format_with_interval
from nanolib.stats.compare import THRESHOLD, Kind, Verdict
from nanolib.stats.intervals import TooFewSamples, median_interval

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
CASE_KEY = ["machine_id", "experiment", "case_id"]  # Columns that identify a case.
# The machine ID, experiment, case ID and factors of each case.
CasesOfMachines = Iterable[tuple[str, str, str, Mapping[str, Any]]]


@dataclass(frozen=True)
class Line:
    """Finding about a case or about a metric of a case.

    Attributes:
        experiment: Name of the experiment.
        case: Readable name of the case.
        metric: Metric and scope, or empty if the finding is about the whole case.
        finding: One of `Kind`, or `changed`, `missing`, `failed` or `new`.
        base: Estimate of the base, in the unit of the metric, or None without an estimate on both
            sides.
        current: Estimate of the current run, in the unit of the metric, or None as for `base`. If
            there is a verdict, `current / base` is the ratio of the verdict.
        verdict: Result of the statistical comparison of a timing, or None without such a
            comparison.
        message: Reason for the finding, or details about the finding.
    """

    experiment: str
    case: str
    metric: str
    finding: str
    base: float | None = None
    current: float | None = None
    verdict: Verdict | None = None
    message: str = ""

    @property
    def name(self) -> str:
        """Name of the finding, with the experiment, the case and the metric."""
        return " ".join(filter(None, (self.experiment, self.case, self.metric)))

    @property
    def change(self) -> str:
        """Relative change, with its interval if the finding has a verdict."""
        if self.verdict is not None:
            low, estimate, high = (f"{end - 1:+.1%}" for end in self.verdict.interval)
            return f"{estimate} [{low} … {high}]"
        if not self.base:
            return "—"
        return f"{self.current / self.base - 1:+.2%}"

    def to_row(self) -> dict[str, str]:
        """Return the finding as a row of readable text, column → text."""
        return {
            "verdict": str(self.finding),
            "experiment": self.experiment,
            "case": self.case,
            "metric": add_unit(self.metric),
            "base": "" if self.base is None else format_number(self.base),
            "current": "" if self.current is None else format_number(self.current),
            "change": self.change,
            "note": self.message,
        }


@dataclass(frozen=True)
class Comparison:
    """Findings of a comparison.

    Attributes:
        lines: Findings, the worst first.
        same_machine: Whether both sides ran on one machine.
        threshold: Smallest change that counts, as a share.
        noise: Notes about interference, and about experiments that were not compared.
        differ: Packages that differ between the interpreters of the two sides.
        missing: Experiments that only the base has. Their cases are not compared.
    """

    lines: tuple[Line, ...]
    same_machine: bool
    threshold: float = THRESHOLD
    noise: Sequence[str] = ()
    differ: Sequence[str] = ()
    missing: Sequence[str] = ()

    @property
    def counts(self) -> dict[str, int]:
        """Number of lines with each finding."""
        found = [line.finding for line in self.lines]
        return {name: found.count(name) for name in _WORST_FIRST if name in found}

    @property
    def has_regressed(self) -> bool:
        """Whether a metric regressed on the same machine, which makes a gate fail."""
        return self.same_machine and Kind.REGRESSED in self.counts

    @property
    def is_compared(self) -> bool:
        """Whether at least one metric has a value on both sides."""
        return any(line.base is not None for line in self.lines)

    @property
    def lost(self) -> bool:
        """Whether an experiment or case of the base is missing or failed."""
        return bool(self.missing or {MISSING, FAILED} & self.counts.keys())

    def table(self, everything: bool = True) -> pd.DataFrame:
        """Return a row of text per finding.

        Args:
            everything: Whether to include metrics that did not change.
        """
        lines = [line for line in self.lines if everything or line.finding != Kind.EQUIVALENT]
        return pd.DataFrame([line.to_row() for line in lines])

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON types."""
        return asdict(self) | {
            "regressed": self.has_regressed,
            "compared": self.is_compared,
            "counts": self.counts,
        }


def worst_first(lines: Iterable[Line]) -> tuple[Line, ...]:
    """Sort findings from the worst to the best."""

    def badness(line: Line) -> tuple[int, float]:
        ratio = line.verdict.ratio if line.verdict else math.inf
        return _WORST_FIRST.index(line.finding), -ratio

    return tuple(sorted(lines, key=badness))


def describe_differences(a: Mapping[str, str], b: Mapping[str, str]) -> list[str]:
    """Describe packages and settings that differ, `python` first, such as `torch 2.12.0 → 2.13.0`.

    The version of an absent package is `none`. The hash of nanolib's source files does not count.
    """
    names = sorted({*a, *b} - {"sources"}, key=lambda name: (name != "python", name))
    return [
        f"{name} {a.get(name, 'none')} → {b.get(name, 'none')}"
        for name in names
        if a.get(name) != b.get(name)
    ]


def add_unit(figure: str) -> str:
    """Return a metric and its scope with the unit, such as `latency forward, ms`."""
    metric = METRICS.get(figure.partition(" ")[0])
    return figure if metric is None or metric.unit == "1" else f"{figure}, {metric.unit}"


# Factors that appear in the name of a case, in order.
_NAMING = (
    "name",
    "ceiling",
    "mode",
    "phase",
    "look",
    "direction",
    "memory_algorithm",
    "precision",
    "recipe",
    "variant",
)
_SIZES = ("seq_len", "batch_size", "dtype", "world_size", "process", "steps")


def case_name(factors: Mapping[str, Any]) -> str:
    """Return the readable name of a case with these factors."""
    named = [str(factors[name]) for name in _NAMING if name in factors]
    if factors.get("compiled"):
        named.append("compiled")
    sizes = [f"{name}={factors[name]}" for name in _SIZES if name in factors]
    return " ".join(named + sizes)


def case_names(cases: CasesOfMachines) -> dict[tuple[str, str, str], str]:
    """Return a name for each case, by machine ID, experiment and case ID.

    If several cases have the same `case_name`, the factors in which they differ follow the name.
    If the cases are from several machines, the machine follows too.

    Args:
        cases: Machine ID, experiment, case ID and factors of each case. A case may occur several
            times.
    """
    cases = list(cases)
    alike = defaultdict(dict)  # experiment and name → case ID → factors as text
    for _, experiment, case_id, factors in cases:
        line = {factor: quote(value) for factor, value in factors.items()}
        alike[experiment, case_name(factors)][case_id] = line
    names = {}
    for (experiment, name), lines in alike.items():
        factors = dict.fromkeys(factor for line in lines.values() for factor in line)
        apart = [
            factor for factor in factors if len({line.get(factor) for line in lines.values()}) > 1
        ]
        for case_id, line in lines.items():
            differs = (f"{factor}={line.get(factor, 'none')}" for factor in apart)
            names[experiment, case_id] = " ".join([name, *differs])
    several = len({machine for machine, *_ in cases}) > 1
    return {
        (machine, experiment, case_id): names[experiment, case_id]
        + (f" machine={machine[:6]}" if several else "")
        for machine, experiment, case_id, _ in cases
    }


def cases_in(rows: pd.DataFrame) -> CasesOfMachines:
    """Return the machine ID, experiment, case ID and factors of each case of some rows."""
    cases = rows.drop_duplicates(CASE_KEY)
    return cases[[*CASE_KEY, "factors"]].itertuples(index=False, name=None)


def share_words(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words that all names share, and the names without these words.

    Example:
        >>> share_words(["dense n=8 dtype=float32", "window n=8 dtype=float32"])
        (['n=8', 'dtype=float32'], ['dense', 'window'])
    """
    words = [name.split() for name in names]
    shared = [word for word in words[0] if all(word in other for other in words)] if words else []
    return shared, [" ".join(word for word in name if word not in shared) for name in words]


def overall_shift(lines: Sequence[Line]) -> str:
    """Return a sentence with the median ratio of all latencies."""
    ratios = [line.verdict.ratio for line in lines if line.verdict is not None]
    try:
        low, ratio, high = np.exp(median_interval(np.log(ratios)))
    except TooFewSamples:
        return f"{len(ratios)} latencies are too few for a ratio over all latencies"
    shift = format_with_interval(ratio, low, high)
    return f"median current / base, scaled by peak rates: {shift} over {len(ratios)} latencies"
