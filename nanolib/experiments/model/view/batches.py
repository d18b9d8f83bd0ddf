"""Tokens per second of one user against those of all over batch sizes: which no other beats, and where more stops paying."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import altair as alt
import pandas as pd

from nanolib.experiments.model.view.tables import model_table
from nanolib.report.claim import Claim, Figure, Order, comparing
from nanolib.report.linking import links
from nanolib.report.overview import cached, listed
from nanolib.report.plot import plot
from nanolib.report.tables import known, short_names
from nanolib.report.theme import empty_chart

FRONT, UNDECIDED, BEATEN = "on the front", "not told apart", "beaten"
_SERIES = ["run_id", "name", "optimisation", "attention_type", "seq_len", "dtype", "device"]
_HALF = (
    0.5  # of what would be gained if tokens/s grew with the batch: below it more batch hardly pays
)

BATCH_COLUMNS = {
    "name": "Model",
    "seq_len": "Seq len",
    "dtype": "Dtype",
    "batch_size": "Batch",
    "user": "Tokens/s of one user [95 %]",
    "total": "Tokens/s in all [95 %]",
    "gain": "Growth per batch [95 %]",
    "memory": "Peak, MiB",
    "planned": "Planned, MiB",
    "front": "No other batch is better",
}


@cached
def batch_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per batch of a generation that was measured with several.

    Returns:
        The columns of `BATCH_COLUMNS`, `run_id`, `optimisation`, `device`, and the ends of intervals. `gain` is d ln(tokens/s in
        all) / d ln(batch) since the batch before: 1 where they grow with the batch, 0 where not at all.
    """
    table = known(model_table(rows), "decode")
    parts = [
        _rated(group.sort_values("batch_size"))
        for _, group in (table.groupby(_SERIES, sort=False) if len(table) else ())
        if group["batch_size"].nunique() > 1
    ]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def _rated(group: pd.DataFrame) -> pd.DataFrame:
    found = group[[*_SERIES, "batch_size"]].assign(
        memory=group["decode_memory"], planned=group["decode_memory_predicted"]
    )
    for end, other in (("", ""), ("_low", "_high"), ("_high", "_low")):
        found[f"user{end}"] = 1e3 / group[f"decode{other}"]
        found[f"total{end}"] = found[f"user{end}"] * group["batch_size"]
    found["user_busy"] = found["total_busy"] = group.get("decode_busy", False)
    lines = [line for _, line in found.iterrows()]
    gains = [(math.nan,) * 3, *(_gain(a, b) for a, b in pairwise(lines))]
    found[["gain_low", "gain", "gain_high"]] = gains
    return found.assign(front=[_standing(line, lines) for line in lines])


def _gain(before: pd.Series, after: pd.Series) -> tuple[float, float, float]:
    """How tokens/s in all grow with the batch between two batches: low, estimate, high."""
    more = math.log(after["batch_size"] / before["batch_size"])
    pairs = (
        (after["total_low"], before["total_high"]),
        (after["total"], before["total"]),
        (after["total_high"], before["total_low"]),
    )
    low, estimate, high = (math.log(up / down) / more for up, down in pairs)
    return low, estimate, high


def _standing(line: pd.Series, others: list[pd.Series]) -> str:
    """Whether another batch is better for one user and for all, as far as intervals tell."""
    standing = FRONT
    for other in others:
        figures = [(Figure.of(line, name), Figure.of(other, name)) for name in ("user", "total")]
        orders = [first.against(second) for first, second in figures]
        if other is not line and any(figure.busy for pair in figures for figure in pair):
            standing = UNDECIDED
        elif orders == [Order.BELOW, Order.BELOW]:
            return BEATEN
        elif other is not line and Order.ABOVE not in orders:
            standing = UNDECIDED
    return standing


