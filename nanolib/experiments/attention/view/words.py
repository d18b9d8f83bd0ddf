"""The verdict on attention, computed from the rows; its first sentence answers the notebook's question."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from nanolib.experiments.attention.view.quality import quality_words
from nanolib.experiments.attention.view.tables import attention_table
from nanolib.report import overview
from nanolib.report.claim import Claim, Order
from nanolib.report.in_turns import ONE, Pairs, gains, not_slower
from nanolib.report.overview import cached
from nanolib.report.roofline import roofline_words
from nanolib.report.tables import in_ms, known, percent, times

_MOST_PATTERNS = 6


@cached
def verdict(rows: pd.DataFrame) -> list[Claim]:
    """At which lengths sparse attention is faster than dense, by how much, and what it costs in loss."""
    table = attention_table(rows)
    timed = known(table, "forward")
    if timed.empty:
        return [
            Claim(
                "No attention case gave a time, so there is no verdict",
                advice="nano run quick attention",
            )
        ]
    groups: list[tuple[str, pd.DataFrame]] = []
    places = [
        name for name in ("run_id", "device") if timed[name].nunique() > 1
    ]  # times of two places are not ranked
    for (batch, dtype, causal, *place), group in timed.groupby(
        ["batch_size", "dtype", "causal", *places], sort=False
    ):
        named = [
            f"run {value[:8]}" if name == "run_id" else value
            for name, value in zip(places, place, strict=True)
        ]
        about = ", ".join(
            [f"{'Causal' if causal else 'Non-causal'}, batch {int(batch)}, {dtype}", *named]
        )
        groups.append((about, group))
    claims = [claim for about, group in groups for claim in _answer(group, about)]
    if not _of_sparse_kind(timed).any():
        advice = "add a kind such as {kind: sparse, pattern: window} to attention_types"
        claims.append(
            Claim(
                "Only dense kernels were measured, so nothing is known of sparse attention",
                advice=advice,
            )
        )
    unsteady = int(timed["forward_unsteady"].sum())
    if unsteady:
        said = f"{unsteady} of {len(timed)} forward timings never settled"
        claims.append(
            Claim(
                said,
                "their intervals hold for this run alone",
                "raise budget_s, or repeat on an idle machine",
            )
        )
    claims += quality_words(rows)
    for further in (_other_patterns, _some_remove_nothing, _fastest):
        claims += [claim for about, group in groups for claim in further(group, about)]
    return [*claims, *roofline_words(rows, "attention")]


def _answer(group: pd.DataFrame, about: str) -> Iterator[Claim]:
    """Whether a pattern is faster than every dense kernel, at each length that was measured."""
    sparse = _sparse(group)
    if sparse.empty:
        if _of_sparse_kind(group).any():
            yield from _removes_nothing(group, about)
        return
    found: dict[str, list[int]] = {"faster": [], "slower": [], "unclear": [], "busy": []}
    best: dict[int, pd.Series] = {}
    pairs: dict[int, Pairs] = {}
    for seq_len, at in known(sparse, "speed_up").groupby("seq_len"):
        words = [_order(row, group) for _, row in at.iterrows()]
        word = next((one for one in ("faster", "busy", "unclear") if one in words), "slower")
        likely = at[[one == word for one in words]]
        best[int(seq_len)] = likely.loc[likely["speed_up"].idxmax()]
        pairs[int(seq_len)] = tuple(
            pair for _, row in likely.iterrows() for pair in _over_dense(row)
        )
        found[word].append(int(seq_len))
    if not best:
        yield _without_baseline(group, about)
        return
    faster, slower, unclear, busy = found.values()
    shown = faster or unclear or slower or busy
    if faster:
        answer = f"Sparse attention is faster than {_backends(group, faster)} at {_tokens(faster)}"
    elif unclear:
        answer = f"No clear difference between sparse and dense attention at {_tokens(unclear)}"
    else:
        answer = f"Dense attention is faster than sparse at {_tokens(shown)}"
    sure = [_gain(best[shown[-1]])]
    for lengths, words in ((slower, "dense is faster"), (unclear, "there is no clear difference")):
        sure += [f"{words} at {_tokens(lengths)}"] if lengths and lengths is not shown else []
    sure += (
        [f"the machine was busy at {_tokens(busy)}: no order drawn"]
        if busy and busy is not shown
        else []
    )
    told = busy[-1:] if busy is shown else [seq_len for seq_len in pairs if seq_len not in busy]
    compared = tuple(pair for seq_len in told for pair in pairs[seq_len])
    advice = "raise budget_s for narrower intervals" if shown is unclear else ""
    yield Claim(answer, "; ".join(sure), advice, about, compared)


def _without_baseline(group: pd.DataFrame, about: str) -> Claim:
    """Why nothing is said of sparse beside dense."""
    if group["is_dense"].any():
        answer = (
            "Sparse and dense attention were not timed in the same rounds, so no order is drawn"
        )
        return Claim(answer, "", "raise budget_s: six rounds are the fewest", about)
    answer = "No dense kernel was measured at these shapes, so sparse attention has no baseline"
    return Claim(answer, "", "add {kind: dense} to attention_types", about)


def _order(row: pd.Series, group: pd.DataFrame) -> str:
    """What one pattern is to all dense kernels of its shape."""
    dense = group[group["is_dense"] & (group["seq_len"] == row["seq_len"])]["name"]
    figures = {figure.name: figure for figure in row["speed_up_over"]}
    orders = {figure.against(ONE) for figure in figures.values()}
    if any(figure.busy for figure in figures.values()):
        return "busy"
    if orders == {Order.ABOVE} and set(dense) <= set(figures):
        return "faster"
    return "slower" if Order.BELOW in orders else "unclear"


def _gain(row: pd.Series) -> str:
    """How much faster one pattern is than the dense kernel that is nearest to it, what it removes, and what its mask takes."""
    text = f"at {int(row['seq_len']):,} tokens {row['name']} (sparsity {row['sparsity']:.0%}) is "
    text += f"{times(row, 'speed_up')} as fast as {row['speed_up_baseline']}"
    if row["once"] > 0:
        built = ["building the mask"] if row["mask"] > 0 and row["mask_kept"] != 0 else []
        also = " and ".join([*built, *(["compiling"] if row["compile"] > 0 else [])])
        text += f", {times(row, 'speed_up_paid')} with {also} in the first call"
    elif row["mask_kept"] == 0:
        text += ", with choosing the mask in each call"
    return text


def _backends(group: pd.DataFrame, lengths: list[int]) -> str:
    """The dense kernels measured at these lengths."""
    names = list(dict.fromkeys(group[group["is_dense"] & group["seq_len"].isin(lengths)]["name"]))
    return names[0] if len(names) == 1 else "every dense kernel"


def _tokens(lengths: list[int]) -> str:
    return f"{overview.listed(f'{n:,}' for n in lengths)} tokens"


def _other_patterns(group: pd.DataFrame, about: str) -> Iterator[Claim]:
    """Each pattern's gain at the longest length, where there are several."""
    sparse = known(_sparse(group), "speed_up")
    at = sparse[sparse["seq_len"] == sparse["seq_len"].max()].sort_values(
        "speed_up", ascending=False
    )
    if len(at) < 2:
        return
    gains = [
        f"{row['name']} {times(row, 'speed_up')} (sparsity {row['sparsity']:.0%}, {_where_faster(group, row['name'])})"
        for _, row in at.iterrows()
    ]
    more = (
        [f"{len(gains) - _MOST_PATTERNS} more in the table"] if len(gains) > _MOST_PATTERNS else []
    )
    pairs = tuple(pair for _, row in at.iterrows() for pair in _over_dense(row))
    answer = f"Smallest speed-up of each pattern over any dense kernel at {_tokens([int(at['seq_len'].iloc[0])])}"
    yield Claim(answer, ", ".join([*gains[:_MOST_PATTERNS], *more]), "", about, pairs)


