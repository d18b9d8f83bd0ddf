"""The conclusions on attention, from the rows; the first sentence answers the notebook's question."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from nanolib.experiments.attention.tables import attention_table, quality_table
from nanolib.measurement import LEARNING_STEPS, SMOKE_TEST
from nanolib.report.finding import Estimate, Finding, Order, comparing
from nanolib.report.in_turns import ONE, Pairs, gains, not_slower
from nanolib.report.overview import cached, join_words
from nanolib.report.roofline import roofline_words
from nanolib.report.tables import drop_missing, in_ms, times

_ORDERS = {  # of several patterns at one length the first counts
    "faster": "sparse attention is faster than every dense kernel",
    "busy": "the machine was too busy to draw an order",
    "unclear": "no clear difference between sparse and dense attention",
    "slower": "dense attention is faster than sparse",
}
_LONGER = "raise budget_s for narrower intervals"
_NONE = Estimate.exact(0.0, "no difference")
_MEANING = {
    Order.ABOVE: "costs loss",
    Order.BELOW: "lowers the loss",
    Order.NO_DIFFERENCE: "makes no clear difference to the loss",
}


@cached
def verdict(rows: pd.DataFrame) -> list[Finding]:
    """At which lengths sparse attention is faster than dense, by how much, and what it costs in loss."""
    timed = drop_missing(attention_table(rows), "forward")
    if timed.empty:
        return [Finding("No attention case gave a time", next_step="nano run quick attention")]
    groups = list(_groups(timed))
    findings = [finding for about, group in groups for finding in _answer(group, about)]
    if not _sparse_kinds(timed).any():
        said = "Only dense kernels were measured, so nothing is known of sparse attention"
        next_step = "add a kind such as {kind: sparse, pattern: window} to attention_types"
        findings.append(Finding(said, next_step=next_step))
    findings += _quality(quality_table(rows))
    for further in (_of_yours, _removes_nothing, _fastest):
        findings += [finding for about, group in groups for finding in further(group, about)]
    return [*findings, *roofline_words(rows, "attention")]


def _groups(timed: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """What is ranked together, and what it is called; times of two runs or devices are not."""
    places = [name for name in ("run_id", "device") if timed[name].nunique() > 1]
    for _, group in timed.groupby(["batch_size", "dtype", "causal", *places], sort=False):
        first = group.iloc[0]
        about = ["Causal" if first["causal"] else "Non-causal", f"batch {int(first['batch_size'])}"]
        about.append(first["dtype"])
        about += [f"run {first['run_id'][:8]}"] if "run_id" in places else []
        about += [first["device"]] if "device" in places else []
        yield ", ".join(about), group


def _answer(group: pd.DataFrame, about: str) -> Iterator[Finding]:
    """Whether a pattern is faster than every dense kernel, at each length that was measured."""
    sparse = group[_sparse_kinds(group) & ~group["mask_is_dense"]]
    lines = drop_missing(sparse, "speed_up")
    if len(sparse) and lines.empty:
        answer = "Sparse attention was not timed in the same rounds as a dense kernel"
        next_step = "add {kind: dense} to attention_types, or raise budget_s"
        yield Finding(answer, next_step=next_step, about=about)
    if lines.empty:
        return
    lines = lines.assign(order=[_order(row, group) for _, row in lines.iterrows()])
    lines["rank"] = lines["order"].map([*_ORDERS].index)
    best = lines.sort_values(["seq_len", "rank", "speed_up"], ascending=[True, True, False])
    best = best.drop_duplicates("seq_len")
    said = {
        order: f"{_ORDERS[order]} at {_tokens(part['seq_len'])}"
        for order, part in best.groupby("order")
    }
    shown = next(order for order in ("faster", "unclear", "slower", "busy") if order in said)
    evidence = [_gain(best[best["order"] == shown].iloc[-1])]
    evidence += [words for order, words in said.items() if order != shown]
    told = lines.merge(best[["seq_len", "order"]])
    told = told[(told["order"] != "busy") | (shown == "busy")]
    compared = tuple(pair for _, row in told.iterrows() for pair in _over_dense(row))
    next_step = _LONGER if shown == "unclear" else ""
    yield Finding(said[shown].capitalize(), "; ".join(evidence), next_step, about, compared)


def _order(row: pd.Series, group: pd.DataFrame) -> str:
    """What one pattern is to all dense kernels of its shape."""
    dense = group[group["is_dense"] & (group["seq_len"] == row["seq_len"])]["name"]
    figures = {figure.name: figure for figure in row["speed_up_over"]}
    orders = {figure.compare_to(ONE) for figure in figures.values()}
    if any(figure.busy for figure in figures.values()):
        return "busy"
    if orders == {Order.ABOVE} and set(dense) <= set(figures):
        return "faster"
    return "slower" if Order.BELOW in orders else "unclear"


def _gain(row: pd.Series) -> str:
    """How much faster one pattern is than the dense kernel that is nearest to it, what it removes, and what its mask takes."""
    text = f"at {_tokens([row['seq_len']])} {row['name']} (sparsity {row['sparsity']:.0%}) is "
    text += f"{times(row, 'speed_up')} as fast as {row['speed_up_baseline']}"
    if row["mask_kept"] == 0:
        return f"{text}, with choosing the mask in each call"
    if row["once"] > 0:
        also = " and compiling" if row["compile"] > 0 else ""
        text += f", {times(row, 'speed_up_paid')} with building the mask{also} in the first call"
    return text


def _of_yours(group: pd.DataFrame, about: str) -> Iterator[Finding]:
    """What each function of yours gains over the dense kernel that is nearest to it, at the longest length."""
    lines = drop_missing(group[group["name"].str.startswith("own ")], "speed_up")
    for _, row in lines[lines["seq_len"] == lines["seq_len"].max()].iterrows():
        answer = f"{row['name']} is {times(row, 'speed_up')} as fast as {row['speed_up_baseline']}"
        answer += f" at {_tokens([row['seq_len']])}"
        yield Finding(answer, about=about, compared=_over_dense(row))


def _removes_nothing(group: pd.DataFrame, about: str) -> Iterator[Finding]:
    """Which kinds are dense at which lengths, since their masks remove nothing there, and what would change that."""
    nothing = group[group["mask_is_dense"]]
    if len(nothing):
        names, lengths = join_words(nothing["name"]), _tokens(sorted(nothing["seq_len"].unique()))
        answer = f"The mask of {names} removes nothing at {lengths}"
        next_step = "smaller tiles (block_size) or longer sequences make it sparse"
        yield Finding(answer, "it is dense there, and no gain is claimed", next_step, about)


def _fastest(group: pd.DataFrame, about: str) -> Iterator[Finding]:
    """The fastest dense kernel at the longest length with two of them."""
    dense = group[group["is_dense"] & (group["speed_up_over"].map(len) > 0)]
    if dense.empty:
        return
    dense = dense[dense["seq_len"] == dense["seq_len"].max()]
    best, where = dense.loc[dense["forward"].idxmin()], f"at {_tokens(dense['seq_len'])}"
    answer, next_step = f"{best['name']} is the fastest dense kernel {where}", ""
    if alike := not_slower(best, dense["name"]):
        answer = f"No clear difference between {join_words([best['name'], *alike])} {where}"
        next_step = _LONGER
    evidence = f"{best['name']} takes {in_ms(best, 'forward')}"
    yield Finding(answer, evidence, next_step, about, _over_dense(best))


def _sparse_kinds(group: pd.DataFrame) -> pd.Series:
    """Which lines are of a kind with a mask, whatever it removes."""
    return ~group["is_dense"] & group["sparsity"].notna()


def _tokens(lengths: object) -> str:
    return f"{join_words(f'{int(n):,}' for n in lengths)} tokens"


def _over_dense(row: pd.Series) -> Pairs:
    """What one line's forward gains over that of every dense kernel of its length."""
    return gains(row, f"{row['name']} at {_tokens([row['seq_len']])}")


