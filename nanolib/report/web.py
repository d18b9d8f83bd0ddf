"""The report as one self-contained web page: it opens by itself, asks nobody for anything, and escapes all that it shows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import mistune
import pandas as pd

from nanolib.report import linking, overview, regressions, renderer
from nanolib.report.claim import Claim, grouped
from nanolib.report.display import aligned
from nanolib.report.section import CaseTable, Changes, Section
from nanolib.report.theme import variables, with_variables
from nanolib.store import SHOWN_CASES

_METHOD = Path(__file__).parents[2] / "docs" / "method.md"

_PAGE = Path(__file__).parent / "page_files"

# Of which run, model and length something is; None where that is no question of it.
Place = tuple[Any, ...]


@dataclass(frozen=True)
class PageChart:
    """One chart of the page.

    Attributes:
        name: Of its files.
        title: Above it, outside of the picture.
        subtitle: The lines under the title.
        spec: Its Vega-Lite without them.
        empty: Why there is nothing to draw; empty where there is.
        places: Of what its points are.
    """

    name: str
    title: str
    subtitle: tuple[str, ...]
    spec: dict[str, Any]
    empty: str
    places: tuple[Place, ...]

    @classmethod
    def of(cls, name: str, spec: dict[str, Any]) -> PageChart:
        """Take title and lines out of a chart's Vega-Lite: as text of the page they wrap, and are read aloud."""
        spec = dict(spec)
        title = spec.pop("title", name.replace("_", " "))
        title = title if isinstance(title, dict) else {"text": title}
        lines = title.get("subtitle", [])
        places = dict.fromkeys(
            tuple(value.get(column) for column in linking.PICKS.values())
            for values in spec.get("datasets", {}).values()
            for value in values
            if value.keys() & set(linking.PICKS.values())
        )
        most = max((sum(value is not None for value in place) for place in places), default=0)
        places = [
            place for place in places if sum(value is not None for value in place) == most
        ]  # no mere background
        empty = spec.get("usermeta", {}).get("empty", "")
        return cls(
            name,
            title["text"],
            tuple([lines] if isinstance(lines, str) else lines),
            spec,
            empty,
            tuple(places),
        )


@dataclass(frozen=True)
class PageTable:
    """One table of the page.

    Attributes:
        title: Above it.
        frame: For people.
        places: Of what each of its lines is.
    """

    title: str
    frame: pd.DataFrame
    places: list[Place]

    @classmethod
    def of(cls, title: str, table: CaseTable, section: Section, rows: pd.DataFrame) -> PageTable:
        """A table of a section without the columns that nothing fills."""
        made, shown = table.of(rows), table.readable(rows)
        links = linking.links(made)
        if section.experiment not in linking.MODELS_OF:
            links.pop("link_model", None)
        columns = [
            links[column].astype(object).where(links[column].notna(), None)
            if column in links
            else [None] * len(made)
            for column in linking.PICKS.values()
        ]
        filled = shown.loc[:, [not set(shown[name]) <= {"", "—"} for name in shown]]
        return cls(title, filled, list(zip(*columns, strict=True)))


@dataclass(frozen=True)
class PageSection:
    """One question of the page.

    Attributes:
        section: What is asked.
        said: Its answers, of all that the page holds.
        tables: Those that have a line, and the main one.
        charts: Those that can be drawn, the main one first.
        left_out: Those that cannot.
    """

    section: Section
    said: list[Claim]
    tables: list[PageTable]
    charts: list[PageChart]
    left_out: list[PageChart]

    @classmethod
    def of(cls, section: Section, rows: pd.DataFrame, drawn: dict[str, Any]) -> PageSection:
        """Everything that the page shows of a question."""
        tables = [
            PageTable.of(title, table, section, rows)
            for title, table in section.shown(rows).items()
        ]
        charts = [PageChart.of(name, drawn[name]) for name in section.charts]
        can = [chart for chart in charts if not chart.empty]
        return cls(
            section, section.verdict(rows), tables, can, [chart for chart in charts if chart.empty]
        )


def web_page(
    sections: list[Section],
    changes: Changes,
    drawn: dict[str, dict[str, Any]],
    rows: pd.DataFrame,
    every: pd.DataFrame,
    runs: pd.DataFrame,
    machines: pd.DataFrame,
    left_out: int,
) -> str:
    """The page.

    Args:
        sections: What is asked, in order.
        changes: Since the runs before, and over all runs.
        drawn: Chart → its Vega-Lite.
        rows: The measurements shown, of each experiment those of one machine.
        every: Those of all machines.
        runs: Their runs.
        machines: All machines.
        left_out: How many cases are not shown.
    """
    loader = jinja2.FileSystemLoader(_PAGE)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"script": linking.as_script}
    markdown = mistune.create_markdown(escape=True, plugins=["table"])
    picked = linking.choices(rows, runs)
    asked = [PageSection.of(section, rows, drawn) for section in sections]
    changed = [PageChart.of(name, drawn[name]) for name in changes.charts]
    charts = [chart for one in asked for chart in one.charts] + [
        chart for chart in changed if not chart.empty
    ]
    return environment.get_template("page.html.jinja").render(
        asked=asked,
        grouped=grouped,
        columns=aligned,
        zip=zip,
        changes=changes,
        changed=changed,
        rows=rows,
        runs=runs,
        left_out=left_out,
        shown_cases=SHOWN_CASES,
        picked=picked,
        hardware=regressions.hardware_table(every, machines),
        across=regressions.machine_ratios(every),
        failed=overview.failures(every),
        flagged=overview.flag_lines(rows),
        facts=overview.run_facts(runs, machines),
        method=markdown(_METHOD.read_text(encoding="utf-8")) if _METHOD.is_file() else "",
        libraries=renderer.javascript().replace("</script", "<\\/script") if charts else "",
        data={
            "specs": with_variables({chart.name: chart.spec for chart in charts}),
            "places": {chart.name: chart.places for chart in charts},
            "choices": picked,
            "picks": list(linking.PICKS),
        },
        style=variables() + (_PAGE / "style.css").read_text(encoding="utf-8"),
        script=(_PAGE / "script.js").read_text(encoding="utf-8"),
    )
