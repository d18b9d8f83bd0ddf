"""Where a model's time goes: layers, operations, what its activations look like, and what finding out cost."""

from __future__ import annotations

import altair as alt
import pandas as pd

from nanolib.measurement import format_with_interval
from nanolib.report.claim import Claim, Figure, Order, comparing
from nanolib.report.drawing import WIDTH, colour_and_shape, coloured
from nanolib.report.frame import Drawn, framed, panels, rule, tooltips, with_interval
from nanolib.report.linking import followed
from nanolib.report.overview import cached, of_experiment, pick
from nanolib.report.palette import FRAME, PALETTE, PAPER
from nanolib.report.tables import CASE, known

# What belongs together lies together and shares a hue: projections blue, attention orange, the MLP green, the rest grey.
OPERATIONS = {
    "q_proj": "#08519c",
    "k_proj": "#3182bd",
    "v_proj": "#6baed6",
    "qkv_proj": "#3182bd",
    "out_proj": "#bdd7e7",
    "rope": "#dadaeb",
    "attention_fused": "#7f2704",
    "qk": "#a63603",
    "scale_mask": "#e6550d",
    "softmax": "#fd8d3c",
    "av": "#fdbe85",
    "gate": "#006d2c",
    "up": "#31a354",
    "activation": "#a1d99b",
    "down": "#74c476",
    "norm": "#CC79A7",
    "embedding": "#e7cb94",
    "head": "#8c6d31",
    "residual": "#999999",
    "cache": "#bbbbbb",
    "other": "#d0d0d0",
    "between": "#f0f0f0",
}
_SPOKEN = {"attention_fused": "fused attention", "between": "gaps between operations"}
ACTIVATIONS = {
    "mean_abs": "mean |x|",
    "sd": "standard deviation",
    "max_abs": "largest |x|",
    "near_zero": "share near zero",
}
DEEP = {
    "attention_entropy": "attention entropy (nats)",
    "attention_max_weight": "largest attention weight",
    "attention_sparsity": "attention weights near zero",
    "mlp_kill_ratio": "MLP units near zero",
    "norm_variance_ratio": "variance after norm / before",
}
MODES = ("again", "minimal", "standard", "deep")
LIMITS = {"minimal": 0.01, "standard": 0.03, "deep": 0.08}
OVERHEAD_COLUMNS = {
    "name": "Model",
    "phase": "Phase",
    "seq_len": "n",
    "mode": "Mode",
    "wall": "Wall time [interval]",
    "cpu": "Processor time [interval]",
    "threads": "Of it, threads beside",
    "plain_ms": "Bare call, ms",
    "pass_ms": "Closest call, ms",
    "n": "Pairs",
}


_FACTORS = ("name", "phase", "seq_len", "batch_size")


def layer_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per layer of each model, shape and phase.

    Returns:
        Columns: `run_id`, `case`, `name`,
        `phase`, `seq_len`, `batch_size`, `layer`, `place`, `ms`, `low`, `high`, `share`, `calls`,
        `joules`, `joules_low`, `joules_high` (attributed), `source`, and the JSON details `operations_ms`,
        `activations`, `deep`, `deep_passes`.
    """
    rows = of_experiment(rows, "energy")
    found = pick(rows, "layer_time")
    if found.empty:
        return pd.DataFrame()
    details = ["layer", "share", "operations_ms", "activations", "deep", "deep_passes"]
    told = pd.DataFrame([{name: one.get(name) for name in details} for one in found["details"]], index=found.index)
    names = {"estimate": "ms", "n": "calls"} | {f"factor.{name}": name for name in _FACTORS}
    table = found[[*CASE, "scope", "low", "high", *names]].rename(columns=names).join(told)
    table = table.assign(place=table.groupby(list(CASE), sort=False).cumcount())
    energy = pick(rows, "layer_energy")
    if len(energy):
        taken = {"estimate": "joules", "low": "joules_low", "high": "joules_high", "method": "source"}
        key = [*CASE, "scope"]
        table = table.merge(energy.drop_duplicates(key)[[*key, *taken]].rename(columns=taken), on=key, how="left")
    return _with_case(table.reset_index(drop=True))


def _with_case(table: pd.DataFrame) -> pd.DataFrame:
    """A name for each case: the phase and length, and the model where there are several, whose name may be cut."""
    if table.empty:
        return table
    words = table["phase"].str.replace("_", " ") + ", n = " + table["seq_len"].astype(int).astype(str)
    return table.assign(case=words if table["name"].nunique() == 1 else words + ", " + table["name"])


def _of_model(rows: pd.DataFrame) -> str:
    """The model's name for a title, where there is one alone."""
    names = of_experiment(rows, "energy")["factor.name"].dropna().unique()
    return f": {names[0]}" if len(names) == 1 else ""


