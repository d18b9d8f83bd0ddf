"""Charts from rows, one function each; `drawing` says how they look."""

from __future__ import annotations

import altair as alt
import pandas as pd

from nanolib.report import tables
from nanolib.report.distributed import decode_scaling, decode_shares, link_model
from nanolib.report.drawing import (
    HEIGHT,
    PALETTE,
    WIDTH,
    colour_and_shape,
    domain_of,
    failed_cases,
    look,
    measured_and_predicted,
    nothing,
    seq_axis,
    short_names,
    tidy,
    why_nothing,
)
from nanolib.report.energy import energy_per_token, power_over_time
from nanolib.report.fp8 import fp8_precisions, fp8_quoted
from nanolib.report.fp8_numerics import fp8_losses, fp8_numerics, fp8_scales
from nanolib.report.fp8_parity import fp8_parity
from nanolib.report.layers import activation_profile, layer_heat_map, operation_breakdown, profiling_overhead
from nanolib.report.linking import links
from nanolib.report.overview import of_experiment, pick
from nanolib.report.quality import quality_chart as attention_quality
from nanolib.report.regressions import ab_ratio
from nanolib.report.roofline import roofline_chart
from nanolib.report.sharding import prefill_times, sharded_memory, training_scaling

_ATTENTION_OTHERS = ["batch_size", "dtype", "causal"]
_MODEL_OTHERS = ["attention_type", "batch_size", "dtype"]
_KEY = "Points: measured, with 95 % intervals. Dashed: predicted. Grey: as n and as n² grow."


