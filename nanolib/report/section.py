"""What the report is made of: sections that experiments hand to it, and what changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import altair as alt
import pandas as pd

from nanolib.report import tables
from nanolib.report.claim import Claim
from nanolib.report.theme import Chart, is_empty

MOST_COLUMNS = 10  # of a table; its file has all of them


@dataclass(frozen=True)
class CaseTable:
    """One table of a section.

    Attributes:
        of: Makes it of rows of any experiments.
        columns: Column → title, of those that people see.
    """

    of: Callable[[pd.DataFrame], pd.DataFrame]
    columns: Mapping[str, str]

    def __post_init__(self) -> None:
        if len(self.columns) > MOST_COLUMNS:
            raise ValueError(
                f"a table shows at most {MOST_COLUMNS} columns, not {', '.join(self.columns)}"
            )

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
    verdict: Callable[[pd.DataFrame], list[Claim]]
    files: Mapping[str, Chart] = field(default_factory=dict)

    def main_chart(self, rows: pd.DataFrame) -> alt.TopLevelMixin:
        """The first chart that can be drawn of the rows, or the one that says why none can."""
        first, *others = {**self.charts, **self.files}.values()
        chart = first(rows)
        if not is_empty(chart):
            return chart
        return next((other for draw in others if not is_empty(other := draw(rows))), chart)

    def shown(self, rows: pd.DataFrame) -> dict[str, CaseTable]:
        """The main table, which says where nothing was measured, and the others that have a line."""
        main = next(iter(self.tables))
        return {
            title: table
            for title, table in self.tables.items()
            if title == main or len(table.of(rows))
        }


@dataclass(frozen=True)
class Changes:
    """What changed since the runs before, and over all runs.

    Attributes:
        verdict: What changed.
        charts: By name.
        table: The findings that are not equivalent.
    """

    verdict: list[Claim]
    charts: Mapping[str, Any]
    table: pd.DataFrame