def generation_batches(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Tokens per second of all and of one user over the batch size."""
    title = "Tokens per second as the batch grows"
    table = batch_table(rows)
    if table.empty:
        return empty_chart(
            title, "no generation was measured with several batches; give generation_batch_sizes"
        )
    table, shared = short_names(table.astype({"seq_len": int}), "name", "optimisation")
    series = table["name"].astype(str)
    for name in [
        name for name in ("attention_type", "seq_len", "dtype") if table[name].nunique() > 1
    ]:
        series = ("n = " if name == "seq_len" else "") + table[name].astype(str) + ", " + series
    parts = [
        pd.DataFrame(
            {
                "panel": words,
                "series": series,
                "x": table["batch_size"].astype(int),
                "y": table[name],
                "low": table[f"{name}_low"],
                "high": table[f"{name}_high"],
                "sure": table["front"] != BEATEN,
                "note": table["front"],
                **links(table),
            }
        )
        for name, words in (("total", "all users"), ("user", "each user"))
    ]
    return plot(
        pd.concat(parts),
        f"{title}{shared}",
        subtitle=["Decoding. Hollow: another batch is better for one user and for all."],
        unit="Tokens per second",
        xunit="Sequences in the batch",
        log="xy",
        width=680,
    )


def batch_words(rows: pd.DataFrame) -> Iterator[Claim]:
    """Which batch pays, up to where, and which no other beats."""
    table = batch_table(rows)
    if table.empty:
        return
    for _, group in table.groupby(_SERIES, sort=False):
        lines = [line for _, line in group.iterrows()]
        first, last = lines[0], lines[-1]
        about = f"{first['name']} ({first['attention_type']}, {first['dtype']}), generating after n = {int(first['seq_len'])}"
        totals = [
            Figure.of(line, "total", name=f"batch {int(line['batch_size'])}") for line in lines
        ]
        answer, compared = _knee(lines)
        one, all_ = (
            f"{first['user']:,.0f} → {last['user']:,.0f}",
            f"{first['total']:,.0f} → {last['total']:,.0f}",
        )
        sure = f"from batch {int(first['batch_size'])} to {int(last['batch_size'])} one user gets {one} tokens/s and all get {all_}"
        beaten = [str(int(line["batch_size"])) for line in lines if line["front"] == BEATEN]
        if beaten:
            sure += f"; batch {listed(beaten)} is beaten in both by another"
        open_ = [str(int(line["batch_size"])) for line in lines if line["front"] == UNDECIDED]
        if open_:
            sure += f"; whether batch {listed(open_)} is beaten cannot be told"
        yield Claim(answer, sure, about=about, compared=compared, figures=tuple(totals))


def _knee(lines: list[pd.Series]) -> tuple[str, tuple[tuple[Figure, Order, Figure], ...]]:
    """From which batch on no larger one brings half of what it could, in words."""
    half, paying = Figure.exactly(_HALF, "half"), []
    for at, before in enumerate(lines[:-1], 1):
        gains = [
            Figure(
                *_gain(before, line),
                name=f"d ln(tokens/s) / d ln(batch) up to batch {int(line['batch_size'])}",
                busy=bool(before["total_busy"] == 1 or line["total_busy"] == 1),
            )
            for line in lines[at:]
        ]
        orders = [gain.against(half) for gain in gains]
        if Order.ABOVE in orders:
            paying.append(gains[orders.index(Order.ABOVE)])
            continue
        told = orders.index(Order.ALIKE) if Order.ALIKE in orders else 0
        batch, to = int(before["batch_size"]), int(lines[at + told]["batch_size"])
        more = lines[at + told]["total"] / before["total"]
        grew = f"{more:#.3g}× the tokens/s for {to / batch:g}× the batch"
        compared = comparing(gains[told], half)
        if orders[told] is Order.BELOW:
            return f"more than batch {batch} hardly pays: {to} gives {grew}", compared
        paid = f"up to batch {batch} more pays; " if paying else ""
        return f"{paid}whether batch {to} pays cannot be told: it gives {grew}", compared
    return f"no knee up to batch {int(lines[-1]['batch_size'])}: more still pays", comparing(
        half, *paying
    )
