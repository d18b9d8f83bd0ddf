"""Findings: what the rows show, the evidence with its intervals, and the next step."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nanolib.measurement import METRICS
from nanolib.numbers import format_with_interval

_MOST_ESTIMATES = 4
MOST_FINDINGS = 5  # per section: a reader takes in no more, and the tables have the rest


class Order(enum.StrEnum):
    """The order of two estimates that their intervals allow."""

    BELOW = "below"
    ABOVE = "above"
    NO_DIFFERENCE = "no clear difference"


@dataclass(frozen=True)
class Estimate:
    """A value with its interval, from a row.

    Attributes:
        low: Lower end, in the metric's unit; nan if it is not known.
        estimate: The value, in the metric's unit.
        high: Upper end, in the metric's unit; nan if it is not known.
        metric: Key of `METRICS`; empty for a value derived from several rows, or declared.
        name: The case's name for people.
        busy: Whether other processes used the machine during the timing.
    """

    low: float
    estimate: float
    high: float
    metric: str = ""
    name: str = ""
    busy: bool = False

    @classmethod
    def of(cls, line: Mapping[str, Any], column: str, metric: str = "", name: str = "") -> Estimate:
        """Read a column of a table's line, with its ends `_low` and `_high` and its label `_busy`."""
        ends = (float(line[f"{column}{end}"]) for end in ("_low", "", "_high"))
        return cls(*ends, metric, name, bool(line.get(f"{column}_busy") == 1))

    @classmethod
    def exact(cls, value: float, name: str = "") -> Estimate:
        """Wrap a value without an interval: a margin, zero, perfect scaling."""
        return cls(value, value, value, name=name)

    def compare_to(self, other: Estimate) -> Order:
        """Return the order that the two intervals allow; no difference if they overlap."""
        if self.high < other.low:
            return Order.BELOW
        return Order.ABOVE if self.low > other.high else Order.NO_DIFFERENCE

    def __str__(self) -> str:
        """Format the name, the value with its interval, and the unit."""
        unit = METRICS[self.metric].unit if self.metric else "1"
        number = format_with_interval(self.estimate, self.low, self.high)
        return f"{self.name} {number}{'' if unit == '1' else f' {unit}'}".strip()


@dataclass(frozen=True)
class Finding:
    """One conclusion; `str` gives its sentences.

    Attributes:
        text: The conclusion. It can stand alone.
        evidence: Its numbers with their intervals.
        next_step: What to try next, as an imperative.
        about: The model or shape, a heading for all findings about it.
        compared: Pairs of estimates whose order the text states.
        figures: Other estimates in it.
    """

    text: str
    evidence: str = ""
    next_step: str = ""
    about: str = ""
    compared: tuple[tuple[Estimate, Order, Estimate], ...] = ()
    figures: tuple[Estimate, ...] = ()

    def without_busy_order(self) -> Finding:
        """Return the finding, or only its estimates if it orders timings of a busy machine."""
        pairs = [pair for pair in self.compared if any(one.busy for one in pair[::2])]
        if not pairs:
            return self
        figures = dict.fromkeys(one for pair in pairs for one in pair[::2] if one.low != one.high)
        evidence = ", ".join(str(one) for one in list(figures)[:_MOST_ESTIMATES])
        next_step = "repeat the run when no other process uses the machine"
        text = "Machine busy: no order drawn"
        return Finding(text, evidence, next_step, self.about, (), tuple(figures))

    @property
    def sentence(self) -> str:
        """Text, evidence and next step, without the heading."""
        text = f"{self.text}: {self.evidence}" if self.evidence else self.text
        parts = (text, self.next_step and f"Next: {self.next_step}")
        return " ".join(
            part if part.endswith(("?", "!")) else f"{part.rstrip('.')}." for part in parts if part
        )

    def __str__(self) -> str:
        return f"{self.about}: {self.sentence}" if self.about else self.sentence


def comparing(first: Estimate, *others: Estimate) -> tuple[tuple[Estimate, Order, Estimate], ...]:
    """Pair an estimate with each of the others, and the order that their intervals allow."""
    return tuple((first, first.compare_to(other), other) for other in others)


def grouped(findings: Iterable[Finding]) -> list[tuple[str, list[Finding]]]:
    """Group findings by what they are about; those about nothing keep their place."""
    groups: list[tuple[str, list[Finding]]] = []
    for finding in findings:
        same = [group for heading, group in groups if heading == finding.about != ""]
        if not same and (finding.about or not groups or groups[-1][0]):
            groups.append((finding.about, []))
        (same[0] if same else groups[-1][1]).append(finding)
    return groups
