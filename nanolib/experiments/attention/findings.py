"""Build the tables and findings of the attention notebook.

The first finding answers the question of the notebook: when is sparse attention faster?
"""

from collections.abc import Iterable, Iterator

import pandas as pd

from nanolib.measurement import LEARNING_STEPS, SMOKE_TEST, Flag
from nanolib.report.charts import roofline_words
from nanolib.report.finding import OVERLAP, Estimate, Finding, Order, Pairs, comparing, unclear
from nanolib.report.overview import explain_missing, join_words, table_of
from nanolib.report.tables import (
    ONE,
    Column,
    add_metric_columns,
    case_rows,
    drop_missing,
    flagged,
    gains,
    in_ms,
    not_slower,
    times,
    titles,
    with_speed_ups,
    with_state,
)

_SHAPE = ["run_id", "seq_len", "batch_size", "dtype", "causal", "device"]
_COLUMNS = (
    Column("name", "Attention"),
    Column("seq_len", "Seq len"),
    Column("shape", "Batch, dtype"),
    Column("sparsity", "Sparsity", "sparsity"),
    Column("block_sparsity", "", "block_sparsity"),
    Column("mask", "Mask, ms [95 %]", "latency", "mask"),
    Column("mask_kept", "", "latency", "mask", detail="kept"),
    Column("compile", "", "latency", "compile"),
    Column("flops", "", "flops", "forward", "formula"),
    Column("forward", "Forward, ms [95 %]", "latency", "forward"),
    Column("cold", "", "latency", "forward, cold"),
    Column("forward_share", "", "mfu", "forward"),
    Column("backward", "Backward, ms [95 %]", "latency", "backward"),
    Column("backward_share", "", "mfu", "backward"),
    Column("speed_up", "Speed-up, × [95 %]"),
    Column("peak_memory", "Peak memory forward, MiB", "peak_memory", "forward"),
    Column("peak_memory_backward", "", "peak_memory", "forward_backward"),
    Column("relative_error", "", "relative_error", "forward"),
    Column("state", "State"),
)
ATTENTION_COLUMNS = titles(_COLUMNS)
_QUALITY = (
    Column("name", "Attention"),
    Column("sparsity", "Sparsity", "sparsity"),
    Column("dense_loss", "Dense loss, nats/byte [95 %]", "loss", "dense"),
    Column("replaced", "Replaced, Δ loss [95 %]", "loss_difference", "replaced"),
    Column("fine_tuned", "Fine-tuned, Δ loss [95 %]", "loss_difference", "fine_tuned"),
    Column("seeds", "Seeds"),
    Column("state", "State"),
)
QUALITY_COLUMNS = titles(_QUALITY)


@table_of("attention", "causal")
def attention_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a table with one line per attention case.

    `speed_up` is the smallest speed-up over the dense kernels that were timed in the same rounds.
    `once` is the time to build the mask and to compile, in ms. `speed_up_paid` is the speed-up of a
    forward pass if its time includes `once`. `bound` is the largest speed-up that the skipped tiles
    allow. `mask_is_dense` is true if the mask of sparse attention removes no pairs.
    """
    table = add_metric_columns(case_rows(rows, ["name", *_SHAPE[1:]], "name"), rows, _COLUMNS)
    table = flagged(with_speed_ups(table, rows, "forward"), rows)
    is_dense = table["name"].str.startswith(("dense", "flash_attn"))
    dense_tiles = table["block_sparsity"].where(is_dense)
    dense_tiles = dense_tiles.groupby([table[name] for name in _SHAPE]).transform("first")
    table = table.assign(
        is_dense=is_dense,
        mask_is_dense=[Flag.MASK_IS_DENSE in flags for flags in table["flags"]],
        shape=table["batch_size"].astype(int).astype(str) + ", " + table["dtype"],
        bound=(1 - dense_tiles) / (1 - table["block_sparsity"]),
    )
    # If each forward pass builds a mask, the forward time already includes the mask.
    is_kept = table["mask_kept"].ne(False)
    for end in ("", "_low", "_high"):
        mask = table[f"mask{end}"].where(is_kept).fillna(0)
        table[f"once{end}"] = mask + table["compile"].fillna(0)
    for end, other in (("", ""), ("_low", "_high"), ("_high", "_low")):
        forward = table[f"forward{end}"]
        share = forward / (forward + table[f"once{other}"])
        table[f"speed_up_paid{end}"] = table[f"speed_up{end}"] * share
    return with_state(table)


@table_of("attention", "seeds")
def quality_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a table with one line per sparse attention in a trained decoder.

    `replaced` and `fine_tuned` are differences from the dense loss, in nats per byte. `pattern` is
    the first word of the name.
    """
    table = case_rows(rows, ["name", "seq_len", "seeds", "steps"], "seeds")
    table = add_metric_columns(table, rows, _QUALITY)
    return with_state(table.assign(pattern=table["name"].str.split().str[0]))


