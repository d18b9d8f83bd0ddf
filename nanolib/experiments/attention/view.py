"""Draw the charts of the attention notebook: speed-up, time by part, and added loss."""

import pandas as pd

from nanolib.experiments.attention.findings import (
    ATTENTION_COLUMNS,
    QUALITY_COLUMNS,
    attention_table,
    quality_table,
    verdict,
)
from nanolib.measurement import LEARNING_STEPS, SMOKE_TEST
from nanolib.numbers import format_number
from nanolib.report.charts import (
    COUNTED_KEY,
    KEY,
    PLAN_KEY,
    ROOFLINE_KEY,
    scaling_chart,
    series_names,
)
from nanolib.report.overview import join_words, rows_with_factor, why_empty
from nanolib.report.plot import links, plot, point_columns
from nanolib.report.section import CaseTable, Section
from nanolib.report.tables import drop_missing
from nanolib.report.theme import Drawing, empty_chart

_OTHERS = ["batch_size", "dtype", "causal", "device"]
_TIMED = {"forward": "forward", "backward": "backward"}
_PARTS = ["forward", "backward", "mask"]
_PANELS = {"replaced": "dense attention replaced", "fine_tuned": "after a fine-tune"}


def attention_speed_up(rows: pd.DataFrame) -> Drawing:
    """Draw the smallest speed-up of a forward pass over the dense kernels, and the upper bound."""
    timed = drop_missing(attention_table(rows), "forward")
    table = drop_missing(timed, "speed_up")
    title = "Speed-up of sparse over dense attention"
    lacking = "sparse attention was not timed in turns with dense attention"
    if len(table := table[~table["is_dense"]] if len(table) else table):
        table, lacking = table[~table["mask_is_dense"]], "no mask removes a pair"
    if table.empty:
        return empty_chart(title, lacking if len(timed) else why_empty(rows, "attention"))
    series, alike = series_names(table, _OTHERS, "")
    ends = series + "  " if table["seq_len"].nunique() > 1 else ""  # Rows have names at the left.
    dense = join_words(figure.name for figures in table["speed_up_over"] for figure in figures)
    sparsity = table["sparsity"].map(", sparsity {:.0%}".format)
    sparsity = sparsity.where(table["sparsity"].notna(), "")
    data = pd.DataFrame(
        {
            "series": series,
            "x": table["seq_len"].astype(int),
            "pred": table["bound"],
            "sure": ~(table["unsteady"] | table["speed_up_busy"].astype(bool)),
            "text": ends + table["speed_up"].map("{:.2f}×".format),
            "note": "over " + table["speed_up_baseline"] + sparsity,
            **point_columns(table, "speed_up", "y"),
        }
    )
    return plot(
        data,
        title + alike,
        subtitle=[
            f"Forward pass, timed in turns with {dense}. Smallest speed-up over any dense kernel.",
            "The time to build a reusable mask is excluded. Hollow: not settled, or a busy machine.",
            "Dashed: upper bound from skipped tiles.",
        ],
        unit="Speed-up (×)",
        xunit="Sequence length (tokens)",
        log="xy",
        ref=1.0,
        ref_text="dense",
    )


def attention_parts(rows: pd.DataFrame) -> Drawing:
    """Draw forward, backward and mask time of each attention at the longest sequence length."""
    table = drop_missing(attention_table(rows), "forward")
    title = "Attention time at the longest sequence length"
    if len(table):
        longest = table["seq_len"].max()
        table = table[table["seq_len"] == longest]
        series, alike = series_names(table, [*_OTHERS, "run_id"], "")
        title += f"{alike}: {int(longest):,} tokens"
        total = table[_PARTS].sum(axis=1)
        text = total.map(format_number) + " ms"
        table = table.assign(series=series, total=total, text=text, **links(table))
        table = table.sort_values("total")
        table = table.melt(["series", "text", "link_run", "link_n"], _PARTS, "part", "x")
        table = table[table["x"] > 0]
    return plot(
        table,
        title,
        "bars",
        unit="Median time (ms)",
        empty=why_empty(rows, "attention"),
    )


def attention_quality(rows: pd.DataFrame) -> Drawing:
    """Draw the loss difference over the sparsity, before and after a fine-tune."""
    title = "Added loss by sparsity"
    table = drop_missing(quality_table(rows), "replaced")
    if table.empty:
        lacking = "the loss was not measured; set quality_patterns"
        cases = rows_with_factor(rows, "attention", "pattern")
        return empty_chart(title, why_empty(cases, "attention", lacking))
    seeds, steps = int(table["seeds"].max()), int(table["steps"].max())
    subtitle = [f"Small decoders, {seeds} seeds. Differences paired by seed, with 95 % intervals."]
    if steps < LEARNING_STEPS:
        subtitle.append(f"{steps} steps: {SMOKE_TEST}.")
    shown = {
        "series": table["pattern"],
        "x": 100 * table["sparsity"],
        "sure": table["steps"] >= LEARNING_STEPS,
    }
    panels = [
        pd.DataFrame({"panel": panel, **shown, **point_columns(table, scope, "y")})
        for scope, panel in _PANELS.items()
    ]
    return plot(
        pd.concat(panels),
        title,
        subtitle=subtitle,
        unit="Loss minus dense loss (nats/byte)",
        xunit="Sparsity (%)",
        fmt="+.2~f",
        ref=0.0,
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
            ["FLOP/s of the kept query-key pairs as a share of the measured peak rate."],
            _TIMED,
            _OTHERS,
        ),
    },
)
