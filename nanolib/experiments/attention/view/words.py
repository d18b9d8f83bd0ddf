"""The verdict on attention, computed from the rows; it ends with one next question."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from nanolib.experiments.attention.view.quality import quality_words
from nanolib.experiments.attention.view.tables import attention_table
from nanolib.measurement import Flag
from nanolib.report import overview
from nanolib.report.claim import Claim, Figure, Order, comparing
from nanolib.report.overview import cached
from nanolib.report.roofline import roofline_words
from nanolib.report.tables import in_ms, known

_UNSTEADY = Flag.NO_STEADY_STATE.value


@cached("attention")
def verdict(rows: pd.DataFrame) -> list[Claim]:
    """Which attention is the fastest at each length, and from which length sparse pays."""
    table = attention_table(rows)
    timed = known(table, "forward")
    if timed.empty:
        return [Claim("No attention case gave a time, so there is no verdict", advice="nano run quick attention")]
    claims: list[Claim] = []
    places = [name for name in ("run_id", "device") if timed[name].nunique() > 1]  # times of two places are not ranked
    for (batch, dtype, causal, *place), group in timed.groupby(["batch_size", "dtype", "causal", *places], sort=False):
        named = [f"run {value[:8]}" if name == "run_id" else value for name, value in zip(places, place, strict=True)]
        about = ", ".join([f"{'Causal' if causal else 'Non-causal'}, batch {int(batch)}, {dtype}", *named])
        claims += [*_fastest(group, about), *_payoff(group, about)]
    unsteady = sum(_UNSTEADY in flags for flags in timed["flags"])
    if unsteady:
        said = f"{unsteady} of {len(timed)} cases never settled"
        claims.append(
            Claim(said, "differences that rest on them say nothing", "a larger budget_s, or a quieter machine")
        )
    claims += roofline_words(rows, "attention")
    if quality := quality_words(rows):
        question = "does it hold in a larger decoder? Raise quality_d_model, quality_layers and quality_steps"
        return [*claims, *quality, Claim("The loss is that of a small decoder", advice=question)]
    if (~timed["name"].str.startswith("dense")).any():
        question = "what do the removed connections cost in loss? Set quality_patterns"
        return [*claims, Claim("This speaks of speed alone", advice=question)]
    question = "would a sparse kind be faster at the longest length?"
    return [*claims, Claim("Only dense kinds were measured", advice=question)]


def _fastest(group: pd.DataFrame, about: str) -> Iterator[Claim]:
    longest = group["seq_len"].max()
    group = group[~group["not_sparse"] | group["name"].str.startswith("dense")]  # a dense mask is no kind of its own
    for seq_len, at in reversed(list(group.groupby("seq_len"))):  # the longest is what most people ask for
        if at["name"].nunique() < 2:
            continue
        found = overview.leaders(at, "forward")
        best = found.iloc[0]
        share = ""
        if seq_len == longest and pd.notna(best["forward_share"]):
            share = f", at {best['forward_share']:.0%} of the machine's matrix-product ceiling"
        if found["name"].nunique() == 1:
            answer, advice = f"at {int(seq_len):,} tokens {best['name']} is the fastest forward", ""
            sure, others = in_ms(best, "forward"), at[at["name"] != best["name"]]
        else:
            answer = f"at {int(seq_len):,} tokens {overview.listed(found['name'])} cannot be told apart forward"
            sure, others = f"{best['name']} {in_ms(best, 'forward')}", found.iloc[1:]
            advice = "a larger budget_s, or a smaller rel_ci, narrows their intervals" if seq_len == longest else ""
        compared = comparing(_forward(best), *(_forward(row) for _, row in others.iterrows()))
        yield Claim(answer, sure + share, advice, about, compared)


def _forward(row: pd.Series) -> Figure:
    return Figure.of(row, "forward", "latency", "forward", row["name"])


def _dense(row: pd.Series) -> Figure:
    return Figure.of(row, "dense", "latency", "forward", row["baseline"])


def _payoff(group: pd.DataFrame, about: str) -> Iterator[Claim]:
    sparse = group[~group["name"].str.startswith("dense")]
    empty = sparse[sparse["not_sparse"]]
    lengths = {name: tuple(sorted(set(cases["seq_len"]))) for name, cases in empty.groupby("name", sort=False)}
    for at, advice in dict.fromkeys((at, _sparser(name)) for name, at in lengths.items()):
        names = [name for name, own in lengths.items() if (own, _sparser(name)) == (at, advice)]
        removes, dense = ("removes", "it is") if len(names) == 1 else ("remove", "they are")
        answer = f"{overview.listed(names)} {removes} nothing at {overview.listed(f'{int(n):,}' for n in at)} tokens"
        yield Claim(answer, f"{dense} dense there, and no gain is claimed", advice, about)
    for name, cases in known(sparse[~sparse["not_sparse"]], "speed_up").groupby("name", sort=False):
        yield _against_dense(str(name), cases.sort_values("seq_len"), about)


def _sparser(name: str) -> str:
    """What would make a mask sparse that removes nothing, by the kind's name."""
    if name.startswith("strided"):  # its stride is its window, in whole tiles
        return "smaller tiles (block_size), or a larger window, make it sparse"
    if " s=" in name:
        return "smaller tiles (block_size), or longer sequences, make it sparse"
    return "smaller tiles (block_size), a smaller window, or longer sequences make it sparse"


def _against_dense(name: str, cases: pd.DataFrame, about: str) -> Claim:
    """Whether a sparse kind is faster than dense; from a length on only where it is at every longer one too."""
    last = cases.iloc[-1]
    baseline, longest = last["baseline"], f"{int(last['seq_len']):,} tokens"
    compared = tuple(pair for _, row in cases.iterrows() for pair in comparing(_forward(row), _dense(row)))
    lengths = [int(n) for n in cases["seq_len"]]
    faster = [n for n, (_, order, _) in zip(lengths, compared, strict=True) if order is Order.BELOW]
    since = min((n for n in lengths if all(longer in faster for longer in lengths if longer >= n)), default=None)
    most, advice = f"at most {last['bound']:.2f}× possible", ""
    if last["above_bound"]:
        most = f"above the {last['bound']:.2f}× that skipping alone can give"
        advice = "measure again, with dense (tiles) too"
    order, ends = compared[-1][1], f" [{last['speed_up_low']:.2f} … {last['speed_up_high']:.2f}]"
    sure = f"{last['speed_up']:.2f}×{ends if pd.notna(last['speed_up_low']) else ''} at {longest}, {most}"
    sure += f"; it removes {last['sparsity']:.0%} of the connections there"
    if since is not None:
        answer = f"from {since:,} tokens on {name} is faster than {baseline}"
    elif order is Order.ALIKE:
        answer = f"at {longest} {name} and {baseline} cannot be told apart"
    elif faster:
        answer = f"at {longest} {name} is slower than {baseline}"
    else:
        answer = f"{name} is not faster than {baseline} up to {longest}"
    if since is None and faster:
        answer += f", though it is faster at {overview.listed(f'{n:,}' for n in faster)}"
    return Claim(answer, sure, advice, about, compared)
