"""Build tables with a line per case and a column per metric, and format them for people.

Tables become text with few digits, CSV or Markdown.
"""

import html
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from nanolib.measurement import OVER, Flag, printable
from nanolib.numbers import format_with_interval
from nanolib.report.section import Estimate, Pairs, comparing


@dataclass(frozen=True)
class Column:
    """Column of a table of cases.

    A column with a metric has further columns for the interval, the prediction and interference.
    The names of these columns end with `_low`, `_high`, `_predicted` and `_busy`. `_busy` is true
    if other processes used the machine.

    Attributes:
        name: Name of the column.
        title: Title of the column for people, or empty if people do not see the column.
        metric: Key of `METRICS`, or empty for a factor or a computed column.
        scope: Scope of the measurements, or None for any scope.
        method: Method of the measurements, or None for any method.
        detail: Key of the details to show, or empty for the estimate.
    """

    name: str
    title: str = ""
    metric: str = ""
    scope: str | None = None
    method: str | None = None
    detail: str = ""

    def of(self, found: pd.DataFrame) -> dict[str, Any]:
        """Return the new columns. `found` has at most one measurement per line of the table."""
        if self.detail:
            return {self.name: [details.get(self.detail) for details in found["details"]]}
        return {
            self.name: found["estimate"],
            f"{self.name}_low": found["low"],
            f"{self.name}_high": found["high"],
            f"{self.name}_predicted": found["predicted"],
            f"{self.name}_busy": [Flag.BUSY_MACHINE in flags for flags in found["flags"]],
        }


# Tables for people show the values of these columns with spaces instead of underscores.
_IN_WORDS = ("algorithm", "direction", "phase", "mode", "recipe")
_WORDS = {"forward_backward": "forward + backward", "_": " "}


def titles(columns: Iterable[Column]) -> dict[str, str]:
    """Return a dict from column name to title, for the columns that have a title."""
    return {column.name: column.title for column in columns if column.title}


def readable(table: pd.DataFrame, names: Mapping[str, str]) -> pd.DataFrame:
    """Format a table for people, with titles, few digits, and intervals in brackets.

    Args:
        table: Table of cases. Columns that end with `_low` and `_high` contain intervals.
        names: Title of each column.
    """
    unknown = [None] * len(table)
    result = pd.DataFrame(index=table.index)
    for column, title in names.items():
        if column not in table:
            continue
        values = table[column]
        if column in _IN_WORDS:
            values = values.replace(_WORDS, regex=True)
        ends = (table.get(f"{column}_{end}", unknown) for end in ("low", "high"))
        result[title] = [_cell(*cell) for cell in zip(values, *ends, strict=True)]
    return result


def _cell(value, low: float | None, high: float | None) -> str:
    if isinstance(value, str):
        return value
    if pd.isna(value):
        return "—"
    return format_with_interval(float(value), low, high)


def pick(
    rows: pd.DataFrame, metric: str, scope: str | None = None, method: str | None = None
) -> pd.DataFrame:
    """Return the rows with a number for a metric. Filter by scope and method if they are given."""
    mask = (rows["metric"] == metric) & rows["estimate"].notna()
    if scope is not None:
        mask &= rows["scope"] == scope
    if method is not None:
        mask &= rows["method"] == method
    return rows[mask]


CASE = ["run_id", "case_id"]  # Columns that identify a case.


def case_rows(rows: pd.DataFrame, factors: Sequence[str]) -> pd.DataFrame:
    """Return a line per case: IDs, factors, status and message.

    The status of a case without a stored `case_duration` is `ok`.
    """
    table = rows.drop_duplicates(CASE).reindex(
        columns=[*CASE, *(f"factor.{name}" for name in factors)]
    )
    ends = rows.loc[rows["metric"] == "case_duration", [*CASE, "status", "message"]]
    table = table.merge(ends, on=CASE, how="left")
    table = table.fillna({"status": "ok", "message": ""})
    return table.rename(columns=lambda name: name.removeprefix("factor."))


def case_table(
    rows: pd.DataFrame, factors: Sequence[str], columns: Iterable[Column]
) -> pd.DataFrame:
    """Return a line per case with its factors, measurements, flags and state.

    Args:
        rows: Measurements of the cases.
        factors: Names of the factors.
        columns: Columns to add. Columns without a metric are skipped.
    """
    table = add_metric_columns(case_rows(rows, factors), rows, columns)
    return add_state(add_flags(table, rows))


def add_metric_columns(
    table: pd.DataFrame, rows: pd.DataFrame, columns: Iterable[Column], key: Sequence[str] = CASE
) -> pd.DataFrame:
    """Add columns with the measurements of each line.

    Args:
        table: Table with a line for each `key`.
        rows: Measurements that have the columns `key`.
        columns: Columns to add. Columns without a metric are skipped.
        key: Names of the columns that identify a line.
    """
    table = table.reset_index(drop=True)
    factors = [name for name in rows if name.startswith("factor.") and name not in key]
    # A merge is slow, so a single merge finds the line of each row for all columns.
    rows = rows.drop(columns=factors).merge(table[key].assign(line=table.index), on=key)
    added = []
    for column in columns:
        if column.metric:
            # If a measurement has no number, its details may still contain a value.
            numbers = rows.assign(estimate=0.0) if column.detail else rows
            found = pick(numbers, column.metric, column.scope, column.method)
            found = found.drop_duplicates("line").set_index("line")
            added.append(pd.DataFrame(column.of(found), found.index))
    return table.join(added)


