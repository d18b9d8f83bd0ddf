"""What the report is made of: sections that experiments hand to it, and the answers that rows of one machine give."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

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
class Answer:
    """What one machine answers to a question.

    Attributes:
        section: The question.
        machine_id: The machine.
        newest: Whether the question's newest run is of this machine.
        rows: All rows of the machine.
    """

    section: Section
    machine_id: str
    newest: bool
    rows: pd.DataFrame

    @property
    def name(self) -> str:
        """Tells the answers of a page apart."""
        return self.section.experiment + ("" if self.newest else f"-{self.machine_id[:6]}")

    @cached_property
    def claims(self) -> list[Claim]:
        """The conclusions."""
        return self.section.verdict(self.rows)

    @cached_property
    def tables(self) -> list[tuple[str, pd.DataFrame, pd.DataFrame]]:
        """The title of each table, the table with all columns, and as people read it."""
        return [
            (title, table.of(self.rows), table.readable(self.rows))
            for title, table in self.section.shown(self.rows).items()
        ]


def answers(sections: Iterable[Section], rows: pd.DataFrame, runs: pd.DataFrame) -> list[Answer]:
    """Answer each question by each machine that ran it, the machine of its newest run first.

    Args:
        sections: The questions.
        rows: Measurements of any machines; the numbers of two are never joined.
        runs: Their runs, with `experiment`, `machine_id` and `started`.
    """
    ordered = runs.sort_values("started", kind="stable")[::-1]
    places = ordered[["experiment", "machine_id"]].drop_duplicates()
    of = {one: rows[rows["machine_id"] == one] for one in places["machine_id"] if len(rows)}
    found = []
    for section in sections:
        machines = places.loc[places["experiment"] == section.experiment, "machine_id"]
        for at, machine in enumerate(machines):
            found.append(Answer(section, machine, at == 0, of.get(machine, rows)))
    return found
