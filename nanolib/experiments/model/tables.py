"""Build the tables of the model notebook: by shape, memory part and batch size."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from nanolib.numbers import MIB
from nanolib.report.section import drop_missing
from nanolib.report.shared import table_of
from nanolib.report.tables import (
    Column,
    add_flags,
    add_metric_columns,
    add_speed_ups,
    add_state,
    pick,
    titles,
)

_MOST_PARTS = 8  # Largest number of parts of a peak in a table.
_FACTORS = ["name", "optimization", "attention_type", "seq_len", "batch_size", "dtype", "device"]
MODEL = ["run_id", "name", "attention_type", "dtype"]
SERIES = [*MODEL, "seq_len"]
CALLS = {
    "inference": "inference",
    "prefill": "reading the prompt",
    "decode": "next token",
    "training_step": "training step",
}
SEVERAL_BATCHES = "batches > 1"  # Condition of the lines that findings and charts compare.
SCOPES = ("inference", "decode", "training_step")  # Findings compare the times of these scopes.

_COLUMNS = (
    Column("name", "Model"),
    Column("seq_len", "Seq len"),
    Column("shape", "Attention, batch, dtype"),
    Column("parameters", "", "parameters"),
    Column("weight_memory", "", "weight_memory"),
    Column("flops_kept", "", "flops", "inference"),  # The first row of a scope has the kept FLOPs.
    Column("flops_full", "", "flops", "inference", "flop_counter"),
    Column("inference", "Inference, ms [95 %]", "latency", "inference"),
    Column("inference_share", "", "mfu", "inference"),
    Column("inference_tokens_per_second", "", "tokens_per_second", "inference"),
    Column("inference_memory", "Inference peak memory, MiB", "peak_memory", "inference"),
    Column("prefill", "First token, ms [95 %]", "latency", "prefill"),
    Column("decode", "Next token, ms [95 %]", "latency", "decode"),
    Column("decode_p99", "", "latency", "decode", detail="p99"),
    Column("total", "", "tokens_per_second", "decode"),
    Column("forward", "", "latency", "forward"),
    Column("backward", "", "latency", "backward"),
    Column("optimizer_step", "", "latency", "optimizer_step"),
    Column("training_step", "Training step, ms [95 %]", "latency", "training_step"),
    Column("training_share", "", "mfu", "training_step"),
    Column("training_memory", "Training peak memory, MiB", "peak_memory", "training_step"),
    Column("compile", "", "latency", "compile"),
    Column("difference", "", "relative_error", "against_eager", "logits"),
    Column("runs_ulp", "", "ulp_difference", "run_to_run"),
    Column("batch_ulp", "", "ulp_difference", "batch"),
    Column("decode_ulp", "", "ulp_difference", "decode"),
    Column("runs_agreement", "", "greedy_agreement", "run_to_run"),
    Column("batch_agreement", "", "greedy_agreement", "batch"),
    Column("decode_agreement", "", "greedy_agreement", "decode"),
    Column("state", "State"),
)
MODEL_COLUMNS = titles(_COLUMNS)
DETERMINISM_COLUMNS = {
    "name": "Model",
    "shape": "Attention, batch, dtype",
    "runs_ulp": "Difference between runs, ULP",
    "batch_ulp": "Difference between batch sizes, ULP",
    "decode_ulp": "Difference between prefill and decode, ULP",
    "agreement": "Greedy tokens that agree",
}
PART_COLUMNS = {
    "name": "Model",
    "call": "Call",
    "kind": "Memory kind",
    "module": "Module",
    "by": "Saved or allocated by",
    "mib": "Size, MiB",
    "share": "Share of the peak",
}


@table_of("model", "mode")
def model_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a table with a line per model and shape.

    Returns:
        Table with a column per factor, the columns in `_COLUMNS`, `flags` and `message`. The
        function `add_speed_ups` adds columns per scope, such as `decode_speed_up`. `total` and
        `user` are the tokens per second of all sequences and of one sequence. `batches` is the
        number of batch sizes at which the eager model generates.
    """
    key = ["run_id", *(f"factor.{name}" for name in _FACTORS)]
    ends = rows[rows["metric"] == "case_duration"].groupby(key, sort=False)
    table = ends.agg(status=("status", _worst), message=("message", _join_messages)).reset_index()
    table = add_metric_columns(table, rows, _COLUMNS, key)
    for scope in SCOPES:
        table = add_speed_ups(table, rows, scope, f"{scope}_speed_up", key)
    table = add_flags(table, rows, key).rename(columns=lambda name: name.removeprefix("factor."))
    table["shape"] = _shape(table)
    for end in ("", "_low", "_high"):
        table[f"user{end}"] = table[f"total{end}"] / table["batch_size"]
    generates = table[table["total"].notna() & (table["optimization"] == "eager")]
    table["batches"] = generates.groupby(SERIES)["batch_size"].transform("nunique")
    return add_state(table)


