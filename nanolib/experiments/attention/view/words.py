"""The verdict on attention, computed from the rows; it ends with one next question."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from nanolib.experiments.attention.view.quality import quality_words
from nanolib.experiments.attention.view.tables import attention_table
from nanolib.measurement import Flag
from nanolib.report import overview
from nanolib.report.overview import cached
from nanolib.report.roofline import roofline_words
from nanolib.report.tables import in_ms

_UNSTEADY = Flag.NO_STEADY_STATE.value


@cached("attention")
def verdict(rows: pd.DataFrame) -> list[str]:
    """Which attention is the fastest at each length, and from which length sparse pays."""
    table = attention_table(rows)
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
        took = in_ms(best, "forward")
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
    for name, cases in sparse[sparse["not_sparse"]].groupby("name", sort=False):
        lengths = overview.listed(f"{int(n):,}" for n in sorted(cases["seq_len"]))
        yield (
            f"{name} removes nothing at n = {lengths}: it is dense there, and no gain is claimed. To make it sparse: smaller "
            "tiles (block_size), a smaller window, or longer sequences."
        )
    for name, cases in sparse[~sparse["not_sparse"]].groupby("name", sort=False):
        cases = cases.sort_values("seq_len")
        last = cases.iloc[-1]
        bound = f"of a bound of {last['bound']:.2f}×"
        if last["above_bound"]:
            bound = f"above the {last['bound']:.2f}× that skipping alone can give, so distrust it or measure dense (tiles) too,"
        gain = (
            f"{last['speed_up']:.2f}× [{last['speed_up_low']:.2f} … {last['speed_up_high']:.2f}] {bound} "
            f"at n = {int(last['seq_len'])}, where it removes {last['sparsity']:.0%} of the connections"
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
