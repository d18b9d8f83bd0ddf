"""Define the sections of the report, and the parts that nanolib makes from the sections."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd

from nanolib.report import tables
from nanolib.report.finding import Finding
from nanolib.report.theme import Chart, Drawing, is_empty

MOST_CHARTS = 3  # The page and the notebooks show the first charts of a section.
# Readers skip longer lists of findings, and the tables show all other results.
_MOST_FINDINGS = 5


@dataclass(frozen=True)
class CaseTable:
    """Table of a section.

    Attributes:
        of: Function that builds the table from measurements, which may be from any experiments.
        columns: Title of each column that people see. The CSV file also contains other columns.
    """

    of: Callable[[pd.DataFrame], pd.DataFrame]
    columns: Mapping[str, str]

    def readable(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Return the table with formatted numbers and only the columns that people see."""
        return tables.readable(self.of(rows), self.columns)


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
