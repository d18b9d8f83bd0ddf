"""One line per model and shape; the loss per step; how time and memory grow."""

from __future__ import annotations

from typing import Any

import pandas as pd

from nanolib.report.overview import cached, of_experiment, pick
from nanolib.report.tables import all_flags, joined, with_interval, worst
from nanolib.stats.intervals import TooFewSamples
from nanolib.stats.scaling import scaling_exponent

_FACTORS = ["name", "optimisation", "attention_type", "seq_len", "batch_size", "dtype", "device"]

MODEL_COLUMNS = {
    "name": "Model",
    "attention_type": "Attention",
    "seq_len": "n",
    "batch_size": "Batch",
    "dtype": "Type",
    "parameters": "Parameters",
    "footprint": "Weights, MiB",
    "inference": "Inference, ms [95 %]",
    "inference_predicted": "Predicted, ms",
    "inference_tokens_per_second": "Tokens/s",
    "inference_memory": "Peak, MiB",
    "prefill": "First token, ms [95 %]",
    "decode": "Per token, ms [95 %]",
    "decode_predicted": "Predicted, ms  ",
    "decode_p99": "p99, ms",
    "decode_tokens_per_second": "Generated tokens/s",
    "training_step": "Training step, ms [95 %]",
    "training_step_predicted": "Predicted, ms ",
    "training_to_inference": "Training / inference",
    "training_memory": "Training peak, MiB",
    "compile": "Compile, ms",
    "difference": "Logits against eager",
    "gradient_difference": "Gradient against eager",
    "status": "Status",
    "flags": "Flags",
}

SCALING_COLUMNS = {
    "name": "Model",
    "attention_type": "Attention",
    "dtype": "Type",
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
        Columns: the factors, `parameters`, `footprint` (MiB), `flops` (forward), `inference` and `training_step` with `low`,
        `high` (ms) and `predicted`, `forward`, `backward`, `optimizer_step` likewise, tokens per second and
        peak memory (MiB) of both,
        `prefill` (time to the first token) and `decode` (per token, ms) with `low`, `high`, `predicted`, `decode_p50`,
        `_p95`, `_p99` (ms), `decode_tokens_per_second`, `training_to_inference`, `difference` and `gradient_difference` (relative
        errors against eager, of an optimisation), `compile` (ms, of all its modes), `status`, `message`, `flags`.
    """
    rows = of_experiment(rows, "model")
    if "factor.mode" not in rows:
        return pd.DataFrame()
    shaped = rows[rows["factor.mode"].notna()]
    optimised = shaped.get("factor.optimisation", pd.Series(index=shaped.index, dtype=object))
    shaped = shaped.assign(**{"factor.optimisation": optimised.fillna("eager")})  # rows of earlier versions have none
    key = ["run_id", *(f"factor.{name}" for name in _FACTORS)]
    ends = shaped[shaped["metric"] == "case_time"]
    table = ends.groupby(key, sort=False).agg(status=("status", worst), message=("message", joined)).reset_index()
    for metric, scope, columns in (
        ("parameters", None, {"estimate": "parameters"}),
        ("footprint", None, {"estimate": "footprint"}),
        ("latency", "inference", with_interval("inference")),
        ("latency", "training_step", with_interval("training_step")),
        ("latency", "prefill", with_interval("prefill")),
        ("latency", "decode", with_interval("decode")),
        ("tokens_per_second", "decode", {"estimate": "decode_tokens_per_second"}),
        ("latency", "forward", with_interval("forward")),
        ("latency", "backward", with_interval("backward")),
        ("latency", "optimizer_step", with_interval("optimizer_step")),
        ("ceiling_share", "inference", {"estimate": "inference_share"}),
        ("ceiling_share", "training_step", {"estimate": "training_share"}),
        ("tokens_per_second", "inference", {"estimate": "inference_tokens_per_second"}),
        ("tokens_per_second", "training_step", {"estimate": "training_tokens_per_second"}),
        ("peak_memory", "inference", {"estimate": "inference_memory"}),
        ("peak_memory", "training_step", {"estimate": "training_memory"}),
    ):
        found = pick(shaped, metric, scope).drop_duplicates(key)[[*key, *columns]].rename(columns=columns)
        table = table.merge(found, on=key, how="left")
    for mode, column in (("inference", "difference"), ("training", "gradient_difference")):
        found = pick(shaped[shaped["factor.mode"] == mode], "relative_error", "against_eager").drop_duplicates(key)
        table = table.merge(found[[*key, "estimate"]].rename(columns={"estimate": column}), on=key, how="left")
    compiled = pick(shaped, "latency", "compile").groupby(key)["estimate"].sum().rename("compile")
    table = table.merge(compiled, on=key, how="left")
    tails = pick(shaped, "latency", "decode").drop_duplicates(key)
    tails = tails.assign(**{f"decode_{p}": [d[p] for d in tails["details"]] for p in ("p50", "p95", "p99")})
    table = table.merge(tails[[*key, "decode_p50", "decode_p95", "decode_p99"]], on=key, how="left")
    work = pick(shaped, "flops", "inference", "formula").drop_duplicates(key)[[*key, "estimate"]]
    table = table.merge(work.rename(columns={"estimate": "flops"}), on=key, how="left")
    table["training_to_inference"] = table["training_step"] / table["inference"]
    flags = shaped.groupby(key, sort=False)["flags"].agg(all_flags).reset_index()
    table = table.merge(flags, on=key, how="left")
    return table.rename(columns=lambda name: name.removeprefix("factor."))


@cached
def loss_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Loss per step: columns `series`, `step`, `loss` (nats per byte); `rows` must carry their samples."""
    found = pick(of_experiment(rows, "model"), "loss")
    parts = [
        pd.DataFrame(
            {
                "series": f"{row['factor.name']} ({row['factor.attention_type']}, {row['factor.dtype']})",
                "step": range(1, len(row["samples"]) + 1),
                "loss": row["samples"],
            }
        )
        for _, row in found.iterrows()
    ]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["series", "step", "loss"])


@cached
def scaling_table(rows: pd.DataFrame) -> pd.DataFrame:
    """How time and memory of each model grow with the sequence length.

    Returns:
        Columns: `name`, `attention_type`, `dtype`, `batch_size`, `quantity`, `exponent` with `exponent_low` and `exponent_high`,
        `meaning`; a series of fewer than three lengths has no exponent and says so.
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
            known = group[group[column].notna()]
            line = {"name": name, "attention_type": kind, "dtype": dtype, "batch_size": batch, "quantity": title}
            try:
                found = scaling_exponent(known["seq_len"], known[column])
            except TooFewSamples as error:
                lines.append(line | {"meaning": str(error)})
                continue
            numbers = {"exponent": found.estimate, "exponent_low": found.low, "exponent_high": found.high}
            lines.append(line | numbers | {"meaning": scaling_words(found.low, found.high)})
    return pd.DataFrame(lines)


_EXPONENT_SLACK = 0.02  # memory is exact, so its interval can be a point that misses a power by a constant's share


def scaling_words(low: float, high: float) -> str:
    """What the interval of an exponent says: which of constant, linear, quadratic it holds."""
    powers = ((0, "constant"), (1, "linear"), (2, "quadratic"))
    held = [word for power, word in powers if low - _EXPONENT_SLACK <= power <= high + _EXPONENT_SLACK]
    if len(held) == 1:
        return held[0]
    if held:
        return f"undecided between {', '.join(held[:-1])} and {held[-1]}; measure more lengths"
    for power, word in ((0, "falls"), (1, "below linear"), (2, "between linear and quadratic")):
        if high < power:
            return word
    return "above quadratic"