def attention_latency(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Latency of attention kinds over sequence length, forward and backward, with the roofline's prediction."""
    rows = of_experiment(rows, "attention")
    found = pick(rows, "latency")
    title = "Attention latency"
    if found.empty:
        return nothing(title, why_nothing(rows, "attention"))
    data = tidy(found, "name", _ATTENTION_OTHERS, "scope")
    subtitle = [_KEY, "The prediction is the roofline of the ceilings measured in the same run."]
    return measured_and_predicted(
        data, failed_cases(rows, "name", _ATTENTION_OTHERS), "latency", title, subtitle, ["forward", "backward"]
    )


def attention_memory(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Peak memory of attention kinds over sequence length."""
    rows = of_experiment(rows, "attention")
    found = pick(rows, "peak_memory")
    title = "Attention memory"
    if found.empty:
        return nothing(title, why_nothing(rows, "attention"))
    data = tidy(found, "name", _ATTENTION_OTHERS, "scope")
    data["panel"] = data["panel"].str.replace("forward_backward", "forward + backward")
    subtitle = [_KEY, "The prediction counts the same bytes on tensors that have shapes and no data."]
    panels = ["forward", "forward + backward"]
    return measured_and_predicted(
        data, failed_cases(rows, "name", _ATTENTION_OTHERS), "peak_memory", title, subtitle, panels
    )


def attention_efficiency(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Share of the measured matrix-product ceiling that each kind reaches."""
    rows = of_experiment(rows, "attention")
    found = pick(rows, "ceiling_share")
    title = "Attention efficiency"
    if found.empty:
        return nothing(title, why_nothing(rows, "attention"))
    data = tidy(found, "name", _ATTENTION_OTHERS, "scope")
    subtitle = [
        "Useful FLOP/s (of kept connections) as a share of this machine's matrix product, measured in the same run."
    ]
    return measured_and_predicted(
        data, pd.DataFrame(), "ceiling_share", title, subtitle, ["forward", "backward"], log=False
    )


def attention_speed_up(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Forward speed-up of sparse kinds over dense, beside the bound that skipped tiles set for the fastest dense kernel."""
    table = tables.attention_table(rows)
    title = "Sparse against dense"
    sparse = table[~table["name"].str.startswith("dense") & table["speed_up"].notna()] if len(table) else table
    if sparse.empty:
        return nothing(title, "no sparse kind was measured beside a dense one")
    data = sparse[["name", "seq_len", "speed_up", "speed_up_low", "speed_up_high", "bound", "baseline"]]
    data = data.assign(**{name: values for name, values in links(sparse).items() if name != "link_model"})
    colour, shape = colour_and_shape("name", "Kind", data["name"], table["name"])
    base = alt.Chart(data).encode(x=seq_axis(data["seq_len"]), color=colour)
    domain = domain_of(data[["speed_up_low", "speed_up_high", "bound"]].assign(one=1.0), log=True)
    scale = alt.Scale(type="log", base=2, domain=domain, nice=False)
    layers = [
        alt.Chart(pd.DataFrame({"y": [1.0]})).mark_rule(color="#888").encode(y=alt.Y("y:Q", scale=scale, title="")),
        base.mark_line(strokeDash=[4, 4], strokeWidth=1.2).encode(y=alt.Y("bound:Q", scale=scale, title="")),
        base.mark_line(strokeWidth=2).encode(y=alt.Y("speed_up:Q", scale=scale, title="Speed-up over dense (×)")),
        base.mark_rule(strokeWidth=2).encode(
            y=alt.Y("speed_up_low:Q", scale=scale, title=""), y2=alt.Y2("speed_up_high:Q")
        ),
        base.mark_point(filled=True, size=55, opacity=1).encode(
            y=alt.Y("speed_up:Q", scale=scale, title="Speed-up over dense (×)"),
            shape=shape,
            tooltip=[
                alt.Tooltip("name:N", title="kind"),
                alt.Tooltip("baseline:N", title="against"),
                alt.Tooltip("seq_len:Q", title="sequence length"),
                *(alt.Tooltip(f"{c}:Q", format=".3~g") for c in ("speed_up", "speed_up_low", "speed_up_high", "bound")),
            ],
        ),
    ]
    subtitle = [
        f"Forward, against {data['baseline'].iloc[0]}. Above the grey line sparse is faster.",
        "Dashed: what the fastest dense kernel measured would gain by skipping the same tiles.",
    ]
    chart = alt.layer(*layers, width=2 * WIDTH, height=HEIGHT, title=alt.Title(title, subtitle=subtitle))
    return look(chart)


def model_performance(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Latency of whole models over sequence length: inference and a training step."""
    rows = of_experiment(rows, "model")
    found = pick(rows, "latency")
    found = found[found["scope"].isin(["inference", "training_step"])] if len(found) else found
    title = "Model latency"
    if found.empty:
        return nothing(title, why_nothing(rows, "model"))
    found, shared = short_names(found)
    data = tidy(found, "name", _MODEL_OTHERS, "scope")
    data["panel"] = data["panel"].str.replace("_", " ")
    subtitle = [_KEY, "The prediction is the roofline of the ceilings measured in the same run."]
    failed = failed_cases(rows, "name", _MODEL_OTHERS)
    return measured_and_predicted(data, failed, "latency", title + shared, subtitle, ["inference", "training step"])


def model_memory(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Peak memory of whole models over sequence length."""
    rows = of_experiment(rows, "model")
    found = pick(rows, "peak_memory")
    title = "Model memory"
    if found.empty:
        return nothing(title, why_nothing(rows, "model"))
    found, shared = short_names(found)
    data = tidy(found, "name", _MODEL_OTHERS, "scope")
    data["panel"] = data["panel"].str.replace("_", " ")
    subtitle = [_KEY, "The prediction counts the same bytes on tensors that have shapes and no data."]
    return measured_and_predicted(
        data, pd.DataFrame(), "peak_memory", title + shared, subtitle, ["inference", "training step"]
    )


def training_phases(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Where a training step's time goes: forward, backward, optimizer."""
    table = tables.model_table(rows)
    title = "Where a training step goes"
    phases = ["forward", "backward", "optimizer_step"]
    if table.empty or not table["training_step"].notna().any():
        return nothing(title, "no training step was measured")
    table, shared = short_names(table[table["training_step"].notna()], "name", "optimisation")
    cases = "n = " + table["seq_len"].astype(int).astype(str)
    if table["name"].nunique() > 1:
        cases = table["name"] + ", " + cases
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
            color=alt.Color("phase:N", title="Phase", sort=order, scale=alt.Scale(domain=order, range=PALETTE[:3])),
            order=alt.Order("order:Q"),
            tooltip=[alt.Tooltip("case:N"), alt.Tooltip("phase:N"), alt.Tooltip("ms:Q", format=",.4~g")],
        )
    )
    return look(chart.properties(width=2 * WIDTH, height=alt.Step(24), title=title + shared))


def model_loss(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Loss over real training steps; `rows` must carry samples."""
    data = tables.loss_table(rows)
    title = "Loss on real text"
    if data.empty:
        return nothing(title, "no loss was measured")
    colour, _ = colour_and_shape("series", "Model", data["series"])
    chart = (
        alt.Chart(data)
        .mark_line(point=alt.OverlayMarkDef(size=18), strokeWidth=1.5)
        .encode(
            x=alt.X("step:Q", title="Step", axis=alt.Axis(format="d", tickMinStep=1)),
            y=alt.Y("loss:Q", title="Loss (nats per byte)", scale=alt.Scale(zero=False)),
            color=colour,
            tooltip=[alt.Tooltip("series:N"), alt.Tooltip("step:Q"), alt.Tooltip("loss:Q", format=".4f")],
        )
    )
    subtitle = "Before each step, on bytes of the standard library's sources. One seed."
    return look(chart.properties(width=2 * WIDTH, height=HEIGHT, title=alt.Title(title, subtitle=subtitle)))


def warmup_curve(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Each step's time from the first one of a fresh process, warm-up and steady state told apart; needs samples."""
    data = tables.warmup_curve(rows)
    title = "From the first step of a fresh process"
    if data.empty:
        return nothing(title, why_nothing(of_experiment(rows, "warmup"), "warmup"))
    phases = ["warm-up", "steady", "not settled"]
    colours = alt.Scale(domain=phases, range=[PALETTE[1], PALETTE[0], "#888888"])
    charts = []
    for direction in dict.fromkeys(data["direction"]):
        base = alt.Chart(data[data["direction"] == direction])
        x = alt.X("step:Q", title="Step", axis=alt.Axis(format="d", tickMinStep=1))
        y = alt.Y("ms:Q", title="Time of the step (ms)", scale=alt.Scale(zero=True))
        line = base.mark_line(color="#bbb", strokeWidth=1).encode(x=x, y=y)
        points = base.mark_point(filled=True, size=45, opacity=1).encode(
            x=x,
            y=y,
            color=alt.Color("phase:N", title="Phase", scale=colours),
            tooltip=[alt.Tooltip("step:Q"), alt.Tooltip("ms:Q", format=",.4~g"), alt.Tooltip("phase:N")],
        )
        title_ = alt.Title(str(direction).replace("_", " + "), fontSize=12)
        charts.append(alt.layer(line, points, width=WIDTH, height=HEIGHT, title=title_))
    return look(alt.hconcat(*charts, spacing=24, title=title))


def warmup_settings(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """What each warm-up setting would report: mean with its standard deviation, each in a fresh process."""
    data = tables.warmup_table(rows)
    title = "What each setting would report"
    if data.empty or not data["mean"].notna().any():
        return nothing(title, why_nothing(of_experiment(rows, "warmup"), "warmup"))
    data = data[data["mean"].notna()].assign(upper=lambda t: t["mean"] + t["sd"], lower=lambda t: t["mean"] - t["sd"])
    charts = []
    for direction in dict.fromkeys(data["direction"]):
        part = data[data["direction"] == direction].drop(columns=["run_id"])
        base = alt.Chart(part).encode(x=alt.X("warmup_steps:O", title="Warm-up steps", axis=alt.Axis(labelAngle=0)))
        rule = base.mark_rule(strokeWidth=2, color=PALETTE[0]).encode(y=alt.Y("lower:Q"), y2=alt.Y2("upper:Q"))
        points = base.mark_point(filled=True, size=70, color=PALETTE[0], opacity=1).encode(
            y=alt.Y("mean:Q", title="Mean ± standard deviation (ms)", scale=alt.Scale(zero=True)),
            tooltip=[
                alt.Tooltip("warmup_steps:O"),
                *(alt.Tooltip(f"{c}:Q", format=",.4~g") for c in ("mean", "sd", "cv", "median", "difference")),
            ],
        )
        title_ = alt.Title(str(direction).replace("_", " + "), fontSize=12)
        charts.append(alt.layer(rule, points, width=WIDTH, height=HEIGHT, title=title_))
    return look(alt.hconcat(*charts, spacing=24, title=title))


def attention_roofline(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """The attention cases under the ceilings of their run."""
    return roofline_chart(rows, "attention")


def model_roofline(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """The models under the ceilings of their run."""
    return roofline_chart(rows, "model")


# What `nano report` writes as pictures, by file name.
CHARTS = {
    "attention_latency": attention_latency,
    "attention_memory": attention_memory,
    "attention_efficiency": attention_efficiency,
    "attention_speed_up": attention_speed_up,
    "model_performance": model_performance,
    "model_memory": model_memory,
    "training_phases": training_phases,
    "model_loss": model_loss,
    "attention_quality": attention_quality,
    "attention_roofline": attention_roofline,
    "model_roofline": model_roofline,
    "warmup_curve": warmup_curve,
    "warmup_settings": warmup_settings,
    "power_over_time": power_over_time,
    "energy_per_token": energy_per_token,
    "layer_heat_map": layer_heat_map,
    "operation_breakdown": operation_breakdown,
    "activation_profile": activation_profile,
    "profiling_overhead": profiling_overhead,
    "fp8_quoted": fp8_quoted,
    "fp8_precisions": fp8_precisions,
    "fp8_parity": fp8_parity,
    "fp8_numerics": fp8_numerics,
    "fp8_losses": fp8_losses,
    "fp8_scales": fp8_scales,
    "decode_scaling": decode_scaling,
    "decode_shares": decode_shares,
    "link_model": link_model,
    "prefill_times": prefill_times,
    "sharded_memory": sharded_memory,
    "training_scaling": training_scaling,
    "ab_ratio": ab_ratio,
}
