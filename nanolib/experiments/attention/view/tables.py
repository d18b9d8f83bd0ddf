"""One line per attention case, with intervals, labels and what went wrong."""

from __future__ import annotations

import pandas as pd

from nanolib.measurement import Flag
from nanolib.report.in_turns import with_speed_ups
from nanolib.report.overview import cached, of_experiment
from nanolib.report.tables import Column, base, filled, flagged, titles, with_state

_FACTORS = ["name", "seq_len", "batch_size", "dtype", "causal", "device"]

_COLUMNS = (
    Column("name", "Attention"),
    Column("seq_len", "Seq len"),
    Column("shape", "Batch, dtype"),
    Column("sparsity", "Sparsity", "sparsity"),
    Column("block_sparsity", "", "block_sparsity"),
    Column("mask", "Mask, ms [95 %]", "latency", "mask", interval=True),
    Column("mask_kept", "", "latency", "mask", detail="kept"),
    Column("compile", "", "latency", "compile"),
    Column("flops", "", "flops", "forward", "formula"),
    Column("forward", "Forward, ms [95 %]", "latency", "forward", interval=True),
    Column("cold", "", "latency", "forward, cold", interval=True),
    Column("forward_share", "", "ceiling_share", "forward", interval=True),
    Column("backward", "Backward, ms [95 %]", "latency", "backward", interval=True),
    Column("backward_share", "", "ceiling_share", "backward"),
    Column("speed_up", "Speed-up, × [95 %]"),
    Column("peak_memory", "Peak, MiB", "peak_memory", "forward"),
    Column("peak_memory_backward", "", "peak_memory", "forward_backward"),
    Column("relative_error", "", "relative_error", "forward"),
    Column("state", "State"),
)
ATTENTION_COLUMNS = titles(_COLUMNS)


@cached
def attention_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per attention case.

    Args:
        rows: Measurements of any experiments.

    Returns:
        Columns: the factors, those of `_COLUMNS`, `speed_up` (the smallest over any dense kernel timed in the same rounds, with
        what `with_speed_ups` puts beside it), `once` (ms of a mask that is built once, and of compiling), `speed_up_paid` (with
        `once` in it), `bound` (what its baseline would gain by skipping the same tiles), `not_sparse` (its mask removes nothing),
        `is_dense`, `unsteady` (a timing never settled), `message`.
    """
    rows = of_experiment(rows, "attention")
    if "factor.pattern" in rows:  # what sparsity does to a model has a table of its own
        rows = rows[rows["factor.pattern"].isna()]
    table = base(rows, _FACTORS, "name")
    if table.empty:
        return table
    table = with_speed_ups(filled(table, rows, _COLUMNS), rows, "forward")
    table["is_dense"] = table["name"].str.startswith(("dense", "flash_attn"))
    table["not_sparse"] = (table["sparsity"] == 0) & ~table["is_dense"]
    table["shape"] = table["batch_size"].astype(int).astype(str) + ", " + table["dtype"]
    once = table["mask_kept"].ne(False)  # otherwise the input decides, and it is in each forward
    for end in ("", "_low", "_high"):
        table[f"once{end}"] = table[f"mask{end}"].where(once).fillna(0) + table["compile"].fillna(0)
    for end, other in (("", ""), ("_low", "_high"), ("_high", "_low")):
        forward = table[f"forward{end}"]
        share = forward / (forward + table[f"once{other}"])
        table[f"speed_up_paid{end}"] = table[f"speed_up{end}"] * share
    table = flagged(_with_bound(table), rows)
    table["unsteady"] = [Flag.NO_STEADY_STATE in flags for flags in table["flags"]]
    return with_state(table)


def _with_bound(table: pd.DataFrame) -> pd.DataFrame:
    shape = ["run_id", "seq_len", "batch_size", "dtype", "causal", "device"]
    dense = table[table["is_dense"]].drop_duplicates([*shape, "name"])
    dense = dense[[*shape, "name", "block_sparsity"]]
    dense = dense.rename(columns={"name": "speed_up_baseline", "block_sparsity": "tiles"})
    table = table.merge(dense, on=[*shape, "speed_up_baseline"], how="left")
    table["bound"] = (1 - table["tiles"]) / (1 - table["block_sparsity"])
    return table.drop(columns="tiles")
