"""Attention over sequence length: latency, memory, efficiency, and sparse beside dense."""

from __future__ import annotations

import altair as alt
import pandas as pd

from nanolib.experiments.attention.view.quality import attention_quality
from nanolib.experiments.attention.view.tables import attention_table
from nanolib.report.drawing import HEIGHT, WIDTH, colour_and_shape, domain_of, seq_axis
from nanolib.report.frame import Drawn, framed, rule, tooltips, with_interval
from nanolib.report.linking import links
from nanolib.report.over_length import COUNTED_KEY, KEY, PLAN_KEY, ROOFLINE_KEY, over_length
from nanolib.report.overview import listed
from nanolib.report.roofline import roofline_chart
from nanolib.report.tables import known

_OTHERS = ["batch_size", "dtype", "causal"]


_TIMED = {"forward": "forward", "backward": "backward"}

attention_latency = over_length("attention", "latency", "Attention latency", [KEY, ROOFLINE_KEY], _TIMED, _OTHERS)
attention_memory = over_length(
    "attention",
    "peak_memory",
    "Attention memory",
    [COUNTED_KEY, PLAN_KEY],
    {"forward": "forward", "forward_backward": "forward + backward"},
    _OTHERS,
)
attention_efficiency = over_length(
    "attention",
    "ceiling_share",
    "Attention efficiency",
    ["Useful FLOP/s (of kept connections) as a share of this machine's matrix product, measured in the same run."],
    _TIMED,
    _OTHERS,
    log=False,
)
attention_roofline = roofline_chart("attention")


@framed("Sparse against dense", why="no sparse kind was measured beside a dense one")
def attention_speed_up(rows: pd.DataFrame) -> Drawn | None:
    """Smallest forward speed-up of sparse kinds over any dense kernel, and what that one would gain by skipping the same tiles."""
    table = attention_table(rows)
    sparse = known(table, "speed_up")
    if sparse.empty or (sparse := sparse[~sparse["is_dense"] & ~sparse["not_sparse"]]).empty:
        return None
    data = sparse[
        ["name", "seq_len", "speed_up", "speed_up_low", "speed_up_high", "bound", "speed_up_baseline", "sparsity"]
    ]
    data = data.rename(columns={"speed_up_baseline": "baseline"}).assign(**links(sparse, but="link_model"))
    colour, shape = colour_and_shape("name", "Kind", data["name"], table["name"])
    base = alt.Chart(data).encode(x=seq_axis(data["seq_len"]), color=colour)
    domain = domain_of(data[["speed_up", "speed_up_low", "speed_up_high", "bound"]].assign(one=1.0), log=True)
    scale = alt.Scale(type="log", base=2, domain=domain, nice=False)
    y = {"title": "Speed-up over dense (×)", "scale": scale}
    tooltip = tooltips(
        "name baseline", "seq_len speed_up speed_up_low speed_up_high bound", ",.4~g", name="kind", baseline="against"
    )
    tooltip += tooltips("", "sparsity", ".0%", sparsity="removes")
    ends = ("speed_up", "speed_up_low", "speed_up_high")
    layers = [
        rule("y", 1.0, y, "y"),
        base.mark_line(strokeDash=[4, 4], strokeWidth=1.2).encode(y=alt.Y("bound:Q", **y)),
        base.mark_line(strokeWidth=2).encode(y=alt.Y("speed_up:Q", **y)),
        *with_interval(base, "y", ends, y, size=55, shape=shape, tooltip=tooltip),
    ]
    dense = listed(figure.name for figures in sparse["speed_up_over"] for figure in figures)
    subtitle = [
        f"Forward, in turns with each dense kernel ({dense}), the smallest gain. Above the grey line sparse is faster.",
        "Masks that are built once are not in it. Dashed: what that dense kernel would gain by skipping the same tiles.",
    ]
    return alt.layer(*layers, width=2 * WIDTH, height=HEIGHT), subtitle


# What the report draws of it, in this order.
CHARTS = {
    "attention_latency": attention_latency,
    "attention_speed_up": attention_speed_up,
    "attention_quality": attention_quality,
    "attention_memory": attention_memory,
    "attention_efficiency": attention_efficiency,
    "attention_roofline": attention_roofline,
}
