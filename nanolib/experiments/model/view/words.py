"""The verdict on whole models, computed from the rows; it ends with one next question."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from nanolib.experiments.model.view.tables import model_table, scaling_table
from nanolib.measurement import format_number
from nanolib.report import overview
from nanolib.report.overview import cached, of_experiment, pick
from nanolib.report.roofline import roofline_words
from nanolib.report.tables import in_ms

_ENDS = ("", "_low", "_high")


@cached("model")
def verdict(rows: pd.DataFrame) -> list[str]:
    """What inference and training cost, where the time goes, how they scale."""
    table = model_table(rows)
    timed = table[table["inference"].notna()] if len(table) else table
    if timed.empty:
        return ["No model case gave a time, so there is no verdict. Run: nano run quick model."]
    lines = []
    eager = timed[timed["optimisation"] == "eager"] if (timed["optimisation"] == "eager").any() else timed
    for (name, kind, dtype), group in eager.groupby(["name", "attention_type", "dtype"], sort=False):
        row = group.sort_values("seq_len").iloc[-1]
        shape = f"{name} ({kind}, {dtype}), batch {int(row['batch_size'])}, n = {int(row['seq_len'])}"
        text = f"{shape}: inference takes {in_ms(row, 'inference')}, {row['inference_tokens_per_second']:,.0f} tokens/s"
        if pd.notna(row["inference_predicted"]):
            text += f", {row['inference'] / row['inference_predicted']:.1f}× the roofline's prediction"
        lines.append(text + ".")
        if pd.notna(row["decode"]):
            text = (
                f"{shape}: the first token comes after {in_ms(row, 'prefill')}, then one takes {in_ms(row, 'decode')} "
            )
            text += f"(p99 {format_number(row['decode_p99'])} ms): {row['decode_tokens_per_second']:,.0f} tokens/s"
            if pd.notna(row["decode_predicted"]):
                text += f", {row['decode'] / row['decode_predicted']:.1f}× what reading the weights once takes"
            lines.append(text + ".")
        if pd.notna(row["training_step"]):
            lines.append(
                f"{shape}: a training step takes {in_ms(row, 'training_step')}, {row['training_to_inference']:.1f}× inference "
                f"(3× is what the FLOPs say), and {row['training_memory']:,.0f} MiB at its peak, "
                f"{row['training_memory'] / row['footprint']:.1f}× the weights; {_largest_phase(row)}."
            )
    lines += _optimised(table)
    lines += _slow_products(rows, table)
    lines += roofline_words(rows, "model")
    refused = table[table["status"] == "oom_predicted"]
    lines += [
        f"{row['name']}, n = {int(row['seq_len'])}, was not started: {row['message']}." for _, row in refused.iterrows()
    ]
    scaling = scaling_table(rows)
    scaling = scaling[scaling["name"].isin(eager["name"])]  # what an optimisation changes is said above
    for _, line in scaling[scaling.get("exponent", pd.Series(index=scaling.index, dtype=float)).notna()].iterrows():
        lines.append(
            f"{line['name']} ({line['attention_type']}): {line['quantity']} grows as n^{line['exponent']:.2f} "
            f"[{line['exponent_low']:.2f} … {line['exponent_high']:.2f}]: {line['meaning']}."
        )
    if len(scaling) and scaling.get("exponent", pd.Series(dtype=float)).notna().any():
        lines.append("Next question: at which length does the attention, quadratic in n, overtake the linear rest?")
    else:
        lines.append("Next question: how does it grow with the length? From four seq_lens on an exponent is fitted.")
    return lines


def _optimised(table: pd.DataFrame) -> Iterator[str]:
    """Each optimisation against the eager model of the same shape, at the longest length, by ranges that do not overlap."""
    shape = ["attention_type", "seq_len", "batch_size", "dtype"]
    suffixes = [f" ({name.replace('_', ' ')})" for name in table["optimisation"]]
    table = table.assign(base=[name.removesuffix(end) for name, end in zip(table["name"], suffixes, strict=True)])
    optimised = table[table["optimisation"] != "eager"]
    eager = table[table["optimisation"] == "eager"]
    joined = optimised.merge(eager, on=["run_id", "base", *shape], suffixes=("", "_eager"))
    for _, row in (
        joined.sort_values("seq_len")
        .drop_duplicates(["run_id", "name", "attention_type", "dtype"], keep="last")
        .iterrows()
    ):
        parts = []
        for column, words in (("inference", "inference"), ("training_step", "a training step"), ("decode", "a token")):
            ratio = row[f"{column}_eager"] / row[column]
            if pd.notna(ratio):
                low, high = (
                    row[f"{column}_low_eager"] / row[f"{column}_high"],
                    row[f"{column}_high_eager"] / row[f"{column}_low"],
                )
                sure = "faster" if low > 1 else "slower" if high < 1 else "not told apart"
                parts.append(f"{words} {ratio:.2f}× [{low:.2f} … {high:.2f}] as fast ({sure})")
        for column, words in (("inference_memory", "inference"), ("training_memory", "training")):
            share = row[column] / row[f"{column}_eager"]
            if pd.notna(share) and abs(share - 1) > 0.005:
                parts.append(f"{words} peak {share:.2f}×")
        if pd.notna(row["difference"]):
            parts.append(f"logits {row['difference']:.1e} away")
        if parts:
            yield f"{row['name']}, n = {int(row['seq_len'])}, against eager: {', '.join(parts)}."


def _slow_products(rows: pd.DataFrame, table: pd.DataFrame) -> Iterator[str]:
    """Where torch's own product in float32 is slower than this CPU's ceiling, and what to try."""
    ceilings = pick(of_experiment(rows, "model"), "ceiling_flops")
    best, torchs = (ceilings[ceilings["scope"] == scope] for scope in ("float32", "float32 by torch"))
    newest = best.drop_duplicates("machine_id", keep="last")
    both = newest.merge(torchs.drop_duplicates("run_id"), on="run_id", suffixes=("", "_torch"))
    if "onednn" not in set(table["optimisation"]):
        for _, row in both[both["high_torch"] < both["low"]].iterrows():
            share = row["estimate_torch"] / row["estimate"]
            yield f"torch's float32 runs at {share:.0%} of what this CPU can do; add onednn to optimisations."


def _largest_phase(row: pd.Series) -> str:
    names = ("forward", "backward", "optimizer_step")
    phases = pd.DataFrame([{"name": name} | {f"ms{end}": row[f"{name}{end}"] for end in _ENDS} for name in names])
    found = overview.leaders(phases, "ms", ascending=False)
    words = [f"the {row['name'].replace('_', ' ')} ({format_number(row['ms'])} ms)" for _, row in found.iterrows()]
    which = "is the largest part" if len(words) == 1 else "cannot be told apart as the largest part"
    return f"{overview.listed(words)} {which}"
