"""Who would hold the memory: a bar for each use, that moves without the chart being drawn anew."""

from __future__ import annotations

import altair as alt

from nanolib.experiments.model.view.memory import KIND_COLOURS, held_colour
from nanolib.measurement import Held
from nanolib.report.drawing import theme
from nanolib.report.frame import tooltips
from nanolib.report.palette import FAILED, INK

MOST = 40  # parts of all bars
_WIDTH = 540


def plan_chart(uses: list[str], gib: float) -> alt.TopLevelMixin:
    """A bar for each use, by what holds the memory; a line stands where the memory ends.

    Args:
        uses: Names of the bars, from the top.
        gib: The memory, until it is set anew.

    Returns:
        A chart with the parameters `held` (of each part its `use`, `kind`, `order`, `gib`) and `memory` (GiB), to be set anew.
    """
    held, memory = alt.param(name="held", value=[]), alt.param(name="memory", value=gib)
    x = alt.X("sum(gib):Q", title="Live tensors at the peak (GiB)", scale=alt.Scale(nice=False, padding=24))
    fields = ("use", "kind", "order", "gib")
    bars = (
        alt.Chart(alt.sequence(0, MOST, as_="at"))
        .transform_filter("datum.at < length(held)")
        .transform_calculate(**{name: f"held[datum.at].{name}" for name in fields})
        .mark_bar()
        .encode(
            x=x,
            y=alt.Y("use:N", title=None, scale=alt.Scale(domain=uses), axis=alt.Axis(labelLimit=200)),
            color=held_colour([kind for kind in KIND_COLOURS if kind != Held.UNATTRIBUTED]),
            order=alt.Order("order:Q"),
            tooltip=tooltips("use kind", "gib", ",.3f", gib="GiB"),
        )
    )
    line = alt.Chart(alt.sequence(0, 1, as_="at")).transform_calculate(gib="memory")
    rule = line.mark_rule(color=FAILED, strokeWidth=2).encode(x=alt.X("gib:Q"))
    said = (
        line.transform_calculate(words="'memory: ' + format(memory, ',~r') + ' GiB'")
        .mark_text(color=INK, fontSize=12, align="right", dx=-5, y=-8)
        .encode(x=alt.X("gib:Q"), text="words:N")
    )
    chart = alt.layer(bars, rule, said, width=_WIDTH, height=alt.Step(30))
    title = alt.Title(
        "Does it fit, and who holds the memory", subtitle="Counted on tensors without data; nothing is run."
    )
    return theme(chart.properties(title=title).add_params(held, memory))
