"""What tables have in common: lines of cases, columns of their metrics, and how numbers are shown to people."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from nanolib.measurement import Flag
from nanolib.numbers import format_number, format_with_interval
from nanolib.report.overview import pick


@dataclass(frozen=True)
class Column:
    """One column of a table of cases, declared once: where it comes from and how people see it.

    Attributes:
        name: In the table.
        title: For people; empty for one that only other columns and sentences use.
        metric: What its numbers are of; empty for a factor, or for what is computed of other columns.
        scope: Of what; None takes any.
        method: How; None takes any.
        interval: Whether `_low`, `_high`, `_predicted` and `_busy` (other processes ran) are next to it.
        detail: What of the measurement's details it shows; empty for the estimate.
    """

    name: str
    title: str = ""
    metric: str = ""
    scope: str | None = None
    method: str | None = None
    interval: bool = False
    detail: str = ""

    def of(self, found: pd.DataFrame) -> dict[str, Any]:
        """Its columns in the table, of the measurements that it shows."""
        if self.detail:
            return {self.name: [details.get(self.detail) for details in found["details"]]}
        if not self.interval:
            return {self.name: found["estimate"]}
        sources = {"_low": "low", "_high": "high", "_predicted": "predicted"}
        busy = [Flag.BUSY_MACHINE in flags for flags in found["flags"]]
        ends = {self.name + end: found.get(name) for end, name in sources.items()}
        return {self.name: found["estimate"], **ends, f"{self.name}_busy": busy}


# columns of names that charts and sentences write as words
_IN_WORDS = ("algorithm", "direction", "phase", "mode", "recipe")


def titles(columns: Iterable[Column]) -> dict[str, str]:
    """Name → title of those that people see, in order."""
    return {column.name: column.title for column in columns if column.title}


def readable(table: pd.DataFrame, names: Mapping[str, str]) -> pd.DataFrame:
    """A table for people: the columns of `names` under their titles, numbers in few digits, intervals in brackets.

    Args:
        table: From this module.
        names: Column → title; a column with `_low` and `_high` siblings gets its interval.
    """
    unknown = [None] * len(table)
    result = pd.DataFrame(index=table.index)
    for column, title in names.items():
        if column not in table:
            continue
        values = table[column]
        if column in _IN_WORDS:
            values = values.replace("forward_backward", "forward + backward")
            values = values.replace("_", " ", regex=True)
        ends = (table.get(f"{column}_{end}", unknown) for end in ("low", "high"))
        result[title] = [_cell(*cell) for cell in zip(values, *ends, strict=True)]
    return result


def compact(
    table: pd.DataFrame, width: int = 120, notes: dict[str, str] | None = None
) -> tuple[str, pd.DataFrame]:
    """A table of findings for a terminal: what all cases share is said once, empty columns go, long names are cut.

    Args:
        table: With the columns `experiment` and `case`.
        width: Characters of a line.
        notes: Note → its number, to be said below: they take a note's place where the table is too wide otherwise.

    Returns:
        What the cases share, and the table.
    """
    names = [name.split() for name in table["case"]]
    shared = [word for word in names[0] if all(word in name for name in names)]
    table = table.assign(
        case=[" ".join(word for word in name if word not in shared) for name in names]
    )
    if table["experiment"].nunique() == 1:
        shared = [table["experiment"].iloc[0], *shared]
        table = table.drop(columns="experiment")
    table = table.loc[:, table.astype(bool).any()]
    if _width(table) > width:
        table = table.drop(columns="p", errors="ignore")  # the interval says as much
        if "note" in table and notes is not None:
            numbers = [text and notes.setdefault(text, str(len(notes) + 1)) for text in table.note]
            table = table.assign(note=numbers)
    if "case" in table:
        most = max(16, table["case"].map(len).max() - max(0, _width(table) - width))
        cut = [_shortened(name, most) for name in table["case"]]
        if len(set(cut)) == table["case"].nunique():
            table = table.assign(case=cut)
    return " ".join(shared), table


def _width(table: pd.DataFrame) -> int:
    return sum(max(len(name), *map(len, table[name].astype(str))) + 1 for name in table) - 1


def _shortened(text: str, most: int) -> str:
    """A text without its middle: names of cases differ at their ends too."""
    return (
        text if len(text) <= most else f"{text[: most // 2]}…{text[len(text) - (most - 1) // 2 :]}"
    )


def _cell(value: Any, low: float | None, high: float | None) -> str:
    if isinstance(value, list):
        return ", ".join(value)
    if value is None or isinstance(value, bool | str):
        return str(value or "")
    if pd.isna(value):
        return "—"
    if low == value == high:
        return format_number(value)
    return format_with_interval(float(value), low, high)


CASE = ("run_id", "case_id")  # tells cases apart


def case_rows(rows: pd.DataFrame, factors: Sequence[str], required: str) -> pd.DataFrame:
    """One line per case that has the factor `required`: ids, factors, status, message.

    A case that others stored without its ending was measured.
    """
    columns = [*CASE, *(f"factor.{name}" for name in factors)]
    rows = (
        rows[rows[f"factor.{required}"].notna()] if f"factor.{required}" in rows else rows.iloc[:0]
    )
    if rows.empty:
        return pd.DataFrame(columns=[*CASE, *factors, "status", "message"])
    table = rows.drop_duplicates(CASE).reindex(columns=columns)
    ends = rows[rows["metric"] == "case_duration"].drop_duplicates(CASE, keep="last")
    table = table.merge(ends[[*CASE, "status", "message"]], on=list(CASE), how="left")
    table = table.fillna({"status": "ok", "message": ""})
    return table.rename(columns=lambda name: name.removeprefix("factor."))


def add_metric_columns(
    table: pd.DataFrame, rows: pd.DataFrame, columns: Iterable[Column], key: Sequence[str] = CASE
) -> pd.DataFrame:
    """The table with its columns of metrics; empty where a line has none.

    Args:
        table: Its lines, told apart by `key`; one without these has no line.
        rows: Measurements, with the same key.
        columns: Those without a metric are left as they are.
        key: Columns of both.
    """
    for column in columns if set(key) <= set(table.columns) else ():
        if column.metric:
            known = (
                rows.assign(estimate=0.0) if column.detail else rows
            )  # one without a number may tell why
            found = pick(known, column.metric, column.scope, column.method).drop_duplicates(
                list(key)
            )
            table = table.merge(found[[*key]].assign(**column.of(found)), on=list(key), how="left")
    return table


def ratios(name: str, table: pd.DataFrame, above: str, below: str) -> dict[str, pd.Series]:
    """The column `above` over the column `below`, with the widest interval that both allow; what drifts between them is in it."""
    ends = (("", "", ""), ("_low", "_low", "_high"), ("_high", "_high", "_low"))
    both = {
        f"{name}{end}": table[f"{above}{up}"] / table[f"{below}{down}"] for end, up, down in ends
    }
    busy = [table[f"{one}_busy"].eq(True) for one in (above, below) if f"{one}_busy" in table]
    return both | ({f"{name}_busy": functools.reduce(operator.or_, busy)} if busy else {})


def drop_missing(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """The lines that have something in a column; none where there is no such column."""
    return table[table[column].notna()] if column in table else table.iloc[:0]


def flagged(table: pd.DataFrame, rows: pd.DataFrame, key: Sequence[str] = CASE) -> pd.DataFrame:
    """The table with the column `flags`: each flag of the rows of a line once. `key` is that of `add_metric_columns`."""
    flags = rows.groupby(list(key), sort=False)["flags"].agg(
        lambda some: sorted(set().union(*some))
    )
    return table.merge(flags.reset_index(), on=list(key), how="left")


_STATES = {
    Flag.NO_STEADY_STATE: "not settled",
    Flag.BUSY_MACHINE: "busy machine",
    Flag.THROTTLED: "throttled",
    Flag.OVERSUBSCRIBED: "more ranks than cores",
    Flag.LOW_SAMPLE_COUNT: "few blocks",
    Flag.SEQUENTIAL: "timed alone",
    Flag.MASK_IS_DENSE: "removes nothing",
}


def with_state(table: pd.DataFrame) -> pd.DataFrame:
    """The table with `state`: why a line has no number, or what makes its numbers less sure, or `ok`."""
    flags = table["flags"] if "flags" in table else [()] * len(table)
    found = []
    for status, message, own in zip(
        table["status"], table["message"].fillna(""), flags, strict=True
    ):
        doubts = [words for flag, words in _STATES.items() if isinstance(own, list) and flag in own]
        failed = f"{status}: {message}" if message else str(status)
        found.append(", ".join(doubts) or "ok" if status == "ok" else failed)
    return table.assign(state=found)


def worst(statuses: pd.Series) -> str:
    """The first status that is not `ok`, or `ok`."""
    return next(iter(statuses[statuses != "ok"]), "ok")


def joined(messages: pd.Series) -> str:
    """Each message once, on one line."""
    return "; ".join(dict.fromkeys(message for message in messages if message))


def with_ends(row: pd.Series, column: str, unit: str = "") -> str:
    """A figure of a table's line with its unit and its interval: `4.06× [3.98 … 4.10]`."""
    figure = format_with_interval(*(row[f"{column}{end}"] for end in ("", "_low", "_high")))
    number, space, ends = figure.partition(" ")
    return f"{number}{unit}{space}{ends}"


