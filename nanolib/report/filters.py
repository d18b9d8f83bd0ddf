"""Add to a chart's data the sequence length by which the page filters, and the run."""

from __future__ import annotations

from typing import Any

import pandas as pd

# Column of a chart's data → where it comes from in rows, or in a table.
_SOURCES = {"link_run": ("run_id",), "link_n": ("factor.seq_len", "seq_len")}


def links(frame: pd.DataFrame, but: str = "") -> dict[str, Any]:
    """Return the columns `link_run` and `link_n`, as far as rows or a table have them, without the column `but`."""
    return {
        column: frame[source]
        for column, sources in _SOURCES.items()
        for source in sources
        if source in frame and column != but
    }


def link_columns(frame: pd.DataFrame) -> list[str]:
    """Return the names of the columns of `links` that a chart's data has."""
    return [name for name in _SOURCES if name in frame]


def followed(data: pd.DataFrame) -> pd.DataFrame:
    """Replace the columns of a chart's data by those of `links`."""
    known = [name for name in ("run_id", "name", "seq_len") if name in data]
    return data.assign(**links(data)).drop(columns=known)


def point_columns(table: pd.DataFrame, column: str, axis: str = "x") -> dict[str, Any]:
    """Return a column as the points of a chart, with its interval, and the columns of `links`."""
    ends = {end: table[f"{column}_{end}"] for end in ("low", "high")}
    return {axis: table[column]} | ends | links(table)