def _quality(table: pd.DataFrame) -> list[Finding]:
    """What each pattern costs at its highest sparsity, and after the fine-tune."""
    short = table["steps"] < LEARNING_STEPS
    if len(table) and short.all():
        tried = f"The loss of sparse patterns was tried over {int(table['steps'].max())} steps"
        return [Finding(tried, SMOKE_TEST, f"quality_steps: {LEARNING_STEPS} or more")]
    tried = drop_missing(table[~short], "replaced").sort_values("sparsity", kind="stable")
    return [_cost(row) for _, row in tried.drop_duplicates("pattern", keep="last").iterrows()]


def _cost(row: pd.Series) -> Finding:
    """What one pattern does to the loss, when it replaces dense attention and after the fine-tune."""
    who = f"In a trained decoder {row['pattern']}"
    if not row["sparsity"]:
        return Finding(f"{who} removed nothing, so its loss says nothing of sparsity")
    scopes = [scope for scope in ("replaced", "fine_tuned") if pd.notna(row[scope])]
    figures = [
        Estimate.of(row, scope, "loss_difference", scope, row["pattern"]) for scope in scopes
    ]
    replaced, *tuned = (_MEANING[figure.compare_to(_NONE)] for figure in figures)
    answer = f"{who}, which removes {row['sparsity']:.0%}, {replaced}"
    answer += "".join(f", and after a fine-tune it {meaning}" for meaning in tuned)
    ends = [f"{f.estimate:+.3f} [{f.low:+.3f} … {f.high:+.3f}] nats per byte" for f in figures]
    evidence = f"{', then '.join(ends)} on a loss of {row['dense_loss']:.2f}"
    compared = tuple(pair for figure in figures for pair in comparing(figure, _NONE))
    return Finding(answer, f"{evidence}; {int(row['seeds'])} seeds", compared=compared)
