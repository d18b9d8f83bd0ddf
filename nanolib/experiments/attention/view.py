"""What a person sees of attention: how much faster sparse is than dense, where the time goes, and what sparsity costs in loss."""

from __future__ import annotations

import altair as alt
import pandas as pd

from nanolib.experiments.attention.findings import verdict
from nanolib.experiments.attention.tables import (
    ATTENTION_COLUMNS,
    QUALITY_COLUMNS,
    attention_table,
    quality_table,
)
from nanolib.measurement import LEARNING_STEPS, SMOKE_TEST
from nanolib.numbers import format_number
from nanolib.report.filters import link_columns, links
from nanolib.report.overview import join_words, why_empty
from nanolib.report.plot import plot
from nanolib.report.roofline import roofline_chart
from nanolib.report.scaling_chart import COUNTED_KEY, KEY, PLAN_KEY, ROOFLINE_KEY, scaling_chart
from nanolib.report.section import CaseTable, Section
from nanolib.report.tables import drop_missing
from nanolib.report.theme import empty_chart

_OTHERS = ["batch_size", "dtype", "causal"]
_TIMED = {"forward": "forward", "backward": "backward"}
_PARTS = ["forward", "backward", "mask"]
_PANELS = {"replaced": "dense attention replaced", "fine_tuned": "and trained on with it"}


def attention_speed_up(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Smallest forward speed-up over any dense kernel, and what that one would gain by skipping the same tiles."""
    timed = attention_table(rows)
    table = drop_missing(timed, "speed_up")
    table = table[~table["is_dense"] & ~table["mask_is_dense"]] if len(table) else table
    title = "Speed-up of sparse attention over dense"
    if table.empty:
        alone = "no sparse kind was measured with a dense one"
        reason = alone if len(drop_missing(timed, "forward")) else why_empty(rows, "attention")
        return empty_chart(title, reason)
    dense = join_words(figure.name for figures in table["speed_up_over"] for figure in figures)
    removed = table["sparsity"].map(", removes {:.0%}".format)
    data = pd.DataFrame(
        {
            "series": table["name"],
            "x": table["seq_len"].astype(int),
            "y": table["speed_up"],
            "low": table["speed_up_low"],
            "high": table["speed_up_high"],
            "pred": table["bound"],
            "sure": ~(table["unsteady"] | table["speed_up_busy"].astype(bool)),
            "text": table["name"] + "  " + table["speed_up"].map("{:.2f}×".format),
            "note": "against "
            + table["speed_up_baseline"]
            + removed.where(table["sparsity"].notna(), ""),
            **links(table),
        }
    )
    return plot(
        data,
        title,
        subtitle=[
            f"Forward, in turns with each dense kernel ({dense}), the smallest gain. Above the grey line sparse is faster.",
            "Masks that are built once are not in it. Hollow: not settled. Dashed: what skipping the same tiles would allow.",
        ],
        unit="Speed-up (×)",
        xunit="Sequence length (tokens)",
        log="xy",
        ref=1.0,
        ref_text="dense",
    )


def attention_parts(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Where the time of each kind goes at the longest length: forward, backward, and the mask if it is built."""
    table = drop_missing(attention_table(rows), "forward")
    if len(table):
        table = table[table["seq_len"] == table["seq_len"].max()]
        total = table[_PARTS].sum(axis=1)
        text = total.map(format_number) + " ms"
        table = table.assign(series=table["name"], total=total, text=text, **links(table))
        table = table.sort_values("total")
        table = table.melt(["series", "text", *link_columns(table)], _PARTS, "part", "x")
        table = table[table["x"] > 0]
    return plot(
        table,
        "Where the time goes at the longest sequence length",
        "bars",
        unit="Median time (ms)",
        empty="no attention case gave a time",
    )


def attention_quality(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Loss above dense over the share of connections removed, before and after a fine-tune."""
    table = drop_missing(quality_table(rows), "replaced")
    parts, subtitle = [], []
    for scope, panel in _PANELS.items() if len(table) else ():
        ends = {"y": table[scope], "low": table[f"{scope}_low"], "high": table[f"{scope}_high"]}
        part = {"panel": panel, "series": table["pattern"], "x": table["sparsity"], **ends}
        part["sure"] = ~(table["steps"] < LEARNING_STEPS)
        parts.append(pd.DataFrame(part | links(table)))
    if parts:
        seeds, steps = int(table["seeds"].max()), int(table["steps"].max())
        subtitle.append(
            f"Small decoders, {seeds} seeds; differences paired by seed, with 95 % intervals."
        )
        subtitle += [f"{steps} steps: {SMOKE_TEST}."] * (steps < LEARNING_STEPS)
    return plot(
        pd.concat(parts) if parts else None,
        "Loss that sparsity adds to a trained model",
        subtitle=subtitle,
        unit="Loss above dense (nats per byte)",
        xunit="Sparsity (share of connections removed)",
        fmt="+.2~f",
        ref=0.0,
        empty="no pattern was tried in a trained model; set quality_patterns",
    )


SECTION = Section(
    "attention",
    "When is sparse attention faster?",
    {
        "attention_speed_up": attention_speed_up,
        "attention_parts": attention_parts,
        "attention_quality": attention_quality,
    },
    {
        "Time, memory and error": CaseTable(attention_table, ATTENTION_COLUMNS),
        "Loss in a trained model": CaseTable(quality_table, QUALITY_COLUMNS),
    },
    verdict,
    files={
        "attention_latency": scaling_chart(
            "attention", "latency", "Attention latency", [KEY, ROOFLINE_KEY], _TIMED, _OTHERS
        ),
        "attention_memory": scaling_chart(
            "attention",
            "peak_memory",
            "Attention memory",
            [COUNTED_KEY, PLAN_KEY],
            {"forward": "forward", "forward_backward": "forward + backward"},
            _OTHERS,
        ),
        "attention_efficiency": scaling_chart(
            "attention",
            "mfu",
            "Attention efficiency",
            ["Useful FLOP/s (of kept connections) as a share of the measured peak rate."],
            _TIMED,
            _OTHERS,
            share=True,
        ),
        "attention_roofline": roofline_chart("attention"),
    },
)
