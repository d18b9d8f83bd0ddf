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
from nanolib.report.plot import plot, point_columns
from nanolib.report.section import (
    CaseTable,
    Section,
)
from nanolib.report.shared import (
    COUNTED_KEY,
    KEY,
    PLAN_KEY,
    ROOFLINE_KEY,
    chart_of,
    scaling_chart,
    series_names,
)
from nanolib.report.theme import Drawing

_OTHERS = ["batch_size", "dtype", "causal", "device"]
_TIMED = {"forward": "forward", "backward": "backward"}


@chart_of(
    attention_table,
    "speed_up",
    "Speed-up of sparse over dense attention",
    where="not is_dense and not mask_is_dense",
)
def attention_speed_up(table: pd.DataFrame, title: str) -> Drawing:
    """Draw the smallest speed-up of a forward pass over the dense kernels, and the upper bound."""
    series, alike = series_names(table, _OTHERS, "")
    data = {
        "series": series,
        "x": table["seq_len"].astype(int),
        "pred": table["bound"],
        "sure": table["state"] == "ok",
        "note": "over " + table["speed_up_baseline"],
    }
    return plot(
        pd.DataFrame(data | point_columns(table, "speed_up", "y")),
        title + alike,
        subtitle=[
            "Forward pass, timed in turns with dense kernels. Smallest speed-up over any of them.",
            "The time to build a reusable mask is excluded. "
            "Hollow: the state in the table is not ok.",
            "Dashed: upper bound from skipped tiles. Line at 1: as fast as dense.",
        ],
        unit="Speed-up (×)",
        xunit="Sequence length (tokens)",
        log="xy",
        ref=1.0,
    )


attention_latency = scaling_chart(
    "attention", "latency", "Attention latency", [KEY, ROOFLINE_KEY], _TIMED, _OTHERS
)


@chart_of(
    quality_table,
    "replaced",
    "Added loss by sparsity",
    otherwise="the loss was not measured; set quality_attentions",
)
def attention_quality(table: pd.DataFrame, title: str) -> Drawing:
    """Draw the loss difference over the sparsity of the attention that replaces dense attention."""
    data = {
        "series": table["pattern"],
        "x": 100 * table["sparsity"],
        "note": table["name"],
        "sure": table["steps"] >= LEARNING_STEPS,
    }
    return plot(
        pd.DataFrame(data | point_columns(table, "replaced", "y")),
        title,
        subtitle=[
            f"Small decoders, {int(table['seeds'].max())} seeds.",
            f"Differences paired by seed, with 95 % intervals. Hollow: {SMOKE_TEST}.",
        ],
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
        "attention_latency": attention_latency,
        "attention_quality": attention_quality,
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
    {
        "Time and memory": CaseTable(attention_table, ATTENTION_COLUMNS),
        "Loss in a trained model": CaseTable(quality_table, QUALITY_COLUMNS),
    },
    verdict,
)
