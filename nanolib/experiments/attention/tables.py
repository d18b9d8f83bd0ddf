"""Tables of attention cases, and of sparse patterns in a trained model."""

from __future__ import annotations

import pandas as pd

from nanolib.measurement import Flag
from nanolib.report.in_turns import with_speed_ups
from nanolib.report.overview import cached, of_experiment, rows_with_factor
from nanolib.report.tables import Column, add_metric_columns, case_rows, flagged, titles, with_state

_SHAPE = ["run_id", "seq_len", "batch_size", "dtype", "causal", "device"]
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
    Column("forward_share", "", "mfu", "forward", interval=True),
    Column("backward", "Backward, ms [95 %]", "latency", "backward", interval=True),
    Column("backward_share", "", "mfu", "backward"),
    Column("speed_up", "Speed-up, × [95 %]"),
    Column("peak_memory", "Peak, MiB", "peak_memory", "forward"),
    Column("peak_memory_backward", "", "peak_memory", "forward_backward"),
    Column("relative_error", "", "relative_error", "forward"),
    Column("state", "State"),
)
ATTENTION_COLUMNS = titles(_COLUMNS)
_QUALITY = (
    Column("pattern", "Pattern"),
    Column("sparsity", "Sparsity", "sparsity", interval=True),
    Column("dense_loss", "Dense loss, nats/byte [95 %]", "loss", "dense", interval=True),
    Column("replaced", "Replaced, Δ [95 %]", "loss_difference", "replaced", interval=True),
    Column("fine_tuned", "Fine-tuned, Δ [95 %]", "loss_difference", "fine_tuned", interval=True),
    Column("seeds", "Seeds"),
    Column("state", "State"),
)
QUALITY_COLUMNS = titles(_QUALITY)


@cached
def attention_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a line per attention case.

    Args:
        rows: Measurements of any experiments.

    Returns:
        Columns: the factors, those of `_COLUMNS`, `speed_up` (the smallest over a dense kernel
        timed in the same rounds, with the columns of `with_speed_ups`), `once` (ms of building a
        mask and of compiling), `speed_up_paid` (including `once`), `bound` (upper bound from
        skipped tiles), `mask_is_dense` (the mask removes nothing), `is_dense`, `unsteady` (a timing
        never settled), `message`.
    """
    rows = of_experiment(rows, "attention")
    if "factor.pattern" in rows:  # `quality_table` has these rows
        rows = rows[rows["factor.pattern"].isna()]
    table = case_rows(rows, ["name", *_SHAPE[1:]], "name")
    if table.empty:
        return table
    table = flagged(
        with_speed_ups(add_metric_columns(table, rows, _COLUMNS), rows, "forward"), rows
    )
    is_dense = table["name"].str.startswith(("dense", "flash_attn"))
    dense_tiles = table["block_sparsity"].where(is_dense)
    dense_tiles = dense_tiles.groupby([table[name] for name in _SHAPE]).transform("first")
    table = table.assign(
        is_dense=is_dense,
        mask_is_dense=(table["sparsity"] == 0) & ~is_dense,
        shape=table["batch_size"].astype(int).astype(str) + ", " + table["dtype"],
        bound=(1 - dense_tiles) / (1 - table["block_sparsity"]),
        unsteady=[Flag.NO_STEADY_STATE in flags for flags in table["flags"]],
    )
    once = table["mask_kept"].ne(
        False
    )  # each forward pass includes a mask that depends on the input
    for end in ("", "_low", "_high"):
        table[f"once{end}"] = table[f"mask{end}"].where(once).fillna(0) + table["compile"].fillna(0)
    for end, other in (("", ""), ("_low", "_high"), ("_high", "_low")):
        forward = table[f"forward{end}"]
        share = forward / (forward + table[f"once{other}"])
        table[f"speed_up_paid{end}"] = table[f"speed_up{end}"] * share
    return with_state(table)


@cached
def quality_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a line per pattern and target sparsity.

    Returns:
        Columns: `run_id`, `case_id`, `seq_len`, `pattern`, `target`, `sparsity` (of the mask),
        `dense_loss`, `replaced` and `fine_tuned` (loss above dense, nats per byte) each with `_low`
        and `_high`, `seeds`, `steps` of training, `status`, `message`.
    """
    rows = rows_with_factor(rows, "attention", "pattern")
    factors = ["pattern", "target", "seq_len", "seeds", "steps"]
    table = add_metric_columns(case_rows(rows, factors, "pattern"), rows, _QUALITY)
    table = table.drop(columns=[name for name in table if name.endswith(("_predicted", "_busy"))])
    return with_state(table)
