"""One choice for all charts of a page: their data tell run, model and length, and each chart keeps what is picked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

# Column of a chart's data → where it comes from in rows, or in a table.
_SOURCES = {
    "link_run": ("run_id",),
    "link_model": ("factor.name", "name"),
    "link_n": ("factor.seq_len", "seq_len"),
}
PICKS = {"run": "link_run", "model": "link_model", "n": "link_n"}
MODELS_OF = (
    "model",
    "energy",
    "fp8",
    "distributed",
)  # elsewhere a name is that of an attention kind


def links(frame: pd.DataFrame, but: str = "") -> dict[str, Any]:
    """The columns by which a chart's data follow a choice, as far as rows or a table have them; with the index of `frame`.

    The column `but` is left out.
    """
    found = {}
    for column, sources in _SOURCES.items():
        source = next((name for name in sources if name in frame), None)
        if source is not None:
            found[column] = frame[source].str[:8] if column == "link_run" else frame[source]
    if "factor.name" in frame and "experiment" in frame:
        found["link_model"] = frame["factor.name"].where(frame["experiment"].isin(MODELS_OF))
    found.pop(but, None)
    return found


def link_columns(frame: pd.DataFrame) -> list[str]:
    """Those of the columns that `links` gives which a chart's data has."""
    return [name for name in _SOURCES if name in frame]


def followed(data: pd.DataFrame) -> pd.DataFrame:
    """A chart's data with those columns in the place of what they come from."""
    known = [name for name in ("run_id", "name", "seq_len") if name in data]
    return data.assign(**links(data)).drop(columns=known)


def kept(frame: pd.DataFrame, picked: Mapping[str, Sequence[Any] | None]) -> pd.DataFrame:
    """The rows that a choice leaves, by the rule of the charts: what does not know of a pick stays.

    Args:
        frame: Rows, or a table.
        picked: `run`, `model` or `n` → the values that are shown; None for everything.
    """
    columns, left = links(frame), pd.Series(True, index=frame.index)
    for name, values in picked.items():
        if values is not None and PICKS[name] in columns:
            column = columns[PICKS[name]]
            left &= column.isna() | column.isin(values)
    return frame[left]


def linked(chart: alt.TopLevelMixin) -> dict[str, Any]:
    """The chart's Vega-Lite with parameters `pick_run`, `pick_model`, `pick_n`: lists of what is shown, or null for everything."""
    spec = chart.to_dict(validate=False)
    columns = {name: set(values[0]) for name, values in spec.get("datasets", {}).items() if values}
    used: set[str] = set()

    def visit(node: Any) -> None:
        if isinstance(node, list):
            for item in node:
                visit(item)
        if not isinstance(node, dict):
            return
        named = node.get("data", {}).get("name") if isinstance(node.get("data"), dict) else None
        filters = []
        for name, column in PICKS.items():
            if column in columns.get(named, ()):
                used.add(name)
                kept = f"pick_{name} == null || datum.{column} == null || indexof(pick_{name}, datum.{column}) >= 0"
                filters.append({"filter": kept})
        if filters:
            node["transform"] = [*filters, *node.get("transform", [])]
        for key, value in node.items():
            if key not in ("datasets", "data", "transform"):
                visit(value)

    visit(spec)
    spec["params"] = [
        *spec.get("params", []),
        *({"name": f"pick_{name}", "value": None} for name in PICKS if name in used),
    ]
    return spec


def choices(rows: pd.DataFrame, runs: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """What can be picked: title → options, each with what the charts are told. A thing of which there is one is no choice.

    Returns:
        Per title: `pick` (the parameter's name) and `options` (label → list of values).
    """
    found: dict[str, dict[str, Any]] = {}
    if rows.empty:
        return found
    short = runs.assign(short=runs["run_id"].str[:8])
    short = short[short["short"].isin(rows["run_id"].str[:8])]
    together = short["launch"].where(
        short["launch"].fillna("") != "", short["run_id"]
    )  # a suite is picked as a whole
    by_launch = {
        _launch_name(group): list(group["short"])
        for _, group in short.groupby(together, sort=False)
    }
    shaped = rows[rows["experiment"].isin(MODELS_OF)]
    names = sorted(set(shaped["factor.name"].dropna())) if "factor.name" in shaped else []
    lengths = (
        sorted({int(n) for n in rows["factor.seq_len"].dropna()})
        if "factor.seq_len" in rows
        else []
    )
    for title, name, options in (
        ("Run", "run", by_launch),
        ("Model", "model", {value: [value] for value in names}),
        ("Sequence length", "n", {f"{value:,}": [value] for value in lengths}),
    ):
        if len(options) > 1:
            found[title] = {"pick": name, "options": options}
    return found


def picked(
    choices: Mapping[str, Mapping[str, Any]], chosen: Mapping[str, str]
) -> dict[str, list[Any] | None]:
    """Pick → the values that all its lists leave; None for everything.

    Args:
        choices: From `choices`.
        chosen: Title → the option that is picked; one that is missing stands for everything.
    """
    found: dict[str, list[Any] | None] = dict.fromkeys(PICKS)
    for title, option in chosen.items():
        name, values = choices[title]["pick"], choices[title]["options"][option]
        before = found[name]
        found[name] = values if before is None else [value for value in before if value in values]
    return found


def _launch_name(runs: pd.DataFrame) -> str:
    first = runs.sort_values("started").iloc[0]
    name = first["label"] or first["suite"] or "no label"
    return f"{name}, {first['started'][:16].replace('T', ' ')} ({first['short']})"


def as_script(data: Any) -> str:
    """JSON that may stand inside a script: no «<» at all, since `</script` and `<!--` mean something in any string."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
