"""Tables of energy, of the operations in a call, and of the overhead of profiling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from nanolib.measurement import Flag
from nanolib.report.overview import cached, of_experiment, pick
from nanolib.report.tables import CASE, Column, add_metric_columns, case_rows, titles, with_state

_ENERGY = (
    Column("name", "Model"),
    Column("phase", "Phase"),
    Column("seq_len", "Seq len"),
    Column("source", "Source"),
    Column("power", "Power, W [range]", "power", "", interval=True),
    Column("idle_power", "Idle, W [range]", "power", "idle", interval=True),
    Column("energy_per_token", "J per token [range]", "energy_per_token", interval=True),
    Column("energy", "Window, J [range]", "energy", interval=True),
    Column("net", "", "net_energy", interval=True),
    Column("energy_delay", "", "energy_delay", interval=True),
    Column("tokens_per_second", "Tokens/s"),
    Column("state", "Provenance"),
)
ENERGY_COLUMNS = titles(_ENERGY)
OVERHEAD_COLUMNS = {
    "name": "Model",
    "phase": "Phase",
    "seq_len": "Seq len",
    "mode": "Mode",
    "wall_percent": "Wall time, % [interval]",
    "cpu_percent": "CPU time, % [interval]",
    "plain_ms": "Baseline, ms",
    "pass_ms": "Detailed call, ms",
    "n": "Pairs",
}
# Part of a bar -> its operations. All others are "other".
PARTS = {
    "attention": "attention_fused rope cache",
    "projections": "q_proj k_proj v_proj qkv_proj out_proj",
    "MLP": "gate up activation down",
    "norm, embedding, head": "norm embedding head residual",
    "gaps": "between",
    "other": "other",
}
_PART_OF = {operation: part for part, names in PARTS.items() for operation in names.split()}


@cached
def energy_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a line per phase, shape and source.

    Returns:
        Columns: `name`, `phase`, `seq_len`, `batch_size`, `source`, `of`, `provenance`, `power`,
        `idle_power` (W), `energy` (J, of the window), `energy_per_token`, `net` (J, above idle),
        `energy_delay` (J·s), each with `_low` and `_high`, `tokens_per_second`, `status`,
        `message`.
    """
    rows = of_experiment(rows, "energy")
    if "factor.look" in rows:  # the other tables have the rows of profiling
        rows = rows[rows["factor.look"].isna()]
    table = case_rows(rows, ["name", "phase", "seq_len", "batch_size"], "phase")
    if table.empty:
        return table
    table = add_metric_columns(
        table, rows, [Column("tokens_per_second", metric="tokens_per_second")]
    )
    rows = rows.assign(
        source=rows["method"],
        of=[details.get("of", "") for details in rows["details"]],
        scope=rows["scope"].where(rows["scope"] == "idle", ""),
    )
    found = rows[rows["metric"] == "energy"]
    found = found[[*CASE, "source", "of", "provenance", "status", "message"]]
    table = table.merge(found, on=list(CASE), how="left", suffixes=("_of_case", ""))
    for name in ("status", "message"):
        table[name] = table[name].fillna(table.pop(f"{name}_of_case"))
    table = table.fillna(dict.fromkeys(("source", "of", "provenance"), ""))
    table = with_state(add_metric_columns(table, rows, _ENERGY, [*CASE, "source", "of"]))
    return table.assign(state=table["state"].where(table["state"] != "ok", table["provenance"]))


def _profile_rows(
    rows: pd.DataFrame, metric: str
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the columns that name the case of each row of a metric, and the row."""
    found = pick(of_experiment(rows, "energy"), metric)
    for row in found.to_dict("records"):
        line = {name: row[f"factor.{name}"] for name in ("name", "phase", "seq_len")}
        case = f"{line['phase'].replace('_', ' ')}, n = {int(line['seq_len'])}"
        case += f", {line['name']}" if found["factor.name"].nunique() > 1 else ""
        yield {"run_id": row["run_id"], **line, "case": case}, row


@cached
def operation_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a line per layer and operation.

    Returns:
        Columns: `run_id`, `name`, `phase`, `seq_len`, `case`, `operation`, `part` (a key of
        `PARTS`), `ms` (of a detailed call).
    """
    lines = []
    for line, row in _profile_rows(rows, "layer_time"):
        for name, ms in row["details"].get("operations_ms", {}).items():
            operation = name if name in _PART_OF else "other"
            lines.append(line | {"operation": operation, "part": _PART_OF[operation], "ms": ms})
    return pd.DataFrame(lines)


@cached
def overhead_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a line per profiling mode, phase and shape.

    Returns:
        Columns: `run_id`, `case`, `name`, `phase`, `seq_len`, `mode`, `wall` and `cpu` (shares of
        the baseline) and both as `_percent`, with `_low` and `_high`, `plain_ms`, `pass_ms`, `n`.
    """
    lines = []
    for line, row in _profile_rows(rows, "overhead"):
        details = row["details"]
        shares = {"wall": (row["low"], row["estimate"], row["high"]), "cpu": details["cpu"]}
        for name, values in shares.items():
            for end, share in zip(("_low", "", "_high"), values, strict=True):
                line |= {f"{name}{end}": share, f"{name}_percent{end}": 100 * share}
        line |= {"mode": row["scope"].split()[-1], "n": row["n"], "plain_ms": details["plain_ms"]}
        busy = {"wall_busy": Flag.BUSY_MACHINE in row["flags"]}
        lines.append(line | busy | {"pass_ms": details["pass_ms"] or float("nan")})
    return pd.DataFrame(lines)
