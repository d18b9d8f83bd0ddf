"""Write the report: one self-contained page, the same in Markdown, pictures of each chart, tables and profiles."""

from __future__ import annotations

import html
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd

from nanolib.compare.history import what_changed
from nanolib.measurement import printable
from nanolib.paths import make_folder
from nanolib.report import hardware, overview, renderer
from nanolib.report.finding import Finding
from nanolib.report.regressions import changes
from nanolib.report.section import Part, Section
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
        folder: Where to: `index.html`, `profiling_report.md`, a PNG and SVG of each chart, and per experiment
            `NAME_summary.csv`, `NAME_summary.md`, `NAME_profile.json` and a pair of tables for each further table that has a
            line. The page has the answers of all machines, the other files those of the machine of each newest run.
        sections: What is asked, in order; those without a run are left out.
        pictures: Whether to draw the PNG and SVG files, which takes longer than all the rest.

    Returns:
        The page.
    """
    (rows, runs), machines = store.shown(run_ids), store.machines()
    make_folder(folder)
    # Everything is written next to the target and moved at the end: a failure half-way leaves the old report whole.
    with (
        TemporaryDirectory(prefix=".nanolib-", dir=folder) as temporary,
        renderer.unchecked(),
        ThreadPoolExecutor(1, thread_name_prefix="nanolib-charts") as drawing,
    ):
        made, pending = Path(temporary), []
        parts: list[Part] = []
        specs: dict[str, dict[str, Any]] = {}
        for part in _parts(store, sections, rows, runs, machines):  # while the last one is drawn
            parts.append(part)
            for name, chart in {**part.charts, **part.files}.items():
                specs[name] = chart.to_dict(validate=False)
                if pictures and part.newest:
                    pending.append(drawing.submit(renderer.save, specs[name], made, name))
            if part.machine and part.newest:
                _write_files(part, runs, made)
        (made / "profiling_report.md").write_text(_markdown(parts), encoding="utf-8")
        cases = rows[["machine_id", "experiment", "case_id"]].drop_duplicates()
        left_out = store.count_cases(run_ids) - len(cases)
        page = web_page(parts, specs, rows, runs, machines, left_out)
        (made / "index.html").write_text(page, encoding="utf-8")
        for picture in pending:
            picture.result()
        for file in made.iterdir():
            file.replace(folder / file.name)
    return folder / "index.html"


def _parts(
    store: Store,
    sections: Iterable[Section],
    rows: pd.DataFrame,
    runs: pd.DataFrame,
    machines: pd.DataFrame,
) -> Iterator[Part]:
    """Answer each question for each machine that ran it, the machine of its newest run first; then summarize all runs."""
    newest = runs.sort_values("started", kind="stable")[::-1]
    # the numbers of two machines are never joined
    own = dict(iter(rows.groupby("machine_id"))) if len(rows) else {}
    for section in sections:
        machine_ids = newest.loc[newest["experiment"] == section.experiment, "machine_id"].unique()
        for at, machine in enumerate(machine_ids):
            yield _answer(section, machine, at == 0, own.get(machine, rows))
    yield changes(*what_changed(store, runs))
    machines_used = {"Hardware": hardware.hardware_table(rows, machines)}
    yield Part("hardware", "Which hardware?", tables=_with_lines(machines_used))
    tables = _with_lines({"What failed": overview.failures(rows)})
    flags = overview.flag_lines(rows)
    if tables or flags:
        yield Part("failed", "What to know before believing a number", flags, tables=tables)
    runs = overview.run_facts(runs, machines)
    yield Part("runs", "Runs and machines", tables=_with_lines({"Runs": runs}))


def _with_lines(tables: dict[str, pd.DataFrame]) -> dict[str, tuple[pd.DataFrame, pd.DataFrame]]:
    """Return the tables that have a line; people see all of their columns."""
    return {title: (table, table) for title, table in tables.items() if len(table)}


def _answer(section: Section, machine: str, newest: bool, rows: pd.DataFrame) -> Part:
    """Answer a question by the rows of one machine."""
    ending = "" if newest else f"-{machine[:6]}"
    return Part(
        section.experiment + ending,
        section.question,
        section.verdict(rows),
        {name + ending: draw(rows) for name, draw in section.charts.items()},
        {
            title: (table.of(rows), table.readable(rows))
            for title, table in section.shown(rows).items()
        },
        machine,
        newest,
        rows,
        dict(_by_length(section, rows)),
        {name: draw(rows) for name, draw in section.files.items()} if newest else {},
    )


def _by_length(section: Section, rows: pd.DataFrame) -> Iterator[tuple[int, list[Finding]]]:
    """Answer a question by the rows of each sequence length, if there are several and the finding has estimates."""
    own = overview.of_experiment(rows, section.experiment)
    seq_lens = own.get("factor.seq_len", pd.Series(dtype=float))
    lengths = seq_lens.dropna().unique()
    for length in lengths if len(lengths) > 1 else ():
        findings = section.verdict(own[seq_lens.isna() | (seq_lens == length)])
        if findings and (findings[0].compared or findings[0].figures):
            yield int(length), findings


def _write_files(part: Part, runs: pd.DataFrame, folder: Path) -> None:
    for at, (title, (table, readable)) in enumerate(part.tables.items()):
        name = re.sub(r"[^a-z0-9]+", "_", title.lower()) if at else "summary"
        for ending, text in (("csv", csv_text(table)), ("md", markdown_table(readable) + "\n")):
            (folder / f"{part.name}_{name}.{ending}").write_text(text, encoding="utf-8")
    profile = {
        "runs": public_runs(runs[runs["experiment"] == part.name]),
        "measurements": measurement_records(overview.of_experiment(part.rows, part.name)),
        "verdict": list(map(str, part.verdict)),
    }
    text = json.dumps(profile, indent=1, ensure_ascii=False, allow_nan=False)
    (folder / f"{part.name}_profile.json").write_text(text, encoding="utf-8")


def public_runs(runs: pd.DataFrame) -> list[dict[str, Any]]:
    """Return runs as JSON records without what is private."""
    return list(public_rows("runs", records(runs)))


def measurement_records(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows as JSON records, as others may see them: without samples, the factors as one object."""
    return list(public_rows("measurements", records(rows)))


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return rows as JSON types with all digits; null for NaN."""
    return table.astype(object).where(table.notna(), None).to_dict("records")


def csv_text(table: pd.DataFrame) -> str:
    """Return a table as CSV in which a spreadsheet finds only text and numbers, in the header too."""
    return table.map(safe_cell).rename(columns=safe_cell).to_csv(index=False)


def safe_cell(value: Any) -> Any:
    """Return a cell that a spreadsheet does not take for a formula: text that begins like one gets a quote in front."""
    if isinstance(value, list | tuple):
        value = ", ".join(map(str, value))
    if not isinstance(value, str):
        return value
    # some spreadsheets take a full-width = for one
    begins = unicodedata.normalize("NFKC", value.lstrip())[:1]
    acts = begins in ("=", "+", "-", "@") or value[:1] in ("\t", "\r", "\n")
    return ("'" if acts and begins else "") + printable(value)


def markdown_table(table: pd.DataFrame) -> str:
    """Return a GitHub table; text cannot break out of its cell."""
    if table.empty:
        return "(nothing was measured)"
    lines = [list(table.columns), ["---"] * len(table.columns), *table.to_numpy().tolist()]
    return "\n".join(
        "| " + " | ".join(_markdown_text(str(cell)) for cell in line) + " |" for line in lines
    )


def _markdown_text(text: str) -> str:
    escaped = html.escape(printable(" ".join(text.split())), quote=False)
    return re.sub(r"([|`\\\[\]*])", r"\\\1", escaped)


def _markdown(parts: list[Part]) -> str:
    """Return the report as Markdown."""
    lines = ["# nanolib report"]
    for part in filter(lambda one: one.newest, parts):
        lines.append(f"## {part.title}")
        lines.append("\n".join(f"- {_markdown_text(str(finding))}" for finding in part.verdict))
        lines += [f"![{name}]({name}.png)" for name in part.charts]
        for title, (_, readable) in part.tables.items():
            lines += [f"### {title}", markdown_table(readable)]
    if not any(part.machine for part in parts):
        lines.append("Nothing was measured yet. Run: nano run quick")
    return "\n\n".join(filter(None, lines)) + "\n"
