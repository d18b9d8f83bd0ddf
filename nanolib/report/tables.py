"""Build tables: a line per case, a column per metric, and numbers as people read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from nanolib.measurement import Flag
from nanolib.numbers import format_with_interval
from nanolib.report.overview import drop_missing, pick


@dataclass(frozen=True)
class Column:
    """One column of a table of cases: its measurements, and its title.

    Attributes:
        name: Its name in the table.
        title: Its title for people; empty if only other columns and sentences use it.
        metric: Key of `METRICS`; empty for a factor, or for a column that is computed from others.
        scope: The scope of the measurements; None means any.
        method: Their method; None means any.
        interval: Whether the table also has `_low`, `_high`, `_predicted` and `_busy` (other processes used the machine).
        detail: Key of the measurements' details that it shows; empty for the estimate.
    """

    name: str
    title: str = ""
    metric: str = ""
    scope: str | None = None
    method: str | None = None
    interval: bool = False
    detail: str = ""

    def of(self, found: pd.DataFrame) -> dict[str, Any]:
        """Return its columns in the table from the measurements that it shows."""
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
    """Return name → title of the columns that people see, in order."""
    return {column.name: column.title for column in columns if column.title}


def readable(table: pd.DataFrame, names: Mapping[str, str]) -> pd.DataFrame:
    """Write a table for people: columns under their titles, numbers in few digits, intervals in brackets.

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
    """Fit a table of findings into a terminal: drop empty columns and what all cases share, shorten long names.

    Args:
        table: With the columns `experiment` and `case`.
        width: Characters of a line.
        notes: Note → its number, which replaces the note in a table that is too wide. The caller prints them below.

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
    if _width(table) > width and "note" in table and notes is not None:
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
    """Cut the middle out of a text, because names of cases differ at their ends too."""
    end = len(text) - (most - 1) // 2
    return text if len(text) <= most else f"{text[: most // 2]}…{text[end:]}"


def _cell(value: Any, low: float | None, high: float | None) -> str:
    if isinstance(value, list):
        return ", ".join(value)
    if value is None or isinstance(value, bool | str):
        return str(value or "")
    if pd.isna(value):
        return "—"
    return format_with_interval(float(value), low, high)


CASE = ("run_id", "case_id")  # the key of a case


def case_rows(rows: pd.DataFrame, factors: Sequence[str], required: str) -> pd.DataFrame:
    """Return one line per case that has the factor `required`: ids, factors, status, message.

    A case that others stored without its ending was measured.
    """
    rows = drop_missing(rows, f"factor.{required}")
    if rows.empty:
        return pd.DataFrame(columns=[*CASE, *factors, "status", "message"])
    columns = [*CASE, *(f"factor.{name}" for name in factors)]
    table = rows.drop_duplicates(CASE).reindex(columns=columns)
    ends = rows[rows["metric"] == "case_duration"].drop_duplicates(CASE, keep="last")
    table = table.merge(ends[[*CASE, "status", "message"]], on=list(CASE), how="left")
    table = table.fillna({"status": "ok", "message": ""})
    return table.rename(columns=lambda name: name.removeprefix("factor."))


def add_metric_columns(
    table: pd.DataFrame, rows: pd.DataFrame, columns: Iterable[Column], key: Sequence[str] = CASE
) -> pd.DataFrame:
    """Add the columns of metrics to a table; empty if a line has none.

    Args:
        table: Its lines, each with a `key` of its own. A table without these columns has no line.
        rows: Measurements, with the same key.
        columns: Those without a metric are left as they are.
        key: Columns of both.
    """
    key = list(key)
    for column in columns if set(key) <= set(table.columns) else ():
        if column.metric:
            # a measurement without a number may have the detail that says why
            numbers = rows.assign(estimate=0.0) if column.detail else rows
            found = pick(numbers, column.metric, column.scope, column.method).drop_duplicates(key)
            table = table.merge(found[key].assign(**column.of(found)), on=key, how="left")
    return table


def ratios(name: str, table: pd.DataFrame, above: str, below: str) -> dict[str, pd.Series]:
    """Divide the column `above` by the column `below`, with the widest interval that both allow.

    The interval includes what drifts between the two.
    """
    ends = (("", "", ""), ("_low", "_low", "_high"), ("_high", "_high", "_low"))
    found = {
        f"{name}{end}": table[f"{above}{up}"] / table[f"{below}{down}"] for end, up, down in ends
    }
    busy = table.reindex(columns=[f"{above}_busy", f"{below}_busy"])
    return found | {f"{name}_busy": busy.eq(True).any(axis=1)}


def flagged(table: pd.DataFrame, rows: pd.DataFrame, key: Sequence[str] = CASE) -> pd.DataFrame:
    """Add the column `flags`, each flag of the rows of a line once. `key` is that of `add_metric_columns`."""
    key = list(key)
    flags = rows.groupby(key, sort=False)["flags"].agg(lambda some: sorted(set().union(*some)))
    return table.merge(flags.reset_index(), on=key, how="left")


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
    """Add the column `state`: why a line has no number, or what makes its numbers less reliable, or `ok`."""
    flags = table["flags"] if "flags" in table else [()] * len(table)
    found = []
    for status, message, own in zip(
        table["status"], table["message"].fillna(""), flags, strict=True
    ):
        doubts = [words for flag, words in _STATES.items() if flag in own]
        failed = f"{status}: {message}" if message else str(status)
        found.append(", ".join(doubts) or "ok" if status == "ok" else failed)
    return table.assign(state=found)


def worst(statuses: pd.Series) -> str:
    """Return the first status that is not `ok`, or `ok`."""
    return next(iter(statuses[statuses != "ok"]), "ok")


def joined(messages: pd.Series) -> str:
    """Join the messages on one line, each once."""
    return "; ".join(dict.fromkeys(message for message in messages if message))


def with_ends(row: pd.Series, column: str, unit: str = "") -> str:
    """Format a number of a table's line with its unit and its interval: `4.06× [3.98 … 4.10]`."""
    figure = format_with_interval(*(row[f"{column}{end}"] for end in ("", "_low", "_high")))
    number, space, ends = figure.partition(" ")
    return f"{number}{unit}{space}{ends}"


