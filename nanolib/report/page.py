"""Write the report as a page that needs no network, as Markdown, and as files of the results."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from altair.utils import schemapi

from nanolib.paths import make_folder
from nanolib.report import display, overview
from nanolib.report.display import Lines, Table
from nanolib.report.finding import Finding
from nanolib.report.regressions import changes
from nanolib.report.section import MOST_CHARTS, Part, Section
from nanolib.report.tables import csv_text, markdown_table, markdown_text
from nanolib.report.theme import use_color_variables, variables
from nanolib.store import Store
from nanolib.store.export import json_text
from nanolib.store.query import SHOWN_CASES

_PAGE = Path(__file__).with_name("page.html.jinja")


def build(
    store: Store,
    run_ids: list[str],
    folder: Path,
    sections: Iterable[Section],
    *,
    pictures: bool = True,
) -> Path:
    """Write the report of some runs.

    The page shows the results of all machines. All files except the page show each experiment on
    the machine of its newest run. `profiling_report.md` is the report in Markdown. Each chart has a
    picture as PNG and as SVG. For each experiment NAME, `NAME_summary.csv` and `NAME_summary.md`
    contain the main table, and `NAME_profile.json` contains the runs, measurements and findings.
    Every further table becomes a CSV file and a Markdown file too.

    Args:
        store: Store with the runs.
        run_ids: IDs of the runs.
        folder: Folder to write to.
        sections: Sections of the report in order. The report omits sections without a run.
        pictures: Whether to draw the pictures, which takes most of the time.

    Returns:
        Path of the page, `index.html` in the folder.
    """
    rows, runs = store.report_data(run_ids)
    hardware = overview.hardware_table(rows, store.machines())
    make_folder(folder)
    with schemapi.debug_mode(False):  # Altair's check of each chart is slow.
        parts = [*_parts(store, sections, rows, runs, hardware)]
        specs = {}
        for part in parts:
            specs |= {name: chart.to_dict(validate=False) for name, chart in part.charts.items()}
    newest = [part for part in parts if part.newest]
    for part in newest:
        if part.machine:
            own = (rows["experiment"] == part.name) & (rows["machine_id"] == part.machine)
            _write_files(part, rows[own], runs, folder)
        for name in part.charts if pictures else ():
            display.save(specs[name], folder, name)
    (folder / "profiling_report.md").write_text(_markdown(newest), encoding="utf-8")
    page = folder / "index.html"  # The page comes last, so an interrupted report keeps the old one.
    page.write_text(_web_page(parts, specs, rows, runs, hardware), encoding="utf-8")
    return page


def _parts(
    store: Store,
    sections: Iterable[Section],
    rows: pd.DataFrame,
    runs: pd.DataFrame,
    hardware: pd.DataFrame,
) -> Iterator[Part]:
    """Yield a part per section and machine, newest results first, and then the summaries."""
    for section in sections:
        own = runs[runs["experiment"] == section.experiment]
        for index, machine in enumerate(own["machine_id"][::-1].unique()):
            yield _answer(section, machine, index == 0, rows[rows["machine_id"] == machine])
    yield changes(store, runs)
    yield Part("hardware", "Which hardware was used?", tables={"Hardware": (hardware, hardware)})
    failed = overview.failures(rows)
    yield Part(
        "failed",
        "Which numbers are not reliable?",
        overview.flag_lines(rows),
        tables={"What failed": (failed, failed)},
    )
    facts = overview.run_facts(runs)
    yield Part("runs", "Runs and machines", tables={"Runs": (facts, facts)})


def _answer(section: Section, machine: str, newest: bool, rows: pd.DataFrame) -> Part:
    """Return the part of a section from the rows of one machine."""
    ending = "" if newest else f"-{machine[:6]}"
    return Part(
        section.experiment + ending,
        section.question,
        section.verdict(rows),
        {name + ending: draw(rows) for name, draw in section.charts.items()},
        {title: (table.of(rows), table.readable(rows)) for title, table in section.tables.items()},
        machine,
        newest,
        dict(_by_length(section, rows)),
    )


def _by_length(section: Section, rows: pd.DataFrame) -> Iterator[tuple[str, list[Finding]]]:
    """Yield each sequence length with its findings, if there are several sequence lengths."""
    own = overview.of_experiment(rows, section.experiment)
    seq_lens = own.get("factor.seq_len", pd.Series(dtype=float))
    lengths = seq_lens.dropna().unique()
    for length in lengths if len(lengths) > 1 else ():
        findings = section.verdict(own[seq_lens.isna() | (seq_lens == length)])
        # Other cases, such as a small decoder, have lengths at which nothing answers the question.
        if findings and (findings[0].compared or findings[0].figures):
            yield f"{length:.0f}", findings


def _write_files(part: Part, rows: pd.DataFrame, runs: pd.DataFrame, folder: Path):
    for index, (title, (table, readable)) in enumerate(part.tables.items()):
        ending = re.sub(r"[^a-z0-9]+", "_", title.lower()) if index else "summary"
        name = folder / f"{part.name}_{ending}"
        name.with_suffix(".csv").write_text(csv_text(table), encoding="utf-8")
        name.with_suffix(".md").write_text(markdown_table(readable) + "\n", encoding="utf-8")
    tables = {"runs": runs[runs["experiment"] == part.name], "measurements": rows}
    text = json_text(tables, verdict=list(map(str, part.verdict)))
    (folder / f"{part.name}_profile.json").write_text(text, encoding="utf-8")


def _markdown(parts: list[Part]) -> str:
    """Return the report as Markdown."""
    lines = ["# nanolib report"]
    for part in parts:
        lines.append(f"## {part.title}")
        lines.append("\n".join(f"- {markdown_text(str(finding))}" for finding in part.verdict))
        lines += [f"![{name}]({name}.png)" for name in part.charts]
        for title, (_, readable) in part.tables.items():
            lines += [f"### {title}", markdown_table(readable)]
    return "\n\n".join(filter(None, lines)) + "\n"


def _table(whole: pd.DataFrame, readable: pd.DataFrame) -> Table:
    """Return a table for people, without empty columns, with the sequence length of each line."""
    filled = ~readable.isin(["", "—"]).all()
    lengths = whole.get("seq_len", pd.Series(float("nan"), index=whole.index))
    return Table(readable.loc[:, filled], lengths.map("{:.0f}".format).replace("nan", ""))


def _web_page(
    parts: list[Part],
    specs: dict[str, dict[str, Any]],
    rows: pd.DataFrame,
    runs: pd.DataFrame,
    hardware: pd.DataFrame,
) -> str:
    """Return the web page, which loads nothing from a network and escapes all text.

    Args:
        parts: Parts of the page in order.
        specs: Vega-Lite specification of each chart, by the name of the chart.
        rows: Measurements of the parts.
        runs: Runs of the measurements.
        hardware: Table of the machines.
    """
    shown = {part.name: [*part.charts][:MOST_CHARTS] for part in parts}
    names = (name for names in shown.values() for name in names)
    drawn = {name: specs[name] for name in names if "usermeta" not in specs[name]}
    machines = hardware.reindex(columns=["Machine", "CPU", "GPU"]).itertuples(index=False)
    lengths = sorted({int(n) for n in rows.get("factor.seq_len", pd.Series()).dropna()})
    data = json.dumps(drawn, separators=(",", ":"))
    template = jinja2.Template(
        _PAGE.read_text(encoding="utf-8"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return template.render(
        parts=parts,
        specs=specs,
        shown=shown,
        drawn=drawn,
        runs=len(runs),
        count=len(rows),
        most_cases=SHOWN_CASES,
        machines={one: f"{cpu}, {gpu} ({one[:6]})" for one, cpu, gpu in machines},
        lengths={n: f"{n:,}" for n in lengths},
        lines=Lines,
        table=_table,
        libraries=display.javascript().replace("</script", "<\\/script"),
        # Browsers act on `</script` and `<!--` even inside a string of a script.
        data=use_color_variables(data).replace("<", "\\u003c"),
        colors=variables(),
    )
