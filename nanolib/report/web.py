"""The report as one self-contained web page: it opens by itself, asks nobody for anything, and escapes all that it shows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import mistune
import pandas as pd

from nanolib.report import hardware, overview, regressions, renderer
from nanolib.report.display import Lines, aligned
from nanolib.report.linking import links
from nanolib.report.section import Answer
from nanolib.report.theme import variables, with_variables
from nanolib.store import SHOWN_CASES

_METHOD = Path(__file__).parents[2] / "docs" / "method.md"
_PAGE = Path(__file__).parent / "page_files"


@dataclass(frozen=True)
class Facts:
    """What a report says of its runs as a whole.

    Attributes:
        count: How many measurements it shows.
        left_out: How many cases are not shown.
        lengths: Each sequence length that was measured, and how people write it.
        machines: Machine → what people call it, of those with a run.
        runs: A line per run.
        hardware: A line per machine.
        across: The same timings on several machines.
        failed: Cases that did not end well.
        flags: How many timings carry which label.
    """

    count: int
    left_out: int
    lengths: list[tuple[int, str]]
    machines: dict[str, str]
    runs: pd.DataFrame
    hardware: pd.DataFrame
    across: pd.DataFrame
    failed: pd.DataFrame
    flags: list[str]

    @classmethod
    def of(
        cls, rows: pd.DataFrame, runs: pd.DataFrame, machines: pd.DataFrame, left_out: int
    ) -> Facts:
        """Gather them from the rows and runs of any machines."""
        used = machines[machines["machine_id"].isin(runs["machine_id"])]
        named = {
            one: f"{cpu}, {gpus[0]['name'] if gpus else 'no GPU'} ({one[:6]})"
            for one, cpu, gpus in used[["machine_id", "cpu", "gpus"]].itertuples(index=False)
        }
        lengths = sorted({int(n) for n in rows.get("factor.seq_len", pd.Series()).dropna()})
        return cls(
            len(rows),
            left_out,
            [(n, f"{n:,}") for n in lengths],
            named,
            overview.run_facts(runs, machines),
            hardware.hardware_table(rows, machines),
            hardware.machine_ratios(rows),
            overview.failures(rows),
            overview.flag_lines(rows),
        )


@dataclass(frozen=True)
class PageChart:
    """One chart of the page.

    Attributes:
        name: Tells it apart.
        title: Above it, outside of the picture: as text of the page it wraps, and is read aloud.
        lines: Under the title.
        empty: Why there is nothing to draw; empty where there is.
        panels: Vega-Lite of each panel, as wide as the page lets it be.
        lengths: Of which sequence lengths the points of each panel are; empty where they know of none.
    """

    name: str
    title: str
    lines: list[str]
    empty: str
    panels: list[dict[str, Any]]
    lengths: list[list[int]]

    @classmethod
    def of(cls, name: str, spec: dict[str, Any]) -> PageChart:
        """Take a chart of `plot` apart, so that its panels go under each other where the page is narrow."""
        title, datasets = spec["title"], spec["datasets"]
        title = title if isinstance(title, dict) else {"text": title}
        lines = title.get("subtitle", [])
        whole = {key: value for key, value in spec.items() if key not in ("title", "datasets")}
        panels, lengths = [], []
        for part in spec.get("hconcat") or spec.get("vconcat") or [whole]:
            text = json.dumps(part)
            own = {one: values for one, values in datasets.items() if f'"{one}"' in text}
            fit = {"width": "container", "autosize": {"type": "fit-x", "contains": "padding"}}
            panels.append({**part, **fit, "config": spec["config"], "datasets": own})
            found = {row.get("link_n") for values in own.values() for row in values}
            lengths.append(sorted(int(n) for n in found if n is not None))
        empty = spec.get("usermeta", {}).get("empty", "")
        lines = [lines] if isinstance(lines, str) else lines
        return cls(name, title["text"], lines, empty, panels, lengths)


def _charts(answer: Answer, specs: dict[str, dict[str, Any]]) -> list[PageChart]:
    """The charts of an answer; those of the newest were drawn for the files already."""
    found = []
    for name, chart in answer.section.charts.items():
        spec = specs[name] if answer.newest else chart(answer.rows).to_dict(validate=False)
        named = name if answer.newest else f"{name}-{answer.machine_id[:6]}"
        found.append(PageChart.of(named, spec))
    return found


def _lengths(table: pd.DataFrame) -> list[str]:
    """The sequence length of each line; empty where it knows of none."""
    lengths = links(table).get("link_n", pd.Series(float("nan"), index=table.index))
    return ["" if pd.isna(n) else str(int(n)) for n in lengths]


def _filled(table: pd.DataFrame) -> pd.DataFrame:
    """The table without the columns that nothing fills."""
    return table.loc[:, [not set(table[name]) <= {"", "—"} for name in table]]


def as_script(data: Any) -> str:
    """JSON that may stand inside a script: no «<» at all, since `</script` and `<!--` mean something in any string."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def web_page(
    answers: list[Answer],
    changes: regressions.Changes,
    specs: dict[str, dict[str, Any]],
    facts: Facts,
) -> str:
    """Write the page.

    Args:
        answers: Of each question, by each machine.
        changes: Since the runs before, and over all runs.
        specs: Chart → its Vega-Lite, of the newest answers and of the changes.
        facts: About the runs.
    """
    loader = jinja2.FileSystemLoader(_PAGE)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined
    )
    drawn = [_charts(answer, specs) for answer in answers]
    changed = [PageChart.of(name, specs[name]) for name in changes.charts]
    charts = [chart for some in (*drawn, changed) for chart in some if not chart.empty]
    markdown = mistune.create_markdown(escape=True, plugins=["table"])
    return environment.get_template("page.html.jinja").render(
        answers=list(zip(answers, drawn, strict=True)),
        changes=changes,
        changed=changed,
        facts=facts,
        shown_cases=SHOWN_CASES,
        lines=Lines,
        columns=aligned,
        filled=_filled,
        lengths=_lengths,
        zip=zip,
        method=markdown(_METHOD.read_text(encoding="utf-8")) if _METHOD.is_file() else "",
        libraries=renderer.javascript().replace("</script", "<\\/script") if charts else "",
        specs=as_script(with_variables({chart.name: chart.panels for chart in charts})),
        style=variables() + (_PAGE / "style.css").read_text(encoding="utf-8"),
        script=(_PAGE / "script.js").read_text(encoding="utf-8"),
    )
