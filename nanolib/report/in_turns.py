"""Speed-ups as they were measured in turns: the `speed_up` rows of a group's cases, as figures that claims compare with one."""

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
    """The table with what each line gains over what was timed in its rounds.

    Args:
        table: Its lines, told apart by `key`.
        rows: Measurements with the same key.
        scope: What was timed, of all lines or of each.
        name: Of the column.
        key: Columns of both.

    Returns:
        The table with `name`, its smallest gain over any baseline, `name_low`, `name_high`, `name_busy`, `name_baseline` (over
        which), and `name_over`: all of them, a tuple of figures that are named like their baselines.
    """
    known: dict[tuple[Any, ...], list[Estimate]] = {}
    for row in pick(rows, "speed_up").to_dict("records"):
        of, _, baseline = row["scope"].partition(OVER)
        known.setdefault((*(row[part] for part in key), of), []).append(_figure(row, baseline))
    scopes = table.assign(of=scope)[[*key, "of"]].itertuples(index=False, name=None)
    lines = [tuple(known.get(line, ())) for line in scopes]
    nothing = Estimate(*(float("nan"),) * 3)
    least = [min(figures, key=lambda figure: figure.estimate, default=nothing) for figures in lines]
    return table.assign(
        **{
            f"{name}_low": [figure.low for figure in least],
            name: [figure.estimate for figure in least],
            f"{name}_high": [figure.high for figure in least],
            f"{name}_busy": [figure.busy for figure in least],
            f"{name}_baseline": [figure.name for figure in least],
            f"{name}_over": pd.Series(lines, index=table.index, dtype=object),
        }
    )


def _figure(row: Mapping[str, Any], baseline: str) -> Estimate:
    busy = Flag.BUSY_MACHINE in row["flags"]
    return Estimate(
        row["low"], row["estimate"], row["high"], "speed_up", row["scope"], baseline, busy
    )


def over(line: Mapping[str, Any], baseline: str, name: str = "speed_up") -> Estimate | None:
    """What one line gains over one baseline, where it was timed in the same rounds."""
    return next((figure for figure in line[f"{name}_over"] if figure.name == baseline), None)


def not_slower(line: Mapping[str, Any], others: Iterable[str], name: str = "speed_up") -> list[str]:
    """The others, of those timed in its rounds, that a line is not shown to be faster than."""
    slower = {figure.name: figure.compare_to(ONE) is Order.ABOVE for figure in line[f"{name}_over"]}
    return [other for other in others if other in slower and not slower[other]]


def gains(
    line: pd.Series, what: str, name: str = "speed_up", among: Container[str] | None = None
) -> Pairs:
    """What one line gains over its baselines, each compared with nothing gained.

    Args:
        line: From `with_speed_ups`.
        what: The line is of, for people.
        name: As in `with_speed_ups`.
        among: Over which of them; None for all.
    """
    chosen = (figure for figure in line[f"{name}_over"] if among is None or figure.name in among)
    named = (replace(figure, name=f"{what}{OVER}{figure.name}") for figure in chosen)
    return tuple(pair for figure in named for pair in comparing(figure, ONE))
