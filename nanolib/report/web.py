"""The report as one self-contained web page: it opens by itself, asks nobody for anything, and escapes all that it shows."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import mistune
import pandas as pd

from nanolib.report import linking, overview, regressions, renderer, tables
from nanolib.report.display import Table
from nanolib.report.section import Changes, Section
from nanolib.store import SHOWN_CASES

_METHOD = Path(__file__).parents[2] / "docs" / "method.md"

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.55 system-ui, sans-serif; color: #1b1b1b; max-width: 1080px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.25rem; margin: 2.6rem 0 .4rem; scroll-margin-top: 3.2rem; }
#picks { position: sticky; top: 0; background: #fff; padding: .5rem 0; z-index: 2; border-bottom: 1px solid #ddd; }
#picks label { margin-right: 1.4rem; font-size: 13px; color: #333; } #picks select { font-size: 13px; max-width: 22rem; }
nav a { margin-right: 1.2rem; } #short { padding: 0; list-style: none; } #short li { margin: .45rem 0; }
#short a { display: block; font-weight: 600; margin: 0; } a { color: #0072B2; }
.verdict { background: #f3f7fa; border-left: 4px solid #0072B2; padding: .7rem 1rem .7rem 2rem; margin: .6rem 0 1.2rem; }
.verdict li { margin: .15rem 0; }
.scroll { overflow-x: auto; } .chart { margin: 1.1rem 0; } .chart.vega-embed { display: block; }
table { border-collapse: collapse; font-size: 13px; white-space: nowrap; }
td, th { padding: .25rem .6rem; border-bottom: 1px solid #e4e4e4; text-align: right; font-variant-numeric: tabular-nums; }
td:first-child, th:first-child { text-align: left; } th { font-weight: 600; border-bottom: 2px solid #999; }
summary { cursor: pointer; margin: .4rem 0; } .small { color: #555; font-size: 13px; }
.said td, .said th { white-space: normal; text-align: left; } .said td:nth-child(even) { overflow-wrap: anywhere; }
#method { border-top: 1px solid #ccc; margin-top: 3rem; } #method td, #method th { text-align: left; white-space: normal; }
"""


_MORE = '<a href="#changes">What changed?</a><a href="#hardware">Which hardware?</a>'


# One list per thing that can be picked; a chart is told of what its data know.
_SCRIPT = """
const views = {}, chosen = {}, actions = {export: true, source: false, compiled: false, editor: false};
for (const [name, spec] of Object.entries(specs))
  vegaEmbed('#chart-' + name, spec, {mode: 'vega', renderer: 'svg', actions: actions}).then(result => {
    views[name] = result.view;
    document.body.dataset.drawn = Object.keys(views).length;
  });
const bar = document.getElementById('picks');
for (const [title, choice] of Object.entries(choices)) {
  const label = document.createElement('label'), select = document.createElement('select');
  label.textContent = title + ' ';
  for (const name of ['all', ...Object.keys(choice.options)]) select.add(new Option(name, name));
  select.onchange = () => {
    chosen[title] = select.selectedIndex ? choice.options[select.value] : null;
    tell(choice.pick);
  };
  label.append(select);
  bar.append(label);
}
function tell(pick) {
  const lists = Object.keys(choices).filter(title => choices[title].pick === pick && chosen[title]).map(title => chosen[title]);
  const kept = lists.length ? lists.reduce((a, b) => a.filter(value => b.includes(value))) : null;
  for (const view of Object.values(views)) {
    try { view.signal('pick_' + pick, kept); } catch { continue; }  // a chart whose data do not know it
    view.runAsync();
  }
}
"""


def _table(frame: pd.DataFrame) -> str:
    return Table(frame)._repr_html_()


def _short_name(chart: str, experiment: str) -> str:
    """`attention_speed_up` in the section on attention → `speed up`."""
    return chart.removeprefix(f"{experiment}_").replace("_", " ")


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
    body = ["<h1>nanolib report</h1>"]
    counted = f"{len(runs)} run{'s' * (len(runs) != 1)}, {len(rows):,} measurements"
    body.append(
        f'<p class="small">{counted}. Points: measured (95 % interval). Dashed: predicted. Red ✕: failed. '
        '<a href="#method">How the numbers are made</a>.</p>'
    )
    if left_out:
        body.append(
            f'<p class="small">The newest {SHOWN_CASES} cases of each notebook are shown, and {left_out:,} older ones are not: '
            "name a run or a label to see those.</p>"
        )
    said = {section.experiment: section.verdict(rows) for section in sections}
    short = (
        f'<li><a href="#{s.experiment}">{html.escape(s.question)}</a> {html.escape(said[s.experiment][0])}</li>'
        for s in sections
    )
    body.append(f'<nav><ul id="short">{"".join(short)}</ul>{_MORE}</nav>')
    picked = linking.choices(rows, runs, machines)
    if picked:
        body.append('<div id="picks" role="group" aria-label="What every chart shows"></div>')
    if not sections:
        body.append("<p>There is nothing to show yet. Run: <code>nano run quick</code></p>")
    for section in sections:
        body.append(f'<h2 id="{section.experiment}">{html.escape(section.question)}</h2>')
        lines = "".join(f"<li>{html.escape(line)}</li>" for line in said[section.experiment])
        body.append(f'<ul class="verdict">{lines}</ul>')
        main, *others = (f'<div class="chart scroll" id="chart-{name}"></div>' for name in section.charts)
        body.append(main)
        if others:
            names = ", ".join(_short_name(name, section.experiment) for name in list(section.charts)[1:])
            body.append(f"<details><summary>More charts: {names}</summary>{''.join(others)}</details>")
        table = tables.readable(section.table(rows), section.columns)
        body.append(f"<details open><summary>All cases</summary>{_table(table)}</details>")
    lines = "".join(f"<li>{html.escape(line)}</li>" for line in changes.verdict)
    body.append(f'<h2 id="changes">What changed?</h2><ul class="verdict">{lines}</ul>')
    body += [f'<div class="chart scroll" id="chart-{name}"></div>' for name in changes.charts]
    if len(changes.table):
        body.append(f"<details><summary>Changed and inconclusive cases</summary>{_table(changes.table)}</details>")
    body.append(f'<h2 id="hardware">Which hardware?</h2>{_table(regressions.hardware_table(rows, machines))}')
    across = regressions.machine_ratios(rows)
    if len(across):
        body.append(
            f"<details open><summary>Latency per machine (ms): a comparison, no gate</summary>{_table(across)}</details>"
        )
    failed, flagged = overview.failures(rows), overview.flag_lines(rows)
    if len(failed):
        body.append(f'<h2 id="failed">What failed</h2><div class="said">{_table(failed)}</div>')
    if flagged:
        items = "".join(f"<li>{html.escape(line)}</li>" for line in flagged)
        body.append(f"<h2>What to know before believing a number</h2><ul>{items}</ul>")
    body.append(f"<h2>Runs and machines</h2>{_table(overview.run_facts(runs, machines))}")
    if _METHOD.is_file():
        text = mistune.create_markdown(escape=True, plugins=["table"])(_METHOD.read_text(encoding="utf-8"))
        body.append(f'<section id="method">{text}</section>')
    script = ""
    if drawn:
        libraries = renderer.javascript().replace("</script", "<\\/script")
        data = f"const specs = {linking.as_script(drawn)}, choices = {linking.as_script(picked)};"
        script = f"<script>{libraries}</script><script>{data}\n{_SCRIPT}</script>"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>nanolib report</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body>{''.join(body)}{script}</body></html>"
    )
