"""Read the speed-ups of cases that were measured in turns, as estimates to compare with 1."""

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
    """Add the speed-up of each line over the baselines that were timed in turns with the line.

    Args:
        table: Table with a line for each `key`.
        rows: Measurements that have the columns `key`.
        scope: Scope of the timing, for all lines or per line.
        name: Name of the new column.
        key: Names of the columns that identify a line.

    Returns:
        The table with the smallest speed-up over any baseline as `name`, with `name_low`,
        `name_high`, `name_busy` and `name_baseline`. The column `name_over` contains a tuple of all
        speed-ups, each with the name of its baseline.
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
    """Return the baselines among `others` for which the line's speed-up is not clearly above 1."""
    speed_ups = line["speed_up_over"]
    unclear = {one.name for one in speed_ups if one.compare_to(ONE) is not Order.ABOVE}
    return [other for other in others if other in unclear]


def gains(
    line: pd.Series, what: str, name: str = "speed_up", among: Container[str] | None = None
) -> Pairs:
    """Compare the speed-ups of a line over its baselines with 1.

    Args:
        line: Line of a table from `with_speed_ups`.
        what: Name of the line for people.
        name: Name of the column with the speed-up.
        among: Names of the baselines to compare with, or None for all baselines.
    """
    chosen = (figure for figure in line[f"{name}_over"] if among is None or figure.name in among)
    named = (replace(figure, name=f"{what}{OVER}{figure.name}") for figure in chosen)
    return tuple(pair for figure in named for pair in comparing(figure, ONE))
