"""Verdicts in words, computed from the rows; each ends with one remedy or next question."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from nanolib.measurement import Flag, format_number
from nanolib.report import overview, tables
from nanolib.report.distributed import decode_words
from nanolib.report.energy import energy_words
from nanolib.report.fp8 import fp8_words
from nanolib.report.quality import quality_words
from nanolib.report.regressions import ab_verdict
from nanolib.report.roofline import roofline_words
from nanolib.report.sharding import sharding_words

_UNSTEADY = Flag.NO_STEADY_STATE.value
_ENDS = ("", "_low", "_high")


def attention(rows: pd.DataFrame) -> list[str]:
    """Which attention is the fastest at each length, and from which length sparse pays."""
    table = tables.attention_table(rows)
    timed = table[table["forward"].notna()] if len(table) else table
    if timed.empty:
        return ["No attention case gave a time, so there is no verdict. Run: nano run quick attention."]
    lines = []
    places = [name for name in ("run_id", "device") if timed[name].nunique() > 1]  # times of two places are not ranked
    for (batch, dtype, causal, *place), group in timed.groupby(["batch_size", "dtype", "causal", *places], sort=False):
        shape = f"{'Causal' if causal else 'Non-causal'}, batch {int(batch)}, {dtype}"
        where = ", ".join(
            [
                shape,
                *(f"run {value[:8]}" if name == "run_id" else value for name, value in zip(places, place, strict=True)),
            ]
        )
        lines += [f"{where}: {line}" for line in _fastest(group)]
        lines += [f"{where}: {line}" for line in _payoff(group)]
    unsteady = sum(_UNSTEADY in flags for flags in timed["flags"])
    if unsteady:
        lines.append(f"{unsteady} of {len(timed)} cases never settled; trust no difference that rests on them.")
    lines += roofline_words(rows, "attention")
    if quality := quality_words(rows):
        lines += [
            *quality,
            "Next question: does it hold for your model and your text? Set the quality_ parameters.",
        ]
    elif (~timed["name"].str.startswith("dense")).any():
        lines.append(
            "This speaks of speed alone. Next question: what do the removed connections cost in loss? Set quality_patterns."
        )
    else:
        lines.append(
            "Only dense kinds were measured. Next question: would a sparse kind be faster at the longest length?"
        )
    return lines


def _fastest(group: pd.DataFrame) -> Iterator[str]:
    longest = group["seq_len"].max()
    for seq_len, at in reversed(list(group.groupby("seq_len"))):  # the longest is what most people ask for
        if at["name"].nunique() < 2:
            continue
        found = overview.leaders(at, "forward")
        best = found.iloc[0]
        took = _ms(best, "forward")
        if found["name"].nunique() == 1:
            text = f"at n = {int(seq_len)} {best['name']} is the fastest forward, {took}"
        else:
            names = overview.listed(found["name"])
            text = f"at n = {int(seq_len)} {names} cannot be told apart forward ({best['name']}: {took})"
        if seq_len == longest and pd.notna(best["forward_share"]):
            text += f", at {best['forward_share']:.0%} of the machine's matrix-product ceiling"
        yield text + "."


def _payoff(group: pd.DataFrame) -> Iterator[str]:
    sparse = group[~group["name"].str.startswith("dense") & group["speed_up"].notna()]
    for name, cases in sparse.groupby("name", sort=False):
        cases = cases.sort_values("seq_len")
        last = cases.iloc[-1]
        gain = (
            f"{last['speed_up']:.2f}× [{last['speed_up_low']:.2f} … {last['speed_up_high']:.2f}] of a bound of "
            f"{last['bound']:.2f}× at n = {int(last['seq_len'])}, where it removes {last['sparsity']:.0%} of the connections"
        )
        won = cases[cases["speed_up_low"] > 1]["seq_len"]
        # it pays from a length on only if it wins at every longer one too
        lost = cases[~(cases["speed_up_low"] > 1)]["seq_len"].max()
        steady = won[won > lost] if pd.notna(lost) else won
        if len(steady):
            yield f"{name} beats {last['baseline']} from n = {int(steady.min())} on: {gain}."
        elif not last["speed_up_high"] < 1:
            yield f"{name} cannot be told apart from {last['baseline']} at n = {int(last['seq_len'])}: {gain}."
        else:
            yield f"{name} does not beat {last['baseline']} up to n = {int(last['seq_len'])}: {gain}."


def model(rows: pd.DataFrame) -> list[str]:
    """What inference and training cost, where the time goes, how they scale."""
    table = tables.model_table(rows)
    timed = table[table["inference"].notna()] if len(table) else table
    if timed.empty:
        return ["No model case gave a time, so there is no verdict. Run: nano run quick model."]
    lines = []
    eager = timed[timed["optimisation"] == "eager"] if (timed["optimisation"] == "eager").any() else timed
    for (name, kind, dtype), group in eager.groupby(["name", "attention_type", "dtype"], sort=False):
        row = group.sort_values("seq_len").iloc[-1]
        shape = f"{name} ({kind}, {dtype}), batch {int(row['batch_size'])}, n = {int(row['seq_len'])}"
        text = f"{shape}: inference takes {_ms(row, 'inference')}, {row['inference_tokens_per_second']:,.0f} tokens/s"
        if pd.notna(row["inference_predicted"]):
            text += f", {row['inference'] / row['inference_predicted']:.1f}× the roofline's prediction"
        lines.append(text + ".")
        if pd.notna(row["decode"]):
            text = f"{shape}: the first token comes after {_ms(row, 'prefill')}, then one takes {_ms(row, 'decode')} "
            text += f"(p99 {format_number(row['decode_p99'])} ms): {row['decode_tokens_per_second']:,.0f} tokens/s"
            if pd.notna(row["decode_predicted"]):
                text += f", {row['decode'] / row['decode_predicted']:.1f}× what reading the weights once takes"
            lines.append(text + ".")
        if pd.notna(row["training_step"]):
            lines.append(
                f"{shape}: a training step takes {_ms(row, 'training_step')}, {row['training_to_inference']:.1f}× inference "
                f"(3× is what the FLOPs say), and {row['training_memory']:,.0f} MiB at its peak, "
                f"{row['training_memory'] / row['footprint']:.1f}× the weights; {_largest_phase(row)}."
            )
    lines += _optimised(table)
    lines += roofline_words(rows, "model")
    refused = table[table["status"] == "oom_predicted"]
    lines += [
        f"{row['name']}, n = {int(row['seq_len'])}, was not started: {row['message']}." for _, row in refused.iterrows()
    ]
    scaling = tables.scaling_table(rows)
    scaling = scaling[scaling["name"].isin(eager["name"])]  # what an optimisation changes is said above
    for _, line in scaling[scaling.get("exponent", pd.Series(index=scaling.index, dtype=float)).notna()].iterrows():
        lines.append(
            f"{line['name']} ({line['attention_type']}): {line['quantity']} grows as n^{line['exponent']:.2f} "
            f"[{line['exponent_low']:.2f} … {line['exponent_high']:.2f}]: {line['meaning']}."
        )
    lines.append("Next question: at which length does the attention, quadratic in n, overtake the linear rest?")
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
        for column, words in (("inference", "inference"), ("training_step", "a training step")):
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


def _largest_phase(row: pd.Series) -> str:
    names = ("forward", "backward", "optimizer_step")
    phases = pd.DataFrame([{"name": name} | {f"ms{end}": row[f"{name}{end}"] for end in _ENDS} for name in names])
    found = overview.leaders(phases, "ms", ascending=False)
    words = [f"the {row['name'].replace('_', ' ')} ({format_number(row['ms'])} ms)" for _, row in found.iterrows()]
    which = "is the largest part" if len(words) == 1 else "cannot be told apart as the largest part"
    return f"{overview.listed(words)} {which}"


def warmup(rows: pd.DataFrame) -> list[str]:
    """How many warm-up steps are enough on this machine."""
    found = overview.of_experiment(rows, "warmup")
    curves = found[found["metric"] == "warmup_needed"] if len(found) else found
    if curves.empty:
        return ["No warm-up curve was measured, so there is no verdict. Run: nano run quick warmup."]
    lines = []
    for _, curve in curves.iterrows():
        direction = curve["scope"].replace("_", " + ")
        if pd.isna(curve["estimate"]):
            lines.append(f"{direction}: {curve['message']}.")
            continue
        needed = int(curve["estimate"])
        steps = "no warm-up step is" if needed == 0 else f"{needed} warm-up step{'s are' if needed > 1 else ' is'}"
        steady = curve["details"]["steady_median"]
        lines.append(
            f"{direction}: {steps} enough in the one fresh process of this curve; then a step takes {steady:.3g} ms."
        )
    table = tables.warmup_table(rows)
    cold = table[(table["warmup_steps"] == 0) & table["difference"].notna()]
    for _, row in cold.iterrows():
        lines.append(
            f"{row['direction'].replace('_', ' + ')}: without warm-up the mean is {row['difference']:+.0%} against that after 5 "
            f"steps, with a CV of {row['cv']:.0%}; the median, {format_number(row['median'])} ms, {_median_moved(row, table)}."
        )
    lines.append(
        "Fresh processes differ. Next question: is the answer the same in a second run? Repeat it before you rely on it."
    )
    return lines


def _median_moved(row: pd.Series, table: pd.DataFrame) -> str:
    """What the same does to the median, as far as the two intervals tell."""
    same = (table["run_id"] == row["run_id"]) & (table["direction"] == row["direction"])
    after = table[same & table["warmup_steps"].isin([row["warmup_steps"], 5])]
    if len(overview.leaders(after.rename(columns={"low": "median_low", "high": "median_high"}), "median")) > 1:
        return "cannot be told from that after 5"
    warm = after[after["warmup_steps"] == 5].iloc[0]
    return f"is {row['median'] / warm['median'] - 1:+.0%} against that after 5"


def _ms(row: pd.Series, column: str) -> str:
    low, high = row[f"{column}_low"], row[f"{column}_high"]
    if pd.isna(low) or pd.isna(high):
        return f"{format_number(row[column])} ms"
    ends = f"{format_number(low, low, high)} … {format_number(high, low, high)}"
    return f"{format_number(row[column], low, high)} ms [{ends}]"


def distributed(rows: pd.DataFrame) -> list[str]:
    """Which form on how many ranks, what bounds it, and what training's communication costs."""
    words = [*decode_words(rows), *sharding_words(rows)]
    return words or ["No case across ranks gave a time, so there is no verdict. Run: nano run quick distributed."]


VERDICTS = {
    "attention": overview.made_once(attention),
    "model": overview.made_once(model),
    "warmup": overview.made_once(warmup),
    "energy": overview.made_once(energy_words),
    "fp8": overview.made_once(fp8_words),
    "distributed": overview.made_once(distributed),
    "ab": overview.made_once(ab_verdict),
}
