"""Charts from rows. Measured values are solid marks with their intervals; predictions are dashed lines without marks."""

from __future__ import annotations

import warnings

import altair as alt
import pandas as pd

from nanolib.measurement import METRICS
from nanolib.report import tables

# Okabe & Ito (2008): told apart by every common kind of colour vision.
PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
_SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right"]
_WIDTH, _HEIGHT = 340, 260
_FAILED = "#B00020"


def axis_title(metric: str) -> str:
    """`Latency (ms)`: title and unit as the vocabulary has them."""
    m = METRICS[metric]
    return m.title if m.unit == "1" else f"{m.title} ({m.unit})"


def _look(chart: alt.TopLevelMixin) -> alt.TopLevelMixin:
    return (
        chart.configure_axis(labelFontSize=12, titleFontSize=12, gridColor="#e8e8e8", titleFontWeight="normal")
        .configure_legend(labelFontSize=12, titleFontSize=12, symbolStrokeWidth=2, labelLimit=260)
        .configure_title(fontSize=14, anchor="start", fontWeight="bold", subtitleFontSize=12, subtitleColor="#555")
        .configure_header(labelFontSize=13, titleFontSize=0, labelFontWeight="bold")
        .configure_view(stroke="#ccc")
    )


def nothing(title: str, why: str) -> alt.TopLevelMixin:
    """A chart that says that there is nothing to draw, and why."""
    text = alt.Chart(pd.DataFrame({"why": [why]})).mark_text(fontSize=13, color="#555").encode(text="why:N")
    return _look(text.properties(width=2 * _WIDTH, height=60, title=title))


def _seq_axis(values: pd.Series, title: str = "Sequence length (tokens)") -> alt.X:
    ticks = sorted(int(value) for value in values.dropna().unique())
    low, high = (min(ticks), max(ticks)) if ticks else (1, 2)
    return alt.X(
        "seq_len:Q",
        title=title,
        scale=alt.Scale(type="log", base=2, domain=[low / 1.15, high * 1.15], nice=False),
        axis=alt.Axis(values=ticks, format="d", grid=False),
    )


def _colour(
    field: str, title: str, values: pd.Series, everything: pd.Series | None = None
) -> tuple[alt.Color, alt.Shape]:
    """A colour and a shape per name; with `everything` a name looks as it does in the chart of all of them."""
    places = {name: i for i, name in enumerate(dict.fromkeys(values if everything is None else everything))}
    names = [name for name in places if name in set(values)]
    colours = [PALETTE[places[name] % len(PALETTE)] for name in names]
    shapes = [_SHAPES[places[name] % len(_SHAPES)] for name in names]
    return (
        alt.Color(f"{field}:N", title=title, sort=names, scale=alt.Scale(domain=names, range=colours)),
        alt.Shape(f"{field}:N", title=title, sort=names, scale=alt.Scale(domain=names, range=shapes)),
    )


def _series(rows: pd.DataFrame, first: str, others: list[str]) -> pd.Series:
    """A name per series: the first factor, and those others that vary."""
    varying = [name for name in others if rows[f"factor.{name}"].astype(str).nunique() > 1]
    label = rows[f"factor.{first}"].astype(str)
    for name in varying:
        short = {"batch_size": "batch "}.get(name, "")
        label = label + ", " + short + rows[f"factor.{name}"].astype(str)
    return label


def _tidy(rows: pd.DataFrame, first: str, others: list[str], panel: str) -> pd.DataFrame:
    """What a chart carries: no samples, no JSON, text for the tooltip."""
    return pd.DataFrame(
        {
            "series": _series(rows, first, others),
            "panel": rows[panel],
            "seq_len": rows["factor.seq_len"].astype(int),
            "estimate": rows["estimate"],
            "low": rows["low"].fillna(rows["estimate"]),
            "high": rows["high"].fillna(rows["estimate"]),
            "predicted": rows["predicted"],
            "n": rows["n"],
            "method": rows["method"],
            "flags": [", ".join(flags) or "none" for flags in rows["flags"]],
        }
    )


