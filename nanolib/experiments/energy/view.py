"""Draw the charts, and build the tables and findings of energy, power, operations and overhead."""

from collections.abc import Iterator

import pandas as pd

from nanolib.measurement import Flag, Provenance
from nanolib.numbers import format_number
from nanolib.report.plot import links, plot, point_columns
from nanolib.report.section import (
    CaseTable,
    Estimate,
    Finding,
    Order,
    Section,
    comparing,
    drop_missing,
    explain_empty,
    explain_missing,
    join_words,
)
from nanolib.report.shared import chart_of, table_of
from nanolib.report.tables import (
    CASE,
    Column,
    add_flags,
    add_metric_columns,
    add_state,
    case_rows,
    pick,
    titles,
)
from nanolib.report.theme import Drawing, hues

_ENERGY = (
    Column("name", "Model"),
    Column("phase", "Phase"),
    Column("seq_len", "Seq len"),
    Column("source", "Source"),
    Column("power", "Power, W [range]", "power", ""),
    Column("idle_power", "Idle, W [range]", "power", "idle"),
    Column("energy_per_token", "J per token [range]", "energy_per_token"),
    Column("energy", "Window, J [range]", "energy"),
    Column("net", "", "net_energy"),
    Column("tokens_per_second", "Tokens/s"),
    Column("state", "Provenance"),
)
_OVERHEAD = {
    "name": "Model",
    "phase": "Phase",
    "seq_len": "Seq len",
    "mode": "Mode",
    "wall_percent": "Wall time, % [interval]",
    "cpu_percent": "CPU time, % [interval]",
    "plain_ms": "Baseline, ms",
    "detailed_ms": "Detailed call, ms",
    "detailed_every": "Calls per detailed call",
    "n": "Pairs",
}
# The keys are parts of a bar, and the values are operations in the presets, and in models such as
# Llama, GPT-2 and BERT. Other operations belong to `other`.
_PARTS = {
    "attention": "attention_fused rope cache",
    "projections": "q_proj k_proj v_proj qkv_proj out_proj o_proj c_attn attn.c_proj query key"
    " value query_key_value attention.output.dense",
    "MLP": "gate up activation down gate_proj up_proj down_proj act_fn c_fc act mlp.c_proj fc1 fc2"
    " intermediate.dense intermediate_act_fn output.dense",
    "norm, embedding, head": "norm embedding head residual embed_tokens wte wpe lm_head"
    " word_embeddings position_embeddings token_type_embeddings",
    "gaps": "between",
    "other": "other",
}
_PART_OF = {operation: part for part, names in _PARTS.items() for operation in names.split()}
_SPOKEN = {"attention_fused": "fused attention", "between": "gaps between operations"}
_SUBTITLES = {
    Provenance.MEASURED: "Measured by a sensor.",
    Provenance.ESTIMATED: "No power sensor. Hollow: a range estimated from CPU utilization.",
    Provenance.REPLAYED: "Hollow: replayed from a recording, not a reading of this machine.",
}


@table_of("energy", "phase")
def energy_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a table with a line per phase, shape and source. `net` is the energy above idle."""
    table = case_rows(rows, ["name", "phase", "seq_len", "batch_size"])
    table = add_metric_columns(table, rows, [Column("tokens_per_second", "", "tokens_per_second")])
    rows = rows.assign(
        source=rows["method"],
        of=[details.get("of", "") for details in rows["details"]],
        scope=rows["scope"].where(rows["scope"] == "idle", ""),
    )
    columns = [*CASE, "source", "of", "provenance", "status", "message"]
    found = rows.loc[rows["metric"] == "energy", columns]
    table = table.merge(found, on=CASE, how="left", suffixes=("_of_case", ""))
    for name in ("status", "message"):
        table[name] = table[name].fillna(table.pop(f"{name}_of_case"))
    table = table.fillna(dict.fromkeys(("source", "of", "provenance"), ""))
    table = add_metric_columns(table, rows, _ENERGY, [*CASE, "source", "of"])
    table = add_state(add_flags(table, rows))
    sources = table["provenance"].where(table["status"] == "ok", "")
    states = sources.str.cat(table["state"].replace("ok", ""), sep=", ")
    return table.assign(state=states.str.strip(", "))


def _profile_rows(rows: pd.DataFrame, metric: str) -> Iterator[tuple[dict, dict]]:
    """Yield a pair for each row of a metric: columns that name the row's case, and the row."""
    for row in pick(rows, metric).to_dict("records"):
        line = {name: row[f"factor.{name}"] for name in ("name", "phase", "seq_len")}
        case = f"{line['name']}, {line['phase'].replace('_', ' ')}, {int(line['seq_len'])} tokens"
        yield {"run_id": row["run_id"], **line, "case": case}, row


