"""Tables and findings of attention. The first finding answers the question of the notebook."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pandas as pd

from nanolib.measurement import LEARNING_STEPS, SMOKE_TEST, Flag
from nanolib.report.charts import roofline_words
from nanolib.report.finding import Estimate, Finding, Order, comparing
from nanolib.report.in_turns import ONE, Pairs, gains, not_slower, with_speed_ups
from nanolib.report.overview import cached, join_words, of_experiment, rows_with_factor
from nanolib.report.tables import (
    Column,
    add_metric_columns,
    case_rows,
    drop_missing,
    flagged,
    in_ms,
    times,
    titles,
    with_state,
)

_SHAPE = ["run_id", "seq_len", "batch_size", "dtype", "causal", "device"]
_COLUMNS = (
    Column("name", "Attention"),
    Column("seq_len", "Seq len"),
    Column("shape", "Batch, dtype"),
    Column("sparsity", "Sparsity", "sparsity"),
    Column("block_sparsity", "", "block_sparsity"),
    Column("mask", "Mask, ms [95 %]", "latency", "mask", interval=True),
    Column("mask_kept", "", "latency", "mask", detail="kept"),
    Column("compile", "", "latency", "compile"),
    Column("flops", "", "flops", "forward", "formula"),
    Column("forward", "Forward, ms [95 %]", "latency", "forward", interval=True),
    Column("cold", "", "latency", "forward, cold", interval=True),
    Column("forward_share", "", "mfu", "forward", interval=True),
    Column("backward", "Backward, ms [95 %]", "latency", "backward", interval=True),
    Column("backward_share", "", "mfu", "backward"),
    Column("speed_up", "Speed-up, × [95 %]"),
    Column("peak_memory", "Peak, MiB", "peak_memory", "forward"),
    Column("peak_memory_backward", "", "peak_memory", "forward_backward"),
    Column("relative_error", "", "relative_error", "forward"),
    Column("state", "State"),
)
ATTENTION_COLUMNS = titles(_COLUMNS)
_QUALITY = (
    Column("pattern", "Pattern"),
    Column("sparsity", "Sparsity", "sparsity", interval=True),
    Column("dense_loss", "Dense loss, nats/byte [95 %]", "loss", "dense", interval=True),
    Column("replaced", "Replaced, Δ [95 %]", "loss_difference", "replaced", interval=True),
    Column("fine_tuned", "Fine-tuned, Δ [95 %]", "loss_difference", "fine_tuned", interval=True),
    Column("seeds", "Seeds"),
    Column("state", "State"),
)
QUALITY_COLUMNS = titles(_QUALITY)


@cached
def attention_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a line per attention case.

    Returns:
        Among others `speed_up` (the smallest over a dense kernel timed in the same rounds), `once`
        (ms of building a mask and of compiling), `speed_up_paid` (including `once`), `bound` (upper
        bound from skipped tiles), `mask_is_dense` (it removes nothing), `unsteady` (not settled).
    """
    rows = of_experiment(rows, "attention")
    if "factor.pattern" in rows:  # `quality_table` has these rows
        rows = rows[rows["factor.pattern"].isna()]
    table = case_rows(rows, ["name", *_SHAPE[1:]], "name")
    if table.empty:
        return table
    table = flagged(
        with_speed_ups(add_metric_columns(table, rows, _COLUMNS), rows, "forward"), rows
    )
    is_dense = table["name"].str.startswith(("dense", "flash_attn"))
    dense_tiles = table["block_sparsity"].where(is_dense)
    dense_tiles = dense_tiles.groupby([table[name] for name in _SHAPE]).transform("first")
    table = table.assign(
        is_dense=is_dense,
        mask_is_dense=(table["sparsity"] == 0) & ~is_dense,
        shape=table["batch_size"].astype(int).astype(str) + ", " + table["dtype"],
        bound=(1 - dense_tiles) / (1 - table["block_sparsity"]),
        unsteady=[Flag.NO_STEADY_STATE in flags for flags in table["flags"]],
    )
    # each forward pass includes a mask that depends on the input
    once = table["mask_kept"].ne(False)
    for end in ("", "_low", "_high"):
        table[f"once{end}"] = table[f"mask{end}"].where(once).fillna(0) + table["compile"].fillna(0)
    for end, other in (("", ""), ("_low", "_high"), ("_high", "_low")):
        forward = table[f"forward{end}"]
        share = forward / (forward + table[f"once{other}"])
        table[f"speed_up_paid{end}"] = table[f"speed_up{end}"] * share
    return with_state(table)