def in_ms(row: pd.Series, column: str) -> str:
    """A time of a table's line with its interval."""
    return with_ends(row, column, " ms")


def times(row: pd.Series, column: str) -> str:
    """A ratio of a table's line with its interval."""
    return with_ends(row, column, "×")


def percent(row: pd.Series, column: str, most: float = 1.0) -> str:
    """A share of a table's line with its interval, none of it above `most`: what seems to exceed the whole is the whole."""
    share, low, high = (min(row[f"{column}{end}"], most) for end in ("", "_low", "_high"))
    return (
        f"{share:.0%}" if pd.isna(low) or pd.isna(high) else f"{share:.0%} [{low:.0%} … {high:.0%}]"
    )


def short_names(
    rows: pd.DataFrame, name: str = "factor.name", optimization: str = "factor.optimization"
) -> tuple[pd.DataFrame, str]:
    """Where one model was measured with several optimizations, they are what tells its rows apart.

    Returns:
        The rows, named by their optimization alone in that case; and the name that they share, empty in others.
    """
    if optimization not in rows or rows[optimization].nunique() < 2:
        return rows, ""
    used = rows[optimization].str.replace("_", " ")
    shared = {
        full.removesuffix(f" ({which})") for full, which in zip(rows[name], used, strict=True)
    }
    return (rows.assign(**{name: used}), f": {shared.pop()}") if len(shared) == 1 else (rows, "")
