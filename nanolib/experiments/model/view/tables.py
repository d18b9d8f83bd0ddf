"""One line per model and shape; the loss per step; how time and memory grow."""

from __future__ import annotations

from typing import Any

import pandas as pd

from nanolib.report.in_turns import with_speed_ups
from nanolib.report.overview import cached, of_experiment, pick
from nanolib.report.tables import Column, filled, flagged, joined, known, titles, with_state, worst
from nanolib.stats.intervals import TooFewSamples
from nanolib.stats.scaling import scaling_exponent

_FACTORS = ["name", "optimisation", "attention_type", "seq_len", "batch_size", "dtype", "device"]

_COLUMNS = (
    Column("name", "Model"),
    Column("seq_len", "Seq len"),
    Column("shape", "Attention, batch, dtype"),
    Column("parameters", "", "parameters"),
    Column("footprint", "", "footprint"),
    Column("flops", "", "flops", "inference", "formula"),
    Column("inference", "Inference, ms [95 %]", "latency", "inference", interval=True),
    Column("inference_share", "", "ceiling_share", "inference"),
    Column("inference_tokens_per_second", "", "tokens_per_second", "inference"),
    Column("inference_memory", "Peak reading, MiB", "peak_memory", "inference"),
    Column("prefill", "First token, ms [95 %]", "latency", "prefill", interval=True),
    Column("decode", "Next token, ms [95 %]", "latency", "decode", interval=True),
    Column("decode_memory", "", "peak_memory", "decode", interval=True),
    Column("decode_tokens_per_second", "", "tokens_per_second", "decode"),
    Column("forward", "", "latency", "forward", interval=True),
    Column("backward", "", "latency", "backward", interval=True),
    Column("optimizer_step", "", "latency", "optimizer_step", interval=True),
    Column("training_step", "Training step, ms [95 %]", "latency", "training_step", interval=True),
    Column("training_share", "", "ceiling_share", "training_step"),
    Column("training_tokens_per_second", "", "tokens_per_second", "training_step"),
    Column("training_memory", "Peak training, MiB", "peak_memory", "training_step"),
    Column("state", "State"),
)
MODEL_COLUMNS = titles(_COLUMNS)
SCOPES = ("inference", "training_step", "decode")  # whose times of one shape are ranked

SCALING_COLUMNS = {
    "name": "Model",
    "attention_type": "Attention",
    "dtype": "Dtype",
    "batch_size": "Batch",
    "quantity": "Quantity",
    "exponent": "Exponent [95 %]",
    "meaning": "Meaning",
}


@cached
def model_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per model and shape: inference beside training.

    Args:
        rows: Measurements of any experiments.

    Returns:
        Columns: the factors, those of `_COLUMNS` (`prefill`: time to the first token; `difference` and `gradient_difference`:
        relative errors of an optimisation against eager; `compile`: of all its modes), `decode_p50`, `decode_p95`, `message`, and
        for each of `SCOPES` what `with_speed_ups` gives, such as `decode_speed_up`.
    """
    rows = of_experiment(rows, "model")
    if "factor.mode" not in rows:
        return pd.DataFrame()
    shaped = rows[rows["factor.mode"].notna()]
    key = ["run_id", *(f"factor.{name}" for name in _FACTORS)]
    ends = shaped[shaped["metric"] == "case_time"]
    table = (
        ends.groupby(key, sort=False)
        .agg(status=("status", worst), message=("message", joined))
        .reset_index()
    )
    table = filled(table, shaped, _COLUMNS, key)
    for mode, column in (("inference", "difference"), ("training", "gradient_difference")):
        against = Column(column, "", "relative_error", "against_eager")
        table = filled(table, shaped[shaped["factor.mode"] == mode], [against], key)
    compiled = pick(shaped, "latency", "compile").groupby(key)["estimate"].sum().rename("compile")
    table = table.merge(compiled, on=key, how="left")
    tails = [
        Column(f"decode_{p}", "", "latency", "decode", detail=p) for p in ("p50", "p95", "p99")
    ]
    table = filled(table, shaped, tails, key)
    for scope in SCOPES:
        table = with_speed_ups(table, shaped, scope, f"{scope}_speed_up", key)
    table["training_to_inference"] = table["training_step"] / table["inference"]
    table = flagged(table, shaped, key).rename(columns=lambda name: name.removeprefix("factor."))
    parts = [table["attention_type"], table["batch_size"].astype(int).astype(str), table["dtype"]]
    return with_state(table.assign(shape=[", ".join(part) for part in zip(*parts, strict=True)]))


@cached
def loss_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Loss per step: columns `series`, `step`, `loss` (nats per byte), `run_id`, `name`, `seq_len`; `rows` must carry samples."""
    found = pick(of_experiment(rows, "model"), "loss")
    parts = [
        pd.DataFrame(
            {
                "series": f"{row['factor.name']} ({row['factor.attention_type']}, {row['factor.dtype']})",
                "step": range(1, len(row["samples"]) + 1),
                "loss": row["samples"],
                "run_id": row["run_id"],
                "name": row["factor.name"],
                "seq_len": row.get("factor.seq_len"),
            }
        )
        for _, row in found.iterrows()
    ]
    return (
        pd.concat(parts, ignore_index=True)
        if parts
        else pd.DataFrame(columns=["series", "step", "loss"])
    )


@cached
def scaling_table(rows: pd.DataFrame) -> pd.DataFrame:
    """How time and memory of each model grow with the sequence length.

    Returns:
        Columns: `name`, `attention_type`, `dtype`, `batch_size`, `quantity`, `lengths` (how many), `exponent` with `exponent_low`
        and `exponent_high`, `meaning`; a series of fewer than four lengths has no exponent and says so.
    """
    table = model_table(rows)
    lines: list[dict[str, Any]] = []
    quantities = {
        "inference time": "inference",
        "training time": "training_step",
        "inference memory": "inference_memory",
        "training memory": "training_memory",
    }
    if table.empty:
        return pd.DataFrame()
    for (name, kind, dtype, batch), group in table.groupby(
        ["name", "attention_type", "dtype", "batch_size"], sort=False
    ):
        for title, column in quantities.items():
            had = known(group, column)
            line = {
                "name": name,
                "attention_type": kind,
                "dtype": dtype,
                "batch_size": batch,
                "quantity": title,
            }
            try:
                found = scaling_exponent(had["seq_len"], had[column])
            except TooFewSamples as error:
                lines.append(line | {"meaning": str(error)})
                continue
            numbers = {
                "lengths": had["seq_len"].nunique(),
                "exponent": found.estimate,
                "exponent_low": found.low,
                "exponent_high": found.high,
            }
            lines.append(line | numbers | {"meaning": scaling_words(found.low, found.high)})
    return pd.DataFrame(lines)


_EXPONENT_SLACK = 0.02  # memory is exact, so its interval can be a point that misses a power by a constant's share


def scaling_words(low: float, high: float) -> str:
    """What the interval of an exponent says: which of constant, linear, quadratic it holds."""
    powers = ((0, "constant"), (1, "linear"), (2, "quadratic"))
    held = [
        word for power, word in powers if low - _EXPONENT_SLACK <= power <= high + _EXPONENT_SLACK
    ]
    if len(held) == 1:
        return held[0]
    if held:
        return f"undecided between {', '.join(held[:-1])} and {held[-1]}; measure more lengths"
    for power, word in ((0, "falls"), (1, "below linear"), (2, "between linear and quadratic")):
        if high < power:
            return word
    return "above quadratic"