@cached
def quality_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a line per pattern and target; `replaced` and `fine_tuned` are the loss above dense."""
    rows = rows_with_factor(rows, "attention", "pattern")
    factors = ["pattern", "target", "seq_len", "seeds", "steps"]
    table = add_metric_columns(case_rows(rows, factors, "pattern"), rows, _QUALITY)
    table = table.drop(columns=[name for name in table if name.endswith(("_predicted", "_busy"))])
    return with_state(table)


_ORDERS = {  # the first that any pattern reaches holds for a length
    "faster": "sparse attention is faster than every dense kernel",
    "busy": "a busy machine allows no comparison of sparse and dense attention",
    "unclear": "no clear difference between sparse and dense attention",
    "slower": "dense attention is faster than sparse",
}
_OVERLAP = "(the intervals overlap)"
_NARROWER = "increase budget_s"
_NONE = Estimate.exact(0.0, "no difference")
_EFFECTS = {
    Order.ABOVE: "increases the loss",
    Order.BELOW: "lowers the loss",
    Order.NO_DIFFERENCE: "makes no clear difference to the loss",
}


@cached
def verdict(rows: pd.DataFrame) -> list[Finding]:
    """Return at which lengths sparse attention is faster than dense, and its effect on the loss."""
    timed = drop_missing(attention_table(rows), "forward")
    if timed.empty:
        return [Finding("Attention was not measured", next_step="nano run quick attention")]
    groups = list(_split_groups(timed))
    findings = [finding for about, group in groups for finding in _compare_sparse(group, about)]
    if not _has_mask(timed).any():
        next_step = "add {kind: sparse, pattern: window} to attention_types"
        text = "Sparse attention was not measured"
        findings.append(Finding(text, "only dense kernels were", next_step))
    findings += _compare_losses(quality_table(rows))
    for further in (_compare_own, _find_dense_masks, _find_fastest):
        findings += [finding for about, group in groups for finding in further(group, about)]
    return [*findings, *roofline_words(rows, "attention")]


def _split_groups(timed: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield cases that may be ranked together. Those of two runs or devices may not."""
    places = [name for name in ("run_id", "device") if timed[name].nunique() > 1]
    for _, group in timed.groupby(["batch_size", "dtype", "causal", *places], sort=False):
        first = group.iloc[0]
        about = ["Causal" if first["causal"] else "Non-causal", f"batch {int(first['batch_size'])}"]
        about.append(first["dtype"])
        about += [f"run {first['run_id'][:8]}"] if "run_id" in places else []
        about += [first["device"]] if "device" in places else []
        yield ", ".join(about), group


def _compare_sparse(group: pd.DataFrame, about: str) -> Iterator[Finding]:
    """Yield whether a pattern is faster than every dense kernel, at each measured length."""
    sparse = group[_has_mask(group) & ~group["mask_is_dense"]]
    lines = drop_missing(sparse, "speed_up")
    if len(sparse) and lines.empty:
        text = "Sparse attention was not compared with dense"
        why = "no dense kernel was timed in the same rounds"
        yield Finding(text, why, "add {kind: dense} to attention_types", about)
    if lines.empty:
        return
    lines = lines.assign(order=[_find_order(row, group) for _, row in lines.iterrows()])
    lines["rank"] = lines["order"].map([*_ORDERS].index)
    best = lines.sort_values(["seq_len", "rank", "speed_up"], ascending=[True, True, False])
    best = best.drop_duplicates("seq_len")
    texts = {
        order: f"{_ORDERS[order]} {_format_lengths(part['seq_len'])}"
        for order, part in best.groupby("order")
    }
    main = next(order for order in ("faster", "unclear", "slower", "busy") if order in texts)
    longest = best[best["order"] == main].iloc[-1]
    evidence = _format_gain(longest)
    # without an overlap, a dense kernel is missing in the rounds
    overlaps = Estimate.of(longest, "speed_up").compare_to(ONE) is Order.NO_DIFFERENCE
    if main == "unclear" and overlaps:
        evidence += f" {_OVERLAP}"
    others = [words.capitalize() for order, words in texts.items() if order != main]
    used = lines.merge(best[["seq_len", "order"]])
    used = used[(used["order"] != "busy") | (main == "busy")]
    compared = tuple(pair for _, row in used.iterrows() for pair in _list_speed_ups(row))
    next_step = _NARROWER if main == "unclear" else ""
    text, evidence = texts[main].capitalize(), ". ".join([evidence, *others])
    yield Finding(text, evidence, next_step, about, compared)


def _find_order(row: pd.Series, group: pd.DataFrame) -> str:
    """Return a key of `_ORDERS`: one pattern against all dense kernels of its shape."""
    dense = group[group["is_dense"] & (group["seq_len"] == row["seq_len"])]["name"]
    orders = {figure.compare_to(ONE) for figure in row["speed_up_over"]}
    if any(figure.busy for figure in row["speed_up_over"]):
        return "busy"
    if orders == {Order.ABOVE} and set(dense) <= {figure.name for figure in row["speed_up_over"]}:
        return "faster"
    return "slower" if Order.BELOW in orders else "unclear"


def _format_gain(row: pd.Series) -> str:
    """Return a pattern's speed-up over the nearest dense kernel, without and with its mask."""
    text = f"{row['name']} (sparsity {row['sparsity']:.0%}) is {times(row, 'speed_up')} as fast as "
    text += f"{row['speed_up_baseline']} {_format_lengths([row['seq_len']])}"
    if row["mask_kept"] == 0:
        return f"{text}, including its mask, which each call chooses"
    if row["once"] > 0:
        also = " and compiling" if row["compile"] > 0 else ""
        text += f", or {times(row, 'speed_up_paid')} in the first call, which includes building "
        text += f"the mask{also}"
    return text


