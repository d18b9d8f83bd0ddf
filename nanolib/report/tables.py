"""Tables from rows: one line per case, with intervals, labels and what went wrong."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd

from nanolib.measurement import Flag, format_with_interval
from nanolib.report.overview import made_once, of_experiment, pick
from nanolib.stats.intervals import TooFewSamples
from nanolib.stats.scaling import scaling_exponent

ATTENTION_FACTORS = ["name", "seq_len", "batch_size", "dtype", "causal", "device"]
MODEL_FACTORS = ["name", "optimisation", "attention_type", "seq_len", "batch_size", "dtype", "device"]

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
    "paid": "Once in all, ms",
    "forward_predicted": "Predicted, ms",
    "forward_share": "Share of ceiling",
    "backward": "Backward, ms [95 %]",
    "peak_memory": "Peak forward, MiB",
    "relative_error": "Error to float64",
    "error_to_dense": "Away from dense",
    "cosine": "Cosine with dense",
    "speed_up": "Speed-up [range]",
    "bound": "Bound",
    "status": "Status",
    "flags": "Flags",
}
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
WARMUP_COLUMNS = {
    "direction": "Direction",
    "warmup_steps": "Warm-up steps",
    "mean": "Mean, ms",
    "sd": "SD, ms",
    "cv": "CV",
    "median": "Median, ms",
    "difference": "Mean against 5 steps",
    "status": "Status",
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


@made_once
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
    table = _base(rows, ATTENTION_FACTORS, "name")
    if table.empty:
        return table
    for metric, scope, method, columns in (
        ("sparsity", None, None, {"estimate": "sparsity"}),
        ("block_sparsity", None, None, {"estimate": "block_sparsity"}),
        ("flops", "forward", "formula", {"estimate": "flops"}),
        ("latency", "mask", None, {"estimate": "mask"}),
        ("latency", "compile", None, {"estimate": "compile"}),
        ("latency", "forward", None, _with_interval("forward")),
        ("ceiling_share", "forward", None, {"estimate": "forward_share"}),
        ("latency", "backward", None, _with_interval("backward")),
        ("ceiling_share", "backward", None, {"estimate": "backward_share"}),
        ("peak_memory", "forward", None, {"estimate": "peak_memory"}),
        ("peak_memory", "forward_backward", None, {"estimate": "peak_memory_backward"}),
        ("relative_error", "forward", None, {"estimate": "relative_error"}),
        ("relative_error", "against_dense", None, {"estimate": "error_to_dense"}),
        ("cosine", None, None, {"estimate": "cosine"}),
    ):
        table = _join(table, pick(rows, metric, scope, method), columns)
    table["paid"] = table["mask"].fillna(0) + table["compile"].fillna(0) + table["forward"]
    return _with_flags(_with_speed_up(table), rows)


@made_once
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
    key = ["run_id", *(f"factor.{name}" for name in MODEL_FACTORS)]
    ends = shaped[shaped["metric"] == "case_time"]
    table = ends.groupby(key, sort=False).agg(status=("status", _worst), message=("message", _joined)).reset_index()
    for metric, scope, columns in (
        ("parameters", None, {"estimate": "parameters"}),
        ("footprint", None, {"estimate": "footprint"}),
        ("latency", "inference", _with_interval("inference")),
        ("latency", "training_step", _with_interval("training_step")),
        ("latency", "prefill", _with_interval("prefill")),
        ("latency", "decode", _with_interval("decode")),
        ("tokens_per_second", "decode", {"estimate": "decode_tokens_per_second"}),
        ("latency", "forward", _with_interval("forward")),
        ("latency", "backward", _with_interval("backward")),
        ("latency", "optimizer_step", _with_interval("optimizer_step")),
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
    compiled = pick(shaped, "latency", "compile").groupby(key, sort=False)["estimate"].sum().rename("compile")
    table = table.merge(compiled, on=key, how="left")
    tails = pick(shaped, "latency", "decode").drop_duplicates(key)
    tails = tails.assign(**{f"decode_{p}": [d[p] for d in tails["details"]] for p in ("p50", "p95", "p99")})
    table = table.merge(tails[[*key, "decode_p50", "decode_p95", "decode_p99"]], on=key, how="left")
    work = pick(shaped, "flops", "inference", "formula").drop_duplicates(key)[[*key, "estimate"]]
    table = table.merge(work.rename(columns={"estimate": "flops"}), on=key, how="left")
    table["training_to_inference"] = table["training_step"] / table["inference"]
    flags = shaped.groupby(key, sort=False)["flags"].agg(_all_flags).reset_index()
    table = table.merge(flags, on=key, how="left")
    return table.rename(columns=lambda name: name.removeprefix("factor."))


@made_once
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


@made_once
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


@made_once
def warmup_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per direction and warm-up setting.

    Returns:
        Columns: `direction`, `warmup_steps`, `mean`, `sd`, `cv`, `median` with `low` and `high` (ms), `difference` of the
        mean to that of warmup = 5 (a share; missing where 5 was not measured), `status`, `message`.
    """
    rows = of_experiment(rows, "warmup")
    if rows.empty:
        return pd.DataFrame()
    settings = rows[rows["factor.curve"] == False]  # noqa: E712  a column, not a bool
    ends = settings[settings["metric"] == "case_time"]
    table = ends[["run_id", "case_id", "factor.direction", "factor.warmup_steps", "status", "message"]]
    found = pick(settings, "latency")
    spread = ["mean", "sd", "cv"]
    described = pd.DataFrame([[d[key] for key in spread] for d in found["details"]], index=found.index, columns=spread)
    columns = {"estimate": "median", "low": "low", "high": "high"}
    found = pd.concat([found[["run_id", "case_id", *columns]].rename(columns=columns), described], axis=1)
    table = table.merge(found, on=["run_id", "case_id"], how="left").drop(columns="case_id")
    table = table.rename(columns=lambda name: name.removeprefix("factor."))
    table["warmup_steps"] = table["warmup_steps"].astype(int)
    reference = table[table["warmup_steps"] == 5].set_index(["run_id", "direction"])["mean"]
    keys = pd.MultiIndex.from_frame(table[["run_id", "direction"]])
    table["difference"] = table["mean"] / reference.reindex(keys).to_numpy() - 1
    return table