def _measured_and_predicted(
    data: pd.DataFrame,
    failed: pd.DataFrame,
    metric: str,
    title: str,
    subtitle: str,
    panels: list[str],
    log: bool = True,
) -> alt.TopLevelMixin:
    """Panels side by side over sequence length: points with intervals, dashed predictions, crosses for what failed."""
    colour, shape = _colour("series", "Kind", data["series"])
    domain = _domain(data[["estimate", "low", "high", "predicted"]], log)
    scale = alt.Scale(type="log", domain=domain, nice=False) if log else alt.Scale(domain=domain, nice=False)
    axis = alt.Axis(format=",.3~r" if log else ".0%", minExtent=42)
    y = alt.Y("estimate:Q", title=axis_title(metric), scale=scale, axis=axis)
    tooltip = [
        alt.Tooltip("series:N", title="kind"),
        alt.Tooltip("seq_len:Q", title="sequence length"),
        alt.Tooltip("estimate:Q", title=axis_title(metric), format=",.4~g"),
        alt.Tooltip("low:Q", title="interval from", format=",.4~g"),
        alt.Tooltip("high:Q", title="to", format=",.4~g"),
        alt.Tooltip("predicted:Q", title="predicted", format=",.4~g"),
        alt.Tooltip("n:Q", title="blocks"),
        alt.Tooltip("method:N"),
        alt.Tooltip("flags:N"),
    ]
    x = _seq_axis(pd.concat([data["seq_len"], failed.get("seq_len", pd.Series(dtype=float))]))
    # One chart per panel with the data of that panel: faceting layered charts by a field breaks in older Vega.
    charts = []
    chosen = alt.selection_point(fields=["series"], bind="legend", name="picked")
    faded = alt.condition(chosen, alt.value(1.0), alt.value(0.12))
    for panel in panels:
        part = data[data["panel"] == panel]
        if part.empty:
            continue
        base = alt.Chart(part).encode(x=x, color=colour)
        layers = [
            base.mark_line(strokeDash=[4, 4], opacity=0.8, strokeWidth=1.2)
            .encode(y=alt.Y("predicted:Q", scale=scale, title=axis_title(metric)))
            .transform_filter("isValid(datum.predicted)"),
            base.mark_line(strokeWidth=2).encode(y=y, opacity=faded),
            base.mark_rule(strokeWidth=2).encode(
                y=alt.Y("low:Q", scale=scale, title=axis_title(metric)), y2="high:Q", opacity=faded
            ),
            base.mark_point(filled=True, size=55, opacity=1).encode(y=y, shape=shape, tooltip=tooltip, opacity=faded),
        ]
        if len(failed):
            reasons = [alt.Tooltip("series:N", title="kind"), alt.Tooltip("status:N"), alt.Tooltip("message:N")]
            layers.append(
                alt.Chart(failed)
                .mark_text(text="✕", fontSize=15, color=_FAILED, baseline="bottom")
                .encode(x=x, y=alt.value(_HEIGHT - 4), tooltip=reasons)
            )
        charts.append(alt.layer(*layers).properties(width=_WIDTH, height=_HEIGHT, title=alt.Title(panel, fontSize=12)))
    with warnings.catch_warnings():  # one selection for all panels is what we want, and what it warns of
        warnings.filterwarnings("ignore", message="Automatically deduplicated selection parameter")
        joined = alt.hconcat(*charts, spacing=24).add_params(chosen)
    return _look(joined.properties(title=alt.Title(title, subtitle=subtitle)))


def _domain(values: pd.DataFrame, log: bool) -> list[float]:
    """One range for all panels, with room at both ends."""
    numbers = values.to_numpy(dtype=float)
    numbers = numbers[numbers > 0] if log else numbers[~pd.isna(numbers)]
    if not len(numbers):
        return [0.1, 1]
    return [float(numbers.min()) / 1.3, float(numbers.max()) * 1.3] if log else [0, float(numbers.max()) * 1.08]


def _failed(rows: pd.DataFrame, first: str, others: list[str]) -> pd.DataFrame:
    bad = rows[(rows["metric"] == "case_time") & (rows["status"] != "ok") & rows[f"factor.{first}"].notna()]
    if bad.empty:
        return pd.DataFrame()
    return pd.DataFrame(
        {
            "series": _series(bad, first, others),
            "seq_len": bad["factor.seq_len"].astype(int),
            "status": bad["status"],
            "message": bad["message"],
        }
    )


_ATTENTION_OTHERS = ["batch_size", "dtype", "causal"]
_MODEL_OTHERS = ["attention_type", "batch_size", "dtype"]
_KEY = "Points: measured, with 95 % intervals. Dashed: predicted. Click a legend entry to pick it out."


