"""The report's sections, which experiments declare, and the parts that are made from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import altair as alt
import pandas as pd

from nanolib.report import tables
from nanolib.report.finding import Finding
from nanolib.report.theme import Chart, is_empty


@dataclass(frozen=True)
class CaseTable:
    """One table of a section.

    Attributes:
        of: Makes the table from rows of any experiments.
        columns: Column → title, of those that people see, at most ten. Its file has all of them.
    """

    of: Callable[[pd.DataFrame], pd.DataFrame]
    columns: Mapping[str, str]

    def readable(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Return the table for people."""
        return tables.readable(self.of(rows), self.columns)


@dataclass(frozen=True)
class Section:
    """One question of the report.

    Attributes:
        experiment: Whose rows answer it.
        question: In words.
        charts: File name → what draws it, at most three; the first one answers the question.
        tables: Title → table, the main one first.
        verdict: Makes the findings.
        files: File name → what draws it, of charts that are written and not shown.
    """

    experiment: str
    question: str
    charts: Mapping[str, Chart]
    tables: Mapping[str, CaseTable]
    verdict: Callable[[pd.DataFrame], list[Finding]]
    files: Mapping[str, Chart] = field(default_factory=dict)

    def main_chart(self, rows: pd.DataFrame) -> alt.TopLevelMixin:
        """Return the first chart that can be drawn, or the one that says why none can."""
        drawings = [*self.charts.values(), *self.files.values()]
        for draw in drawings:
            if not is_empty(chart := draw(rows)):
                return chart
        return drawings[0](rows)

    def shown(self, rows: pd.DataFrame) -> dict[str, CaseTable]:
        """Return the main table, which may say that nothing was measured, and the others that have a line."""
        main = next(iter(self.tables))
        return {
            title: table
            for title, table in self.tables.items()
            if title == main or len(table.of(rows))
        }


@dataclass(frozen=True)
class Part:
    """One heading of the report with its content.

    Attributes:
        name: Its name, different from all others.
        title: The heading, a question.
        verdict: The findings.
        charts: File name → chart.
        tables: Title → the table with all columns, and as people read it.
        machine: The machine whose rows answer; empty for all machines.
        newest: Whether the question's newest run is of this machine.
        rows: The rows that answer.
        by_length: Sequence length → the findings of only that length.
        files: File name → chart that is written and not shown.
    """

    name: str
    title: str
    verdict: Sequence[Finding] = ()
    charts: Mapping[str, alt.TopLevelMixin] = field(default_factory=dict)
    tables: Mapping[str, tuple[pd.DataFrame, pd.DataFrame]] = field(default_factory=dict)
    machine: str = ""
    newest: bool = True
    rows: pd.DataFrame = field(default_factory=pd.DataFrame)
    by_length: Mapping[int, Sequence[Finding]] = field(default_factory=dict)
    files: Mapping[str, alt.TopLevelMixin] = field(default_factory=dict)

    @property
    def findings(self) -> dict[str, Sequence[Finding]]:
        """Sequence length → its findings; those of all lengths under the empty text."""
        return {"": self.verdict} | {str(length): found for length, found in self.by_length.items()}