# If sparse patterns differ at a sequence length, the finding states the first of these results.
_ORDERS = {
    "faster": "Sparse attention is faster than every dense kernel",
    "unclear": "No clear difference between sparse and dense attention",
    "slower": "Dense attention is faster than sparse attention",
}
_NARROWER = "increase budget_s"
_SPARSER = "use longer seq_lens or a sparser pattern"
_NONE = Estimate.exact(0.0, "no difference")
_EFFECTS = {
    Order.ABOVE: "increases the loss",
    Order.BELOW: "lowers the loss",
    Order.NO_DIFFERENCE: "makes no clear difference to the loss",
}


def verdict(rows: pd.DataFrame) -> list[Finding]:
    """Return findings about the speed of sparse and dense attention, the loss, and the roofline."""
    timed = drop_missing(attention_table(rows), "forward")
    if timed.empty:
        return explain_missing(rows, "attention", "Attention")
    groups = list(_split_groups(timed))
    findings = []
    for find in (_compare_sparse, _compare_own):
        for about, group in groups:
            findings += find(group, about)
    if not (_has_mask(timed) | timed["mask_is_dense"]).any():
        kinds = timed["is_dense"].map({True: "dense kernels", False: "your own attentions"})
        next_step = "add {kind: sparse, pattern: window} to attention_types"
        text = "Sparse attention was not measured"
        findings.append(Finding(text, f"only {join_words(kinds)} were measured", next_step))
    findings += _compare_losses(quality_table(rows))
    for find in (_find_dense_masks, _find_fastest):
        for about, group in groups:
            findings += find(group, about)
    return [*findings, *roofline_words(rows, "attention")]


