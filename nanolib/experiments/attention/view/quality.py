"""What sparsity does to a model: the loss that each pattern adds, before and after a fine-tune."""

from __future__ import annotations

import altair as alt
import pandas as pd

from nanolib.measurement import LEARNING_STEPS, SMOKE_TEST
from nanolib.report.claim import Claim, Figure, Order, comparing
from nanolib.report.linking import links
from nanolib.report.overview import cached, having
from nanolib.report.plot import plot
from nanolib.report.tables import Column, base, filled, known, titles, with_state
from nanolib.report.theme import empty_chart

_FACTORS = ["pattern", "target", "seq_len", "seeds", "steps"]
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
_PANELS = {"replaced": "dense attention replaced", "fine_tuned": "and trained on with it"}
_NONE = Figure.exactly(0.0, "no difference")
_MEANING = {
    Order.ABOVE: "costs loss",
    Order.BELOW: "lowers the loss",
    Order.ALIKE: "makes no clear difference to the loss",
}


@cached
def quality_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per pattern and sparsity.

    Returns:
        Columns: `run_id`, `case_id`, `seq_len`, `pattern`, `target`, `sparsity` (as it came out), `dense_loss`, `replaced` and
        `fine_tuned` (loss above dense, nats per byte) each with `_low` and `_high`, `seeds`, `steps` of training, `status`,
        `message`.
    """
    rows = having(rows, "attention", "pattern")
    table = filled(base(rows, _FACTORS, "pattern"), rows, _QUALITY)
    table = table.drop(columns=[name for name in table if name.endswith(("_predicted", "_busy"))])
    return with_state(table)


def attention_quality(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Loss above dense over the share of connections removed, before and after a fine-tune."""
    table = known(quality_table(rows), "replaced")
    title = "Loss that sparsity adds to a trained model"
    if table.empty:
        return empty_chart(title, "no pattern was tried in a trained model; set quality_patterns")
    learnt = ~(table["steps"] < LEARNING_STEPS)
    parts = [
        pd.DataFrame(
            {
                "panel": words,
                "series": table["pattern"],
                "x": table["sparsity"],
                "y": table[name],
                "low": table[f"{name}_low"],
                "high": table[f"{name}_high"],
                "sure": learnt,
                **links(table),
            }
        )
        for name, words in _PANELS.items()
    ]
    few = "" if learnt.any() else f"{int(table['steps'].max())} steps: {SMOKE_TEST}."
    return plot(
        pd.concat(parts),
        title,
        subtitle=[
            f"Small decoders, {int(table['seeds'].max())} seeds; differences paired by seed, with 95 % intervals.",
            few,
        ],
        unit="Loss above dense (nats per byte)",
        xunit="Sparsity (share of connections removed)",
        fmt="+.2~f",
        ref=0.0,
    )


def quality_words(rows: pd.DataFrame) -> list[Claim]:
    """What each pattern costs at its highest sparsity, and after the fine-tune."""
    table = quality_table(rows)
    short = table["steps"] < LEARNING_STEPS
    if len(table) and short.all():
        tried = f"The loss of sparse patterns was tried over {int(table['steps'].max())} steps"
        return [Claim(tried, SMOKE_TEST, f"quality_steps: {LEARNING_STEPS} or more")]
    tried = known(table[~short], "replaced").sort_values("sparsity", kind="stable")
    return [_cost(row) for _, row in tried.drop_duplicates("pattern", keep="last").iterrows()]


def _cost(row: pd.Series) -> Claim:
    """What one pattern does to the loss, when it replaces dense attention and after the fine-tune."""
    who = f"In a trained decoder {row['pattern']}"
    if not row["sparsity"]:
        return Claim(f"{who} removed nothing, so its loss says nothing of sparsity")
    scopes = [scope for scope in _PANELS if pd.notna(row[scope])]
    figures = [Figure.of(row, scope, "loss_difference", scope, row["pattern"]) for scope in scopes]
    replaced, *tuned = (_MEANING[figure.against(_NONE)] for figure in figures)
    answer = f"{who}, which removes {row['sparsity']:.0%}, {replaced}"
    answer += "".join(f", and after a fine-tune it {meaning}" for meaning in tuned)
    ends = [f"{f.estimate:+.3f} [{f.low:+.3f} … {f.high:+.3f}] nats per byte" for f in figures]
    sure = f"{', then '.join(ends)} on a loss of {row['dense_loss']:.2f}"
    compared = tuple(pair for figure in figures for pair in comparing(figure, _NONE))
    return Claim(answer, f"{sure}; {int(row['seeds'])} seeds", compared=compared)
