"""What a logarithmic axis cannot show is left out of it and named under the title: one zero takes the whole axis away."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from nanolib.measurement import format_number

_MOST = 4  # points that are named
_CHANNELS = ("x", "y", "color", "size")
_INSIDE = ("layer", "hconcat", "vconcat", "concat")


@dataclass
class _Use:
    """A field that a mark draws on a logarithmic scale."""

    owner: Any  # the chart whose data it is of
    mark: Any
    channel: str
    field: str
    end: str  # the field of the interval's other end, where the mark is one
    axis: str  # the same for what shares a scale


def leave_out(chart: alt.TopLevelMixin) -> None:
    """Take zeros, negative and infinite values off a chart's logarithmic axes, and say so under its title.

    A lower end of an interval that is not above zero is drawn down to the axis. Changes the chart; missing values stay missing.
    """
    uses = list(_uses(chart))
    before = {id(use.owner): use.owner.data for use in uses}
    names: dict[str, None] = {}
    for use in uses:
        names |= dict.fromkeys(_named(use, before[id(use.owner)]))
    for axis in dict.fromkeys(use.axis for use in uses):
        _mend([use for use in uses if use.axis == axis], before)
    if names:
        named = [*names]
        more = f" and {len(named) - _MOST} more" if len(named) > _MOST else ""
        _say(chart, f"Left out of the logarithmic axis: {'; '.join(named[:_MOST])}{more}.")


def drawable(values: pd.Series) -> pd.Series:
    """Those of the values that a logarithmic axis can show: finite, and above zero."""
    return values[_drawable(values.to_numpy(dtype=float))]


def _uses(chart: Any, owner: Any = None, axes: dict[str, str] | None = None) -> Iterator[_Use]:
    """Every field on a logarithmic scale. The marks of one picture share their scales, and so do panels of one domain."""
    owner = chart if isinstance(_part(chart, "data"), pd.DataFrame) else owner
    for name in _INSIDE:
        parts = _part(chart, name)
        if isinstance(parts, list):
            shared = dict(pair for part in parts for pair in _axes(part).items()) if name == "layer" else None
            for part in parts:
                yield from _uses(part, owner, shared)
    if owner is None or not isinstance(chart, alt.Chart):
        return
    for channel, axis in (_axes(chart) if axes is None else axes).items():
        field, end = (_field(chart, name) for name in (channel, f"{channel}2"))
        for one, other in ((field, end), (end, field)):
            if one in owner.data:
                yield _Use(owner, chart, channel, one, other, axis)


def _axes(chart: Any) -> dict[str, str]:
    """Channel → which axis it is, of those that are logarithmic."""
    found = {channel: _scale(chart, channel) for channel in _CHANNELS}
    return {
        channel: f"{channel} {_part(scale, 'domain') or id(chart)}"
        for channel, scale in found.items()
        if _part(scale, "type") == "log"
    }


def _scale(chart: Any, channel: str) -> Any:
    return _part(_part(_part(chart, "encoding"), channel), "scale")


def _part(whole: Any, name: str) -> Any:
    """A part of an Altair object or of a plain dictionary; None where it is not set. Attributes of a channel are its setters."""
    try:
        found = whole[name]
    except (KeyError, TypeError):
        return None
    return None if found is alt.Undefined else found


def _field(chart: Any, channel: str) -> str:
    name = _part(_part(_part(chart, "encoding"), channel), "shorthand")
    return name.partition(":")[0] if isinstance(name, str) else ""


def _numbers(data: pd.DataFrame, field: str) -> np.ndarray:
    return pd.to_numeric(data[field], errors="coerce").to_numpy(dtype=float)


def _drawable(values: np.ndarray) -> np.ndarray:
    return np.isfinite(values) & (values > 0)


def _named(use: _Use, data: pd.DataFrame) -> Iterator[str]:
    """Which points cannot be drawn; of an interval both ends or the upper one, since the lower one is drawn to the axis."""
    if _part(use.mark["encoding"], "tooltip") is None:  # a line that only guides the eye, or joins points
        return
    values = _numbers(data, use.field)
    bad = ~_drawable(values)
    mark = _part(use.mark, "mark")
    kind = mark if isinstance(mark, str) else _part(mark, "type")
    if kind != "point" or _part(mark, "strokeDash"):
        bad &= ~np.isnan(values)  # nothing is predicted of it, or an end is not known
    if use.end in data:
        other = _numbers(data, use.end)
        bad &= ~(_drawable(other) & (other > values))
    for place in np.flatnonzero(bad):
        value = "no number" if math.isnan(values[place]) else format_number(float(values[place]))
        yield f"{_name(use, data.iloc[place])} ({value})"


def _name(use: _Use, row: pd.Series) -> str:
    """The point as its tooltip and its place name it."""
    tooltip = _part(use.mark["encoding"], "tooltip")
    shown = [_part(one, "shorthand") or "" for one in (tooltip if isinstance(tooltip, list) else [tooltip])]
    fields = [text.removesuffix(":N") for text in shown if text.endswith(":N")][:1]
    fields += [_field(use.mark, name) for name in ("x", "y") if name != use.channel]
    words = []
    for value in (row.get(field) for field in dict.fromkeys(fields)):
        if isinstance(value, str) and value:
            words.append(value)
        elif isinstance(value, int | float | np.number) and value > 0 and float(value).is_integer():
            words.append(f"at {int(value):,}")
    return ", ".join(dict.fromkeys(words)).replace(", at ", " at ") or use.field


def _mend(group: list[_Use], before: dict[int, pd.DataFrame]) -> None:
    """Take what cannot be drawn out of the data of one scale, and out of its domain."""
    values = np.concatenate([_numbers(before[id(use.owner)], use.field) for use in group])
    drawn = values[_drawable(values)]
    low, high = (float(drawn.min()) / 1.5, float(drawn.max()) * 1.5) if len(drawn) else (0.1, 1.0)
    scales = [scale for use in group if (scale := _scale(use.mark, use.channel)) is not None]
    domain = next((found for scale in scales if (found := _part(scale, "domain")) is not None), None)
    if not len(drawn) or (isinstance(domain, list) and not _drawable(np.asarray(domain, dtype=float)).all()):
        domain = [low, high]
        for scale in scales:
            scale["domain"] = domain
    floor = float(domain[0]) if isinstance(domain, list) else low
    for use in group:
        known = before[id(use.owner)]
        column = _numbers(known, use.field)
        fine = _drawable(column)
        if fine.all():
            continue
        kept = np.where(fine, column, np.nan)
        if use.end in known:
            other = _numbers(known, use.end)
            kept = np.where(~fine & ~np.isnan(column) & _drawable(other) & (other > column), floor, kept)
        use.owner.data = use.owner.data.assign(**{use.field: kept})


def _say(chart: alt.TopLevelMixin, line: str) -> None:
    """Add a line under a chart's title."""
    title = chart.title.to_dict() if isinstance(chart.title, alt.SchemaBase) else chart.title
    title = title if isinstance(title, dict) else {"text": title if isinstance(title, str) else ""}
    lines = title.get("subtitle", [])
    title["subtitle"] = [*([lines] if isinstance(lines, str) else lines), line]
    chart.title = alt.Title(**title)
