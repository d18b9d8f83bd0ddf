"""The summary's live panel: what is picked once, every chart, verdict and table of it follows."""

from __future__ import annotations

import html
from typing import Any

import pandas as pd

from nanolib.experiments import sections
from nanolib.report import linking, renderer
from nanolib.report.display import Lines, Table
from nanolib.report.section import Section
from nanolib.run import sweep


class SummaryPanel:
    """A list for each thing that can be picked, over a tab per question: its main chart, its verdict and its tables.

    Args:
        rows: As `summary.load` gives them.
        runs: Likewise.

    Attributes:
        picks: Title → the list.
        charts: Experiment → its chart.
        said: What is picked and what it leaves, in words.
        texts: Experiment → its verdict and tables.
        widget: What a notebook shows.
    """

    def __init__(self, rows: pd.DataFrame, runs: pd.DataFrame) -> None:
        import ipywidgets as widgets

        self._rows = rows
        self._choices = linking.choices(rows, runs)
        self._sections = [
            section for section in sections() if section.experiment in set(runs["experiment"])
        ]
        self.picks = {
            title: widgets.Dropdown(
                description=title,
                options=["all", *choice["options"]],
                style={"description_width": "initial"},
            )
            for title, choice in self._choices.items()
        }
        self.charts = {
            section.experiment: renderer.linked_chart(section.main_chart(rows))
            for section in self._sections
        }
        self.texts = {section.experiment: widgets.HTML() for section in self._sections}
        self.said = widgets.HTML()
        for pick in self.picks.values():
            pick.observe(self._follow, names="value")
        self._follow()
        tabs = widgets.Tab(
            children=[widgets.VBox([self.charts[name], self.texts[name]]) for name in self.charts],
            titles=[section.experiment for section in self._sections],
        )
        lists = widgets.HBox(list(self.picks.values()), layout={"flex_flow": "wrap"})
        self.widget = widgets.VBox([lists, self.said, tabs])

    def picked(self) -> dict[str, list[Any] | None]:
        """Pick → the values that all its lists leave; None for everything."""
        return linking.picked(self._choices, self._chosen())

    def _chosen(self) -> dict[str, str]:
        return {title: pick.value for title, pick in self.picks.items() if pick.value != "all"}

    def _in_words(self, kept: pd.DataFrame) -> str:
        """`sequence length 1,024: 40 of 1,117 measurements, of 2 of 6 runs`."""
        chosen = (
            ", ".join(f"{title.lower()} {value}" for title, value in self._chosen().items())
            or "everything"
        )
        runs = f"{kept['run_id'].nunique()} of {self._rows['run_id'].nunique()} runs"
        return html.escape(
            f"Shown: {chosen}: {len(kept):,} of {len(self._rows):,} measurements, of {runs}"
        )

    def _follow(self, _: Any = None) -> None:
        picked = self.picked()
        kept = linking.kept(self._rows, picked)
        self.said.value = self._in_words(kept)
        for section in self._sections:
            params = self.charts[section.experiment].params
            for name, values in picked.items():
                if params.has_trait(f"pick_{name}"):
                    setattr(params, f"pick_{name}", values)
            self.texts[section.experiment].value = _text(section, kept)


def _text(section: Section, rows: pd.DataFrame) -> str:
    """The verdict and the tables of what is left."""
    left = {
        title: shown
        for title, table in section.tables.items()
        if len(shown := table.readable(rows))
    }
    if not left:
        return f"<i>Nothing of {html.escape(section.experiment)} is left by what is picked.</i>"
    shown = (
        f"<b>{html.escape(title)}</b>{Table(table)._repr_html_()}" for title, table in left.items()
    )
    return Lines(section.verdict(rows))._repr_html_() + "".join(shown)


def summary_panel(rows: pd.DataFrame, runs: pd.DataFrame) -> Any:
    """The panel, where a live front end is there and the database has something to pick from; None in a batch run."""
    if not sweep.live_front_end() or rows.empty:
        return None
    return SummaryPanel(rows, runs).widget
