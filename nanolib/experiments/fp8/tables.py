"""Build the tables of the FP8 notebook: speed and memory, and loss next to rounding errors."""

from typing import Any

import pandas as pd

from nanolib.experiments.model.tables import bytes_by_kind
from nanolib.measurement import LEARNING_STEPS, MemoryKind
from nanolib.numbers import MIB
from nanolib.report.overview import pick, table_of
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
    Column("weights", "Weights, MiB"),
    Column("optimizer", "Optimizer, MiB"),
    Column("activations", "Activations, MiB"),
    Column("state", "State"),
)
SPEED_COLUMNS = titles(_SPEED)
# Column → kinds of memory use.
_MEMORY = {
    "weights": (MemoryKind.WEIGHTS,),
    "optimizer": (MemoryKind.STATES,),
    "activations": (MemoryKind.SAVED, MemoryKind.TEMPORARIES),
}
_PARITY = (
    Column("recipe", "Recipe"),
    Column("verdict", "Verdict against bf16", _PARITY_METRIC, detail="verdict"),
    Column("difference", "Loss difference, nats/byte [95 %]", _PARITY_METRIC),
    Column("margin_nats", "Margin, nats/byte", _PARITY_METRIC, detail="margin_nats"),
    Column("control", "", _PARITY_METRIC, detail="control"),
    Column("not_finite", "", _PARITY_METRIC, detail="not_finite"),
    Column("loss", "Loss, nats/byte [95 %]", "loss"),
    Column("sqnr", "Signal-to-noise, dB"),
    Column("seeds", "Seeds"),
    Column("steps", "Steps"),
    Column("provenance", "Products", _PARITY_METRIC, detail="provenance"),
    Column("state", "State"),
)
PARITY_COLUMNS = titles(_PARITY)


@table_of("fp8", "precision")
def speed_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a table of models by precision and mode. `bound` is the largest possible speed-up.

    The memory columns are parts of the peak. `activations` are saved activations and temporaries.
    """
    factors = ["name", "mode", "precision", "compiled", "seq_len", "batch_size"]
    table = add_metric_columns(case_rows(rows, factors, "preset"), rows, _SPEED)
    model = table["name"] + ", " + table["mode"].str.replace("_", " ")
    compiled = table["compiled"].map({True: ", compiled"}).fillna("")
    memory = pick(rows, "peak_memory").set_index(list(CASE))["details"].map(_memory_parts)
    table = table.join(pd.DataFrame([*memory], memory.index, [*_MEMORY]), on=list(CASE))
    table = table.assign(what=model + compiled)
    return with_state(with_speed_ups(table, rows, table["mode"]))


def _memory_parts(details: dict[str, Any]) -> list[float | None]:
    """Return the size of the columns of `_MEMORY` at a peak, MiB, or None if it is not known."""
    if "parts" not in details:
        return [None] * len(_MEMORY)
    sizes = bytes_by_kind(details) / MIB
    return [float(sizes.reindex(kinds).sum()) for kinds in _MEMORY.values()]


@table_of("fp8", "recipe")
def parity_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a table of the trained recipes. `not_finite` is the reason for a missing loss.

    `sqnr` is the median signal-to-noise ratio of the products of all layers, dB.
    """
    rows = rows[(rows["metric"] != "loss") | (rows["scope"] == rows["factor.recipe"])]
    table = case_rows(rows, ["recipe", "seq_len", "seeds", "steps"], "recipe")
    table = add_metric_columns(table, rows, _PARITY)
    medians = pick(rows, "sqnr").groupby(list(CASE))["estimate"].median()
    table = table.join(medians.rename("sqnr"), on=list(CASE))
    is_short = (table["steps"] < LEARNING_STEPS) & table["verdict"].notna()
    table = table.assign(
        recipe=table["recipe"].str.replace("_", " "),
        control=table["control"].eq(True),
        verdict=table["verdict"].mask(is_short, "smoke test"),
    )
    return with_state(table)
