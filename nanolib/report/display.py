"""Tables and verdicts as a notebook shows them: HTML or Markdown where it is rendered, plain text elsewhere."""

from __future__ import annotations

import html
from collections.abc import Iterable

import pandas as pd


class Table:
    """A table whose cells do not wrap; wide ones scroll.

    Args:
        frame: From `tables.readable`, or any frame of text.
    """

    def __init__(self, frame: pd.DataFrame) -> None:
        self.frame = frame

    def _repr_html_(self) -> str:
        if self.frame.empty:
            return "<p>Nothing was measured.</p>"
        table = self.frame.to_html(index=False, border=0, escape=True)
        return f'<div style="overflow-x: auto; white-space: nowrap">{table}</div>'

    def __repr__(self) -> str:
        return "Nothing was measured." if self.frame.empty else self.frame.to_string(index=False)


class Lines:
    """Sentences as a list.

    Args:
        lines: The sentences; what they hold is shown as text.
    """

    def __init__(self, lines: Iterable[str]) -> None:
        self.lines = list(lines)

    def _repr_html_(self) -> str:
        return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in self.lines) + "</ul>" if self.lines else ""

    def __repr__(self) -> str:
        return "\n".join(f"• {line}" for line in self.lines)
