"""Define findings, and the sections and parts of the report that contain findings.

A finding has a conclusion, evidence with intervals, and a next step.
"""

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import pandas as pd

from nanolib.measurement import METRICS
from nanolib.numbers import format_with_interval
from nanolib.report.theme import Chart, Drawing, is_empty

MOST_CHARTS = 3  # The page and the notebooks show the first charts of a section.
# Readers skip longer lists of findings, and the tables show all other results.
_MOST_FINDINGS = 5
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


@dataclass(frozen=True)
class CaseTable:
    """Table of a section.

    Attributes:
        of: Function that builds the table from measurements, which may be from any experiments.
        columns: Title of each column that people see. The CSV file also contains other columns.
    """

    of: Callable[[pd.DataFrame], pd.DataFrame]
    columns: Mapping[str, str]


@dataclass(frozen=True)
class Section:
    """Question of the report, with its findings, charts and tables.

    Attributes:
        experiment: Name of the experiment that answers the question.
        question: Heading of the section.
        charts: Maps a file name to the function that draws the chart. The first chart answers the
            question. Further charts than `MOST_CHARTS` are only pictures in the report's folder.
        tables: Maps a title to a table, the main table first.
        find: Function that builds the findings from measurements.
    """

    experiment: str
    question: str
    charts: Mapping[str, Chart]
    tables: Mapping[str, CaseTable]
    find: Callable[[pd.DataFrame], list[Finding]]

    def main_chart(self, rows: pd.DataFrame) -> Drawing:
        """Return the first chart that has data. If no chart has data, return the last chart."""
        for draw in self.charts.values():
            if not is_empty(chart := draw(rows)):
                break
        return chart

    def verdict(self, rows: pd.DataFrame) -> list[Finding]:
        """Return the first five findings, without orders of timings from a busy machine.

        A heading has at most one finding about a busy machine.
        """
        kept = {}
        for finding in self.find(rows):
            sound = finding.without_busy_order()
            kept.setdefault((sound.about, "" if sound is not finding else str(finding)), sound)
        return list(kept.values())[:_MOST_FINDINGS]


@dataclass(frozen=True)
class Part:
    """Part of the report, with a heading and its content.

    Attributes:
        name: Unique name of the part.
        title: Heading of the part.
        verdict: Findings over all models and sequence lengths.
        charts: Maps a file name to a chart.
        tables: Maps a title to the table with all columns, and to the same table for people.
        machine: ID of the machine that the part is about, or empty for all machines.
        run: ID of the run if all results are from one run, otherwise empty.
        needs: List of the page, `machine` or `run`. The page hides the part until the reader picks
            from this list, or picks the run.
        findings: Maps a model and a sequence length to the findings that are true for them. An
            empty text stands for all models or lengths.
    """

    name: str
    title: str
    verdict: Sequence[Finding] = ()
    charts: Mapping[str, Drawing] = field(default_factory=dict)
    tables: Mapping[str, tuple[pd.DataFrame, pd.DataFrame]] = field(default_factory=dict)
    machine: str = ""
    run: str = ""
    needs: str = ""
    findings: Mapping[tuple[str, str], list[Finding]] = field(default_factory=dict)


def join_words(names: Iterable[str]) -> str:
    """Join distinct names as in a sentence, such as `a, b and c`."""
    *others, last = dict.fromkeys(names)
    return f"{', '.join(others)} and {last}" if others else last


def of_experiment(rows: pd.DataFrame, experiment: str) -> pd.DataFrame:
    """Return the rows of one experiment."""
    return rows[rows["experiment"] == experiment]


def drop_missing(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return the lines that have a value in a column, or no line if the column is missing."""
    return table[table[column].notna()] if column in table else table.iloc[:0]


def failed_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows about the end of each case that failed."""
    return rows[(rows["metric"] == "case_duration") & (rows["status"] != "ok")]


def explain_empty(
    rows: pd.DataFrame, experiment: str, otherwise: str = "", factor: str = ""
) -> str:
    """Return why cases have no data, such as the message of the first case that failed.

    Args:
        rows: Measurements of any experiments.
        experiment: Name of the experiment.
        otherwise: Reason to return if no case failed, or empty for a general reason.
        factor: Factor of the cases in question, or empty for all cases of the experiment.
    """
    rows = of_experiment(rows, experiment)
    if rows.empty:
        return f"no {experiment} run is in the database; run: nano run quick {experiment}"
    failed = failed_rows(drop_missing(rows, f"factor.{factor}") if factor else rows)
    if len(failed):
        first = failed.iloc[0]
        return f"{first['status']}: {first['message']}" if first["message"] else first["status"]
    return otherwise or "no case has this result"


def explain_missing(rows: pd.DataFrame, experiment: str, what: str) -> list[Finding]:
    """Return the finding of an experiment without a result.

    Args:
        rows: Measurements of any experiments.
        experiment: Name of the experiment.
        what: Subject of the finding, such as `Attention`.
    """
    text = f"{what} was not measured"
    if of_experiment(rows, experiment).empty:
        return [Finding(text, next_step=f"run nano run quick {experiment}")]
    return [Finding(text, explain_empty(rows, experiment))]
