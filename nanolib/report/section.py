"""What the report is made of: sections that experiments hand to it, and the parts that come of them."""

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
        of: Makes it of rows of any experiments.
        columns: Column → title, of those that people see: at most ten. Its file has all of them.
    """

    of: Callable[[pd.DataFrame], pd.DataFrame]
    columns: Mapping[str, str]

    def readable(self, rows: pd.DataFrame) -> pd.DataFrame:
        """The table for people."""
        return tables.readable(self.of(rows), self.columns)


@dataclass(frozen=True)
class Section:
    """One question of the report.

    Attributes:
        experiment: Whose rows answer it.
        question: In words.
        charts: File name → what draws it, the one that answers first, at most three.
        tables: Title → table, the main one first.
        verdict: What the rows say.
        files: File name → what draws it, of charts that are written and not shown.
    """

    experiment: str
    question: str
    charts: Mapping[str, Chart]
    tables: Mapping[str, CaseTable]
    verdict: Callable[[pd.DataFrame], list[Finding]]
    files: Mapping[str, Chart] = field(default_factory=dict)

    def main_chart(self, rows: pd.DataFrame) -> alt.TopLevelMixin:
        """The first chart that can be drawn of the rows, or the one that says why none can."""
        drawings = [*self.charts.values(), *self.files.values()]
        for draw in drawings:
            if not is_empty(chart := draw(rows)):
                return chart
        return drawings[0](rows)

    def shown(self, rows: pd.DataFrame) -> dict[str, CaseTable]:
        """The main table, which says where nothing was measured, and the others that have a line."""
        main = next(iter(self.tables))
        return {
            title: table
            for title, table in self.tables.items()
            if title == main or len(table.of(rows))
        }


@dataclass(frozen=True)
class Part:
    """One heading of the report, and all that is under it.

    Attributes:
        name: Tells it from others.
        title: The heading: a question.
        verdict: What is said first.
        charts: File name → chart.
        tables: Title → the table with all columns, and as people read it.
        machine: Which machine answers; empty for what is of all of them.
        newest: Whether the question's newest run is of this machine.
        rows: What a machine answers by.
        by_length: Sequence length → what is said of it alone, first.
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
    def said(self) -> dict[str, Sequence[Finding]]:
        """Sequence length → what is said of it; of all of them at the empty text."""
        return {"": self.verdict} | {str(length): said for length, said in self.by_length.items()}
