"""The report: one self-contained page, the same in Markdown, pictures of each chart, tables and profiles as files."""

from __future__ import annotations

import html
import json
import re
import unicodedata
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd

from nanolib.compare.history import what_changed
from nanolib.measurement import printable
from nanolib.paths import make_folder
from nanolib.report import overview, regressions, renderer
from nanolib.report.section import Answer, Section, answers
from nanolib.report.web import Facts, web_page
from nanolib.store import Store
from nanolib.store.export import public_rows


def build(
    store: Store,
    run_ids: list[str],
    folder: Path,
    sections: Iterable[Section],
    *,
    pictures: bool = True,
) -> Path:
    """Write the report of some runs.

    Args:
        store: Where they are.
        run_ids: Which.
        folder: Where to: `index.html`, `profiling_report.md`, a PNG and SVG of each chart, and per experiment
            `NAME_summary.csv`, `NAME_summary.md`, `NAME_profile.json` and a pair of tables for each further table that has a
            line. The page has the answers of all machines, the other files those of the machine of each newest run.
        sections: What is asked, in order; those without a run are left out.
        pictures: Whether to draw the PNG and SVG files, which takes longer than all the rest.

    Returns:
        The page.
    """
    (rows, runs), machines = store.shown(run_ids), store.machines()
    cases = rows[["machine_id", "experiment", "case_id"]].drop_duplicates()
    facts = Facts.of(rows, runs, machines, store.count_cases(run_ids) - len(cases))
    answered = answers(sections, rows, runs)
    since, histories = what_changed(store, runs)
    changes = regressions.changes(since, histories)
    make_folder(folder)
    # Everything is made beside the target and moved in at the end: a failure half-way leaves the old report whole.
    with (
        TemporaryDirectory(prefix=".nanolib-", dir=folder) as beside,
        renderer.unchecked(),
        ThreadPoolExecutor(1, thread_name_prefix="nanolib-charts") as drawing,
    ):
        made, coming = Path(beside), []
        specs: dict[str, dict[str, Any]] = {}

        def draw(name: str, spec: dict[str, Any]) -> None:
            specs[name] = spec
            if pictures:
                coming.append(drawing.submit(renderer.save, spec, made, name))

        for name, chart in changes.charts.items():
            draw(name, chart.to_dict(validate=False))
        for answer in answered:
            if not answer.newest:
                continue
            for name, chart in {**answer.section.charts, **answer.section.files}.items():
                draw(name, chart(answer.rows).to_dict(validate=False))
            _write_files(answer, runs, made)
        shown = [answer for answer in answered if answer.newest]
        text = _markdown(shown, changes, facts)
        (made / "profiling_report.md").write_text(text, encoding="utf-8")
        page = web_page(answered, changes, specs, facts)
        (made / "index.html").write_text(page, encoding="utf-8")
        for one in coming:
            one.result()
        for file in made.iterdir():
            file.replace(folder / file.name)
    return folder / "index.html"


def _write_files(answer: Answer, runs: pd.DataFrame, folder: Path) -> None:
    experiment = answer.section.experiment
    for at, (title, table, readable) in enumerate(answer.tables):
        name = re.sub(r"[^a-z0-9]+", "_", title.lower()) if at else "summary"
        for ending, text in (("csv", csv_text(table)), ("md", markdown_table(readable) + "\n")):
            (folder / f"{experiment}_{name}.{ending}").write_text(text, encoding="utf-8")
    profile = {
        "runs": public_runs(runs[runs["experiment"] == experiment]),
        "measurements": measurement_records(overview.of_experiment(answer.rows, experiment)),
        "verdict": list(map(str, answer.claims)),
    }
    text = json.dumps(profile, indent=1, ensure_ascii=False, allow_nan=False)
    (folder / f"{experiment}_profile.json").write_text(text, encoding="utf-8")


def public_runs(runs: pd.DataFrame) -> list[dict[str, Any]]:
    """Runs as JSON records, as others may see them."""
    return list(public_rows("runs", records(runs)))


def measurement_records(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows as JSON records, as others may see them: without samples, the factors as one object."""
    return list(public_rows("measurements", records(rows)))


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as JSON types, every digit kept; null for NaN."""
    return table.astype(object).where(table.notna(), None).to_dict("records")


def csv_text(table: pd.DataFrame) -> str:
    """A table as CSV that a spreadsheet takes for text and numbers only, in its header too."""
    return table.map(safe_cell).rename(columns=safe_cell).to_csv(index=False)


def safe_cell(value: Any) -> Any:
    """A cell that a spreadsheet will not take for a formula: text that begins like one gets a quote in front."""
    if isinstance(value, list | tuple):
        value = ", ".join(map(str, value))
    if not isinstance(value, str):
        return value
    # some spreadsheets take a full-width = for one
    begins = unicodedata.normalize("NFKC", value.lstrip())[:1]
    acts = begins in ("=", "+", "-", "@") or value[:1] in ("\t", "\r", "\n")
    return ("'" if acts and begins else "") + printable(value)


def markdown_table(table: pd.DataFrame) -> str:
    """A GitHub table; text cannot break out of its cell."""
    if table.empty:
        return "(nothing was measured)"
    lines = [list(table.columns), ["---"] * len(table.columns), *table.to_numpy().tolist()]
    return "\n".join(
        "| " + " | ".join(_markdown_text(str(cell)) for cell in line) + " |" for line in lines
    )


def _markdown_text(text: str) -> str:
    escaped = html.escape(printable(" ".join(text.split())), quote=False)
    return re.sub(r"([|`\\\[\]*])", r"\\\1", escaped)


def _markdown_list(lines: Iterable[Any]) -> str:
    return "\n".join(f"- {_markdown_text(str(line))}" for line in lines)


def _markdown(shown: list[Answer], changes: regressions.Changes, facts: Facts) -> str:
    """The report as Markdown; an empty part has no heading."""
    parts = ["# nanolib report", markdown_table(facts.runs)]
    for answer in shown:
        parts += [f"## {answer.section.question}", _markdown_list(answer.claims)]
        parts += [f"![{name}]({name}.png)" for name in answer.section.charts]
        for title, _, readable in answer.tables:
            parts += [f"### {title}", markdown_table(readable)]
    parts += ["## What changed?", _markdown_list(changes.verdict)]
    parts += [f"![{name}]({name}.png)" for name in changes.charts]
    for title, table in (
        ("Changed and inconclusive cases", changes.table),
        ("Hardware", facts.hardware),
        ("Latency per machine (ms)", facts.across),
        ("What failed", facts.failed),
    ):
        parts += [f"## {title}", markdown_table(table)] if len(table) else []
    if facts.flags:
        parts += ["## What to know before believing a number", _markdown_list(facts.flags)]
    return (
        "\n\n".join(parts if shown else [*parts, "Nothing was measured yet. Run: nano run quick"])
        + "\n"
    )