def _split_groups(timed: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    several = timed["run_id"].nunique() > 1  # nanolib never compares timings of different runs.
    for _, group in timed.groupby(["run_id", "batch_size", "dtype"], sort=False):
        first = group.iloc[0]
        causal = "Causal" if first["causal"] else "Non-causal"
        about = f"{causal}, batch {int(first['batch_size'])}, {first['dtype']}"
        yield about + (f", run {first['run_id'][:8]}" if several else ""), group


def _compare_sparse(group: pd.DataFrame, about: str) -> Iterator[Finding]:
    sparse = group[_has_mask(group)]
    if sparse.empty and group["mask_is_dense"].any():
        why = "no mask removes a query-key pair"
        yield Finding("Sparse attention was not measured", why, _SPARSER, about)
    lines = drop_missing(sparse, "speed_up")
    if lines.empty:
        if len(sparse):
            text = "Sparse attention was not compared with dense attention"
            why = "no dense kernel was timed in the same rounds"
            yield Finding(text, why, "add {kind: dense} to attention_types", about)
        return
    orders = [_find_order(line) for _, line in lines.iterrows()]
    lines = lines.assign(order=pd.Categorical(orders, [*_ORDERS]))
    best = lines.sort_values(["seq_len", "order", "speed_up"], ascending=[True, True, False])
    best = best.drop_duplicates("seq_len")
    texts = {
        order: f"{_ORDERS[order]} {_format_lengths(lengths)}"
        for order, lengths in best.groupby("order", observed=True)["seq_len"]
    }
    main = next(order for order in ("faster", "unclear", "slower") if order in texts)
    longest = best[best["order"] == main].iloc[-1]
    evidence = _format_gain(longest)
    # If the order is unclear, the smallest speed-up may be clear and another speed-up is not.
    overlaps = Estimate.of(longest, "speed_up").compare_to(ONE) is Order.NO_DIFFERENCE
    if main == "unclear" and overlaps:
        evidence += f" {OVERLAP}"
    evidence = ". ".join([evidence, *(text for order, text in texts.items() if order != main)])
    compared = tuple(pair for _, line in best.iterrows() for pair in _list_speed_ups(line))
    yield Finding(texts[main], evidence, _NARROWER if main == "unclear" else "", about, compared)


def _find_order(line: pd.Series) -> str:
    """Compare a pattern with the dense kernels of the same length. Return a key of `_ORDERS`."""
    orders = {figure.compare_to(ONE) for figure in line["speed_up_over"]}
    if orders == {Order.ABOVE}:
        return "faster"
    return "slower" if Order.BELOW in orders else "unclear"


def _format_gain(line: pd.Series) -> str:
    text = f"{line['name']} (sparsity {line['sparsity']:.0%}) is {times(line, 'speed_up')} as fast "
    text += f"as {line['speed_up_baseline']} {_format_lengths([line['seq_len']])}"
    if line["mask_kept"] == 0:
        return f"{text}, including the time to build a mask in each call"
    if line["once"] > 0:
        text += f", or {times(line, 'speed_up_paid')} in the first call, which includes building "
        text += "the mask and compiling" if line["compile"] > 0 else "the mask"
    return text


def _compare_own(group: pd.DataFrame, about: str) -> Iterator[Finding]:
    """Compare attentions without a mask that nanolib knows with dense attention."""
    is_other = ~(group["is_dense"] | group["mask_is_dense"] | _has_mask(group))
    lines = drop_missing(group[is_other], "speed_up")
    for _, line in lines[lines["seq_len"] == lines["seq_len"].max()].iterrows():
        name, dense = line["name"], line["speed_up_baseline"]
        where = _format_lengths([line["seq_len"]])
        evidence, order = times(line, "speed_up"), Estimate.of(line, "speed_up").compare_to(ONE)
        text = f"{name} is {'faster' if order is Order.ABOVE else 'slower'} than {dense} {where}"
        if order is Order.NO_DIFFERENCE:
            text, evidence = unclear(f"{name} and {dense} {where}", evidence)
        yield Finding(text, evidence, about=about, compared=_list_speed_ups(line, {dense}))


def _find_dense_masks(group: pd.DataFrame, about: str) -> Iterator[Finding]:
    nothing = group[group["mask_is_dense"]]
    for name, lines in nothing.groupby("name", sort=False):
        where = _format_lengths(sorted(lines["seq_len"].unique()))
        text = f"The mask of {name} removes no pairs {where}"
        yield Finding(text, "the comparison excludes such masks", _SPARSER, about)


def _find_fastest(group: pd.DataFrame, about: str) -> Iterator[Finding]:
    """Yield a finding about the fastest of several dense kernels at the longest sequence."""
    dense = group[group["is_dense"] & (group["speed_up_over"].map(len) > 0)]
    if dense.empty:
        return
    dense = dense[dense["seq_len"] == dense["seq_len"].max()].sort_values("forward")
    best, where = dense.iloc[0], _format_lengths(dense["seq_len"])
    text, next_step = f"{best['name']} is the fastest dense kernel {where}", ""
    evidence = in_ms(best, "forward")
    if ties := not_slower(best, dense["name"]):
        tied = dense[dense["name"].isin([best["name"], *ties])]
        evidence = join_words(in_ms(line, "forward") for _, line in tied.iterrows())
        text, evidence = unclear(f"{join_words(tied['name'])} {where}", evidence)
        next_step = _NARROWER
    yield Finding(text, evidence, next_step, about, _list_speed_ups(best))


def _has_mask(lines: pd.DataFrame) -> pd.Series:
    return ~lines["is_dense"] & (lines["sparsity"] > 0)


def _format_lengths(lengths: Iterable[float]) -> str:
    return f"at {join_words(f'{int(n):,}' for n in lengths)} tokens"


def _list_speed_ups(line: pd.Series, over: set[str] | None = None) -> Pairs:
    return gains(line, f"{line['name']} {_format_lengths([line['seq_len']])}", among=over)


def _compare_losses(table: pd.DataFrame) -> list[Finding]:
    """Return a finding per sparse pattern about the loss at the highest measured sparsity."""
    if table.empty:
        return []
    is_short = table["steps"] < LEARNING_STEPS
    if is_short.all():
        evidence = f"{int(table['steps'].max())} training steps are {SMOKE_TEST}"
        next_step = f"set quality_steps to at least {LEARNING_STEPS}"
        return [Finding("The loss of sparse attention was not measured", evidence, next_step)]
    long = drop_missing(table[~is_short], "replaced").sort_values("sparsity", kind="stable")
    lines = long.drop_duplicates("pattern", keep="last")
    return [_compare_loss(line) for _, line in lines.iterrows()]


def _compare_loss(line: pd.Series) -> Finding:
    if not line["sparsity"]:
        text = f"The loss of {line['pattern']} was not measured"
        return Finding(
            text, "the mask removes no pairs", "use a sparser pattern or a smaller block_size"
        )
    scopes = [scope for scope in ("replaced", "fine_tuned") if pd.notna(line[scope])]
    figures = [Estimate.of(line, scope, "loss_difference", line["pattern"]) for scope in scopes]
    effects = [_EFFECTS[figure.compare_to(_NONE)] for figure in figures]
    text = f"In a trained decoder, {line['pattern']} ({line['sparsity']:.0%} sparse) "
    if len(set(effects)) < len(effects):
        effects = [f"{effects[0]}, before and after a fine-tune"]
    text += ", and after a fine-tune it ".join(effects)
    ends = [f"{one.estimate:+.3f} [{one.low:+.3f} … {one.high:+.3f}]" for one in figures]
    evidence = f"{' and '.join(ends)} nats/byte with {int(line['seeds'])} seeds, "
    evidence += f"and the dense loss is {line['dense_loss']:.2f}"
    compared = tuple(pair for figure in figures for pair in comparing(figure, _NONE))
    return Finding(text, evidence, compared=compared)
