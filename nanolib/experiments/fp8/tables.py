"""Tables of FP8: speed and memory, loss next to bf16, and the error of emulated products."""

from __future__ import annotations

import pandas as pd

from nanolib.measurement import LEARNING_STEPS
from nanolib.report.in_turns import with_speed_ups
from nanolib.report.overview import cached, pick, rows_with_factor
from nanolib.report.plot import links
from nanolib.report.tables import CASE, Column, add_metric_columns, case_rows, titles, with_state

_PARITY_METRIC = "loss_difference_from_bf16"
_SPEED = (
    Column("what", "Model"),
    Column("precision", "Precision"),
    Column("latency", "Step, ms [95 %]", "latency", interval=True),
    Column("parameters", "", "latency", detail="parameters"),
    Column("speed_up", "Speed-up over bf16, × [95 %]"),
    Column("bound", "", "converted_share", detail="amdahl_bound"),
    Column("tokens_per_second", "Tokens/s", "tokens_per_second"),
    Column("mfu", "Share of the peak", "mfu"),
    Column("weights", "Weights, MiB", "memory_part", "weights"),
    Column("gradients", "", "memory_part", "gradients"),
    Column("optimizer", "Optimizer, MiB", "memory_part", "optimizer"),
    Column("activations", "Activations, MiB", "memory_part", "activations"),
    Column("state", "State"),
)
SPEED_COLUMNS = titles(_SPEED)
_PARITY = (
    Column("recipe", "Recipe"),
    Column("verdict", "Against bf16", _PARITY_METRIC, detail="verdict"),
    Column("difference", "Loss above bf16, nats/byte [95 %]", _PARITY_METRIC, interval=True),
    Column("margin_nats", "Margin, nats", _PARITY_METRIC, detail="margin_nats"),
    Column("control", "", _PARITY_METRIC, detail="control"),
    Column("loss", "Loss, nats/byte [95 %]", "loss", interval=True),
    Column("seeds", "Seeds"),
    Column("steps", "Steps"),
    Column("provenance", "Products"),
    Column("state", "State"),
)
PARITY_COLUMNS = titles(_PARITY)


@cached
def speed_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a line per model, precision and mode, with its speed-up over bf16 of the same run.

    Returns:
        Columns: `run_id`, `seq_len`, `batch_size`, those of `_SPEED` (`bound`: upper bound by
        Amdahl's law), and those of `with_speed_ups`.
    """
    rows = rows_with_factor(rows, "fp8", "precision")
    factors = ["name", "mode", "precision", "compiled", "seq_len", "batch_size"]
    table = add_metric_columns(case_rows(rows, factors, "preset"), rows, _SPEED)
    if table.empty:
        return table
    model = table["name"] + ", " + table["mode"].str.replace("_", " ")
    compiled = table["compiled"].map({True: ", compiled"}).fillna("")
    table = table.assign(what=model + compiled)
    return with_state(with_speed_ups(table, rows, table["mode"]))


@cached
def parity_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a line per recipe that was trained next to bf16.

    Returns:
        Columns: `run_id`, `case_id`, `seq_len`, `recipe`, `control`, `verdict`, `difference` and
        `loss` (nats per byte) each with `_low` and `_high`, `margin_nats`, `seeds`, `steps`,
        `provenance`, `not_finite` (why there is no difference), `status`, `message`.
    """
    rows = rows_with_factor(rows, "fp8", "recipe")
    if rows.empty:
        return pd.DataFrame()
    rows = rows[(rows["metric"] != "loss") | (rows["scope"] == rows["factor.recipe"])]
    table = add_metric_columns(
        case_rows(rows, ["recipe", "seq_len", "seeds", "steps"], "recipe"), rows, _PARITY
    )
    pairs = rows[rows["metric"] == _PARITY_METRIC].rename(columns={"message": "not_finite"})
    pairs = pairs[[*CASE, "provenance", "not_finite"]]
    table = table.merge(pairs, on=list(CASE), how="left").fillna({"not_finite": ""})
    smoke = (table["steps"] < LEARNING_STEPS) & table["verdict"].notna()
    return with_state(table.assign(verdict=table["verdict"].mask(smoke, "smoke test")))


def numerics_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a line per cast, layer and product, with the signal to noise of the product.

    Returns:
        Columns: `variant`, `layer`, `product`, `sqnr` (dB), and those of `links`.
    """
    found = pick(rows_with_factor(rows, "fp8", "variant"), "sqnr")
    if found.empty:
        return pd.DataFrame()
    parts = found["scope"].str.rsplit(" ", n=1, expand=True)
    columns = {"factor.variant": "variant", "estimate": "sqnr"}
    table = found.rename(columns=columns)[[*columns.values()]]
    return table.assign(layer=parts[0], product=parts[1], **links(found))