def warmup_curve(rows: pd.DataFrame) -> pd.DataFrame:
    """The per-step curve: columns `direction`, `step`, `ms`, `phase` (`warm-up` or `steady`); needs samples."""
    rows = of_experiment(rows, "warmup")
    if rows.empty:
        return pd.DataFrame(columns=["direction", "step", "ms", "phase"])
    curves = rows[rows["factor.curve"] == True]  # noqa: E712  a column, not a bool
    needed = curves[curves["metric"] == "warmup_needed"].set_index(["run_id", "case_id"])["estimate"]
    parts = []
    for _, row in pick(curves, "latency").iterrows():
        cut = needed.get((row["run_id"], row["case_id"]))
        steps = range(1, len(row["samples"]) + 1)
        phase = ["not settled" if pd.isna(cut) else "warm-up" if step <= cut else "steady" for step in steps]
        parts.append(pd.DataFrame({"direction": row["scope"], "step": steps, "ms": row["samples"], "phase": phase}))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=["direction", "step", "ms", "phase"])


def readable(table: pd.DataFrame, names: dict[str, str]) -> pd.DataFrame:
    """A table for people: the columns of `names` under their titles, numbers in few digits, intervals in brackets.

    Args:
        table: From this module.
        names: Column → title; a column with `_low` and `_high` siblings gets its interval.
    """
    result = pd.DataFrame(index=table.index)
    for column, title in names.items():
        if column not in table:
            continue
        low, high = (table.get(f"{column}_{end}") for end in ("low", "high"))
        if low is None or high is None:
            result[title] = [_cell(value) for value in table[column]]
        else:
            result[title] = [_cell(*values) for values in zip(table[column], low, high, strict=True)]
    return result


def _cell(value: Any, low: float | None = None, high: float | None = None) -> str:
    if isinstance(value, list):
        return ", ".join(value)
    if isinstance(value, bool | str) or value is None:
        return "" if value is None else str(value)
    if pd.isna(value):
        return "—"
    return format_with_interval(float(value), low, high)


def _with_interval(name: str) -> dict[str, str]:
    return {"estimate": name, "low": f"{name}_low", "high": f"{name}_high", "predicted": f"{name}_predicted"}


def _base(rows: pd.DataFrame, factors: list[str], required: str) -> pd.DataFrame:
    """One line per case that has the factor `required`: ids, factors, status, message."""
    if f"factor.{required}" not in rows:
        return pd.DataFrame()
    ends = rows[(rows["metric"] == "case_time") & rows[f"factor.{required}"].notna()]
    columns = ["run_id", "case_id", *(f"factor.{name}" for name in factors), "status", "message"]
    return ends[columns].rename(columns=lambda name: name.removeprefix("factor.")).reset_index(drop=True)


def _join(table: pd.DataFrame, rows: pd.DataFrame, columns: dict[str, str]) -> pd.DataFrame:
    key = ["run_id", "case_id"]
    found = rows.drop_duplicates(key)[[*key, *columns]].rename(columns=columns)
    return table.merge(found, on=key, how="left")


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
    flags = rows.groupby(["run_id", "case_id"], sort=False)["flags"].agg(_all_flags).reset_index()
    table = table.merge(flags, on=["run_id", "case_id"], how="left")
    above = (table["speed_up_low"] > table["bound"]) & ~table["name"].str.startswith("dense")
    table["flags"] = [
        [*flags, Flag.ABOVE_BOUND.value] if is_above else flags
        for flags, is_above in zip(table["flags"], above, strict=True)
    ]
    return table


def _all_flags(flags: Iterable[list[str]]) -> list[str]:
    return sorted({flag for some in flags for flag in some})


def _worst(statuses: pd.Series) -> str:
    bad = [status for status in statuses if status != "ok"]
    return bad[0] if bad else "ok"


def _joined(messages: pd.Series) -> str:
    return "; ".join(dict.fromkeys(message for message in messages if message))
