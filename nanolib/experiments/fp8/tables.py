"""Build the tables of the FP8 notebook: speed and memory, loss, and rounding errors."""

import pandas as pd

from nanolib.measurement import LEARNING_STEPS
from nanolib.report.overview import pick, table_of
from nanolib.report.plot import links
from nanolib.report.tables import (
    CASE,
    Column,
    add_metric_columns,
    case_rows,
    titles,
    with_speed_ups,
    with_state,
)

_PARITY_METRIC = "loss_difference_from_bf16"
_SPEED = (
    Column("what", "Model"),
    Column("precision", "Precision"),
    Column("latency", "Latency, ms [95 %]", "latency"),
    Column("parameters", "", "latency", detail="parameters"),
    Column("speed_up", "Speed-up over bf16, × [95 %]"),
    Column("bound", "", "converted_share", detail="amdahl_bound"),
    Column("tokens_per_second", "Tokens/s", "tokens_per_second"),
    Column("mfu", "Share of the peak rate", "mfu"),
    Column("weights", "Weights, MiB", "memory_part", "weights"),
    Column("gradients", "", "memory_part", "gradients"),
    Column("optimizer", "Optimizer, MiB", "memory_part", "optimizer"),
    Column("activations", "Activations, MiB", "memory_part", "activations"),
    Column("state", "State"),
)
SPEED_COLUMNS = titles(_SPEED)
_PARITY = (
    Column("recipe", "Recipe"),
    Column("verdict", "Verdict against bf16", _PARITY_METRIC, detail="verdict"),
    Column("difference", "Loss difference, nats/byte [95 %]", _PARITY_METRIC),
    Column("margin_nats", "Margin, nats/byte", _PARITY_METRIC, detail="margin_nats"),
    Column("control", "", _PARITY_METRIC, detail="control"),
    Column("loss", "Loss, nats/byte [95 %]", "loss"),
    Column("seeds", "Seeds"),
    Column("steps", "Steps"),
    Column("provenance", "Products"),
    Column("state", "State"),
)
PARITY_COLUMNS = titles(_PARITY)


@table_of("fp8", "precision")
def speed_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a table of models by precision and mode. `bound` is the largest possible speed-up."""
    factors = ["name", "mode", "precision", "compiled", "seq_len", "batch_size"]
    table = add_metric_columns(case_rows(rows, factors, "preset"), rows, _SPEED)
    model = table["name"] + ", " + table["mode"].str.replace("_", " ")
    compiled = table["compiled"].map({True: ", compiled"}).fillna("")
    table = table.assign(what=model + compiled)
    return with_state(with_speed_ups(table, rows, table["mode"]))


@table_of("fp8", "recipe")
def parity_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a table of the trained recipes. `not_finite` is the reason for a missing loss."""
    rows = rows[(rows["metric"] != "loss") | (rows["scope"] == rows["factor.recipe"])]
    table = case_rows(rows, ["recipe", "seq_len", "seeds", "steps"], "recipe")
    table = add_metric_columns(table, rows, _PARITY)
    pairs = rows[rows["metric"] == _PARITY_METRIC].rename(columns={"message": "not_finite"})
    pairs = pairs[[*CASE, "provenance", "not_finite"]]
    table = table.merge(pairs, on=list(CASE), how="left").fillna({"not_finite": ""})
    smoke = (table["steps"] < LEARNING_STEPS) & table["verdict"].notna()
    return with_state(table.assign(verdict=table["verdict"].mask(smoke, "smoke test")))


@table_of("fp8", "variant")
def numerics_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a table of casts by layer and product. `sqnr` is the signal-to-noise ratio in dB."""
    found = pick(rows, "sqnr")
    if found.empty:
        return pd.DataFrame()
    columns = {"factor.variant": "variant", "estimate": "sqnr"}
    table = found.rename(columns=columns)[[*columns.values()]]
    note = found["scope"].str.replace(" ", ", ").str.replace("_", " ")
    return table.assign(note=note, **links(found))
