"""Show tables and findings in a notebook as HTML, and in a terminal as plain text."""

import re
from collections import defaultdict
from collections.abc import Iterable
from html import escape

import anywidget
import pandas as pd
import traitlets

from nanolib.report.finding import Finding
from nanolib.report.section import MOST_CHARTS, Section
from nanolib.report.theme import is_empty

__all__ = ["Lines", "Table", "Tables", "show"]


_EMPTY = "The table is empty."  # Such as the predictions of cases without a formula.


class Table:
    """Table whose cells do not wrap. Readers can scroll a table that is too wide.

    Args:
        frame: Table of text, for example from `tables.readable`.
        lengths: Sequence length of each line as text, or an empty text for no length. The report
            page filters lines by these lengths.

    Example:
        >>> Table(pd.DataFrame({"case": ["dense"], "ms": ["1.5"]}))  # A notebook shows HTML.
          case  ms
         dense 1.5
    """

    def __init__(self, frame: pd.DataFrame, lengths: Iterable[str] = ()) -> None:
        self.frame = frame
        self.lengths = [*lengths] or [""] * len(frame)

    def _repr_html_(self) -> str:
        if self.frame.empty:
            return f"<p>{_EMPTY}</p>"
        sides = [_side(self.frame[name].astype(str)) for name in self.frame]
        rows = [_row("th", sides, self.frame.columns)]
        for line, length in zip(self.frame.to_numpy(), self.lengths, strict=True):
            rows.append(_row("td", sides, line, f" data-n={length}" if length else ""))
        look = 'style="overflow-x: auto" tabindex="0" role="region" aria-label="Table"'
        return f"<div {look}><table>{''.join(rows)}</table></div>"

    def __repr__(self) -> str:
        return _EMPTY if self.frame.empty else self.frame.to_string(index=False)

    def folded(self, title: str, is_open: bool) -> str:
        """Return the HTML of a section that readers can fold, with the title and the table."""
        mark = " open" if is_open else ""
        return f"<details{mark}><summary>{escape(title)}</summary>{self._repr_html_()}</details>"


def _row(tag: str, sides: Iterable[str], line: Iterable[object], about: str = "") -> str:
    # Without this style, JupyterLab wraps cells, and widgets show cells without space between them.
    cells = (
        f'<{tag} style="text-align: {side}; white-space: nowrap; padding: 2px 8px">'
        f"{escape(str(value))}</{tag}>"
        for side, value in zip(sides, line, strict=True)
    )
    return f"<tr{about}>{''.join(cells)}</tr>"


_NUMBER = re.compile(r"[-+−]?[\d—]")


def _side(cells: Iterable[str]) -> str:
    """Return `right` as the alignment of a column if all cells are numbers, otherwise `left`."""
    return "right" if all(_NUMBER.match(cell) for cell in cells if cell) else "left"


class Lines:
    """List of findings, with a heading for each model or shape.

    Args:
        findings: Findings to list. The HTML contains their escaped texts.

    Example:
        >>> Lines([Finding("Dense is faster"), Finding("Not clear", "batch 2")])
        • Dense is faster.
        • Not clear: batch 2.
    """

    def __init__(self, findings: Iterable[Finding]) -> None:
        self.findings = list(findings)

    def _repr_html_(self) -> str:
        items: dict[str, str] = defaultdict(str)
        for finding in self.findings:
            answer = finding.text.rstrip(".")
            rest = finding.sentence.removeprefix(answer)
            items[finding.about] += f"<li><b>{escape(answer)}</b>{escape(rest)}</li>"
        return "".join(
            (f"<p><small>{escape(heading)}</small></p>" if heading else "") + f"<ul>{lines}</ul>"
            for heading, lines in items.items()
        )

    def __repr__(self) -> str:
        return "\n".join(f"• {finding}" for finding in self.findings)


class Tables:
    """Tables of a section. Only the main table is expanded.

    Args:
        section: Section of the report.
        rows: Measurements of any experiments on one machine.

    Example:
        >>> from nanolib.experiments.attention.view import SECTION
        >>> Tables(SECTION, run.measurements())  # doctest: +SKIP
    """

    def __init__(self, section: Section, rows: pd.DataFrame) -> None:
        self.tables = {
            title: Table(table.readable(rows)) for title, table in section.tables.items()
        }

    def _repr_html_(self) -> str:
        tables = enumerate(self.tables.items())
        return "".join(table.folded(title, at == 0) for at, (title, table) in tables)

    def __repr__(self) -> str:
        return "\n\n".join(f"{title}\n{table!r}" for title, table in self.tables.items())


def show(section: Section, rows: pd.DataFrame) -> None:
    """Show the heading, findings, charts and tables of a section in a notebook.

    Example:
        >>> from nanolib.experiments.attention.view import SECTION
        >>> show(SECTION, run.measurements())  # doctest: +SKIP
    """
    from IPython.display import Markdown, display

    charts = (draw(rows) for draw in [*section.charts.values()][:MOST_CHARTS])
    drawn = (chart for chart in charts if not is_empty(chart))
    display(Markdown(f"## {section.question}"), Lines(section.verdict(rows)), *drawn)
    display(Tables(section, rows))


class CommandLine(anywidget.AnyWidget):
    """Command with a button that copies the command. If copying fails, the text is selected.

    Attributes:
        text: Text of the command.
    """

    _esm = """
    export default { render({ model, el }) {
      const button = document.createElement("button"), code = document.createElement("code");
      button.className = "jupyter-button jupyter-widgets";
      button.style.cssText = "flex: none; width: auto; padding: 0 10px";
      code.style.cssText = "white-space: pre-wrap; overflow-wrap: anywhere";
      el.style.cssText = "display: flex; gap: 8px; align-items: center; margin: 4px 2px";
      const show = () => {
        code.textContent = model.get("text");
        button.textContent = "Copy as nano run …";
      };
      button.addEventListener("click", async () => {
        try {
          await navigator.clipboard.writeText(model.get("text"));
          button.textContent = "Copied";
        } catch {
          getSelection().selectAllChildren(code);
          button.textContent = "Selected: press Ctrl+C";
        }
      });
      model.on("change:text", show);
      show();
      el.append(button, code);
    } };
    """
    text = traitlets.Unicode().tag(sync=True)
