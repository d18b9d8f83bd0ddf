"""What tables have in common: lines of cases, columns of their metrics, and how numbers are shown to people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from nanolib.measurement import format_number, format_with_interval


def readable(table: pd.DataFrame, names: Mapping[str, str]) -> pd.DataFrame:
    """A table for people: the columns of `names` under their titles, numbers in few digits, intervals in brackets.

    Args:
        table: From this module.
        names: Column → title; a column with `_low` and `_high` siblings gets its interval.
    """
    result = pd.DataFrame(index=table.index)
    for column, title in names.items():
        if column not in table:
            continue
        low, high = (table.get(f"{column}_{end}") for end in ("low", "high"))
        if low is None or high is None:
            result[title] = [_cell(value) for value in table[column]]
        else:
            result[title] = [_cell(*values) for values in zip(table[column], low, high, strict=True)]
    return result


def _cell(value: Any, low: float | None = None, high: float | None = None) -> str:
    if isinstance(value, list):
        return ", ".join(value)
    if isinstance(value, bool | str) or value is None:
        return "" if value is None else str(value)
    if pd.isna(value):
        return "—"
    return format_with_interval(float(value), low, high)


def with_interval(name: str) -> dict[str, str]:
    """Columns of a metric → those that a table has of it: estimate, ends and prediction."""
    return {"estimate": name, "low": f"{name}_low", "high": f"{name}_high", "predicted": f"{name}_predicted"}


def base(rows: pd.DataFrame, factors: list[str], required: str) -> pd.DataFrame:
    """One line per case that has the factor `required`: ids, factors, status, message."""
    if f"factor.{required}" not in rows:
        return pd.DataFrame()
    ends = rows[(rows["metric"] == "case_time") & rows[f"factor.{required}"].notna()]
    columns = ["run_id", "case_id", *(f"factor.{name}" for name in factors), "status", "message"]
    return ends[columns].rename(columns=lambda name: name.removeprefix("factor.")).reset_index(drop=True)


def join(table: pd.DataFrame, rows: pd.DataFrame, columns: dict[str, str]) -> pd.DataFrame:
    """The table with columns of a metric's rows, under new names; empty where a case has none."""
    key = ["run_id", "case_id"]
    found = rows.drop_duplicates(key)[[*key, *columns]].rename(columns=columns)
    return table.merge(found, on=key, how="left")


def all_flags(flags: Iterable[list[str]]) -> list[str]:
    """Each flag once."""
    return sorted({flag for some in flags for flag in some})


def worst(statuses: pd.Series) -> str:
    """The first status that is not `ok`, or `ok`."""
    bad = [status for status in statuses if status != "ok"]
    return bad[0] if bad else "ok"


def joined(messages: pd.Series) -> str:
    """Each message once, on one line."""
    return "; ".join(dict.fromkeys(message for message in messages if message))


def in_ms(row: pd.Series, column: str) -> str:
    """A time of a table's line with its interval."""
    low, high = row[f"{column}_low"], row[f"{column}_high"]
    if pd.isna(low) or pd.isna(high):
        return f"{format_number(row[column])} ms"
    ends = f"{format_number(low, low, high)} … {format_number(high, low, high)}"
    return f"{format_number(row[column], low, high)} ms [{ends}]"
