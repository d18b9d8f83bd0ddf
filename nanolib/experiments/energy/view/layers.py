"""Where a model's time goes: layers, operations, what its activations look like, and what finding out cost."""

from __future__ import annotations

import altair as alt
import pandas as pd

from nanolib.measurement import format_with_interval
from nanolib.report.claim import Claim, Figure, Order, comparing
from nanolib.report.linking import followed, link_columns
from nanolib.report.overview import cached, of_experiment, pick
from nanolib.report.plot import plot
from nanolib.report.tables import CASE, known
from nanolib.report.theme import empty_chart

_GROUPS = {
    "attention": ("attention_fused", "qk", "scale_mask", "softmax", "av", "rope", "cache"),
    "projections": ("q_proj", "k_proj", "v_proj", "qkv_proj", "out_proj"),
    "MLP": ("gate", "up", "activation", "down"),
    "norm, embedding, head": ("norm", "embedding", "head", "residual"),
    "gaps": ("between",),
    "other": ("other",),
}
_FAMILIES = {
    operation: family for family, operations in _GROUPS.items() for operation in operations
}
_SPOKEN = {"attention_fused": "fused attention", "between": "gaps between operations"}
OVERHEAD_COLUMNS = {
    "name": "Model",
    "phase": "Phase",
    "seq_len": "Seq len",
    "mode": "Mode",
    "wall": "Wall time [interval]",
    "cpu": "Processor time [interval]",
    "threads": "Of it, threads beside",
    "plain_ms": "Bare call, ms",
    "pass_ms": "Closest call, ms",
    "n": "Pairs",
}


_FACTORS = ("name", "phase", "seq_len", "batch_size")


def layer_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per layer of each model, shape and phase.

    Returns:
        Columns: `run_id`, `case`, `name`,
        `phase`, `seq_len`, `batch_size`, `layer`, `place`, `ms`, `low`, `high`, `share`, `calls`,
        `joules`, `joules_low`, `joules_high` (attributed), `source`, and the JSON details `operations_ms`,
        `activations`, `deep`, `deep_passes`.
    """
    rows = of_experiment(rows, "energy")
    found = pick(rows, "layer_time")
    if found.empty:
        return pd.DataFrame()
    details = ["layer", "share", "operations_ms", "activations", "deep", "deep_passes"]
    told = pd.DataFrame(
        [{name: one.get(name) for name in details} for one in found["details"]], index=found.index
    )
    names = {"estimate": "ms", "n": "calls"} | {f"factor.{name}": name for name in _FACTORS}
    table = found[[*CASE, "scope", "low", "high", *names]].rename(columns=names).join(told)
    table = table.assign(place=table.groupby(list(CASE), sort=False).cumcount())
    energy = pick(rows, "layer_energy")
    if len(energy):
        taken = {
            "estimate": "joules",
            "low": "joules_low",
            "high": "joules_high",
            "method": "source",
        }
        key = [*CASE, "scope"]
        table = table.merge(
            energy.drop_duplicates(key)[[*key, *taken]].rename(columns=taken), on=key, how="left"
        )
    return _with_case(table.reset_index(drop=True))


def _with_case(table: pd.DataFrame) -> pd.DataFrame:
    """A name for each case: the phase and length, and the model where there are several, whose name may be cut."""
    if table.empty:
        return table
    words = (
        table["phase"].str.replace("_", " ") + ", n = " + table["seq_len"].astype(int).astype(str)
    )
    return table.assign(
        case=words if table["name"].nunique() == 1 else words + ", " + table["name"]
    )


def _of_model(rows: pd.DataFrame) -> str:
    """The model's name for a title, where there is one alone."""
    names = of_experiment(rows, "energy")["factor.name"].dropna().unique()
    return f": {names[0]}" if len(names) == 1 else ""


