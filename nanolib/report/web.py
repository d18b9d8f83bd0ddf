"""The report as one self-contained web page: it opens by itself, asks nobody for anything, and escapes all that it shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
import mistune
import pandas as pd
from markupsafe import Markup

from nanolib.report import linking, overview, regressions, renderer
from nanolib.report.claim import grouped
from nanolib.report.display import Table
from nanolib.report.section import Changes, Section
from nanolib.store import SHOWN_CASES

_METHOD = Path(__file__).parents[2] / "docs" / "method.md"

_PAGE = Path(__file__).parent / "page_files"


def web_page(
    sections: list[Section],
    changes: Changes,
    drawn: dict[str, dict[str, Any]],
    rows: pd.DataFrame,
    runs: pd.DataFrame,
    machines: pd.DataFrame,
    left_out: int,
) -> str:
    """The page.

    Args:
        sections: What is asked, in order.
        changes: Since the runs before, and over all runs.
        drawn: Chart → its compiled specification.
        rows: The measurements shown.
        runs: Their runs.
        machines: All machines.
        left_out: How many cases are not shown.
    """
    loader = jinja2.FileSystemLoader(_PAGE)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    markdown = mistune.create_markdown(escape=True, plugins=["table"])
    picked = linking.choices(rows, runs, machines)
    return environment.get_template("page.html.jinja").render(
        sections=sections,
        grouped=grouped,
        said={section.experiment: section.verdict(rows) for section in sections},
        changes=changes,
        rows=rows,
        runs=runs,
        left_out=left_out,
        shown_cases=SHOWN_CASES,
        picked=picked,
        hardware=regressions.hardware_table(rows, machines),
        across=regressions.machine_ratios(rows),
        failed=overview.failures(rows),
        flagged=overview.flag_lines(rows),
        facts=overview.run_facts(runs, machines),
        method=markdown(_METHOD.read_text(encoding="utf-8")) if _METHOD.is_file() else "",
        libraries=renderer.javascript().replace("</script", "<\\/script") if drawn else "",
        specs=linking.as_script(drawn) if drawn else "",
        choices=linking.as_script(picked),
        style=(_PAGE / "style.css").read_text(encoding="utf-8"),
        script=(_PAGE / "script.js").read_text(encoding="utf-8"),
        table=lambda frame: Markup(Table(frame)._repr_html_()),
    )
