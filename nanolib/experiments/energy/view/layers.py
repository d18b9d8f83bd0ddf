"""Where a model's time goes: layers, operations, what its activations look like, and what finding out cost."""

from __future__ import annotations

import altair as alt
import pandas as pd

from nanolib.measurement import format_with_interval
from nanolib.report.drawing import PALETTE, WIDTH, empty_chart, theme, why_empty
from nanolib.report.overview import of_experiment, pick

# What belongs together lies together and shares a hue: projections blue, attention's steps orange, the MLP green, the rest grey.
OPERATIONS = {
    "q_proj": "#08519c",
    "k_proj": "#3182bd",
    "v_proj": "#6baed6",
    "out_proj": "#bdd7e7",
    "rope": "#dadaeb",
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


def layer_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per layer of each model, shape and phase.

    Returns:
        Columns: `case`, `name`, `phase`, `seq_len`, `batch_size`, `layer`, `place`, `ms`, `low`, `high`, `share`, `calls`,
        `joules`, `joules_low`, `joules_high` (attributed), `source`, and the JSON details `operations_ms`,
        `activations`, `deep`, `fused_ms`, `deep_passes`.
    """
    rows = of_experiment(rows, "energy")
    found = pick(rows, "layer_time")
    if found.empty:
        return pd.DataFrame()
    energy = pick(rows, "layer_energy")
    lines = []
    for (run_id, case_id), group in found.groupby(["run_id", "case_id"], sort=False):
        for place, (_, row) in enumerate(group.iterrows()):
            details = row["details"]
            line = {name: row[f"factor.{name}"] for name in ("name", "phase", "seq_len", "batch_size")}
            line |= {"layer": details["layer"], "place": place, "share": details["share"], "calls": row["n"]}
            line |= {"ms": row["estimate"], "low": row["low"], "high": row["high"]}
            line |= {
                key: details.get(key) for key in ("operations_ms", "activations", "deep", "fused_ms", "deep_passes")
            }
            of_layer = energy[(energy["run_id"] == run_id) & (energy["case_id"] == case_id)]
            of_layer = of_layer[of_layer["scope"] == row["scope"]] if len(of_layer) else of_layer
            if len(of_layer):
                first = of_layer.iloc[0]
                line |= {"joules": first["estimate"], "joules_low": first["low"], "joules_high": first["high"]}
                line["source"] = first["method"]
            lines.append(line)
    return _with_case(pd.DataFrame(lines))


def _with_case(table: pd.DataFrame) -> pd.DataFrame:
    """A name for each case: the phase and length, and the model where there are several."""
    if table.empty:
        return table
    words = table["phase"].str.replace("_", " ") + ", n = " + table["seq_len"].astype(int).astype(str)
    return table.assign(case=words if table["name"].nunique() == 1 else table["name"] + " " + words)


def _of_model(rows: pd.DataFrame) -> str:
    """The model's name for a title, where there is one alone."""
    names = of_experiment(rows, "energy")["factor.name"].dropna().unique()
    return f": {names[0]}" if len(names) == 1 else ""


def _operations(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per layer and operation of the deep passes."""
    table = layer_table(rows)
    if table.empty or not table["operations_ms"].notna().any():
        return pd.DataFrame()
    has_energy = "joules" in table
    lines = []
    for _, row in table[table["operations_ms"].notna()].iterrows():
        whole = sum(row["operations_ms"].values())
        for place, name in enumerate(OPERATIONS):
            if name not in row["operations_ms"]:
                continue
            ms = row["operations_ms"][name]
            line = {"case": row["case"], "phase": row["phase"], "layer": row["layer"], "operation": name, "ms": ms}
            line |= {"order": place, "place": row["place"], "share": ms / whole, "passes": row["deep_passes"]}
            if has_energy:
                line["joules"] = "{:.2g} to {:.2g} J".format(
                    *(row[end] * ms / whole for end in ("joules_low", "joules_high"))
                )
            lines.append(line)
    return pd.DataFrame(lines)


def _tooltip(data: pd.DataFrame, *names: str) -> list[alt.Tooltip]:
    shown = [
        alt.Tooltip("case:N"),
        *(alt.Tooltip(f"{name}:N") for name in names),
        alt.Tooltip("ms:Q", title="ms per call, in deep passes", format=".3~g"),
        alt.Tooltip("share:Q", title="share of its layer", format=".1%"),
    ]
    if "joules" in data:
        shown.append(alt.Tooltip("joules:N", title="energy, attributed by time"))
    return [*shown, alt.Tooltip("passes:Q", title="deep passes")]


def layer_heat_map(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Layers by operations, coloured by time; the energy attributed to each by its time is in the tooltip."""
    title = "Where the time goes, layer by layer"
    data = _operations(rows)
    if data.empty:
        return empty_chart(title, why_empty(of_experiment(rows, "energy"), "energy"))
    charts = []
    for case, part in data.groupby("case", sort=False):
        layers = list(part.sort_values("place")["layer"].unique())
        used = [name for name in OPERATIONS if name in set(part["operation"])]
        base = alt.Chart(part).encode(
            x=alt.X("operation:N", sort=used, title=None, axis=alt.Axis(labelAngle=-50)),
            y=alt.Y("layer:N", sort=layers, title=None),
        )
        colour = alt.Color(
            "ms:Q",
            title="ms",
            scale=alt.Scale(type="log", scheme="viridis"),
            legend=alt.Legend(gradientLength=120, format=".2~g"),
        )
        cells = base.mark_rect(stroke="white", strokeWidth=1).encode(
            color=colour, tooltip=_tooltip(part, "layer", "operation")
        )
        size = {"width": alt.Step(26), "height": alt.Step(22 if len(layers) < 20 else 12)}
        charts.append(cells.properties(**size, title=alt.Title(case, fontSize=12)))
    subtitle = [
        "Deep passes: one call in k, attention in its four steps instead of the fused kernel; time per call, logarithmic.",
        "No sensor sees a layer: the joules in the tooltip are the window's, attributed by time.",
    ]
    joined = alt.vconcat(*charts, spacing=18).resolve_scale(color="independent")
    return theme(joined.properties(title=alt.Title(title + _of_model(rows), subtitle=subtitle)))


def operation_breakdown(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """All layers' operations as shares of a call, one bar per phase."""
    title = "Where the time goes, operation by operation"
    data = _operations(rows)
    if data.empty:
        return empty_chart(title, why_empty(of_experiment(rows, "energy"), "energy"))
    total = data.groupby(["case", "operation", "order"], sort=False)["ms"].sum().reset_index()
    total["share"] = total["ms"] / total.groupby("case")["ms"].transform("sum")
    used = [name for name in OPERATIONS if name in set(total["operation"])]
    colour = alt.Color(
        "operation:N",
        title="Operation",
        legend=alt.Legend(columns=2),
        sort=used,
        scale=alt.Scale(domain=used, range=[OPERATIONS[name] for name in used]),
    )
    bars = (
        alt.Chart(total)
        .mark_bar(stroke="#888", strokeWidth=0.4, height=22)
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
                alt.Tooltip("case:N"),
                alt.Tooltip("operation:N"),
                alt.Tooltip("share:Q", format=".1%"),
                alt.Tooltip("ms:Q", title="ms per call, all layers", format=".3~g"),
            ],
        )
    )
    subtitle = "Between: Python, launching, memory given back. Attention's steps take the fused kernel's place in these passes."
    chart = bars.properties(
        width=int(1.6 * WIDTH), height=alt.Step(34), title=alt.Title(title + _of_model(rows), subtitle=subtitle)
    )
    return theme(chart)


def activation_profile(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """What the blocks' outputs, their attention and their MLPs look like, over depth."""
    title = "Activations over depth"
    table = layer_table(rows)
    if table.empty or not table["activations"].notna().any():
        return empty_chart(title, why_empty(of_experiment(rows, "energy"), "energy"))
    blocks = table[table["layer"].str.contains(r"\d") & table["activations"].notna()]
    blocks = blocks.assign(depth=blocks.groupby("case").cumcount())
    lines = [
        {"case": row["case"], "depth": row["depth"], "layer": row["layer"], "what": words, "value": values[key]}
        for _, row in blocks.iterrows()
        for values, known in ((row["activations"], ACTIVATIONS), (row["deep"] or {}, DEEP))
        for key, words in known.items()
        if key in values
    ]
    data = pd.DataFrame(lines)
    cases = list(dict.fromkeys(data["case"]))
    colour = alt.Color("case:N", title="Case", sort=cases, scale=alt.Scale(domain=cases, range=PALETTE[: len(cases)]))
    charts = []
    for what in dict.fromkeys(data["what"]):
        part = data[data["what"] == what]
        depths = sorted(part["depth"].unique())
        positive = part["value"].min() > 0 and part["value"].max() > 20 * part["value"].min()
        y = alt.Y("value:Q", title=None, scale=alt.Scale(type="log" if positive else "linear", zero=False, nice=True))
        x = alt.X("depth:Q", title="Block", axis=alt.Axis(values=depths[:: max(1, len(depths) // 8)], format="d"))
        tooltip = [alt.Tooltip("case:N"), alt.Tooltip("layer:N"), alt.Tooltip("value:Q", format=".3~g")]
        line = alt.Chart(part).mark_line(point=alt.OverlayMarkDef(size=40), strokeWidth=1.5)
        charts.append(
            line.encode(x=x, y=y, color=colour, tooltip=tooltip).properties(
                width=190, height=130, title=alt.Title(what, fontSize=12)
            )
        )
    rows_of_charts = [alt.hconcat(*charts[at : at + 3], spacing=18) for at in range(0, len(charts), 3)]
    subtitle = [
        "Means over the calls that were looked at closely. Of a large output an even sample of 2,048 elements is looked at,"
    ]
    subtitle.append("but for its largest one; attention over the pairs that are not masked.")
    return theme(alt.vconcat(*rows_of_charts, spacing=12, title=alt.Title(title + _of_model(rows), subtitle=subtitle)))


def overhead_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per mode of profiling, phase and shape.

    Returns:
        Columns: `case`, `name`, `phase`, `seq_len`, `mode`, `wall`, `wall_low`, `wall_high`, `cpu`, `cpu_low`, `cpu_high`,
        `threads` (shares of the bare call), `plain_ms`, `pass_ms`, `n`.
    """
    found = pick(of_experiment(rows, "energy"), "overhead")
    lines = []
    for _, row in found.iterrows() if len(found) else []:
        details = row["details"]
        line = {name: row[f"factor.{name}"] for name in ("name", "phase", "seq_len")}
        line |= {"mode": row["scope"].split()[-1], "n": row["n"]}
        line |= {
            "wall": row["estimate"],
            "wall_low": row["low"],
            "wall_high": row["high"],
            "threads": details["threads"],
        }
        line |= dict(zip(("cpu_low", "cpu", "cpu_high"), details["cpu"], strict=True))
        line |= {"plain_ms": details["plain_ms"], "pass_ms": details["pass_ms"] or float("nan")}
        lines.append(line)
    return _with_case(pd.DataFrame(lines))


def readable_overheads(rows: pd.DataFrame) -> pd.DataFrame:
    """The table in words, shares in per cent."""
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
    return shown[list(OVERHEAD_COLUMNS)].rename(columns=OVERHEAD_COLUMNS)


def profiling_overhead(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """What each mode costs with its interval, beside the bare call against itself, and what it may cost."""
    title = "Profiling overhead"
    data = overhead_table(rows)
    if data.empty:
        return empty_chart(title, why_empty(of_experiment(rows, "energy"), "energy"))
    data = data.assign(limit=[LIMITS.get(mode, float("nan")) for mode in data["mode"]])
    charts = []
    colour = alt.Color(
        "mode:N",
        title="Mode",
        sort=MODES,
        scale=alt.Scale(domain=list(MODES), range=["#888888", *PALETTE[:3]]),
    )
    for case, part in data.groupby("case", sort=False):
        y = alt.Y("mode:N", sort=MODES, title=None)
        words = "Wall time on top of the bare call"
        x = alt.X("wall:Q", title=words, axis=alt.Axis(format="+.0%"))
        tooltip = [
            alt.Tooltip("case:N"),
            alt.Tooltip("mode:N"),
            *(alt.Tooltip(f"{name}:Q", format="+.2%") for name in ("wall", "wall_low", "wall_high", "cpu", "threads")),
            alt.Tooltip("pass_ms:Q", title="closest call, ms", format=".3~g"),
            alt.Tooltip("plain_ms:Q", title="bare call, ms", format=".3~g"),
            alt.Tooltip("n:Q", title="pairs"),
        ]
        base = alt.Chart(part).encode(y=y)
        layers = alt.layer(
            alt.Chart(pd.DataFrame({"zero": [0.0]})).mark_rule(color="#999").encode(x=alt.X("zero:Q")),
            base.mark_tick(color="#000", thickness=2, size=22, strokeDash=[3, 2]).encode(x=alt.X("limit:Q")),
            base.mark_rule(strokeWidth=2).encode(
                x=alt.X("wall_low:Q", title=words), x2=alt.X2("wall_high:Q"), color=colour
            ),
            base.mark_point(filled=True, size=70, opacity=1).encode(x=x, color=colour, tooltip=tooltip),
        )
        charts.append(layers.properties(width=WIDTH, height=110, title=alt.Title(case, fontSize=12)))
    rows_of_charts = [alt.hconcat(*charts[at : at + 2], spacing=18) for at in range(0, len(charts), 2)]
    subtitle = [
        "Calls with and without the profiler alternate; again is the bare call against itself. k − 1 calls are watched, one in k",
        "is looked at closely. Dashed ticks: what a mode may cost on a model of usual size; on small ones a module's cost shows.",
    ]
    return theme(alt.vconcat(*rows_of_charts, spacing=12, title=alt.Title(title + _of_model(rows), subtitle=subtitle)))


def layer_words(rows: pd.DataFrame) -> list[str]:
    """Which operations take most of each phase, and what it cost to find out."""
    lines = []
    data = _operations(rows)
    for case, part in data.groupby("case", sort=False) if len(data) else []:
        total = part.groupby("operation")["ms"].sum().sort_values(ascending=False)
        shares = total / total.sum()
        most = shares.head(max(3, int((shares.cumsum() <= 0.5).sum()) + 1))  # so many that it is more than half of it
        between = shares.get("between", 0)
        remedy = ""
        if between > 0.2:
            more = " more than faster kernels" if between > 0.5 else ""
            remedy = f" Much lies between operations: larger batches or compiling would help{more}."
        text = ", ".join(f"{name} {share:.0%}" for name, share in most.items())
        lines.append(f"{case}: most of the time goes to {text}.{remedy}")
    table = overhead_table(rows)
    for case, part in table[table["mode"] != "again"].groupby("case", sort=False) if len(table) else []:
        costs = [
            f"{row['mode']} {format_with_interval(100 * row['wall'], 100 * row['wall_low'], 100 * row['wall_high'])} %"
            for _, row in part.iterrows()
        ]
        lines.append(f"{case}: profiling costs {'; '.join(costs)}.")
    return lines


# What the report draws of it, in this order.
CHARTS = {
    "operation_breakdown": operation_breakdown,
    "layer_heat_map": layer_heat_map,
    "activation_profile": activation_profile,
    "profiling_overhead": profiling_overhead,
}
