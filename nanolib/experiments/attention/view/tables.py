"""One line per attention case, with intervals, labels and what went wrong."""

from __future__ import annotations

import pandas as pd

from nanolib.measurement import Flag
from nanolib.report.overview import cached, of_experiment
from nanolib.report.tables import Column, base, filled, flagged, ratios, titles

_FACTORS = ["name", "seq_len", "batch_size", "dtype", "causal", "device"]

_COLUMNS = (
    Column("name", "Kind"),
    Column("seq_len", "n"),
    Column("batch_size", "Batch"),
    Column("dtype", "Type"),
    Column("sparsity_predicted", "Asked to remove"),
    Column("sparsity", "Connections removed", "sparsity"),
    Column("block_sparsity", "Tiles skipped", "block_sparsity"),
    Column("mask", "Mask, ms", "latency", "mask"),
    Column("compile", "Compile, ms", "latency", "compile"),
    Column("flops", "", "flops", "forward", "formula"),
    Column("forward", "Forward, ms [95 %]", "latency", "forward", interval=True),
    Column("cold", "Forward, cold cache, ms [95 %]", "latency", "forward, cold", interval=True),
    Column("paid", "Total incl. mask, ms"),
    Column("forward_predicted", "Predicted, ms"),
    Column("forward_share", "Share of ceiling", "ceiling_share", "forward"),
    Column("backward", "Backward, ms [95 %]", "latency", "backward", interval=True),
    Column("backward_share", "", "ceiling_share", "backward"),
    Column("peak_memory", "Peak forward, MiB", "peak_memory", "forward"),
    Column("peak_memory_backward", "", "peak_memory", "forward_backward"),
    Column("relative_error", "Error to float64", "relative_error", "forward"),
    Column("error_to_dense", "Difference from dense", "relative_error", "against_dense"),
    Column("cosine", "Cosine with dense", "cosine"),
    Column("speed_up", "Speed-up [range]"),
    Column("bound", "Bound"),
    Column("status", "Status"),
    Column("flags", "Flags"),
)
ATTENTION_COLUMNS = titles(_COLUMNS)


@cached("attention")
def attention_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per attention case.

    Args:
        rows: Measurements of any experiments.

    Returns:
        Columns: the factors, those of `_COLUMNS` (`paid`: ms of mask, compile and one forward; `error_to_dense` and `cosine`: on
        random inputs), `baseline` and its time `dense` (ms), `speed_up` over it, each with `_low` and `_high`, its `bound`,
        `above_bound`, `not_sparse` (its mask removes nothing), `message`.
    """
    rows = of_experiment(rows, "attention")
    if "factor.pattern" in rows:  # what sparsity does to a model has a table of its own
        rows = rows[rows["factor.pattern"].isna()]
    table = base(rows, _FACTORS, "name")
    if table.empty:
        return table
    table = filled(table, rows, _COLUMNS)
    table["paid"] = table["mask"].fillna(0) + table["compile"].fillna(0) + table["forward"]
    return _with_flags(_with_speed_up(table), rows)


def _with_speed_up(table: pd.DataFrame) -> pd.DataFrame:
    """Forward speed-up over the dense baseline of the same run and shape.

    The baseline is `dense (flash)` where it was measured, else the first dense kind. The two were timed one after the other, so the
    interval is the widest that both allow and drift is not controlled. The bound is what the fastest dense kernel would gain by
    skipping the same tiles.
    """
    shape = ["run_id", "seq_len", "batch_size", "dtype", "causal", "device"]
    dense = table[table["name"].str.startswith("dense") & table["forward"].notna()]
    dense = dense.assign(order=(dense["name"] != "dense (flash)").astype(int)).sort_values("order", kind="stable")
    dense["fastest"] = dense.groupby(shape, dropna=False)["forward"].transform("min")
    columns = {"name": "baseline", "forward": "dense", "forward_low": "dense_low", "forward_high": "dense_high"}
    dense = dense.drop_duplicates(shape)[[*shape, *columns, "fastest", "block_sparsity"]]
    table = table.merge(dense.rename(columns=columns | {"block_sparsity": "tiles"}), on=shape, how="left")
    table = table.assign(**ratios("speed_up", table, "dense", "forward"))
    table["bound"] = table["dense"] / table["fastest"] * (1 - table["tiles"]) / (1 - table["block_sparsity"])
    return table.drop(columns=["tiles", "fastest"])


def _with_flags(table: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    table = flagged(table, rows)
    kind = ~table["name"].str.startswith(("dense", "flash_attn"))
    table["above_bound"] = (table["speed_up_low"] > table["bound"]) & kind
    table["not_sparse"] = (table["sparsity"] == 0) & kind  # rows of earlier versions have no flag
    for name, flag in (("above_bound", Flag.ABOVE_BOUND), ("not_sparse", Flag.NOT_SPARSE)):
        table["flags"] = [
            [*flags, flag.value] if is_so and flag.value not in flags else flags
            for flags, is_so in zip(table["flags"], table[name], strict=True)
        ]
    return table