@table_of("energy", "phase")
def operation_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a table with the time (ms) and the bar segment of each operation in each layer."""
    lines = []
    for line, row in _profile_rows(rows, "layer_time"):
        for name, ms in row["details"].get("operations_ms", {}).items():
            operation = name if name in _PART_OF else "other"
            lines.append(line | {"operation": operation, "part": _PART_OF[operation], "ms": ms})
    return pd.DataFrame(lines)


@table_of("energy", "phase")
def overhead_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a table of profiling overheads by mode, phase and shape, relative to the baseline."""
    lines = []
    for line, row in _profile_rows(rows, "overhead"):
        line |= row["details"] | {"mode": row["scope"].split()[-1], "n": row["n"]}
        ends = {"wall": (row["low"], row["estimate"], row["high"]), "cpu": line.pop("cpu")}
        for name, shares in ends.items():
            for end, share in zip(("_low", "", "_high"), shares, strict=True):
                line[f"{name}_percent{end}"] = 100 * share
        lines.append(line | {"wall_percent_busy": Flag.BUSY_MACHINE in row["flags"]})
    return pd.DataFrame(lines)


@chart_of(energy_table, "energy_per_token", "Energy per token")
def energy_per_token(table: pd.DataFrame, title: str) -> Drawing:
    """Draw the energy per token by phase. Points that are not measured are hollow."""
    phase = table["phase"].str.replace("_", " ")
    data = {
        "series": phase + ", seq len " + table["seq_len"].astype(int).astype(str),
        "panel": table["name"],
        "sure": table["provenance"] == Provenance.MEASURED,
        "hue": phase.map(hues(phase)),
        "text": [*map(_format_energy, table.to_dict("records"))],
        "note": table["provenance"] + ", " + table["source"] + " " + table["of"],
    }
    return plot(
        pd.DataFrame(data | point_columns(table, "energy_per_token")),
        title,
        "rows",
        subtitle=[
            "Bars: bounds of the power source.",
            *table["provenance"].map(_SUBTITLES).unique(),
        ],
        unit="Energy per token (J)",
        log="x",
        fmt=".2~g",
    )


def _format_energy(row: dict) -> str:
    """Format the energy per token with its interval. An estimate has only a range."""
    scale, unit = (1e3, "mJ") if row["energy_per_token"] < 1 else (1.0, "J")
    low, value, high = (scale * row[f"energy_per_token{end}"] for end in ("_low", "", "_high"))
    if row["provenance"] != Provenance.ESTIMATED:
        return Estimate(low, value, high).text(f" {unit}")
    ends = (format_number(end, low, high) for end in (low, high))
    return f"{' to '.join(ends)} {unit}"


def power_over_time(rows: pd.DataFrame) -> Drawing:
    """Draw the power in each measurement window and in the preceding idle window."""
    found, parts = pick(rows, "power"), [pd.DataFrame()]
    found = found[found["provenance"] != Provenance.ESTIMATED]
    for row in found.to_dict("records"):
        course = pd.Series(row["details"].get("course_s", []), dtype=float)
        shift = course.max() if row["scope"] == "idle" else 0.0  # The idle window comes first.
        points = {
            "series": row["scope"].replace("_", " "),
            "x": course - shift,
            "y": row["details"].get("course_w", []),
            "sure": row["provenance"] == Provenance.MEASURED,
        }
        parts.append(pd.DataFrame(points | links(row)))
    return plot(
        pd.concat(parts, ignore_index=True),
        "Power over time",
        subtitle=found["provenance"].map(_SUBTITLES).unique(),
        unit="Power (W)",
        xunit="Time since the work began (s)",
        empty=explain_empty(rows, "energy", "no sensor measured this machine's power"),
    )