def _where_faster(group: pd.DataFrame, name: str) -> str:
    """At which lengths one pattern is faster than every dense kernel."""
    own = _sparse(group)[lambda lines: lines["name"] == name].sort_values("seq_len")
    lengths = [int(row["seq_len"]) for _, row in own.iterrows() if _order(row, group) == "faster"]
    return f"faster at {_tokens(lengths)}" if lengths else "faster at none"


def _some_remove_nothing(group: pd.DataFrame, about: str) -> Iterator[Claim]:
    """The same, where it is not the answer already."""
    if not _sparse(group).empty:
        yield from _removes_nothing(group, about)


def _removes_nothing(group: pd.DataFrame, about: str) -> Iterator[Claim]:
    """Which kinds are dense at which lengths, since their masks remove nothing there, and what would change that."""
    lengths = {
        str(name): tuple(sorted(cases["seq_len"]))
        for name, cases in group[_of_sparse_kind(group) & group["not_sparse"]].groupby(
            "name", sort=False
        )
    }
    for at, advice in dict.fromkeys((at, _sparser(name)) for name, at in lengths.items()):
        names = [name for name, own in lengths.items() if (own, _sparser(name)) == (at, advice)]
        removes, dense = ("removes", "it is") if len(names) == 1 else ("remove", "they are")
        answer = f"{overview.listed(names)} {removes} nothing at {_tokens([int(n) for n in at])}"
        yield Claim(answer, f"{dense} dense there, and no gain is claimed", advice, about)


