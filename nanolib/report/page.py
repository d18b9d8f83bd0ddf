"""The report: one self-contained page, the same in Markdown, pictures of each chart, tables and profiles as files."""

from __future__ import annotations

import html
import json
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd

from nanolib.compare.history import what_changed
from nanolib.measurement import printable
from nanolib.paths import make_folder
from nanolib.report import (
    overview,
    regressions,
    renderer,
)
from nanolib.report.section import Changes, Section
from nanolib.report.web import web_page
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
        folder: Where to: `index.html`, `profiling_report.md`, a PNG and SVG of each chart, `attention_summary.csv` and `.md`,
            `model_summary.csv` and `.md`, `warmup_summary.csv` and `.md`, and of each further table that has a line a pair named
            after its title; `attention_profile.json`, `model_profile.json`, `warmup_profile.json`.
        sections: What is asked, in order; those without a run are left out.
        pictures: Whether to draw the PNG and SVG files, which takes longer than all the rest.

    Returns:
        The page.
    """
    (every, runs), machines = store.shown(run_ids), store.machines()
    rows = overview.newest_machine(every, runs)
    left_out = (
        store.count_cases(run_ids)
        - every[["machine_id", "experiment", "case_id"]].drop_duplicates().shape[0]
    )
    make_folder(folder)
    # Everything is made beside the target and moved in at the end: a failure half-way leaves the old report whole.
    with (
        TemporaryDirectory(prefix=".nanolib-", dir=folder) as beside,
        renderer.quick_charts(),
        renderer.LinkedSpecs(Path(beside) if pictures else None) as drawn,
    ):
        made = Path(beside)
        shown = [section for section in sections if section.experiment in set(runs["experiment"])]
        for section in shown:
            for name, chart in {**section.charts, **section.files}.items():
                drawn.add(name, chart(rows))
        changes = _changes(store, runs)
        for name, chart in changes.charts.items():
            drawn.add(name, chart)
        for section in shown:
            _write_files(section, rows, runs, made)
        (made / "profiling_report.md").write_text(
            _markdown(shown, changes, rows, every, runs, machines), encoding="utf-8"
        )
        page = web_page(shown, changes, drawn.all(), rows, every, runs, machines, left_out)
        (made / "index.html").write_text(page, encoding="utf-8")
        for file in made.iterdir():
            file.replace(folder / file.name)
    return folder / "index.html"


def _changes(store: Store, runs: pd.DataFrame) -> Changes:
    since, found = what_changed(store, runs)
    drawn = {"since_the_run_before": regressions.since_chart(since)} if since is not None else {}
    if found:
        drawn["history"] = regressions.history_chart(found)
    table = since.table(everything=False) if since is not None else pd.DataFrame()
    return Changes(regressions.changes_verdict(since, found), drawn, table)


def _write_files(section: Section, rows: pd.DataFrame, runs: pd.DataFrame, folder: Path) -> None:
    for at, (title, table) in enumerate(section.shown(rows).items()):
        name = re.sub(r"[^a-z0-9]+", "_", title.lower()) if at else "summary"
        (folder / f"{section.experiment}_{name}.csv").write_text(
            csv_text(table.of(rows)), encoding="utf-8"
        )
        text = markdown_table(table.readable(rows)) + "\n"
        (folder / f"{section.experiment}_{name}.md").write_text(text, encoding="utf-8")
    chosen = overview.of_experiment(rows, section.experiment)
    profile = {
        "runs": public_runs(runs[runs["experiment"] == section.experiment]),
        "measurements": measurement_records(chosen),
        "verdict": [claim.to_dict() for claim in section.verdict(rows)],
    }
    text = json.dumps(profile, indent=1, ensure_ascii=False, allow_nan=False)
    (folder / f"{section.experiment}_profile.json").write_text(text, encoding="utf-8")


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
    """A table as CSV that a spreadsheet takes for text and numbers alone, in its header too."""
    return (
        table.map(safe_cell)
        .set_axis([safe_cell(name) for name in table.columns], axis=1)
        .to_csv(index=False)
    )


def safe_cell(value: Any) -> Any:
    """A cell that a spreadsheet will not take for a formula: text that begins like one gets a quote in front."""
    if isinstance(value, list | tuple):
        value = ", ".join(map(str, value))
    if not isinstance(value, str):
        return value
    begins = unicodedata.normalize("NFKC", value.lstrip())[
        :1
    ]  # some spreadsheets take a full-width = for one
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


def _markdown(
    sections: list[Section],
    changes: Changes,
    rows: pd.DataFrame,
    every: pd.DataFrame,
    runs: pd.DataFrame,
    machines: pd.DataFrame,
) -> str:
    parts = ["# nanolib report", markdown_table(overview.run_facts(runs, machines))]
    if not sections:
        parts.append("There is nothing to show yet. Run: nano run quick")
    for section in sections:
        parts += [
            f"## {section.question}",
            *(f"- {_markdown_text(str(claim))}" for claim in section.verdict(rows)),
        ]
        parts += [f"![{name}]({name}.png)" for name in section.charts]
        for title, table in section.shown(rows).items():
            parts += [f"### {title}", markdown_table(table.readable(rows))]
    parts += ["## What changed?", *(f"- {_markdown_text(str(claim))}" for claim in changes.verdict)]
    parts += [f"![{name}]({name}.png)" for name in changes.charts]
    if len(changes.table):
        parts.append(markdown_table(changes.table))
    matrix, across = regressions.hardware_table(every, machines), regressions.machine_ratios(every)
    parts += [
        "## Hardware",
        markdown_table(matrix),
        *([markdown_table(across)] if len(across) else []),
    ]
    failed = overview.failures(every)
    if len(failed):
        parts += ["## What failed", markdown_table(failed)]
    flagged = overview.flag_lines(rows)
    if flagged:
        parts += [
            "## What to know before believing a number",
            *(f"- {_markdown_text(line)}" for line in flagged),
        ]
    return "\n\n".join(parts).replace("\n\n- ", "\n- ").replace("\n- ", "\n\n- ", 1) + "\n"
