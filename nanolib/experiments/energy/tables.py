"""Build the tables of the energy notebook: energy and power, operations and profiling overhead."""

from collections.abc import Iterator

import pandas as pd

from nanolib.measurement import Flag
from nanolib.report.overview import cached, of_experiment, pick
from nanolib.report.tables import (
    CASE,
    Column,
    add_metric_columns,
    case_rows,
    flagged,
    titles,
    with_state,
)

_ENERGY = (
    Column("name", "Model"),
    Column("phase", "Phase"),
    Column("seq_len", "Seq len"),
    Column("source", "Source"),
    Column("power", "Power, W [range]", "power", ""),
    Column("idle_power", "Idle, W [range]", "power", "idle"),
    Column("energy_per_token", "J per token [range]", "energy_per_token"),
    Column("energy", "Window, J [range]", "energy"),
    Column("net", "", "net_energy"),
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
    "detailed_ms": "Detailed call, ms",
    "detailed_every": "Calls per detailed call",
    "n": "Pairs",
}
# The keys are parts of a bar, and the values are operations in the presets, and in models such as
# Llama, GPT-2 and BERT. Other operations belong to `other`.
PARTS = {
    "attention": "attention_fused rope cache",
    "projections": (
        "q_proj k_proj v_proj qkv_proj out_proj o_proj c_attn attn.c_proj query key value"
        " query_key_value attention.output.dense"
    ),
    "MLP": (
        "gate up activation down gate_proj up_proj down_proj act_fn c_fc act mlp.c_proj fc1 fc2"
        " intermediate.dense intermediate_act_fn output.dense"
    ),
    "norm, embedding, head": (
        "norm embedding head residual embed_tokens wte wpe lm_head word_embeddings"
        " position_embeddings token_type_embeddings"
    ),
    "gaps": "between",
    "other": "other",
}
_PART_OF = {operation: part for part, names in PARTS.items() for operation in names.split()}


@cached
def energy_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a table with a line per phase, shape and source. `net` is the energy above idle."""
    rows = of_experiment(rows, "energy")
    table = case_rows(rows, ["name", "phase", "seq_len", "batch_size"], "phase")
    if table.empty:
        return table
    table = add_metric_columns(table, rows, [Column("tokens_per_second", "", "tokens_per_second")])
    rows = rows.assign(
        source=rows["method"],
        of=[details.get("of", "") for details in rows["details"]],
        scope=rows["scope"].where(rows["scope"] == "idle", ""),
    )
    columns = [*CASE, "source", "of", "provenance", "status", "message"]
    found = rows.loc[rows["metric"] == "energy", columns]
    table = table.merge(found, on=list(CASE), how="left", suffixes=("_of_case", ""))
    for name in ("status", "message"):
        table[name] = table[name].fillna(table.pop(f"{name}_of_case"))
    table = table.fillna(dict.fromkeys(("source", "of", "provenance"), ""))
    table = add_metric_columns(table, rows, _ENERGY, [*CASE, "source", "of"])
    table = with_state(flagged(table, rows))
    is_ok, doubts = table["status"] == "ok", table["state"].replace("ok", "")
    sources = table["provenance"].where(is_ok, "").str.cat(doubts, sep=", ").str.strip(", ")
    return table.assign(state=sources)


def _profile_rows(rows: pd.DataFrame, metric: str) -> Iterator[tuple[dict, dict]]:
    """Yield a pair for each row of a metric: columns that name the row's case, and the row."""
    found = pick(of_experiment(rows, "energy"), metric)
    for row in found.to_dict("records"):
        line = {name: row[f"factor.{name}"] for name in ("name", "phase", "seq_len")}
        case = f"{line['phase'].replace('_', ' ')}, {int(line['seq_len'])} tokens"
        case += f", {line['name']}" if found["factor.name"].nunique() > 1 else ""
        yield {"run_id": row["run_id"], **line, "case": case}, row


@cached
def operation_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a table with the time (ms) and the bar segment of each operation in each layer."""
    lines = []
    for line, row in _profile_rows(rows, "layer_time"):
        for name, ms in row["details"].get("operations_ms", {}).items():
            operation = name if name in _PART_OF else "other"
            lines.append(line | {"operation": operation, "part": _PART_OF[operation], "ms": ms})
    return pd.DataFrame(lines)


@cached
def overhead_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a table of profiling overheads by mode, phase and shape, relative to the baseline."""
    lines = []
    for line, row in _profile_rows(rows, "overhead"):
        details = row["details"]
        shares = {"wall": (row["low"], row["estimate"], row["high"]), "cpu": details["cpu"]}
        for name, values in shares.items():
            for end, share in zip(("_low", "", "_high"), values, strict=True):
                line |= {f"{name}{end}": share, f"{name}_percent{end}": 100 * share}
        line |= {"mode": row["scope"].split()[-1], "n": row["n"]}
        calls = {name: details.get(name) for name in ("plain_ms", "detailed_ms", "detailed_every")}
        lines.append(line | calls | {"wall_busy": Flag.BUSY_MACHINE in row["flags"]})
    return pd.DataFrame(lines)
