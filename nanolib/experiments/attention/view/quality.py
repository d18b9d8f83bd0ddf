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


@cached
def quality_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per pattern and sparsity.

    Returns:
        Columns: `run_id`, `case_id`, `seq_len`,
        `pattern`, `target`, `sparsity` (as it came out), `dense_loss`, `replaced` and `fine_tuned` (loss above dense, nats
        per byte) each with `_low` and `_high`, `seeds`, `steps` of training, `status`, `message`.
    """
    rows = having(rows, "attention", "pattern")
    table = filled(
        base(rows, ["pattern", "target", "seq_len", "seeds", "steps"], "pattern"), rows, _QUALITY
    )
    table = table.drop(columns=[name for name in table if name.endswith(("_predicted", "_busy"))])
    return with_state(table)


def attention_quality(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Loss above dense over the share of connections removed, before and after a fine-tune."""
    table = known(quality_table(rows), "replaced")
    title = "Loss that sparsity adds to a trained model"
    if table.empty:
        return empty_chart(title, "no pattern was tried in a trained model; set quality_patterns")
    parts = [
        pd.DataFrame(
            {
                "panel": words,
                "series": table["pattern"],
                "x": table["sparsity"],
                "y": table[name],
                "low": table[f"{name}_low"],
                "high": table[f"{name}_high"],
                "sure": ~(table["steps"] < LEARNING_STEPS),
                **links(table),
            }
        )
        for name, words in _PANELS.items()
    ]
    few = (table["steps"] < LEARNING_STEPS).all()
    return plot(
        pd.concat(parts),
        title,
        subtitle=[
            f"Small decoders, {int(table['seeds'].max())} seeds; differences paired by seed, with 95 % intervals.",
            f"{int(table['steps'].max())} steps: {SMOKE_TEST}." if few else "",
        ],
        unit="Loss above dense (nats per byte)",
        xunit="Sparsity (share of connections removed)",
        fmt="+.2~f",
        ref=0.0,
    )


def quality_words(rows: pd.DataFrame) -> list[Claim]:
    """What each pattern costs at its highest sparsity, and whether training on takes it back."""
    table = quality_table(rows)
    if len(table) and (table["steps"] < LEARNING_STEPS).all():
        tried = f"The loss of sparse patterns was tried over {int(table['steps'].max())} steps"
        return [Claim(tried, SMOKE_TEST, f"quality_steps: {LEARNING_STEPS} or more")]
    claims = []
    tried = known(table[~(table["steps"] < LEARNING_STEPS)], "replaced")
    for pattern, group in tried.groupby("pattern", sort=False):
        row = group.sort_values("sparsity").iloc[-1]
        if not row["sparsity"]:
            claims.append(
                Claim(
                    f"In a trained decoder {pattern} removed nothing, so its loss says nothing of sparsity"
                )
            )
            continue
        figures = [_loss(row, name) for name in ("replaced", "fine_tuned") if pd.notna(row[name])]
        answer = f"In a trained decoder {pattern}, which removes {row['sparsity']:.0%}, {_meaning(*figures)}"
        sure = f"{_nats(row, 'replaced')} on a loss of {row['dense_loss']:.2f}"
        if len(figures) > 1:
            sure += f", {_nats(row, 'fine_tuned')} after both were trained on"
        sure += f"; {int(row['seeds'])} seeds"
        compared = tuple(pair for figure in figures for pair in comparing(figure, _NONE))
        claims.append(Claim(answer, sure, compared=compared))
    return claims


def _nats(row: pd.Series, name: str) -> str:
    return (
        f"{row[name]:+.3f} [{row[f'{name}_low']:+.3f} … {row[f'{name}_high']:+.3f}] nats per byte"
    )


_NONE = Figure.exactly(0.0, "no difference")


def _loss(row: pd.Series, scope: str) -> Figure:
    return Figure.of(row, scope, "loss_difference", scope, row["pattern"])


def _meaning(replaced: Figure, tuned: Figure | None = None) -> str:
    """What replacing dense attention does to the loss, and whether training on takes it back, as the intervals tell."""
    said = {
        Order.ABOVE: "costs loss",
        Order.BELOW: "lowers the loss",
        Order.ALIKE: "shows no difference in loss",
    }
    text = said[replaced.against(_NONE)]
    if tuned is None:
        return text
    after = {
        Order.ABOVE: "the fine-tune does not take back all of it",
        Order.BELOW: "after a fine-tune it is lower than dense",
        Order.ALIKE: "after a fine-tune these seeds show no difference",
    }
    if replaced.against(_NONE) is not Order.ABOVE:
        after[Order.ABOVE] = "after a fine-tune it is higher than dense"
    return f"{text}, and {after[tuned.against(_NONE)]}"
