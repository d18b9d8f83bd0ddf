"""The report: one self-contained page, the same in Markdown, pictures of each chart, tables and profiles as files."""

from __future__ import annotations

import html
import json
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from nanolib.compare.history import what_changed
from nanolib.measurement import printable
from nanolib.paths import make_folder
from nanolib.report import (
    charts,
    distributed,
    energy,
    fp8_parity,
    overview,
    regressions,
    renderer,
    tables,
    verdicts,
)
from nanolib.report.web import web_page
from nanolib.scratch import Scratch
from nanolib.store import Store
from nanolib.store.sharing import Redaction


@dataclass(frozen=True)
class Section:
    """One question of the report: its charts, table and verdict."""

    experiment: str
    question: str
    charts: tuple[str, ...]
    table: Callable[[pd.DataFrame], pd.DataFrame]
    columns: dict[str, str]


SECTIONS = (
    Section(
        "attention",
        "When does sparse attention pay?",
        (
            "attention_latency",
            "attention_speed_up",
            "attention_quality",
            "attention_memory",
            "attention_efficiency",
            "attention_roofline",
        ),
        tables.attention_table,
        tables.ATTENTION_COLUMNS,
    ),
    Section(
        "model",
        "What does a whole model cost?",
        ("model_performance", "training_phases", "model_memory", "model_loss", "model_roofline"),
        tables.model_table,
        tables.MODEL_COLUMNS,
    ),
    Section(
        "warmup",
        "How much warm-up is enough?",
        ("warmup_curve", "warmup_settings"),
        tables.warmup_table,
        tables.WARMUP_COLUMNS,
    ),
    Section(
        "energy",
        "What does a token cost in joules?",
        (
            "energy_per_token",
            "power_over_time",
            "operation_breakdown",
            "layer_heat_map",
            "activation_profile",
            "profiling_overhead",
        ),
        energy.energy_table,
        energy.ENERGY_COLUMNS,
    ),
    Section(
        "fp8",
        "Does 8-bit floating point pay?",
        ("fp8_quoted", "fp8_precisions", "fp8_parity", "fp8_numerics", "fp8_losses", "fp8_scales"),
        fp8_parity.parity_table,
        fp8_parity.PARITY_COLUMNS,
    ),
    Section(
        "distributed",
        "How far does it scale across ranks?",
        ("decode_scaling", "decode_shares", "link_model", "prefill_times", "sharded_memory", "training_scaling"),
        distributed.decode_table,
        distributed.DECODE_COLUMNS,
    ),
    Section(
        "ab",
        "Which of two versions is slower?",
        ("ab_ratio",),
        regressions.ab_table,
        regressions.AB_COLUMNS,
    ),
)


def build(store: Store, run_ids: list[str], folder: Path, *, pictures: bool = True) -> Path:
    """Write the report of some runs.

    Args:
        store: Where they are.
        run_ids: Which.
        folder: Where to: `index.html`, `profiling_report.md`, a PNG and SVG of each chart, `attention_summary.csv` and `.md`,
            `model_summary.csv` and `.md`, `warmup_summary.csv` and `.md`, `attention_profile.json`, `model_profile.json`,
            `warmup_profile.json`.
        pictures: Whether to draw the PNG and SVG files, which takes longer than all the rest.

    Returns:
        The page.
    """
    (rows, runs), machines = store.shown(run_ids), store.machines()
    left_out = store.count_cases(run_ids) - rows[["machine_id", "case_id"]].drop_duplicates().shape[0]
    make_folder(folder)
    # Everything is made beside the target and moved in at the end: a failure half-way leaves the old report whole.
    with (
        Scratch("report", beside=folder) as scratch,
        renderer.quick_charts(),
        renderer.LinkedSpecs(scratch.path if pictures else None) as drawn,
    ):
        made = scratch.path
        shown = [section for section in SECTIONS if section.experiment in set(runs["experiment"])]
        for section in shown:
            for name in section.charts:
                drawn.add(name, charts.CHARTS[name](rows))
        changes = _changes(store, runs)
        for name, chart in changes.charts.items():
            drawn.add(name, chart)
        for section in shown:
            _write_files(section, rows, runs, made)
        (made / "profiling_report.md").write_text(_markdown(shown, changes, rows, runs, machines), encoding="utf-8")
        page = web_page(shown, changes, drawn.all(), rows, runs, machines, left_out)
        (made / "index.html").write_text(page, encoding="utf-8")
        for file in made.iterdir():
            file.replace(folder / file.name)
    return folder / "index.html"


@dataclass(frozen=True)
class Changes:
    """What changed since the runs before, and over all runs.

    Attributes:
        verdict: In words.
        charts: By name.
        table: The findings that are not equivalent.
    """

    verdict: list[str]
    charts: dict[str, Any]
    table: pd.DataFrame


