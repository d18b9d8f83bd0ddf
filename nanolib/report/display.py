"""Tables and verdicts as a notebook shows them: HTML or Markdown where it is rendered, plain text elsewhere."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

import pandas as pd

from nanolib.report.claim import Claim, grouped
from nanolib.report.section import Section
from nanolib.report.theme import is_empty

__all__ = ["Lines", "Table", "Tables", "show"]


class Table:
    """A table whose cells do not wrap; wide ones scroll.

    Args:
        frame: From `tables.readable`, or any frame of text.

    Example:
        >>> Table(pd.DataFrame({"case": ["dense"], "ms": ["1.5"]}))  # in a notebook it is drawn
          case  ms
         dense 1.5
    """

    def __init__(self, frame: pd.DataFrame) -> None:
        self.frame = frame

    def _repr_html_(self) -> str:
        if self.frame.empty:
            return "<p>Nothing was measured.</p>"
        sides = ["left" if words else "right" for _, words in aligned(self.frame)]
        lines = [
            ("th", self.frame.columns),
            *(("td", line) for line in self.frame.itertuples(index=False, name=None)),
        ]
        rows = "".join(
            f"<tr>{''.join(_cell(tag, side, value) for side, value in zip(sides, line, strict=True))}</tr>"
            for tag, line in lines
        )
        return f'<div style="overflow-x: auto"><table>{rows}</table></div>'

    def __repr__(self) -> str:
        return "Nothing was measured." if self.frame.empty else self.frame.to_string(index=False)


def _cell(tag: str, side: str, value: object) -> str:
    # In JupyterLab each cell would wrap, whatever is around it, and in a widget touch the next.
    return f'<{tag} style="text-align: {side}; white-space: nowrap; padding: 2px 8px">{html.escape(str(value))}</{tag}>'


_NUMBER = re.compile(r"[-+−]?[\d—]")


def aligned(frame: pd.DataFrame) -> list[tuple[str, bool]]:
    """Tell the title of each column, and whether it holds words.

    Words stand to the left, numbers to the right.

    Example:
        >>> aligned(pd.DataFrame({"case": ["dense"], "ms": ["1.5"]}))
        [('case', True), ('ms', False)]
    """
    return [
        (str(title), not all(_NUMBER.match(str(cell)) for cell in frame.iloc[:, at] if str(cell)))
        for at, title in enumerate(frame)
    ]


class Lines:
    """A verdict as a list.

    It says once what it is about, then each answer, how sure it is, and what to try next.

    Args:
        lines: Claims, or sentences; what they hold is shown as text.

    Example:
        >>> Lines(["dense is faster", "undecided: batch 2"])
        • dense is faster.
        • undecided: batch 2.
    """

    def __init__(self, lines: Iterable[Claim | str]) -> None:
        self.groups = grouped(lines)

    def _repr_html_(self) -> str:
        parts = []
        for heading, claims in self.groups:
            items = "".join(f"<li>{_claim_html(claim)}</li>" for claim in claims)
            parts += [f"<p><small>{html.escape(heading)}</small></p>"] if heading else []
            parts.append(f"<ul>{items}</ul>")
        return "".join(parts)

    def __repr__(self) -> str:
        lines = []
        for heading, claims in self.groups:
            if heading and len(claims) == 1:
                lines.append(f"• {claims[0]}")
                continue
            lines += [f"• {heading}:"] if heading else []
            lines += [f"{'  – ' if heading else '• '}{claim.sentence}" for claim in claims]
        return "\n".join(lines)


class Tables:
    """All tables of a question that have a line, the first one open.

    Args:
        section: The question.
        rows: Measurements of any experiments, of one machine.

    Example:
        >>> from nanolib.experiments.attention.view import SECTION
        >>> Tables(SECTION, run.measurements())  # doctest: +SKIP
    """

    def __init__(self, section: Section, rows: pd.DataFrame) -> None:
        self.tables = {
            title: Table(table.readable(rows)) for title, table in section.shown(rows).items()
        }

    def _repr_html_(self) -> str:
        return "".join(
            f"<details{' open' if at == 0 else ''}><summary>{html.escape(title)} · {len(table.frame)} rows</summary>"
            f"{table._repr_html_()}</details>"
            for at, (title, table) in enumerate(self.tables.items())
        )

    def __repr__(self) -> str:
        return "\n\n".join(f"{title}\n{table!r}" for title, table in self.tables.items())


def show(section: Section, rows: pd.DataFrame) -> None:
    """Show a question in a notebook: its heading, what the rows say, its charts and its tables.

    Example:
        >>> from nanolib.experiments.attention.view import SECTION
        >>> show(SECTION, run.measurements())  # doctest: +SKIP
    """
    from IPython.display import Markdown, display

    display(Markdown(f"## {section.question}"), Lines(section.verdict(rows)))
    display(*(chart for draw in section.charts.values() if not is_empty(chart := draw(rows))))
    display(Tables(section, rows))


def _claim_html(claim: Claim) -> str:
    answer, sure, advice = (
        html.escape(part.rstrip(".")) for part in (claim.answer, claim.sure, claim.advice)
    )
    text = f"<b>{answer}</b>" + (f": {sure}." if sure else ".")
    return text + (f" <i>Next: {advice}{'' if advice.endswith('?') else '.'}</i>" if advice else "")
