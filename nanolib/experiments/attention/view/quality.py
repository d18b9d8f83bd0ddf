"""What sparsity does to a model: the loss that each pattern adds, before and after a fine-tune."""

from __future__ import annotations

import altair as alt
import pandas as pd

from nanolib.measurement import LEARNING_STEPS, SMOKE_TEST
from nanolib.report.claim import Claim, Figure, Order, comparing
from nanolib.report.drawing import HEIGHT, WIDTH, colour_and_shape
from nanolib.report.frame import Drawn, framed, panels, rule, tooltips, with_interval
from nanolib.report.linking import links
from nanolib.report.overview import cached, having
from nanolib.report.palette import PALETTE
from nanolib.report.tables import Column, base, filled, known, titles

_QUALITY = (
    Column("pattern", "Pattern"),
    Column("target", "Asked to remove"),
    Column("sparsity", "Removed", "sparsity", interval=True),
    Column("dense_loss", "Dense loss, nats/byte [95 %]", "loss", "dense", interval=True),
    Column("replaced", "Replaced, Δ [95 %]", "loss_difference", "replaced", interval=True),
    Column("fine_tuned", "Fine-tuned, Δ [95 %]", "loss_difference", "fine_tuned", interval=True),
    Column("seeds", "Seeds"),
    Column("status", "Status"),
)
QUALITY_COLUMNS = titles(_QUALITY)
_PANELS = {"replaced": "dense attention replaced", "fine_tuned": "and trained on with it"}


@cached("attention")
def quality_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per pattern and sparsity.

    Returns:
        Columns: `run_id`, `case_id`, `seq_len`,
        `pattern`, `target`, `sparsity` (as it came out), `dense_loss`, `replaced` and `fine_tuned` (loss above dense, nats
        per byte) each with `_low` and `_high`, `seeds`, `steps` of training, `status`, `message`.
    """
    rows = having(rows, "attention", "pattern")
    table = filled(base(rows, ["pattern", "target", "seq_len", "seeds", "steps"], "pattern"), rows, _QUALITY)
    return table.drop(columns=[name for name in table if name.endswith(("_predicted", "_row", "_busy"))])


@framed("What sparsity does to a trained model", why="no pattern was tried in a trained model; set quality_patterns")
def attention_quality(rows: pd.DataFrame) -> Drawn | None:
    """Loss above dense over the share of connections removed, a panel before and one after the fine-tune."""
    table = known(quality_table(rows), "replaced")
    if table.empty:
        return None
    colour, shape = colour_and_shape("pattern", "Pattern", table["pattern"])
    ends = table[[f"{name}_{end}" for name in _PANELS for end in ("low", "high")]].to_numpy()
    room = 0.05 * (max(ends.max(), 0) - min(ends.min(), 0))
    scale = alt.Scale(domain=[float(min(ends.min(), 0) - room), float(max(ends.max(), 0) + room)], nice=False)
    x = alt.X("sparsity:Q", title="Connections removed", axis=alt.Axis(format=".0%"), scale=alt.Scale(zero=False))
    y = {"title": "Loss above dense (nats per byte)", "scale": scale}
    parts = [
        table[["pattern", "sparsity", "target"]].assign(
            **links(table), panel=words, difference=table[name], low=table[f"{name}_low"], high=table[f"{name}_high"]
        )
        for name, words in _PANELS.items()
    ]
    tooltip = tooltips("pattern", "target sparsity difference low high")

    def draw(part: pd.DataFrame) -> alt.TopLevelMixin:
        base = alt.Chart(part).encode(x=x, color=colour)
        layers = [
            rule("y", 0.0, y, "y", color=PALETTE[-1], strokeWidth=0.8),
            base.mark_line(strokeWidth=1.5, opacity=0.7).encode(y=alt.Y("difference:Q", **y)),
            *with_interval(base, "y", ("difference", "low", "high"), y, size=55, shape=shape, tooltip=tooltip),
        ]
        return alt.layer(*layers, width=WIDTH, height=HEIGHT)

    seeds = int(table["seeds"].max())
    subtitle = (
        f"Small decoders trained on bytes of real text, {seeds} seeds; differences paired by seed, with 95 % intervals."
    )
    more = f" {int(table['steps'].max())} steps: {SMOKE_TEST}." if (table["steps"] < LEARNING_STEPS).all() else ""
    return panels(pd.concat(parts), draw), [subtitle, more.strip()] if more else subtitle


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
                Claim(f"In a trained decoder {pattern} removed nothing, so its loss says nothing of sparsity")
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
    return f"{row[name]:+.3f} [{row[f'{name}_low']:+.3f} … {row[f'{name}_high']:+.3f}] nats per byte"


_NONE = Figure.exactly(0.0, "no difference")


def _loss(row: pd.Series, scope: str) -> Figure:
    return Figure.of(row, scope, "loss_difference", scope, row["pattern"])


def _meaning(replaced: Figure, tuned: Figure | None = None) -> str:
    """What replacing dense attention does to the loss, and whether training on takes it back, as the intervals tell."""
    said = {Order.ABOVE: "costs loss", Order.BELOW: "lowers the loss", Order.ALIKE: "shows no difference in loss"}
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
