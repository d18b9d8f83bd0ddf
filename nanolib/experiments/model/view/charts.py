"""Whole models over sequence length: latency, memory, the parts of a training step, loss."""

from __future__ import annotations

import altair as alt
import pandas as pd

from nanolib.experiments.model.view.batches import generation_batches
from nanolib.experiments.model.view.tables import loss_table, model_table
from nanolib.measurement import LEARNING_STEPS, SMOKE_TEST
from nanolib.report.drawing import HEIGHT, WIDTH, colour_and_shape, coloured, short_names
from nanolib.report.frame import Drawn, framed, tooltips
from nanolib.report.linking import followed, links
from nanolib.report.over_length import COUNTED_KEY, KEY, PLAN_KEY, ROOFLINE_KEY, over_length
from nanolib.report.palette import PALETTE
from nanolib.report.roofline import roofline_chart
from nanolib.report.tables import known

_OTHERS = ["attention_type", "batch_size", "dtype"]
_PANELS = {"inference": "inference", "training_step": "training step"}


model_performance = over_length("model", "latency", "Model latency", [KEY, ROOFLINE_KEY], _PANELS, _OTHERS)
model_memory = over_length("model", "peak_memory", "Model memory", [COUNTED_KEY, PLAN_KEY], _PANELS, _OTHERS)
model_generation = over_length(
    "model",
    "latency",
    "Generation",
    [KEY, ROOFLINE_KEY],
    {"prefill": "first token", "decode": "each token after it"},
    _OTHERS,
)
model_roofline = roofline_chart("model")


@framed("Where a training step goes", why="no training step was measured")
def training_phases(rows: pd.DataFrame) -> Drawn | None:
    """Where a training step's time goes: forward, backward, optimizer."""
    table = known(model_table(rows), "training_step")
    if table.empty:
        return None
    phases = ["forward", "backward", "optimizer_step"]
    table, shared = short_names(table, "name", "optimisation")
    cases = "n = " + table["seq_len"].astype(int).astype(str)
    if table["name"].nunique() > 1:
        cases = cases + ", " + table["name"]  # the name may be so long that it is cut
    elif not shared:
        shared = f": {table['name'].iloc[0]}"
    table = table.assign(case=cases)
    table = table.assign(**links(table))
    data = table.melt(["case", *links(table)], phases, "phase", "ms").assign(
        phase=lambda t: t["phase"].str.replace("_", " ")
    )
    order = [phase.replace("_", " ") for phase in phases]
    data["order"] = data["phase"].map(order.index)
    chart = (
        alt.Chart(data)
        .mark_bar()
        .encode(
            x=alt.X("sum(ms):Q", title="Median time (ms)"),
            y=alt.Y("case:N", title=None, sort=list(dict.fromkeys(data["case"]))),
            color=coloured("phase", "Phase", dict(zip(order, PALETTE[:3], strict=True)), sort=order),
            order=alt.Order("order:Q"),
            tooltip=tooltips("case phase", "ms", ",.4~g"),
        )
    )
    return chart.properties(width=2 * WIDTH, height=alt.Step(24)), "", shared


@framed("Loss on real text", why="no loss was measured")
def model_loss(rows: pd.DataFrame) -> Drawn | None:
    """Loss over real training steps; `rows` must carry samples."""
    data = loss_table(rows)
    if data.empty:
        return None
    data = followed(data)
    colour, shape = colour_and_shape("series", "Model", data["series"])
    chart = (
        alt.Chart(data)
        .mark_line(point=alt.OverlayMarkDef(size=18), strokeWidth=1.5)
        .encode(
            x=alt.X("step:Q", title="Step", axis=alt.Axis(format="d", tickMinStep=1)),
            y=alt.Y("loss:Q", title="Loss (nats per byte)", scale=alt.Scale(zero=False)),
            color=colour,
            shape=shape,
            tooltip=tooltips("series", "step loss", ".4~f"),
        )
    )
    subtitle = ["Before each step, on bytes of the standard library's sources. One seed."]
    if (steps := int(data["step"].max())) < LEARNING_STEPS:
        subtitle.append(f"{steps} steps: {SMOKE_TEST}.")
    return chart.properties(width=2 * WIDTH, height=HEIGHT), subtitle


# What the report draws of it, in this order.
CHARTS = {
    "model_performance": model_performance,
    "model_generation": model_generation,
    "generation_batches": generation_batches,
    "training_phases": training_phases,
    "model_memory": model_memory,
    "model_loss": model_loss,
    "model_roofline": model_roofline,
}
