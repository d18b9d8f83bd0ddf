"""What a verdict says, as data: the answer, how sure, what to try next, and the figures that it rests on."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


class Order(enum.StrEnum):
    """How two figures lie; a claim says no more of them than that."""

    BELOW = "below"
    ABOVE = "above"
    ALIKE = "not told apart"


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
    """

    low: float
    estimate: float
    high: float
    metric: str = ""
    scope: str = ""
    name: str = ""

    @classmethod
    def of(cls, line: Mapping[str, Any], column: str, metric: str = "", scope: str = "", name: str = "") -> Figure:
        """A column of a table's line, with the ends `_low` and `_high` beside it."""
        return cls(*(float(line[f"{column}{end}"]) for end in ("_low", "", "_high")), metric, scope, name)

    @classmethod
    def exactly(cls, value: float, name: str = "") -> Figure:
        """What is declared, or counted, and has no interval: a margin, zero, perfect scaling."""
        return cls(value, value, value, name=name)

    def against(self, other: Figure) -> Order:
        """The order that the two intervals allow; none where they meet or are not known."""
        if self.high < other.low:
            return Order.BELOW
        return Order.ABOVE if self.low > other.high else Order.ALIKE


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
        lengths: Through how many sequence lengths a law was fitted; 0 for none.
        machine: On which machine, where there are several.
    """

    answer: str
    sure: str = ""
    advice: str = ""
    about: str = ""
    compared: tuple[tuple[Figure, Order, Figure], ...] = ()
    figures: tuple[Figure, ...] = ()
    lengths: int = 0
    machine: str = ""

    @property
    def heading(self) -> str:
        """The machine and what it is about, as far as they are to be said."""
        return ": ".join(part for part in (self.machine, self.about) if part)

    @property
    def sentence(self) -> str:
        """The three parts without the heading."""
        text = f"{self.answer}: {self.sure}" if self.sure else self.answer
        parts = (text, self.advice and f"Next: {self.advice}")
        return " ".join(part if part.endswith(("?", "!")) else f"{part.rstrip('.')}." for part in parts if part)

    def __str__(self) -> str:
        return f"{self.heading}: {self.sentence}" if self.heading else self.sentence

    def to_dict(self) -> dict[str, Any]:
        """JSON types; an end that is not known is null."""
        found = asdict(self) | {"text": str(self)}
        found["compared"] = [[_json(first), str(order), _json(second)] for first, order, second in self.compared]
        return found | {"figures": [_json(figure) for figure in self.figures]}


def comparing(first: Figure, *others: Figure) -> tuple[tuple[Figure, Order, Figure], ...]:
    """The order of a figure and each of the others, as their intervals allow it."""
    return tuple((first, first.against(other), other) for other in others)


def grouped(lines: Iterable[Claim | str]) -> list[tuple[str, list[Claim]]]:
    """Claims under what they are about, which is said once; those about nothing in particular stay where they are."""
    groups: list[tuple[str, list[Claim]]] = []
    for line in lines:
        claim = Claim(*line.split(": ", 1)) if isinstance(line, str) else line  # a label, and what it means
        same = [group for heading, group in groups if heading == claim.heading != ""]
        if not same and (claim.heading or not groups or groups[-1][0]):
            groups.append((claim.heading, []))
        (same[0] if same else groups[-1][1]).append(claim)
    return groups


def _json(figure: Figure) -> dict[str, Any]:
    return {key: None if value != value else value for key, value in asdict(figure).items()}
