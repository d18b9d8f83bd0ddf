"""One line per attention case, with intervals, labels and what went wrong."""

from __future__ import annotations

import pandas as pd

from nanolib.measurement import Flag
from nanolib.report.overview import cached, of_experiment, pick
from nanolib.report.tables import all_flags, base, join, with_interval

_FACTORS = ["name", "seq_len", "batch_size", "dtype", "causal", "device"]

ATTENTION_COLUMNS = {
    "name": "Kind",
    "seq_len": "n",
    "batch_size": "Batch",
    "dtype": "Type",
    "sparsity": "Connections removed",
    "block_sparsity": "Tiles skipped",
    "mask": "Mask, ms",
    "compile": "Compile, ms",
    "forward": "Forward, ms [95 %]",
    "paid": "Total incl. mask, ms",
    "forward_predicted": "Predicted, ms",
    "forward_share": "Share of ceiling",
    "backward": "Backward, ms [95 %]",
    "peak_memory": "Peak forward, MiB",
    "relative_error": "Error to float64",
    "error_to_dense": "Difference from dense",
    "cosine": "Cosine with dense",
    "speed_up": "Speed-up [range]",
    "bound": "Bound",
    "status": "Status",
    "flags": "Flags",
}


@cached
def attention_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per attention case.

    Args:
        rows: Measurements of any experiments.

    Returns:
        Columns: the factors, `sparsity`, `block_sparsity`, `flops`, `mask` and `compile` (ms, paid once), for forward and backward
        `latency` with `low` and `high` (ms), `predicted` and `share` (of the measured ceiling), `paid` (ms: mask, compile and one
        forward), `peak_memory` (MiB), `relative_error`, `error_to_dense` and `cosine` (on random inputs), `speed_up` over dense
        with `speed_up_low` and `speed_up_high`, its `bound`, `status`, `message`, `flags`.
    """
    rows = of_experiment(rows, "attention")
    if "factor.pattern" in rows:  # what sparsity does to a model has a table of its own
        rows = rows[rows["factor.pattern"].isna()]
    table = base(rows, _FACTORS, "name")
    if table.empty:
        return table
    for metric, scope, method, columns in (
        ("sparsity", None, None, {"estimate": "sparsity"}),
        ("block_sparsity", None, None, {"estimate": "block_sparsity"}),
        ("flops", "forward", "formula", {"estimate": "flops"}),
        ("latency", "mask", None, {"estimate": "mask"}),
        ("latency", "compile", None, {"estimate": "compile"}),
        ("latency", "forward", None, with_interval("forward")),
        ("ceiling_share", "forward", None, {"estimate": "forward_share"}),
        ("latency", "backward", None, with_interval("backward")),
        ("ceiling_share", "backward", None, {"estimate": "backward_share"}),
        ("peak_memory", "forward", None, {"estimate": "peak_memory"}),
        ("peak_memory", "forward_backward", None, {"estimate": "peak_memory_backward"}),
        ("relative_error", "forward", None, {"estimate": "relative_error"}),
        ("relative_error", "against_dense", None, {"estimate": "error_to_dense"}),
        ("cosine", None, None, {"estimate": "cosine"}),
    ):
        table = join(table, pick(rows, metric, scope, method), columns)
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
    columns = {"name": "baseline", "forward": "b", "forward_low": "b_low", "forward_high": "b_high"}
    dense = dense.drop_duplicates(shape)[[*shape, *columns, "fastest", "block_sparsity"]]
    table = table.merge(dense.rename(columns=columns | {"block_sparsity": "b_tiles"}), on=shape, how="left")
    table["speed_up"] = table["b"] / table["forward"]
    table["speed_up_low"] = table["b_low"] / table["forward_high"]
    table["speed_up_high"] = table["b_high"] / table["forward_low"]
    table["bound"] = table["b"] / table["fastest"] * (1 - table["b_tiles"]) / (1 - table["block_sparsity"])
    return table.drop(columns=["b", "b_low", "b_high", "b_tiles", "fastest"])


def _with_flags(table: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    flags = rows.groupby(["run_id", "case_id"], sort=False)["flags"].agg(all_flags).reset_index()
    table = table.merge(flags, on=["run_id", "case_id"], how="left")
    above = (table["speed_up_low"] > table["bound"]) & ~table["name"].str.startswith("dense")
    table["flags"] = [
        [*flags, Flag.ABOVE_BOUND.value] if is_above else flags
        for flags, is_above in zip(table["flags"], above, strict=True)
    ]
    return table