@chart_of(
    operation_table,
    "ms",
    "Time by operation",
    otherwise="no layer was profiled; set profiling to [deep]",
)
def operation_breakdown(data: pd.DataFrame, title: str) -> Drawing:
    """Draw the operations of all layers as shares of a call, with one bar per phase."""
    key = ["case", "run_id", "name", "seq_len", "part"]
    total = data.groupby(key, sort=False, as_index=False)["ms"].sum()
    total = total.sort_values("part", key=lambda part: part.map([*_PARTS].index), kind="stable")
    share = total["ms"] / total.groupby("case")["ms"].transform("sum")
    bars = {"series": total["case"], "part": total["part"], "x": share}
    return plot(
        pd.DataFrame(bars | links(total)),
        title,
        "bars",
        subtitle=[
            "A training step's bar shows only the forward pass.",
            "Gaps: Python, kernel launches and freeing memory.",
        ],
        unit="Share of a call",
        fmt=".0%",
    )


def verdict(rows: pd.DataFrame) -> list[Finding]:
    """Return findings about energy per token, the slowest operations and profiling overheads."""
    table = energy_table(rows)
    if table.empty:
        return explain_missing(rows, "energy", "Energy")
    known = drop_missing(table, "energy_per_token")
    costs = known.groupby(["name", "seq_len", "source"], sort=False)
    findings = [_state_energy(*key, group) for key, group in costs]
    if (table["provenance"] == Provenance.ESTIMATED).any():
        why = "no power sensor was found, and estimated ranges allow no comparison"
        next_step = "run nano doctor to list the supported sensors"
        findings.append(Finding("This machine's power was not measured", why, next_step))
    for row in table[table["status"] != "ok"].to_dict("records"):
        phase, about = (
            row["phase"].replace("_", " "),
            f"{row['name']}, {int(row['seq_len'])} tokens",
        )
        text = f"The energy of {phase} was not measured"
        findings.append(Finding(text, row["message"], about=about))
    profiles = {_find_largest: operation_table(rows), _compare_overheads: overhead_table(rows)}
    for find, lines in profiles.items():
        for case, part in lines.groupby("case", sort=False) if len(lines) else ():
            findings.append(find(case, part))
    return findings


def _state_energy(name: str, seq_len: float, source: str, group: pd.DataFrame) -> Finding:
    """Return a finding about the energy per token of each phase, according to one source."""
    parts, figures, provenance = [], [], group["provenance"].iloc[0]
    if provenance == Provenance.ESTIMATED:
        source = "an estimate from CPU utilization"
    for row in group.to_dict("records"):
        energy = _format_energy(row)
        if provenance != Provenance.ESTIMATED:
            energy += f" at {Estimate.of(row, 'power').text(' W')}"
        parts.append(f"{energy} ({row['phase'].replace('_', ' ')})")
        figures.append(Estimate.of(row, "energy_per_token", "energy_per_token", name=row["phase"]))
    by = "in a replayed trace" if provenance == Provenance.REPLAYED else f"according to {source}"
    about = f"{name}, {int(seq_len)} tokens"
    return Finding(f"A token uses {join_words(parts)} {by}", about=about, figures=tuple(figures))


def _find_largest(case: str, part: pd.DataFrame) -> Finding:
    """Return a finding about the slowest operations, at least three, that take half of the time."""
    shares = part.groupby("operation")["ms"].sum().sort_values(ascending=False) / part["ms"].sum()
    most = shares.head(max(3, int((shares.cumsum() <= 0.5).sum()) + 1))
    names = join_words(f"{_SPOKEN.get(name, name)} ({share:.0%})" for name, share in most.items())
    return Finding(f"Most of the forward pass is spent in {names}", about=case)


def _compare_overheads(case: str, modes: pd.DataFrame) -> Finding:
    """Return a finding about the overhead of each profiling mode."""
    costs, compared, none = [], (), Estimate.exact(0.0, "the baseline")
    for row in modes[modes["mode"] != "again"].to_dict("records"):
        percent = Estimate.of(row, "wall_percent", name=f"{row['mode']} (%)")
        cost, share = comparing(percent, none), percent.text("%")
        if cost[0][1] is Order.NO_DIFFERENCE:
            share = f"{share} (no clear difference)"
        costs.append(f"{share} in mode {row['mode']}")
        compared += cost
    return Finding(f"The profiling overhead is {', '.join(costs)}", about=case, compared=compared)


SECTION = Section(
    "energy",
    "How much energy does a token need?",
    {
        "energy_per_token": energy_per_token,
        "operation_breakdown": operation_breakdown,
        "power_over_time": power_over_time,
    },
    {
        "Energy, power and time": CaseTable(energy_table, titles(_ENERGY)),
        "Profiling overhead": CaseTable(overhead_table, _OVERHEAD),
    },
    verdict,
)
