"""Write the report as a page that needs no network, as Markdown, and as files of the results."""

import json
import re
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pandas as pd
from altair.utils import schemapi

from nanolib.measurement import printable
from nanolib.paths import make_folder
from nanolib.report import display
from nanolib.report.display import Lines, Table
from nanolib.report.overview import changes, failures, flag_lines, hardware_table, run_facts
from nanolib.report.plot import links
from nanolib.report.section import MOST_CHARTS, Finding, Part, Section, of_experiment
from nanolib.report.tables import markdown_table, markdown_text, readable
from nanolib.report.theme import use_color_variables, variables
from nanolib.store import Store
from nanolib.store.export import json_text
from nanolib.store.query import SHOWN_CASES

_PAGE = Path(__file__).with_name("page.html.jinja")
# Each further run and each further list of findings makes the page slower and larger.
_MOST_EXTRA_RUNS = 6
_MOST_PICKS = 24


def build(
    store: Store,
    run_ids: list[str],
    folder: Path,
    sections: Iterable[Section],
    *,
    pictures: bool = True,
) -> Path:
    """Write the report of some runs.

    The page shows the results of all machines, and of each of the newest runs. All files except the
    page show each experiment on the machine of its newest run. `profiling_report.md` is the report
    in Markdown. Each chart has a picture as PNG and as SVG. For each experiment NAME,
    `NAME_summary.csv` and `NAME_summary.md` contain the main table, and `NAME_profile.json`
    contains the runs, measurements and findings. Every further table becomes a CSV file and a
    Markdown file too.

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
    hardware = hardware_table(rows, store.machines())
    make_folder(folder)
    with schemapi.debug_mode(False):  # Altair's check of each chart is slow.
        parts = [*_parts(store, sections, rows, runs, hardware)]
        specs = {}
        for part in parts:
            specs |= {name: chart.to_dict(validate=False) for name, chart in part.charts.items()}
    newest = [part for part in parts if not part.needs]
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
    """Yield a part per section and machine, newest results first, and then the summaries.

    The part of a machine has the newest measurement of each case. If these are from several runs,
    each of the newest runs has an extra part with all its own results.
    """
    most = max(1, _MOST_EXTRA_RUNS // max(1, runs["experiment"].nunique()))
    for section in sections:
        own = runs[runs["experiment"] == section.experiment]
        parts = []
        for machine in own["machine_id"][::-1].unique():
            found = rows[rows["machine_id"] == machine]
            parts.append(_answer(section, machine, "machine" if parts else "", found))
        yield from parts
        others = own[~own["run_id"].isin([part.run for part in parts])].tail(most)
        for run in others.itertuples():
            found = store.measurements([run.run_id], samples=True, newest=SHOWN_CASES)
            yield _answer(section, run.machine_id, "run", found)
    yield changes(store, runs)
    yield Part("hardware", "Which hardware was used?", tables={"Hardware": (hardware, hardware)})
    failed = failures(rows)
    yield Part(
        "failed",
        "Which numbers are not reliable?",
        flag_lines(rows),
        tables={"What failed": (failed, failed)},
    )
    facts = run_facts(runs)
    yield Part("runs", "Runs and machines", tables={"Runs": (runs, facts)})


def _answer(section: Section, machine: str, needs: str, rows: pd.DataFrame) -> Part:
    """Return the part of a section from the rows of one machine, or of one run."""
    own = of_experiment(rows, section.experiment)
    runs = own["run_id"].unique()
    run = runs[0] if len(runs) == 1 else ""
    ending = f"-{run[:8] if needs == 'run' else machine[:6]}" if needs else ""
    verdict, tables = section.verdict(rows), {}
    for title, table in section.tables.items():
        whole = table.of(rows)
        tables[title] = whole, readable(whole, table.columns)
    return Part(
        section.experiment + ending,
        section.question,
        verdict,
        {name + ending: draw(rows) for name, draw in section.charts.items()},
        tables,
        machine,
        run,
        needs,
        dict(_by_pick(section, own, verdict, 1 if needs == "run" else _MOST_PICKS)),
    )


def _by_pick(
    section: Section, rows: pd.DataFrame, verdict: list[Finding], most: int
) -> Iterator[tuple[tuple[str, str], list[Finding]]]:
    """Yield each pair of a model and a sequence length of a case, with the findings about it.

    A pair also chooses the rows without a model or a length, such as peak rates. An empty text
    chooses all models or lengths.

    Args:
        section: Section that finds something in the rows.
        rows: Measurements of the section's experiment.
        verdict: Findings from all rows.
        most: Largest number of different lists of findings. Further pairs have no findings.
    """
    known = rows.reindex(columns=["factor.preset", "factor.seq_len"]).astype(object).fillna("")
    known = known.map(lambda value: str(value).removesuffix(".0")).to_numpy()
    pairs = [("", "")]
    for model, n in known:
        pairs += product(("", model), ("", n))
    found = {}  # Chosen rows as bytes → findings.
    for pair in dict.fromkeys(pairs):
        chosen = ((known == pair) | (known == "") | (np.array(pair) == "")).all(axis=1)
        key = chosen.tobytes()
        if found and key not in found:
            findings = section.verdict(rows[chosen]) if len(found) < most else []
            # Other cases, such as a small decoder, do not answer the question.
            answers = any(finding.compared or finding.figures for finding in findings[:1])
            found[key] = findings if answers else []
        yield pair, found.setdefault(key, verdict)


def _write_files(part: Part, rows: pd.DataFrame, runs: pd.DataFrame, folder: Path):
    for index, (title, (table, shown)) in enumerate(part.tables.items()):
        ending = re.sub(r"[^a-z0-9]+", "_", title.lower()) if index else "summary"
        name = folder / f"{part.name}_{ending}"
        name.with_suffix(".csv").write_text(csv_text(table), encoding="utf-8")
        name.with_suffix(".md").write_text(markdown_table(shown) + "\n", encoding="utf-8")
    tables = {"runs": runs[runs["experiment"] == part.name], "measurements": rows}
    text = json_text(tables, verdict=list(map(str, part.verdict)))
    (folder / f"{part.name}_profile.json").write_text(text, encoding="utf-8")


def csv_text(table: pd.DataFrame) -> str:
    """Return a table as CSV. Spreadsheets run none of the cells as a formula."""
    return table.map(_safe_cell).rename(columns=_safe_cell).to_csv(index=False)


def _safe_cell(value):
    """Return a cell with a quote before text that a spreadsheet would run as a formula."""
    if isinstance(value, list | tuple):
        value = ", ".join(map(str, value))
    if not isinstance(value, str):
        return value
    acts = value.startswith(tuple("=+-@\t\r"))
    return ("'" if acts else "") + printable(value)


def _markdown(parts: list[Part]) -> str:
    """Return the report as Markdown."""
    lines = ["# nanolib report"]
    for part in parts:
        lines.append(f"## {part.title}")
        lines.append("\n".join(f"- {markdown_text(str(finding))}" for finding in part.verdict))
        lines += [f"![{name}]({name}.png)" for name in part.charts]
        for title, (_, shown) in part.tables.items():
            lines += [f"### {title}", markdown_table(shown)]
    return "\n\n".join(filter(None, lines)) + "\n"


def _table(whole: pd.DataFrame, shown: pd.DataFrame) -> Table:
    """Return a table for people, without empty columns, that the lists of the page filter."""
    filled = ~shown.isin(["", "—"]).all()
    found = pd.DataFrame(links(whole), whole.index).rename(
        columns=lambda name: name.removeprefix("link_")
    )
    return Table(shown.loc[:, filled], found)


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
    own = [part.run for part in parts]
    pairs = sorted({pair for part in parts for pair in part.findings})
    lengths = sorted({int(n) for _, n in pairs if n})
    data = json.dumps(drawn, separators=(",", ":"))
    template = jinja2.Template(
        _PAGE.read_text(encoding="utf-8"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return template.render(
        parts=parts,
        specs=specs,
        shown=shown,
        drawn=drawn,
        count=len(rows),
        most_cases=SHOWN_CASES,
        total=len(runs),
        lists={
            "machine": (
                "Machine",
                "newest run of each question",
                {machine: f"{cpu}, {gpu} ({machine[:6]})" for machine, cpu, gpu in machines},
            ),
            "run": (
                "Run",
                "newest measurement of each case",
                {
                    run.run_id: f"{run.experiment}, {run.label or run.run_id[:8]}, "
                    f"{run.started[:16].replace('T', ' ')} UTC"
                    for run in runs[runs["run_id"].isin(own)][::-1].itertuples()
                },
            ),
            "model": ("Model", "all", {model: model for model, _ in pairs if model}),
            "n": ("Sequence length", "all", {n: f"{n:,}" for n in lengths}),
        },
        lines=Lines,
        table=_table,
        libraries=display.javascript().replace("</script", "<\\/script"),
        # Browsers act on `</script` and `<!--` even inside a string of a script.
        data=use_color_variables(data).replace("<", "\\u003c"),
        colors=variables(),
    )