def _changes(store: Store, runs: pd.DataFrame) -> Changes:
    since, found = what_changed(store, runs)
    drawn = {"since_the_run_before": regressions.since_chart(since)} if since is not None else {}
    if found:
        drawn["history"] = regressions.history_chart(found)
    table = since.table(everything=False) if since is not None else pd.DataFrame()
    return Changes(regressions.changes_verdict(since, found), drawn, table)


def _write_files(section: Section, rows: pd.DataFrame, runs: pd.DataFrame, folder: Path) -> None:
    table = section.table(rows)
    (folder / f"{section.experiment}_summary.csv").write_text(csv_text(table), encoding="utf-8")
    shown = tables.readable(table, section.columns)
    (folder / f"{section.experiment}_summary.md").write_text(markdown_table(shown) + "\n", encoding="utf-8")
    chosen = overview.of_experiment(rows, section.experiment)
    profile = {
        "runs": public_runs(runs[runs["experiment"] == section.experiment]),
        "measurements": measurement_records(chosen, runs),
        "verdict": verdicts.VERDICTS[section.experiment](rows),
    }
    text = json.dumps(profile, indent=1, ensure_ascii=False, allow_nan=False)
    (folder / f"{section.experiment}_profile.json").write_text(text, encoding="utf-8")


def public_runs(runs: pd.DataFrame) -> list[dict[str, Any]]:
    """Runs as JSON records, without what names a process, a path, a person or a host."""
    return list(Redaction(runs["params"]).rows(records(runs.drop(columns=["process", "launch"]))))


def measurement_records(rows: pd.DataFrame, runs: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows as JSON records, without samples and without the factor columns (the factors are there as one object)."""
    columns = [name for name in rows.columns if not name.startswith("factor.") and name not in ("samples", "id")]
    return list(Redaction(runs["params"]).rows(records(rows[columns])))


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as JSON types, every digit kept; null for NaN."""
    return table.astype(object).where(table.notna(), None).to_dict("records")


def csv_text(table: pd.DataFrame) -> str:
    """A table as CSV that a spreadsheet takes for text and numbers alone, in its header too."""
    return table.map(safe_cell).set_axis([safe_cell(name) for name in table.columns], axis=1).to_csv(index=False)


def safe_cell(value: Any) -> Any:
    """A cell that a spreadsheet will not take for a formula: text that begins like one gets a quote in front."""
    if isinstance(value, list | tuple):
        value = ", ".join(map(str, value))
    if not isinstance(value, str):
        return value
    begins = unicodedata.normalize("NFKC", value.lstrip())[:1]  # some spreadsheets take a full-width = for one
    acts = begins in ("=", "+", "-", "@") or value[:1] in ("\t", "\r", "\n")
    return ("'" if acts and begins else "") + printable(value)


def markdown_table(table: pd.DataFrame) -> str:
    """A GitHub table; text cannot break out of its cell."""
    if table.empty:
        return "(nothing was measured)"
    lines = [list(table.columns), ["---"] * len(table.columns), *table.to_numpy().tolist()]
    return "\n".join("| " + " | ".join(_markdown_text(str(cell)) for cell in line) + " |" for line in lines)


def _markdown_text(text: str) -> str:
    escaped = html.escape(printable(" ".join(text.split())), quote=False)
    return re.sub(r"([|`\\\[\]*])", r"\\\1", escaped)


def _markdown(
    sections: list[Section], changes: Changes, rows: pd.DataFrame, runs: pd.DataFrame, machines: pd.DataFrame
) -> str:
    parts = ["# nanolib report", markdown_table(overview.run_facts(runs, machines))]
    if not sections:
        parts.append("There is nothing to show yet. Run: nano run quick")
    for section in sections:
        parts += [
            f"## {section.question}",
            *(f"- {_markdown_text(line)}" for line in verdicts.VERDICTS[section.experiment](rows)),
        ]
        parts += [f"![{name}]({name}.png)" for name in section.charts]
        parts.append(markdown_table(tables.readable(section.table(rows), section.columns)))
    parts += ["## What changed?", *(f"- {_markdown_text(line)}" for line in changes.verdict)]
    parts += [f"![{name}]({name}.png)" for name in changes.charts]
    if len(changes.table):
        parts.append(markdown_table(changes.table))
    matrix, across = regressions.hardware_table(rows, machines), regressions.machine_ratios(rows)
    parts += ["## Hardware", markdown_table(matrix), *([markdown_table(across)] if len(across) else [])]
    failed = overview.failures(rows)
    if len(failed):
        parts += ["## What failed", markdown_table(failed)]
    flagged = overview.flag_lines(rows)
    if flagged:
        parts += ["## What to know before believing a number", *(f"- {_markdown_text(line)}" for line in flagged)]
    return "\n\n".join(parts).replace("\n\n- ", "\n- ").replace("\n- ", "\n\n- ", 1) + "\n"