def attention_latency(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Latency of attention kinds over sequence length, forward and backward, with the roofline's prediction."""
    rows = tables.of_experiment(rows, "attention")
    found = tables.pick(rows, "latency")
    title = "Attention latency"
    if found.empty:
        return nothing(title, _why(rows, "attention"))
    data = _tidy(found, "name", _ATTENTION_OTHERS, "scope")
    subtitle = [_KEY, "The prediction is the roofline of the ceilings measured in the same run."]
    return _measured_and_predicted(
        data, _failed(rows, "name", _ATTENTION_OTHERS), "latency", title, subtitle, ["forward", "backward"]
    )


def attention_memory(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Peak memory of attention kinds over sequence length."""
    rows = tables.of_experiment(rows, "attention")
    found = tables.pick(rows, "peak_memory")
    title = "Attention memory"
    if found.empty:
        return nothing(title, _why(rows, "attention"))
    data = _tidy(found, "name", _ATTENTION_OTHERS, "scope")
    data["panel"] = data["panel"].str.replace("forward_backward", "forward + backward")
    subtitle = [_KEY, "The prediction counts inputs and output alone."]
    panels = ["forward", "forward + backward"]
    return _measured_and_predicted(
        data, _failed(rows, "name", _ATTENTION_OTHERS), "peak_memory", title, subtitle, panels
    )


def attention_efficiency(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Share of the measured matrix-product ceiling that each kind reaches."""
    rows = tables.of_experiment(rows, "attention")
    found = tables.pick(rows, "ceiling_share")
    title = "Attention efficiency"
    if found.empty:
        return nothing(title, _why(rows, "attention"))
    data = _tidy(found, "name", _ATTENTION_OTHERS, "scope")
    subtitle = [
        "Useful FLOP/s (of kept connections) as a share of this machine's matrix product, measured in the same run."
    ]
    return _measured_and_predicted(
        data, pd.DataFrame(), "ceiling_share", title, subtitle, ["forward", "backward"], log=False
    )


def attention_speed_up(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Forward speed-up of sparse kinds over dense, beside the bound that skipped tiles set."""
    table = tables.attention_table(rows)
    title = "Sparse against dense"
    sparse = table[~table["name"].str.startswith("dense") & table["speed_up"].notna()] if len(table) else table
    if sparse.empty:
        return nothing(title, "no sparse kind was measured beside a dense one")
    data = sparse[["name", "seq_len", "speed_up", "speed_up_low", "speed_up_high", "bound", "baseline"]]
    colour, shape = _colour("name", "Kind", data["name"], table["name"])
    base = alt.Chart(data).encode(x=_seq_axis(data["seq_len"]), color=colour)
    domain = _domain(data[["speed_up_low", "speed_up_high", "bound"]].assign(one=1.0), log=True)
    scale = alt.Scale(type="log", base=2, domain=domain, nice=False)
    layers = [
        alt.Chart(pd.DataFrame({"y": [1.0]})).mark_rule(color="#888").encode(y=alt.Y("y:Q", scale=scale, title="")),
        base.mark_line(strokeDash=[4, 4], strokeWidth=1.2).encode(y=alt.Y("bound:Q", scale=scale, title="")),
        base.mark_line(strokeWidth=2).encode(y=alt.Y("speed_up:Q", scale=scale, title="Speed-up over dense (×)")),
        base.mark_rule(strokeWidth=2).encode(y=alt.Y("speed_up_low:Q", scale=scale, title=""), y2="speed_up_high:Q"),
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
        "Dashed: the bound that skipped tiles set.",
    ]
    chart = alt.layer(*layers).properties(width=2 * _WIDTH, height=_HEIGHT, title=alt.Title(title, subtitle=subtitle))
    return _look(chart)


def model_performance(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Latency of whole models over sequence length: inference and a training step."""
    rows = tables.of_experiment(rows, "model")
    found = tables.pick(rows, "latency")
    found = found[found["scope"].isin(["inference", "training_step"])] if len(found) else found
    title = "Model latency"
    if found.empty:
        return nothing(title, _why(rows, "model"))
    data = _tidy(found, "name", _MODEL_OTHERS, "scope")
    data["panel"] = data["panel"].str.replace("_", " ")
    subtitle = [_KEY, "The prediction is the roofline of the ceilings measured in the same run."]
    failed = _failed(rows, "name", _MODEL_OTHERS)
    return _measured_and_predicted(data, failed, "latency", title, subtitle, ["inference", "training step"])


def model_memory(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Peak memory of whole models over sequence length."""
    rows = tables.of_experiment(rows, "model")
    found = tables.pick(rows, "peak_memory")
    title = "Model memory"
    if found.empty:
        return nothing(title, _why(rows, "model"))
    data = _tidy(found, "name", _MODEL_OTHERS, "scope")
    data["panel"] = data["panel"].str.replace("_", " ")
    subtitle = [_KEY, "The prediction is a lower bound: weights, gradients, optimizer and logits, without activations."]
    return _measured_and_predicted(data, pd.DataFrame(), "peak_memory", title, subtitle, ["inference", "training step"])


def training_phases(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Where a training step's time goes: forward, backward, optimizer."""
    table = tables.model_table(rows)
    title = "Where a training step goes"
    phases = ["forward", "backward", "optimizer_step"]
    if table.empty or not table["training_step"].notna().any():
        return nothing(title, "no training step was measured")
    table = table[table["training_step"].notna()].assign(
        case=lambda t: t["name"] + " n=" + t["seq_len"].astype(int).astype(str)
    )
    data = table.melt(["case"], phases, "phase", "ms").assign(phase=lambda t: t["phase"].str.replace("_", " "))
    order = [phase.replace("_", " ") for phase in phases]
    data["order"] = data["phase"].map(order.index)
    chart = (
        alt.Chart(data)
        .mark_bar()
        .encode(
            x=alt.X("sum(ms):Q", title="Median time (ms)"),
            y=alt.Y("case:N", title=None, sort=list(dict.fromkeys(data["case"]))),
            color=alt.Color("phase:N", title="Phase", sort=order, scale=alt.Scale(domain=order, range=PALETTE[:3])),
            order="order:Q",
            tooltip=["case:N", "phase:N", alt.Tooltip("ms:Q", format=",.4~g")],
        )
    )
    return _look(chart.properties(width=2 * _WIDTH, height=alt.Step(24), title=title))


def model_loss(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Loss over real training steps; `rows` must carry samples."""
    data = tables.loss_table(rows)
    title = "Loss on real text"
    if data.empty:
        return nothing(title, "no loss was measured")
    colour, _ = _colour("series", "Model", data["series"])
    chart = (
        alt.Chart(data)
        .mark_line(point=alt.OverlayMarkDef(size=18), strokeWidth=1.5)
        .encode(
            x=alt.X("step:Q", title="Step", axis=alt.Axis(format="d", tickMinStep=1)),
            y=alt.Y("loss:Q", title="Loss (nats per byte)", scale=alt.Scale(zero=False)),
            color=colour,
            tooltip=["series:N", "step:Q", alt.Tooltip("loss:Q", format=".4f")],
        )
    )
    subtitle = "Before each step, on bytes of the standard library's sources. One seed."
    return _look(chart.properties(width=2 * _WIDTH, height=_HEIGHT, title=alt.Title(title, subtitle=subtitle)))


def warmup_curve(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Each step's time from the first one of a fresh process, warm-up and steady state told apart; needs samples."""
    data = tables.warmup_curve(rows)
    title = "From the first step of a fresh process"
    if data.empty:
        return nothing(title, _why(tables.of_experiment(rows, "warmup"), "warmup"))
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
            tooltip=["step:Q", alt.Tooltip("ms:Q", format=",.4~g"), "phase:N"],
        )
        title_ = alt.Title(str(direction).replace("_", " + "), fontSize=12)
        charts.append(alt.layer(line, points).properties(width=_WIDTH, height=_HEIGHT, title=title_))
    return _look(alt.hconcat(*charts, spacing=24).properties(title=title))


def warmup_settings(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """What each warm-up setting would report: mean with its standard deviation, each in a fresh process."""
    data = tables.warmup_table(rows)
    title = "What each setting would report"
    if data.empty or not data["mean"].notna().any():
        return nothing(title, _why(tables.of_experiment(rows, "warmup"), "warmup"))
    data = data[data["mean"].notna()].assign(upper=lambda t: t["mean"] + t["sd"], lower=lambda t: t["mean"] - t["sd"])
    charts = []
    for direction in dict.fromkeys(data["direction"]):
        part = data[data["direction"] == direction].drop(columns=["run_id"])
        base = alt.Chart(part).encode(x=alt.X("warmup_steps:O", title="Warm-up steps", axis=alt.Axis(labelAngle=0)))
        rule = base.mark_rule(strokeWidth=2, color=PALETTE[0]).encode(y="lower:Q", y2="upper:Q")
        points = base.mark_point(filled=True, size=70, color=PALETTE[0], opacity=1).encode(
            y=alt.Y("mean:Q", title="Mean ± standard deviation (ms)", scale=alt.Scale(zero=True)),
            tooltip=[
                "warmup_steps:O",
                *(alt.Tooltip(f"{c}:Q", format=",.4~g") for c in ("mean", "sd", "cv", "median", "difference")),
            ],
        )
        title_ = alt.Title(str(direction).replace("_", " + "), fontSize=12)
        charts.append(alt.layer(rule, points).properties(width=_WIDTH, height=_HEIGHT, title=title_))
    return _look(alt.hconcat(*charts, spacing=24).properties(title=title))


def _why(rows: pd.DataFrame, experiment: str) -> str:
    """Why there is nothing to draw: never run, or nothing but failures."""
    if rows.empty:
        return f"no {experiment} run is in the database; run: nano run quick {experiment}"
    bad = rows[(rows["metric"] == "case_time") & (rows["status"] != "ok")]
    counts = ", ".join(f"{count} {status}" for status, count in bad["status"].value_counts().items())
    return f"no case gave a number ({counts or 'none has ended'})"


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
    "warmup_curve": warmup_curve,
    "warmup_settings": warmup_settings,
}
