"""Whole models: the time of a call, the memory at its peak, how generation grows with the batch, the loss."""

from __future__ import annotations

import altair as alt
import pandas as pd

from nanolib.experiments.model.view.batches import generation_batches
from nanolib.experiments.model.view.memory import model_peaks
from nanolib.experiments.model.view.tables import loss_table
from nanolib.measurement import LEARNING_STEPS, SMOKE_TEST
from nanolib.report.linking import links
from nanolib.report.over_length import COUNTED_KEY, KEY, PLAN_KEY, ROOFLINE_KEY, over_length
from nanolib.report.plot import plot
from nanolib.report.roofline import roofline_chart
from nanolib.report.theme import empty_chart

_OTHERS = ["attention_type", "batch_size", "dtype"]
_CALLS = {"inference": "inference", "decode": "next token", "training_step": "training step"}

model_performance = over_length(
    "model", "latency", "Time of a call", [KEY, ROOFLINE_KEY], _CALLS, _OTHERS
)
model_memory = over_length(
    "model",
    "peak_memory",
    "Model memory",
    [COUNTED_KEY, PLAN_KEY],
    {name: _CALLS[name] for name in ("inference", "training_step")},
    _OTHERS,
)
model_roofline = roofline_chart("model")


def model_loss(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Loss over real training steps; `rows` must carry samples."""
    data = loss_table(rows)
    if data.empty:
        return empty_chart("Loss on real text", "no loss was measured")
    few = int(data["step"].max()) < LEARNING_STEPS
    return plot(
        data.rename(columns={"step": "x", "loss": "y"}).assign(**links(data)),
        "Loss on real text",
        subtitle=[
            "Before each step, on bytes of the standard library's sources. One seed.",
            f"{int(data['step'].max())} steps: {SMOKE_TEST}." if few else "",
        ],
        unit="Loss (nats per byte)",
        xunit="Step",
    )


# What the report shows, the chart that answers first.
CHARTS = {
    "model_performance": model_performance,
    "model_peaks": model_peaks,
    "generation_batches": generation_batches,
}
# What it writes as files only.
FILES = {"model_memory": model_memory, "model_loss": model_loss, "model_roofline": model_roofline}