def _operations(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per layer and operation of the deep passes."""
    table = known(layer_table(rows), "operations_ms")
    if table.empty:
        return pd.DataFrame()
    lines = []
    for _, row in table.iterrows():
        operations = dict(row["operations_ms"])
        for name in set(operations) - set(OPERATIONS):  # modules that go by their own names
            operations["other"] = operations.get("other", 0.0) + operations.pop(name)
        whole = sum(operations.values())
        for place, name in enumerate(OPERATIONS):
            if name not in operations:
                continue
            ms = operations[name]
            line = {"case": row["case"], "phase": row["phase"], "layer": row["layer"], "operation": name, "ms": ms}
            line |= {"order": place, "place": row["place"], "share": ms / whole, "passes": row["deep_passes"]}
            line |= {name: row[name] for name in ("run_id", "name", "seq_len")}
            if "joules" in table:
                line["joules"] = "{:.2g} to {:.2g} J".format(
                    *(row[end] * ms / whole for end in ("joules_low", "joules_high"))
                )
            lines.append(line)
    return followed(pd.DataFrame(lines))


def _tooltip(data: pd.DataFrame, *names: str) -> list[alt.Tooltip]:
    titles = {"ms": "ms per call, in deep passes", "joules": "energy, attributed by time", "passes": "deep passes"}
    return [
        *tooltips(" ".join(["case", *names]), "ms", **titles),
        *tooltips("", "share", ".1%", share="share of its layer"),
        *tooltips("joules" if "joules" in data else "", "passes", "d", **titles),
    ]


@framed("Where the time goes, layer by layer", "energy")
def layer_heat_map(rows: pd.DataFrame) -> Drawn | None:
    """Layers by operations, coloured by time; the energy attributed to each by its time is in the tooltip."""
    data = _operations(rows)
    if data.empty:
        return None
    heat = alt.Legend(gradientLength=120, format=".2~g")
    colour = alt.Color("ms:Q", title="ms", scale=alt.Scale(type="log", scheme="viridis"), legend=heat)

    def draw(part: pd.DataFrame) -> alt.TopLevelMixin:
        layers = list(part.sort_values("place")["layer"].unique())
        used = [name for name in OPERATIONS if name in set(part["operation"])]
        cells = alt.Chart(part, width=alt.Step(26), height=alt.Step(22 if len(layers) < 20 else 12))
        return cells.mark_rect(stroke=PAPER, strokeWidth=1).encode(
            x=alt.X("operation:N", sort=used, title=None, axis=alt.Axis(labelAngle=-50)),
            y=alt.Y("layer:N", sort=layers, title=None),
            color=colour,
            tooltip=_tooltip(part, "layer", "operation"),
        )

    subtitle = [
        "Deep passes: one call in k; time per call, logarithmic.",
        "No sensor sees a layer: the joules in the tooltip are the window's, attributed by time.",
    ]
    shown = panels(data, draw, "case", columns=1, spacing=18)
    return shown.resolve_scale(color="independent"), subtitle, _of_model(rows)


@framed("Where the time goes, operation by operation", "energy")
def operation_breakdown(rows: pd.DataFrame) -> Drawn | None:
    """All layers' operations as shares of a call, one bar per phase."""
    data = _operations(rows)
    if data.empty:
        return None
    known = [name for name in data if name.startswith("link_")]
    total = data.groupby(["case", "operation", "order", *known], sort=False)["ms"].sum().reset_index()
    total["share"] = total["ms"] / total.groupby("case")["ms"].transform("sum")
    used = [name for name in OPERATIONS if name in set(total["operation"])]
    colours = {name: OPERATIONS[name] for name in used}
    colour = coloured("operation", "Operation", colours, legend=alt.Legend(columns=2), sort=used)
    bars = (
        alt.Chart(total)
        .mark_bar(stroke=FRAME, strokeWidth=0.4, height=22)
        .encode(
            x=alt.X(
                "share:Q",
                title="Share of a deep pass",
                axis=alt.Axis(format=".0%"),
                scale=alt.Scale(domain=[0, 1]),
            ),
            y=alt.Y("case:N", title=None, sort=list(dict.fromkeys(data["case"])), axis=alt.Axis(labelLimit=360)),
            color=colour,
            order=alt.Order("order:Q"),
            tooltip=[
                *tooltips("case operation", "share", ".1%"),
                *tooltips("", "ms", ms="ms per call, all layers"),
            ],
        )
    )
    subtitle = "Between: Python, launching, memory given back."
    return bars.properties(width=int(1.6 * WIDTH), height=alt.Step(34)), subtitle, _of_model(rows)


@framed("Activations over depth", "energy")
def activation_profile(rows: pd.DataFrame) -> Drawn | str | None:
    """What the blocks' outputs, their attention and their MLPs look like, over depth."""
    table = known(layer_table(rows), "activations")
    if table.empty:
        return None
    blocks = table[table["layer"].str.contains(r"\d")]
    blocks = blocks.assign(depth=blocks.groupby("case").cumcount())
    lines = [
        {"case": row["case"], "depth": row["depth"], "layer": row["layer"], "what": words, "value": values[key]}
        | {name: row[name] for name in ("run_id", "name", "seq_len")}
        for _, row in blocks.iterrows()
        for values, known in ((row["activations"], ACTIVATIONS), (row["deep"] or {}, DEEP))
        for key, words in known.items()
        if key in values
    ]
    if not lines:
        return "the model's layers are no numbered blocks, so they have no depth"
    data = followed(pd.DataFrame(lines))
    colour, shape = colour_and_shape("case", "Case", data["case"])

    def draw(part: pd.DataFrame) -> alt.TopLevelMixin:
        depths = sorted(part["depth"].unique())
        positive = part["value"].min() > 0 and part["value"].max() > 20 * part["value"].min()
        y = alt.Y(
            "value:Q",
            title=None,
            scale=alt.Scale(type="log", nice=True) if positive else alt.Scale(zero=False, nice=True),
        )
        x = alt.X("depth:Q", title="Block", axis=alt.Axis(values=depths[:: max(1, len(depths) // 8)], format="d"))
        line = alt.Chart(part, width=190, height=130).mark_line(point=alt.OverlayMarkDef(size=40), strokeWidth=1.5)
        return line.encode(x=x, y=y, color=colour, shape=shape, tooltip=tooltips("case layer", "value"))

    subtitle = [
        "Means over the calls that were looked at closely. Of a large output an even sample of 2,048 elements is looked at,"
    ]
    subtitle.append("but for its largest one; of fused attention 64 queries, over the pairs that are not masked.")
    return panels(data, draw, "what", columns=3, spacing=18), subtitle, _of_model(rows)


@cached("energy")
def overhead_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per mode of profiling, phase and shape.

    Returns:
        Columns: `run_id`, `latency_row`, `case`, `name`,
        `phase`, `seq_len`, `mode`, `wall`, `wall_low`, `wall_high`, `cpu`, `cpu_low`, `cpu_high`,
        `threads` (shares of the bare call), `plain_ms`, `pass_ms`, `n`.
    """
    found = pick(of_experiment(rows, "energy"), "overhead")
    lines = [
        {"run_id": row["run_id"], "latency_row": row.get("id")}
        | {name: row[f"factor.{name}"] for name in ("name", "phase", "seq_len")}
        | {"mode": row["scope"].split()[-1], "n": row["n"]}
        | {"wall": row["estimate"], "wall_low": row["low"], "wall_high": row["high"], "threads": details["threads"]}
        | dict(zip(("cpu_low", "cpu", "cpu_high"), details["cpu"], strict=True))
        | {"plain_ms": details["plain_ms"], "pass_ms": details["pass_ms"] or float("nan")}
        for row, details in zip(found.to_dict("records"), found["details"], strict=True)
    ]
    return _with_case(pd.DataFrame(lines))


def overhead_words(rows: pd.DataFrame) -> pd.DataFrame:
    """The table in words, shares in per cent: the columns of `OVERHEAD_COLUMNS`, and those by which a choice is followed."""
    table = overhead_table(rows)
    if table.empty:
        return table
    shown = table.copy()
    for name in ("wall", "cpu"):
        shown[name] = [
            f"{value:+.1%} [{low:+.1%} … {high:+.1%}]"
            for low, value, high in zip(table[f"{name}_low"], table[name], table[f"{name}_high"], strict=True)
        ]
    shown["threads"] = [f"{value:.2%}" for value in table["threads"]]
    for name in ("plain_ms", "pass_ms"):
        shown[name] = ["—" if pd.isna(value) else f"{value:.3g}" for value in table[name]]
    shown["phase"] = shown["phase"].str.replace("_", " ")
    return shown.drop(columns=[f"{name}_{end}" for name in ("wall", "cpu") for end in ("low", "high")])


@framed("Profiling overhead", "energy")
def profiling_overhead(rows: pd.DataFrame) -> Drawn | None:
    """What each mode costs with its interval, beside the bare call against itself, and what it may cost."""
    data = overhead_table(rows)
    if data.empty:
        return None
    data = followed(data).assign(limit=[LIMITS.get(mode, float("nan")) for mode in data["mode"]])
    colour = coloured("mode", "Mode", dict(zip(MODES, [FRAME, *PALETTE[:3]], strict=True)), sort=MODES)
    x = {"title": "Wall time on top of the bare call"}
    percent = x | {"axis": alt.Axis(format="+.0%")}
    shown = {"pass_ms": "closest call, ms", "plain_ms": "bare call, ms", "n": "pairs"}
    tooltip = tooltips("case mode", "wall wall_low wall_high cpu threads", "+.2%")
    tooltip += tooltips("", "pass_ms plain_ms n", ",.3~g", **shown)
    ends = ("wall", "wall_low", "wall_high")

    def draw(part: pd.DataFrame) -> alt.TopLevelMixin:
        base = alt.Chart(part).encode(y=alt.Y("mode:N", sort=MODES, title=None))
        limits = base.mark_tick(color=PALETTE[-1], thickness=2, size=22, strokeDash=[3, 2])
        marks = with_interval(base.encode(color=colour), "x", ends, percent, size=70, tooltip=tooltip)
        layers = [rule("x", 0.0, x, "zero"), limits.encode(x=alt.X("limit:Q", **x)), *marks]
        return alt.layer(*layers, width=WIDTH, height=110)

    subtitle = [
        "Calls with and without the profiler alternate; again is the bare call against itself. k − 1 calls are watched, one in k",
        "is looked at closely. Dashed ticks: what a mode may cost on a model of usual size; on small ones a module's cost shows.",
    ]
    return panels(data, draw, "case", columns=2, spacing=18), subtitle, _of_model(rows)


def layer_words(rows: pd.DataFrame) -> list[Claim]:
    """Which operations take most of each phase, and what it cost to find out."""
    claims = []
    data = _operations(rows)
    for case, part in data.groupby("case", sort=False) if len(data) else []:
        total = part.groupby("operation")["ms"].sum().sort_values(ascending=False)
        shares = total / total.sum()
        most = shares.head(max(3, int((shares.cumsum() <= 0.5).sum()) + 1))  # so many that it is more than half of it
        between, sure, advice = shares.get("between", 0), "", ""
        if between > 0.2:
            more = ", more than faster kernels" if between > 0.5 else ""
            sure, advice = "much lies between operations", f"larger batches or compiling would help{more}"
        text = ", ".join(f"{_SPOKEN.get(name, name)} {share:.0%}" for name, share in most.items())
        # profilers watch the forward calls of modules, of a training step too
        what = "most of its forward pass" if case.startswith("training step") else "most of the time"
        claims.append(Claim(f"{what} goes to {text}", sure, advice, case))
    claims += _unseen(rows)
    table = overhead_table(rows)
    for case, part in table[table["mode"] != "again"].groupby("case", sort=False) if len(table) else []:
        costs = [_cost(row) for _, row in part.iterrows()]
        compared = [pair for _, row in part.iterrows() for pair in comparing(_overhead(row), _NOTHING)]
        claims.append(Claim(f"profiling costs: {'; '.join(costs)}", about=case, compared=tuple(compared)))
    return claims


def _unseen(rows: pd.DataFrame) -> list[Claim]:
    """What deep passes did not show of the blocks, and why, once for all of them."""
    found = pick(of_experiment(rows, "energy"), "layer_time")
    told = [(line, row["factor.name"]) for _, row in found.iterrows() for line in row["details"].get("unseen", [])]
    return [Claim("of its blocks this was not seen", line, about=name) for line, name in dict.fromkeys(told)]


_NOTHING = Figure.exactly(0.0, "the bare call")


def _overhead(row: pd.Series) -> Figure:
    return Figure.of(row, "wall", "overhead", name=row["mode"])


def _cost(row: pd.Series) -> str:
    ends = format_with_interval(100 * row["wall"], 100 * row["wall_low"], 100 * row["wall_high"])
    if _overhead(row).against(_NOTHING) is Order.ALIKE:
        return f"{row['mode']}, not distinguishable from zero ({ends} %)"
    return f"{row['mode']} {ends} %"


# What the report draws of it, in this order.
CHARTS = {
    "operation_breakdown": operation_breakdown,
    "layer_heat_map": layer_heat_map,
    "activation_profile": activation_profile,
    "profiling_overhead": profiling_overhead,
}