def _compare_own(group: pd.DataFrame, about: str) -> Iterator[Finding]:
    """Yield the speed-up of each function of the user over the nearest dense kernel."""
    lines = drop_missing(group[group["name"].str.startswith("own ")], "speed_up")
    for _, row in lines[lines["seq_len"] == lines["seq_len"].max()].iterrows():
        name, dense = row["name"], row["speed_up_baseline"]
        where = _format_lengths([row["seq_len"]])
        evidence, order = times(row, "speed_up"), Estimate.of(row, "speed_up").compare_to(ONE)
        text = f"{name} is {'faster' if order is Order.ABOVE else 'slower'} than {dense} {where}"
        if order is Order.NO_DIFFERENCE:
            text = f"No clear difference between {name} and {dense} {where}"
            evidence += f" {_OVERLAP}"
        compared = gains(row, f"{name} {where}", among={dense})
        yield Finding(text, evidence, about=about, compared=compared)


def _find_dense_masks(group: pd.DataFrame, about: str) -> Iterator[Finding]:
    """Yield the patterns whose masks remove nothing, and at which lengths."""
    nothing = group[group["mask_is_dense"]]
    if len(nothing):
        where = _format_lengths(sorted(nothing["seq_len"].unique()))
        text = f"The mask of {join_words(nothing['name'])} removes nothing {where}"
        next_step = "reduce block_size, or use longer seq_lens"
        yield Finding(text, "it is excluded from the comparison", next_step, about)


def _find_fastest(group: pd.DataFrame, about: str) -> Iterator[Finding]:
    """Yield the fastest dense kernel at the longest length with two of them."""
    dense = group[group["is_dense"] & (group["speed_up_over"].map(len) > 0)]
    if dense.empty:
        return
    dense = dense[dense["seq_len"] == dense["seq_len"].max()]
    best, where = dense.loc[dense["forward"].idxmin()], _format_lengths(dense["seq_len"])
    text, next_step = f"{best['name']} is the fastest dense kernel {where}", ""
    evidence = in_ms(best, "forward")
    if ties := not_slower(best, dense["name"]):
        tied = dense[dense["name"].isin([best["name"], *ties])].sort_values("forward")
        text = f"No clear difference between {join_words(tied['name'])} {where}"
        evidence = join_words(in_ms(row, "forward") for _, row in tied.iterrows())
        evidence, next_step = f"{evidence} {_OVERLAP}", _NARROWER
    yield Finding(text, evidence, next_step, about, _list_speed_ups(best))


def _has_mask(group: pd.DataFrame) -> pd.Series:
    """Return which lines have a mask, whatever it removes."""
    return ~group["is_dense"] & group["sparsity"].notna()


def _format_lengths(lengths: Iterable[float]) -> str:
    return f"at {join_words(f'{int(n):,}' for n in lengths)} tokens"


def _list_speed_ups(row: pd.Series) -> Pairs:
    """Return the speed-ups of a line over every dense kernel of its length."""
    return gains(row, f"{row['name']} {_format_lengths([row['seq_len']])}")


def _compare_losses(table: pd.DataFrame) -> list[Finding]:
    """Return the effect of each pattern on the loss at its highest sparsity."""
    short = table["steps"] < LEARNING_STEPS
    if len(table) and short.all():
        evidence = f"{int(table['steps'].max())} training steps are {SMOKE_TEST}"
        next_step = f"set quality_steps to at least {LEARNING_STEPS}"
        return [Finding("The loss of sparse attention was not measured", evidence, next_step)]
    long = drop_missing(table[~short], "replaced").sort_values("sparsity", kind="stable")
    return [
        _compare_loss(row) for _, row in long.drop_duplicates("pattern", keep="last").iterrows()
    ]


def _compare_loss(row: pd.Series) -> Finding:
    """Return the effect of one pattern on the loss, before and after the fine-tune."""
    if not row["sparsity"]:
        text = f"The loss of {row['pattern']} was not measured"
        return Finding(text, "its mask removes nothing", "reduce quality_block_size")
    scopes = [scope for scope in ("replaced", "fine_tuned") if pd.notna(row[scope])]
    figures = [Estimate.of(row, scope, "loss_difference", row["pattern"]) for scope in scopes]
    replaced, *tuned = (_EFFECTS[figure.compare_to(_NONE)] for figure in figures)
    text = f"In a trained decoder, {row['pattern']} ({row['sparsity']:.0%} sparse) {replaced}"
    text += "".join(f", and after a fine-tune it {effect}" for effect in tuned)
    ends = [f"{one.estimate:+.3f} [{one.low:+.3f} … {one.high:+.3f}]" for one in figures]
    evidence = f"{' and '.join(ends)} nats/byte, {int(row['seeds'])} seeds, "
    evidence += f"dense loss {row['dense_loss']:.2f}"
    compared = tuple(pair for figure in figures for pair in comparing(figure, _NONE))
    return Finding(text, evidence, compared=compared)