def _shape(table: pd.DataFrame) -> list[str]:
    return [
        f"{line.attention_type}, {line.batch_size:.0f}, {line.dtype}" for line in table.itertuples()
    ]


@table_of("model", "mode")
def peak_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a table with the largest memory peak of each eager model, if the parts are known.

    A peak of training replaces all other peaks of the same model.

    Returns:
        Table with peaks of training first, and the columns `run_id`, `name`, `attention_type`,
        `seq_len`, `batch_size`, `dtype`, `scope`, `estimate`, `predicted` (MiB), `parts` and
        `label`. Each part has a kind of memory, a module, an operation, a line of code and a size
        in bytes. `label` is the name with the attention type and the dtype if they vary.
    """
    found = pick(rows, "peak_memory").rename(columns=lambda name: name.removeprefix("factor."))
    found = found.assign(
        parts=[details.get("parts") for details in found["details"]],
        trains=found["scope"] == "training_step",
    )
    found = found[found["parts"].notna() & (found["optimization"] == "eager")]
    found = found.sort_values(["trains", "estimate"], ascending=False, kind="stable")
    found = found.drop_duplicates(MODEL[1:])
    label = found["name"]
    for name in MODEL[2:]:
        if found[name].nunique() > 1:
            label = label + ", " + found[name]
    return found.assign(label=label)


def part_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a table of the largest parts of each model's largest memory peak.

    Returns:
        Table with the columns `run_id`, `model` and `seq_len`, and the columns of `PART_COLUMNS`.
    """
    tables = [pd.DataFrame()]
    for _, row in peak_table(rows).iterrows():
        parts = largest_parts(row["parts"])
        parts = parts.assign(
            run_id=row["run_id"],
            seq_len=row["seq_len"],
            name=row["label"],
            model=row["name"],
            call=call_of(row),
            mib=parts["size"] / MIB,
        )
        tables.append(parts)
    return pd.concat(tables, ignore_index=True)


def largest_parts(parts: list[list[Any]]) -> pd.DataFrame:
    """Return a table of the largest parts of a memory peak.

    Args:
        parts: Kind of memory, module, operation, line of code and bytes of each part.

    Returns:
        Table with the columns `kind`, `module`, `by` (the line or the operation), `size` (bytes)
        and `share` of the peak.
    """
    table = pd.DataFrame(parts, columns=["kind", "module", "operation", "line", "size"])
    operation = table["operation"].str.removeprefix("aten::")
    table["by"] = table["line"].where(table["line"] != "", operation)
    table["share"] = (table["size"] / table["size"].sum()).map("{:.0%}".format)
    columns = ["kind", "module", "by", "size", "share"]
    return table.nlargest(_MOST_PARTS, "size")[columns].replace("", "—")


def determinism_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a table with a line per model whose logits were computed in several ways.

    `agreement` is the lowest share of equal greedy tokens. The comparison splits each sequence of
    the case in two, so the table has twice the batch size and half of the sequence length.
    """
    table = drop_missing(model_table(rows), "runs_ulp")
    if table.empty:
        return table
    shares = table.filter(regex="_agreement$").min(axis=1)
    table = table.assign(
        agreement=shares.map("{:.0%}".format),
        batch_size=2 * table["batch_size"],
        seq_len=table["seq_len"] // 2,
    )
    return table.assign(shape=_shape(table))


def call_of(row: pd.Series) -> str:
    """Describe a call with its sequence length, such as `training step at 128 tokens`."""
    return f"{CALLS[row['scope']]} at {int(row['seq_len'])} tokens"


def bytes_by_kind(row: Mapping[str, Any]) -> pd.Series:
    """Return the bytes of the `parts` of a memory peak by `MemoryKind`, in descending order."""
    return pd.DataFrame(row["parts"]).groupby(0, sort=False)[4].sum().sort_values(ascending=False)


def _worst(statuses: pd.Series) -> str:
    """Return the first status that is not `ok`, or `ok` if there is none."""
    return next(iter(statuses[statuses != "ok"]), "ok")


def _join_messages(messages: pd.Series) -> str:
    """Join the distinct messages on one line."""
    return "; ".join(dict.fromkeys(message for message in messages if message))