def _sparser(name: str) -> str:
    """What would make a mask sparse that removes nothing, by the kind's name."""
    if name.startswith("threshold"):
        return "smaller tiles (block_size), a smaller mass, or longer sequences make it sparse"
    if name.startswith("strided"):  # its stride is its window, in whole tiles
        return "smaller tiles (block_size), or a larger window, make it sparse"
    if " s=" in name:
        return "smaller tiles (block_size), or longer sequences, make it sparse"
    return "smaller tiles (block_size), a smaller window, or longer sequences make it sparse"


def _fastest(group: pd.DataFrame, about: str) -> Iterator[Claim]:
    """The fastest dense kernel at the longest length with two of them."""
    dense = group[group["is_dense"] & (group["speed_up_over"].map(len) > 0)]
    if dense.empty:
        return
    seq_len = int(dense["seq_len"].max())
    at = dense[dense["seq_len"] == seq_len].sort_values("forward", kind="stable")
    best = at.iloc[0]
    alike = not_slower(best, (name for name in at["name"] if name != best["name"]))
    sure, advice = in_ms(best, "forward"), ""
    if pd.notna(best["forward_share"]):
        sure += f", {percent(best, 'forward_share')} of the measured {best['dtype']} peak"
    if alike:
        answer = f"No clear difference between {overview.listed([best['name'], *alike])}"
        sure, advice = f"{best['name']} {sure}", "raise budget_s for narrower intervals"
    else:
        answer = f"{best['name']} is the fastest dense kernel"
    yield Claim(f"{answer} at {_tokens([seq_len])}", sure, advice, about, _over_dense(best))


def _of_sparse_kind(group: pd.DataFrame) -> pd.Series:
    """Which lines are of a sparse kind, whatever its mask removes."""
    return ~group["is_dense"]


def _sparse(group: pd.DataFrame) -> pd.DataFrame:
    """The lines whose mask removes something."""
    return group[_of_sparse_kind(group) & ~group["not_sparse"]]


def _over_dense(row: pd.Series) -> Pairs:
    """What one line's forward gains over that of every dense kernel of its length."""
    return gains(row, f"{row['name']} at {_tokens([int(row['seq_len'])])}")
