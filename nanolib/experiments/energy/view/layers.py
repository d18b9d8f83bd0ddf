"""Where a model's time goes, operation by operation, and what profiling costs."""

from __future__ import annotations

import altair as alt
import pandas as pd

from nanolib.measurement import format_with_interval
from nanolib.report.claim import Claim, Figure, Order, comparing
from nanolib.report.linking import followed, link_columns
from nanolib.report.overview import cached, of_experiment, pick
from nanolib.report.plot import plot
from nanolib.report.theme import empty_chart

# Part of a bar -> the operations in it; others are "other".
_PARTS = {
    "attention": "attention_fused rope cache",
    "projections": "q_proj k_proj v_proj qkv_proj out_proj",
    "MLP": "gate up activation down",
    "norm, embedding, head": "norm embedding head residual",
    "gaps": "between",
    "other": "other",
}
_PART_OF = {operation: part for part, names in _PARTS.items() for operation in names.split()}
_SPOKEN = {"attention_fused": "fused attention", "between": "gaps between operations"}
OVERHEAD_COLUMNS = {
    "name": "Model",
    "phase": "Phase",
    "seq_len": "Seq len",
    "mode": "Mode",
    "wall": "Wall time, % [interval]",
    "cpu": "Processor time, % [interval]",
    "plain_ms": "Bare call, ms",
    "pass_ms": "Closest call, ms",
    "n": "Pairs",
}
_FACTORS = ("name", "phase", "seq_len")


def _factors(row: pd.Series) -> dict[str, object]:
    return {"run_id": row["run_id"]} | {name: row[f"factor.{name}"] for name in _FACTORS}


def _with_case(table: pd.DataFrame) -> pd.DataFrame:
    """Name each case by phase and length, and by the model if there are several."""
    if table.empty:
        return table
    lengths = table["seq_len"].astype(int).astype(str)
    case = table["phase"].str.replace("_", " ") + ", n = " + lengths
    return table.assign(case=case if table["name"].nunique() == 1 else case + ", " + table["name"])


def _operations(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per layer and operation: its ms in a deep pass."""
    found = pick(of_experiment(rows, "energy"), "layer_time")
    lines = [
        _factors(row) | {"operation": name if name in _PART_OF else "other", "ms": ms}
        for _, row in found.iterrows()
        for name, ms in row["details"].get("operations_ms", {}).items()
    ]
    return _with_case(pd.DataFrame(lines))


def operation_breakdown(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """All layers' operations as shares of a call, a bar per phase."""
    data = _operations(rows)
    if data.empty:
        return empty_chart("Where the time goes", "no layer was profiled; set profiling to [deep]")
    only = f": {data['name'].iloc[0]}" if data["name"].nunique() == 1 else ""
    data = followed(data.assign(part=data["operation"].map(_PART_OF)))
    keys = ["case", *link_columns(data), "part"]
    total = data.groupby(keys, sort=False)["ms"].sum().reset_index()
    share = total["ms"] / total.groupby("case")["ms"].transform("sum")
    total = total.assign(series=total["case"], x=share).drop(columns=["case", "ms"])
    total = total.sort_values("part", key=lambda parts: parts.map([*_PARTS].index), kind="stable")
    return plot(
        total,
        f"Where the time goes{only}",
        "bars",
        subtitle=["Share of a call. Gaps: Python, launching kernels, freeing memory."],
        unit="Share of the time",
        fmt=".0%",
    )


@cached
def overhead_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per mode of profiling, phase and shape.

    Returns:
        Columns: `run_id`, `case`, `name`, `phase`, `seq_len`, `mode`, `wall` and `cpu` with `_low`
        and `_high` (shares of the bare call), `plain_ms`, `pass_ms`, `n`.
    """
    lines = []
    for _, row in pick(of_experiment(rows, "energy"), "overhead").iterrows():
        details = row["details"]
        line = _factors(row) | {"mode": row["scope"].split()[-1], "n": row["n"]}
        line |= {"wall": row["estimate"], "wall_low": row["low"], "wall_high": row["high"]}
        line |= dict(zip(("cpu_low", "cpu", "cpu_high"), details["cpu"], strict=True))
        pass_ms = details["pass_ms"] or float("nan")
        lines.append(line | {"plain_ms": details["plain_ms"], "pass_ms": pass_ms})
    return _with_case(pd.DataFrame(lines))


def overhead_percent(rows: pd.DataFrame) -> pd.DataFrame:
    """The table with its shares in per cent."""
    table = overhead_table(rows)
    shares = [name for name in table if name.startswith(("wall", "cpu"))]
    return table.assign(**{name: 100 * table[name] for name in shares})


def layer_words(rows: pd.DataFrame) -> list[Claim]:
    """Which operations take most of each phase, and what profiling costs."""
    data, table = _operations(rows), overhead_table(rows)
    claims = (
        [_most(case, part) for case, part in data.groupby("case", sort=False)] if len(data) else []
    )
    claims += _without_weights(rows)
    modes = table[table["mode"] != "again"] if len(table) else table
    for case, part in modes.groupby("case", sort=False) if len(table) else ():
        costs, compared = [], []
        for _, row in part.iterrows():
            costs.append(_cost(row))
            compared += comparing(_overhead(row), _NOTHING)
        text = f"profiling costs: {'; '.join(costs)}"
        claims.append(Claim(text, about=case, compared=tuple(compared)))
    return claims


def _most(case: str, part: pd.DataFrame) -> Claim:
    """At least three operations, and as many as take half of the time."""
    total = part.groupby("operation")["ms"].sum().sort_values(ascending=False)
    shares = total / total.sum()
    most = shares.head(max(3, int((shares.cumsum() <= 0.5).sum()) + 1))
    text = ", ".join(f"{_SPOKEN.get(name, name)} {share:.0%}" for name, share in most.items())
    between, sure, advice = shares.get("between", 0), "", ""
    if between > 0.2:
        sure, advice = "much lies between operations", "larger batches or compiling would help"
        advice += ", more than faster kernels" if between > 0.5 else ""
    # a profiler sees the forward calls of modules, in a training step too
    what = "most of its forward pass" if case.startswith("training step") else "most of the time"
    return Claim(f"{what} goes to {text}", sure, advice, case)


def _without_weights(rows: pd.DataFrame) -> list[Claim]:
    """Models whose attention weights no deep pass showed."""
    names = []
    for _, row in pick(of_experiment(rows, "energy"), "layer_time").iterrows():
        is_deep_block = row["details"].get("kind") == "block" and "deep" in row["details"]
        if is_deep_block and "attention_entropy" not in row["details"]["deep"]:
            names.append(row["factor.name"])
    why = "only torch's scaled_dot_product_attention shows them"
    text = "attention weights were not measured"
    return [Claim(text, why, about=name) for name in dict.fromkeys(names)]


_NOTHING = Figure.exactly(0.0, "the bare call")


def _overhead(row: pd.Series) -> Figure:
    return Figure.of(row, "wall", "overhead", name=row["mode"])


def _cost(row: pd.Series) -> str:
    ends = format_with_interval(100 * row["wall"], 100 * row["wall_low"], 100 * row["wall_high"])
    if _overhead(row).against(_NOTHING) is Order.ALIKE:
        return f"{row['mode']}, not distinguishable from zero ({ends} %)"
    return f"{row['mode']} {ends} %"