def in_ms(row: pd.Series, column: str) -> str:
    """Format a time of a table's line with its interval."""
    return with_ends(row, column, " ms")


def times(row: pd.Series, column: str) -> str:
    """Format a ratio of a table's line with its interval."""
    return with_ends(row, column, "×")


def percent(row: pd.Series, column: str, most: float = 1.0) -> str:
    """Format a share of a table's line with its interval. A share above `most` is `most`, since it cannot exceed the whole."""
    share, low, high = (min(row[f"{column}{end}"], most) for end in ("", "_low", "_high"))
    ends = "" if pd.isna(low) or pd.isna(high) else f" [{low:.0%} … {high:.0%}]"
    return f"{share:.0%}{ends}"


def short_names(rows: pd.DataFrame, prefix: str = "factor.") -> tuple[pd.DataFrame, str]:
    """Name rows by their optimization if they are of one model with several optimizations.

    Args:
        rows: Measurements or lines of a table.
        prefix: Of the columns `name` and `optimization`.

    Returns:
        The rows, and the name that they share; the rows as they are and an empty name in other cases.
    """
    name, optimization = f"{prefix}name", f"{prefix}optimization"
    if optimization not in rows or rows[optimization].nunique() < 2:
        return rows, ""
    used = rows[optimization].str.replace("_", " ")
    names = zip(rows[name], used, strict=True)
    models = {full.removesuffix(f" ({which})") for full, which in names}
    return (rows.assign(**{name: used}), f": {models.pop()}") if len(models) == 1 else (rows, "")
