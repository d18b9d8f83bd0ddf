"""Define findings. A finding has a conclusion, evidence with intervals, and a next step."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from nanolib.measurement import METRICS
from nanolib.numbers import format_with_interval

_MOST_ESTIMATES = 4


class Order(enum.StrEnum):
    """Order of two estimates, according to their intervals."""

    BELOW = "below"
    ABOVE = "above"
    NO_DIFFERENCE = "no clear difference"


@dataclass(frozen=True)
class Estimate:
    """Value with its interval.

    Attributes:
        low: Lower end of the interval in the unit of the metric, or NaN if it is not known.
        estimate: Value in the unit of the metric.
        high: Upper end of the interval in the unit of the metric, or NaN if it is not known.
        metric: Key of `METRICS`, or empty if the value is not from a single measurement.
        name: Name of the case for people.
        busy: Whether other processes used the machine during the timing.
    """

    low: float
    estimate: float
    high: float
    metric: str = ""
    name: str = ""
    busy: bool = False

    @classmethod
    def of(cls, line: Mapping[str, Any], column: str, metric: str = "", name: str = "") -> Self:
        """Read a column of a line, and the columns with the interval and the interference."""
        ends = (float(line[f"{column}{end}"]) for end in ("_low", "", "_high"))
        return cls(*ends, metric, name, bool(line.get(f"{column}_busy") == 1))

    @classmethod
    def exact(cls, value: float, name: str = "") -> Self:
        """Return an estimate for a value without uncertainty, such as a margin or zero."""
        return cls(value, value, value, name=name)

    def compare_to(self, other: Self) -> Order:
        """Return the order of two estimates, or no clear difference if their intervals overlap."""
        if self.high < other.low:
            return Order.BELOW
        return Order.ABOVE if self.low > other.high else Order.NO_DIFFERENCE

    def text(self, unit: str = "") -> str:
        """Format the value with its unit and its interval, such as `4.06× [3.98 … 4.10]`."""
        figure = format_with_interval(self.estimate, self.low, self.high)
        number, space, ends = figure.partition(" ")
        return f"{number}{unit}{space}{ends}"

    @property
    def percent(self) -> str:
        """The share with its interval, in whole percent."""
        ends = f" [{self.low:.0%} … {self.high:.0%}]" if self.low <= self.high else ""
        return f"{self.estimate:.0%}{ends}"

    def __str__(self) -> str:
        """Return the name, and the value with its unit and its interval."""
        unit = METRICS[self.metric].unit if self.metric else "1"
        unit = "×" if self.metric == "speed_up" else "" if unit == "1" else f" {unit}"
        return f"{self.name}: {self.text(unit)}"


Pairs = tuple[tuple[Estimate, Order, Estimate], ...]


@dataclass(frozen=True)
class Finding:
    """Conclusion from measurements.

    Attributes:
        text: Conclusion that a reader understands without the evidence.
        evidence: Numbers that support the conclusion, with their intervals.
        next_step: Imperative that names a parameter or a command.
        about: Heading of the finding, such as a model or a shape.
        compared: Pairs of estimates whose order the text states.
        figures: Other estimates in the finding.
    """

    text: str
    evidence: str = ""
    next_step: str = ""
    about: str = ""
    compared: Pairs = ()
    figures: tuple[Estimate, ...] = ()

    def without_busy_order(self) -> Self:
        """Return the finding. If it ranks timings of a busy machine, return only the estimates."""
        pairs = [pair for pair in self.compared if any(estimate.busy for estimate in pair[::2])]
        if not pairs:
            return self
        figures = dict.fromkeys(
            estimate for pair in pairs for estimate in pair[::2] if estimate.low != estimate.high
        )
        return Finding(
            "Other processes used the machine, so nanolib does not rank these estimates",
            ", ".join(map(str, list(figures)[:_MOST_ESTIMATES])),
            "repeat the run when no other process uses the machine",
            self.about,
            figures=tuple(figures),
        )

    @property
    def sentence(self) -> str:
        """The text, the evidence and the next step, without the heading."""
        text = f"{self.text}: {self.evidence}" if self.evidence else self.text
        text = f"{text.rstrip('.')}."
        return f"{text} Next: {self.next_step.rstrip('.')}." if self.next_step else text

    def __str__(self) -> str:
        return f"{self.about}: {self.sentence}" if self.about else self.sentence


def unclear(what: str, evidence: str) -> tuple[str, str]:
    """Return the text and the evidence of a finding about estimates whose intervals overlap.

    Args:
        what: Names of the compared cases, as in a sentence.
        evidence: Numbers of these cases.
    """
    return f"No clear difference between {what}", f"{evidence} (the intervals overlap)"


def comparing(first: Estimate, *others: Estimate) -> Pairs:
    """Compare an estimate with each of the others, and return the estimates and their order."""
    return tuple((first, first.compare_to(other), other) for other in others)