def _operations(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per layer and operation of the deep passes."""
    table = known(layer_table(rows), "operations_ms")
    if table.empty:
        return pd.DataFrame()
    lines = []
    for _, row in table.iterrows():
        operations = dict(row["operations_ms"])
        for name in set(operations) - set(_FAMILIES):  # modules that go by their own names
            operations["other"] = operations.get("other", 0.0) + operations.pop(name)
        for name in _FAMILIES:
            if name not in operations:
                continue
            ms = operations[name]
            line = {
                "case": row["case"],
                "phase": row["phase"],
                "layer": row["layer"],
                "operation": name,
                "ms": ms,
            }
            line |= {name: row[name] for name in ("run_id", "name", "seq_len")}
            lines.append(line)
    return followed(pd.DataFrame(lines))


def operation_breakdown(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """All layers' operations as shares of a call, a bar per phase."""
    data = _operations(rows)
    if data.empty:
        return empty_chart(
            "Where the time goes", "no layer was looked into; give layer_modes with deep"
        )
    kept = ["case", *link_columns(data)]
    data = data.assign(part=data["operation"].map(_FAMILIES))
    total = data.groupby([*kept, "part"], sort=False)["ms"].sum().reset_index()
    total = total.assign(
        series=total["case"], x=total["ms"] / total.groupby("case")["ms"].transform("sum")
    )
    total = total.sort_values("part", key=lambda parts: parts.map([*_GROUPS].index), kind="stable")
    return plot(
        total.drop(columns=["case", "ms"]),
        f"Where the time goes{_of_model(rows)}",
        "bars",
        subtitle=["Share of a deep pass. Gaps: Python, launching kernels, freeing memory."],
        unit="Share of the time",
        fmt=".0%",
    )


@cached
def overhead_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per mode of profiling, phase and shape.

    Returns:
        Columns: `run_id`, `case`, `name`,
        `phase`, `seq_len`, `mode`, `wall`, `wall_low`, `wall_high`, `cpu`, `cpu_low`, `cpu_high`,
        `threads` (shares of the bare call), `plain_ms`, `pass_ms`, `n`.
    """
    found = pick(of_experiment(rows, "energy"), "overhead")
    lines = [
        {"run_id": row["run_id"]}
        | {name: row[f"factor.{name}"] for name in ("name", "phase", "seq_len")}
        | {"mode": row["scope"].split()[-1], "n": row["n"]}
        | {
            "wall": row["estimate"],
            "wall_low": row["low"],
            "wall_high": row["high"],
            "threads": details["threads"],
        }
        | dict(zip(("cpu_low", "cpu", "cpu_high"), details["cpu"], strict=True))
        | {"plain_ms": details["plain_ms"], "pass_ms": details["pass_ms"] or float("nan")}
        for row, details in zip(found.to_dict("records"), found["details"], strict=True)
    ]
    return _with_case(pd.DataFrame(lines))


def overhead_words(rows: pd.DataFrame) -> pd.DataFrame:
    """The table in words, shares in per cent: the columns of `OVERHEAD_COLUMNS`, and those by which a choice is followed."""
    table = overhead_table(rows)
    if table.empty:
        return table
    shown = table.copy()
    for name in ("wall", "cpu"):
        shown[name] = [
            f"{value:+.1%} [{low:+.1%} … {high:+.1%}]"
            for low, value, high in zip(
                table[f"{name}_low"], table[name], table[f"{name}_high"], strict=True
            )
        ]
    shown["threads"] = [f"{value:.2%}" for value in table["threads"]]
    for name in ("plain_ms", "pass_ms"):
        shown[name] = ["—" if pd.isna(value) else f"{value:.3g}" for value in table[name]]
    shown["phase"] = shown["phase"].str.replace("_", " ")
    return shown.drop(
        columns=[f"{name}_{end}" for name in ("wall", "cpu") for end in ("low", "high")]
    )


def layer_words(rows: pd.DataFrame) -> list[Claim]:
    """Which operations take most of each phase, and what it cost to find out."""
    claims = []
    data = _operations(rows)
    for case, part in data.groupby("case", sort=False) if len(data) else []:
        total = part.groupby("operation")["ms"].sum().sort_values(ascending=False)
        shares = total / total.sum()
        most = shares.head(
            max(3, int((shares.cumsum() <= 0.5).sum()) + 1)
        )  # so many that it is more than half of it
        between, sure, advice = shares.get("between", 0), "", ""
        if between > 0.2:
            more = ", more than faster kernels" if between > 0.5 else ""
            sure, advice = (
                "much lies between operations",
                f"larger batches or compiling would help{more}",
            )
        text = ", ".join(f"{_SPOKEN.get(name, name)} {share:.0%}" for name, share in most.items())
        # profilers watch the forward calls of modules, of a training step too
        what = (
            "most of its forward pass" if case.startswith("training step") else "most of the time"
        )
        claims.append(Claim(f"{what} goes to {text}", sure, advice, case))
    claims += _unseen(rows)
    table = overhead_table(rows)
    for case, part in (
        table[table["mode"] != "again"].groupby("case", sort=False) if len(table) else []
    ):
        costs = [_cost(row) for _, row in part.iterrows()]
        compared = [
            pair for _, row in part.iterrows() for pair in comparing(_overhead(row), _NOTHING)
        ]
        claims.append(
            Claim(f"profiling costs: {'; '.join(costs)}", about=case, compared=tuple(compared))
        )
    return claims


def _unseen(rows: pd.DataFrame) -> list[Claim]:
    """Models whose attention weights no deep pass showed."""
    found = pick(of_experiment(rows, "energy"), "layer_time")
    names = [
        row["factor.name"]
        for _, row in found.iterrows()
        if row["details"].get("kind") == "block"
        and row["details"].get("deep_passes")
        and "attention_entropy" not in row["details"]["deep"]
    ]
    why = "only torch's scaled_dot_product_attention shows them"
    return [
        Claim("attention weights were not measured", why, about=name)
        for name in dict.fromkeys(names)
    ]


_NOTHING = Figure.exactly(0.0, "the bare call")


def _overhead(row: pd.Series) -> Figure:
    return Figure.of(row, "wall", "overhead", name=row["mode"])


def _cost(row: pd.Series) -> str:
    ends = format_with_interval(100 * row["wall"], 100 * row["wall_low"], 100 * row["wall_high"])
    if _overhead(row).against(_NOTHING) is Order.ALIKE:
        return f"{row['mode']}, not distinguishable from zero ({ends} %)"
    return f"{row['mode']} {ends} %"
