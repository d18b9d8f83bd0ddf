"""What a verdict says, as data: the answer, how sure, what to try next, and the figures that it rests on."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nanolib.measurement import METRICS
from nanolib.numbers import format_number, format_with_interval

_MOST_FIGURES = 4
MOST_CLAIMS = 5  # of a section: a reader takes in no more; its tables have the rest


class Order(enum.StrEnum):
    """How two figures lie; a claim says no more of them than that."""

    BELOW = "below"
    ABOVE = "above"
    ALIKE = "no clear difference"


@dataclass(frozen=True)
class Figure:
    """A figure with its interval, as it stands in a row.

    Attributes:
        low: Lower end; nan where none is known.
        estimate: The figure, in the metric's unit.
        high: Upper end; nan where none is known.
        metric: Of which metric; empty for what is worked out from several rows, or declared.
        scope: Of what, as in the row.
        name: Of which case, for people.
        busy: Whether other processes used the machine while it was timed.
    """

    low: float
    estimate: float
    high: float
    metric: str = ""
    scope: str = ""
    name: str = ""
    busy: bool = False

    @classmethod
    def of(
        cls, line: Mapping[str, Any], column: str, metric: str = "", scope: str = "", name: str = ""
    ) -> Figure:
        """A column of a table's line, with the ends `_low` and `_high` and the label `_busy` beside it."""
        ends = (float(line[f"{column}{end}"]) for end in ("_low", "", "_high"))
        return cls(*ends, metric, scope, name, bool(line.get(f"{column}_busy") == 1))

    @classmethod
    def exactly(cls, value: float, name: str = "") -> Figure:
        """What is declared, or counted, and has no interval: a margin, zero, perfect scaling."""
        return cls(value, value, value, name=name)

    def against(self, other: Figure) -> Order:
        """The order that the two intervals allow; none where they meet or are not known."""
        if self.high < other.low:
            return Order.BELOW
        return Order.ABOVE if self.low > other.high else Order.ALIKE

    def __str__(self) -> str:
        """The name, the figure with its interval, and the unit."""
        unit = METRICS[self.metric].unit if self.metric else "1"
        exact = self.low == self.estimate == self.high
        number = (
            format_number(self.estimate)
            if exact
            else format_with_interval(self.estimate, self.low, self.high)
        )
        return f"{self.name} {number}{'' if unit == '1' else f' {unit}'}".strip()


@dataclass(frozen=True)
class Claim:
    """One thing that a verdict says; `str` gives the sentence.

    Attributes:
        answer: What is so.
        sure: How sure: the interval, the bound, how many.
        advice: What to try next, or what to ask.
        about: Which model or shape; said once above all claims about it.
        compared: Pairs of figures whose order the answer states.
        figures: Further figures that it gives.
    """

    answer: str
    sure: str = ""
    advice: str = ""
    about: str = ""
    compared: tuple[tuple[Figure, Order, Figure], ...] = ()
    figures: tuple[Figure, ...] = ()

    def without_busy_order(self) -> Claim:
        """The claim itself; or the figures alone, if it orders timings that other processes disturbed."""
        pairs = [pair for pair in self.compared if any(figure.busy for figure in pair[::2])]
        if not pairs:
            return self
        figures = dict.fromkeys(
            figure for pair in pairs for figure in pair[::2] if figure.low != figure.high
        )
        sure = ", ".join(str(figure) for figure in list(figures)[:_MOST_FIGURES])
        advice = "repeat the run when no other process uses the machine"
        return Claim("Machine busy: no order drawn", sure, advice, self.about, (), tuple(figures))

    @property
    def sentence(self) -> str:
        """The three parts without the heading."""
        text = f"{self.answer}: {self.sure}" if self.sure else self.answer
        parts = (text, self.advice and f"Next: {self.advice}")
        return " ".join(
            part if part.endswith(("?", "!")) else f"{part.rstrip('.')}." for part in parts if part
        )

    def __str__(self) -> str:
        return f"{self.about}: {self.sentence}" if self.about else self.sentence


def comparing(first: Figure, *others: Figure) -> tuple[tuple[Figure, Order, Figure], ...]:
    """The order of a figure and each of the others, as their intervals allow it."""
    return tuple((first, first.against(other), other) for other in others)


def grouped(claims: Iterable[Claim]) -> list[tuple[str, list[Claim]]]:
    """Claims under what they are about, which is said once; those about nothing in particular stay where they are."""
    groups: list[tuple[str, list[Claim]]] = []
    for claim in claims:
        same = [group for heading, group in groups if heading == claim.about != ""]
        if not same and (claim.about or not groups or groups[-1][0]):
            groups.append((claim.about, []))
        (same[0] if same else groups[-1][1]).append(claim)
    return groups
