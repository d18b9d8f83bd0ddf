"""Build the tables and findings of the attention notebook.

The first finding answers the question of the notebook: when is sparse attention faster?
"""

from collections.abc import Iterable, Iterator

import pandas as pd

from nanolib.measurement import Flag
from nanolib.report.section import (
    Estimate,
    Finding,
    Order,
    Pairs,
    comparing,
    drop_missing,
    explain_missing,
    join_words,
)
from nanolib.report.shared import (
    compare_speed,
    drop_short,
    find_fastest,
    roofline_words,
    table_of,
)
from nanolib.report.tables import (
    ONE,
    Column,
    add_speed_ups,
    case_table,
    gains,
    times,
    titles,
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
_MOST_ERROR = 0.1  # Rounding in 16-bit dtypes causes an error of about 0.01.
_QUALITY = (
    Column("name", "Attention"),
    Column("sparsity", "Sparsity", "sparsity"),
    Column("dense_loss", "Dense loss, nats/byte [95 %]", "loss", "dense"),
    Column("replaced", "Replaced, Δ loss [95 %]", "loss_difference", "replaced"),
    Column("seeds", "Seeds"),
    Column("state", "State"),
)
QUALITY_COLUMNS = titles(_QUALITY)


@table_of("attention", "causal")
def attention_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a table with one line per attention case.

    `speed_up` is the smallest speed-up over the dense kernels that were timed in the same rounds.
    An attention with a wrong output has no speed-up.
    `speed_up_paid` is the speed-up of a forward pass whose time includes building the mask and
    compiling. `bound` is the largest speed-up that the skipped tiles allow. `is_sparse` is true for
    a mask that removes pairs, and `mask_is_dense` for the mask of sparse attention that removes
    none.
    """
    table = add_speed_ups(case_table(rows, ["name", *_SHAPE[1:]], _COLUMNS), rows, "forward")
    table.loc[table["relative_error"] > _MOST_ERROR, "speed_up"] = float("nan")
    is_dense = table["name"].str.startswith(("dense", "flash_attn"))
    dense_tiles = table["block_sparsity"].where(is_dense)
    dense_tiles = dense_tiles.groupby([table[name] for name in _SHAPE]).transform("first")
    table = table.assign(
        is_dense=is_dense,
        is_sparse=~is_dense & (table["sparsity"] > 0),
        mask_is_dense=[Flag.MASK_IS_DENSE in flags for flags in table["flags"]],
        shape=table["batch_size"].astype(int).astype(str) + ", " + table["dtype"],
        bound=(1 - dense_tiles) / (1 - table["block_sparsity"]),
    )
    # If each forward pass builds a mask, the forward time already includes the mask.
    is_kept = table["mask_kept"].ne(False)
    for end, other in (("", ""), ("_low", "_high"), ("_high", "_low")):
        once = table[f"mask{other}"].where(is_kept).fillna(0) + table["compile"].fillna(0)
        forward = table[f"forward{end}"]
        table[f"speed_up_paid{end}"] = table[f"speed_up{end}"] * forward / (forward + once)
    return table


@table_of("attention", "seeds")
def quality_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a table with one line per sparse attention in a trained decoder.

    `replaced` is the difference from the dense loss, in nats per byte. `pattern` is the first word
    of the name.
    """
    table = case_table(rows, ["name", "seq_len", "seeds", "steps"], _QUALITY)
    return table.assign(pattern=table["name"].str.split().str[0])


# If sparse patterns differ at a sequence length, the finding states the first of these orders.
_ORDERS = (
    "Sparse attention is faster than every dense kernel",
    "No clear difference between sparse and dense attention",
    "Dense attention is faster than sparse attention",
)
_FASTER, _UNCLEAR, _SLOWER = range(3)
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
    sparse, own, dense = [], list(_find_wrong(timed)), []
    several = timed["run_id"].nunique() > 1  # nanolib never compares timings of different runs.
    for (run_id, batch, dtype), group in timed.groupby(
        ["run_id", "batch_size", "dtype"], sort=False
    ):
        causal = "Causal" if group["causal"].iloc[0] else "Non-causal"
        about = f"{causal}, batch {int(batch)}, {dtype}{f', run {run_id[:8]}' if several else ''}"
        sparse += _compare_sparse(group, about)
        own += _compare_own(group, about)
        kernels = drop_missing(group[group["is_dense"]], "speed_up")
        longest = kernels["seq_len"].max()
        kernels = kernels[kernels["seq_len"] == longest]
        where = f"at {longest:,.0f} tokens"
        dense += find_fastest(kernels, "name", "forward", "dense kernel", where, about)
    if not sparse:
        own.append(
            Finding(
                "Sparse attention was not compared with dense attention",
                "no mask that removes pairs was timed in turns with a dense kernel",
                "add both to attention_types, or use longer seq_lens",
            )
        )
    losses = _compare_losses(quality_table(rows))
    return [*sparse, *own, *losses, *dense, *roofline_words(rows, "attention")]


def _find_wrong(timed: pd.DataFrame) -> Iterator[Finding]:
    """Yield a finding per attention whose output differs from float64."""
    wrong = timed[timed["relative_error"] > _MOST_ERROR]
    for name, errors in wrong.groupby("name", sort=False)["relative_error"]:
        text = f"{name} does not return the output of dense attention under its mask"
        yield Finding(text, f"the relative error is {errors.max():.2g}", "correct the function")


def _compare_sparse(group: pd.DataFrame, about: str) -> Iterator[Finding]:
    """Compare the best sparse attention at each sequence length with all dense kernels."""
    lines = drop_missing(group[group["is_sparse"]], "speed_up")
    if lines.empty:
        return
    lines = lines.assign(order=[_find_order(line) for _, line in lines.iterrows()])
    best = lines.sort_values(["order", "speed_up"], ascending=[True, False])
    best = best.drop_duplicates("seq_len").sort_values("seq_len")
    text, *others = (
        f"{_ORDERS[order]} {_format_lengths(part['seq_len'])}"
        for order, part in best.groupby("order")
    )
    first = best[best["order"] == best["order"].min()].iloc[-1]
    evidence = ". ".join([_format_gain(first), *others])
    next_step = "increase budget_s" if first["order"] == _UNCLEAR else ""
    compared = ()
    for _, line in best.iterrows():
        compared += _list_speed_ups(line)
    yield Finding(text, evidence, next_step, about, compared)


def _find_order(line: pd.Series) -> int:
    """Compare a sparse attention with all dense kernels. Return an index of `_ORDERS`."""
    orders = {figure.compare_to(ONE) for figure in line["speed_up_over"]}
    if orders == {Order.ABOVE}:
        return _FASTER
    return _SLOWER if Order.BELOW in orders else _UNCLEAR


def _format_gain(line: pd.Series) -> str:
    text = f"{line['name']} (sparsity {line['sparsity']:.0%}) is {times(line, 'speed_up')} as fast "
    text += f"as {line['speed_up_baseline']} {_format_lengths([line['seq_len']])}"
    if line["mask_kept"] == 0:
        return f"{text}, including the time to build a mask in each call"
    if line["speed_up_paid"] < line["speed_up"]:
        text += f", or {times(line, 'speed_up_paid')} in the first call, which includes building "
        text += "the mask and compiling" if line["compile"] > 0 else "the mask"
    return text


def _compare_own(group: pd.DataFrame, about: str) -> Iterator[Finding]:
    """Compare attentions without a mask that nanolib knows with dense attention."""
    is_other = ~(group["is_dense"] | group["mask_is_dense"] | group["is_sparse"])
    lines = drop_missing(group[is_other], "speed_up").sort_values("seq_len", kind="stable")
    for _, line in lines.drop_duplicates("name", keep="last").iterrows():
        dense = line["speed_up_baseline"]
        found = compare_speed(line, line["name"], f"{dense} {_format_lengths([line['seq_len']])}")
        yield Finding(*found, about=about, compared=_list_speed_ups(line, {dense}))


def _format_lengths(lengths: Iterable[float]) -> str:
    return f"at {join_words(f'{int(n):,}' for n in lengths)} tokens"


def _list_speed_ups(line: pd.Series, over: set[str] | None = None) -> Pairs:
    return gains(line, f"{line['name']} {_format_lengths([line['seq_len']])}", among=over)


def _compare_losses(table: pd.DataFrame) -> list[Finding]:
    """Return a finding per sparse pattern about the loss at the highest measured sparsity."""
    if table.empty:
        return []
    table, findings = drop_short(table, "sparse attentions", "quality_steps")
    lines = drop_missing(table, "replaced")
    lines = lines[lines["sparsity"] > 0].sort_values("sparsity", kind="stable")
    for _, line in lines.drop_duplicates("pattern", keep="last").iterrows():
        figure = Estimate.of(line, "replaced", "loss_difference", line["pattern"])
        named = f"{line['pattern']} ({line['sparsity']:.0%} sparse)"
        text = f"In a trained decoder, {named} {_EFFECTS[figure.compare_to(_NONE)]}"
        evidence = f"{figure.text()} nats/byte with {int(line['seeds'])} seeds, and the dense loss "
        evidence += f"is {line['dense_loss']:.2f}"
        findings.append(Finding(text, evidence, compared=comparing(figure, _NONE)))
    return findings