def add_flags(table: pd.DataFrame, rows: pd.DataFrame, key: Sequence[str] = CASE) -> pd.DataFrame:
    """Add the column `flags` with the distinct flags of all measurements of a line.

    Args:
        table: Table with a line for each `key`.
        rows: Measurements that have the columns `key`.
        key: Names of the columns that identify a line.
    """
    flags = rows.groupby(key, sort=False)["flags"].agg(lambda some: sorted(set().union(*some)))
    return table.merge(flags.reset_index(), on=key, how="left")


ONE = Estimate.exact(1.0)


def add_speed_ups(
    table: pd.DataFrame,
    rows: pd.DataFrame,
    scope: str | pd.Series,
    name: str = "speed_up",
    key: Sequence[str] = CASE,
) -> pd.DataFrame:
    """Add the speed-up of each line over the baselines that were timed in turns with the line.

    Args:
        table: Table with a line for each `key`.
        rows: Measurements that have the columns `key`.
        scope: Scope of the timing, for all lines or per line.
        name: Name of the new column.
        key: Names of the columns that identify a line.

    Returns:
        The table with new columns. `name` is the smallest of the speed-ups over the baselines.
        `name_low`, `name_high` and `name_busy` describe that speed-up, and `name_baseline` names
        its baseline. `name_over` is a tuple of all speed-ups with the names of their baselines.
    """
    found = {}  # key and scope → speed-ups
    for row in pick(rows, "speed_up").to_dict("records"):
        of, _, baseline = row["scope"].partition(OVER)
        figure = Estimate(
            row["low"],
            row["estimate"],
            row["high"],
            "speed_up",
            baseline,
            Flag.BUSY_MACHINE in row["flags"],
        )
        found.setdefault((*(row[part] for part in key), of), []).append(figure)
    scopes = table.assign(of=scope)[[*key, "of"]].itertuples(index=False, name=None)
    over = [tuple(found.get(line, ())) for line in scopes]
    unknown = Estimate.exact(float("nan"))
    least = [min(figures, key=lambda figure: figure.estimate, default=unknown) for figures in over]
    fields = {"": "estimate", "_low": "low", "_high": "high", "_busy": "busy", "_baseline": "name"}
    columns = {
        name + ending: [getattr(figure, field) for figure in least]
        for ending, field in fields.items()
    }
    return table.assign(**columns, **{f"{name}_over": over})


def gains(
    line: pd.Series, what: str, name: str = "speed_up", among: Container[str] | None = None
) -> Pairs:
    """Compare the speed-ups of a line over its baselines with 1.

    Args:
        line: Line of a table from `add_speed_ups`.
        what: Name of the line for people.
        name: Name of the column with the speed-up.
        among: Names of the baselines to compare with, or None for all baselines.
    """
    pairs = ()
    for figure in line[f"{name}_over"]:
        if among is None or figure.name in among:
            pairs += comparing(replace(figure, name=f"{what}{OVER}{figure.name}"), ONE)
    return pairs


_STATES = {
    Flag.NO_STEADY_STATE: "not settled",
    Flag.BUSY_MACHINE: "busy machine",
    Flag.THROTTLED: "throttled",
    Flag.OVERSUBSCRIBED: "more ranks than cores",
    Flag.LOW_SAMPLE_COUNT: "few blocks",
    Flag.SEQUENTIAL: "not timed in turns",
    Flag.MASK_IS_DENSE: "mask removes no pairs",
}


def add_state(table: pd.DataFrame) -> pd.DataFrame:
    """Add the column `state` with the failure of a case and the flags of its numbers, or `ok`."""
    flags = table.get("flags", [()] * len(table))
    states = []
    for status, message, own in zip(table["status"], table["message"], flags, strict=True):
        words = [words for flag, words in _STATES.items() if flag in own]
        if status != "ok":
            words.insert(0, f"{status}: {message}" if message else status)
        states.append(", ".join(words) or "ok")
    return table.assign(state=states)


def worst(statuses: pd.Series) -> str:
    """Return the first status that is not `ok`, or `ok` if there is none."""
    return next(iter(statuses[statuses != "ok"]), "ok")


def join_messages(messages: pd.Series) -> str:
    """Join the distinct messages on one line."""
    return "; ".join(dict.fromkeys(message for message in messages if message))


def format_ms(row: Mapping[str, Any], column: str) -> str:
    """Format a time of a line with its interval, in ms."""
    return Estimate.of(row, column).text(" ms")


def times(row: Mapping[str, Any], column: str) -> str:
    """Format a ratio of a line with its interval."""
    return Estimate.of(row, column).text("×")


def markdown_table(table: pd.DataFrame) -> str:
    """Return a table in GitHub's Markdown, with escaped cells."""
    if table.empty:
        return "The table is empty."
    lines = [table.columns, ["---"] * len(table.columns), *table.to_numpy()]
    return "\n".join(
        "| " + " | ".join(markdown_text(str(cell)) for cell in line) + " |" for line in lines
    )


def markdown_text(text: str) -> str:
    """Return the text on one line, escaped so that GitHub shows it unchanged."""
    escaped = html.escape(printable(" ".join(text.split())), quote=False)
    return re.sub(r"([|`\\\[\]*])", r"\\\1", escaped)
