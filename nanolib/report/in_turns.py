"""Read the speed-ups that were measured in turns: the `speed_up` rows of a group of cases, as estimates to compare with 1."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from nanolib.measurement import OVER, Flag
from nanolib.report.finding import Estimate, Order, comparing
from nanolib.report.overview import pick
from nanolib.report.tables import CASE

ONE = Estimate.exact(1.0)
Pairs = tuple[tuple[Estimate, Order, Estimate], ...]


def with_speed_ups(
    table: pd.DataFrame,
    rows: pd.DataFrame,
    scope: str | pd.Series,
    name: str = "speed_up",
    key: Sequence[str] = CASE,
) -> pd.DataFrame:
    """Add how much faster each line is than what was timed in its rounds.

    Args:
        table: Its lines, each with a `key` of its own.
        rows: Measurements with the same key.
        scope: What was timed, of all lines or of each.
        name: Of the column.
        key: Columns of both.

    Returns:
        The table with the smallest speed-up over any baseline as `name`, with `name_low`, `name_high`, `name_busy` and
        `name_baseline`. `name_over` is a tuple of all speed-ups, each named like its baseline.
    """
    found: dict[tuple[Any, ...], list[Estimate]] = {}
    for row in pick(rows, "speed_up").to_dict("records"):
        of, _, baseline = row["scope"].partition(OVER)
        ends, busy = (row["low"], row["estimate"], row["high"]), Flag.BUSY_MACHINE in row["flags"]
        figure = Estimate(*ends, "speed_up", baseline, busy)
        found.setdefault((*(row[part] for part in key), of), []).append(figure)
    scopes = table.assign(of=scope)[[*key, "of"]].itertuples(index=False, name=None)
    lines = [tuple(found.get(line, ())) for line in scopes]
    nothing = Estimate(*(float("nan"),) * 3)
    least = [min(figures, key=lambda figure: figure.estimate, default=nothing) for figures in lines]
    ends = {"estimate": "", "low": "_low", "high": "_high", "busy": "_busy", "name": "_baseline"}
    columns = pd.DataFrame(map(vars, least), table.index, [*ends])
    columns[f"{name}_over"] = pd.Series(lines, index=table.index, dtype=object)
    return table.join(columns.rename(columns={field: name + end for field, end in ends.items()}))


def not_slower(line: Mapping[str, Any], others: Iterable[str]) -> list[str]:
    """Return the others, of those timed in its rounds, that a line is not shown to be faster than."""
    slower = {
        figure.name: figure.compare_to(ONE) is Order.ABOVE for figure in line["speed_up_over"]
    }
    return [other for other in others if other in slower and not slower[other]]


def gains(
    line: pd.Series, what: str, name: str = "speed_up", among: Container[str] | None = None
) -> Pairs:
    """Compare the speed-ups of one line over its baselines with 1.

    Args:
        line: From `with_speed_ups`.
        what: The name of the line, for people.
        name: As in `with_speed_ups`.
        among: The baselines that count; None means all.
    """
    chosen = (figure for figure in line[f"{name}_over"] if among is None or figure.name in among)
    named = (replace(figure, name=f"{what}{OVER}{figure.name}") for figure in chosen)
    return tuple(pair for figure in named for pair in comparing(figure, ONE))
