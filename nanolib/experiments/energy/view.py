"""What a person sees of energy: joules per token, power over time, and where a call's time goes.

Readings are solid, estimates hollow by their range, and never beside a reading as if they were one.
"""

from __future__ import annotations

import altair as alt
import pandas as pd

from nanolib.measurement import Provenance
from nanolib.numbers import format_number, format_with_interval
from nanolib.report.filters import followed, link_columns, links
from nanolib.report.finding import Estimate, Finding, Order, comparing
from nanolib.report.overview import cached, of_experiment, pick, why_empty
from nanolib.report.plot import plot
from nanolib.report.section import CaseTable, Section
from nanolib.report.tables import (
    CASE,
    Column,
    add_metric_columns,
    case_rows,
    drop_missing,
    titles,
    with_ends,
    with_state,
)
from nanolib.report.theme import empty_chart, hues

_ENERGY = (
    Column("name", "Model"),
    Column("phase", "Phase"),
    Column("seq_len", "Seq len"),
    Column("source", "Source"),
    Column("power", "Power, W [range]", "power", "", interval=True),
    Column("idle_power", "Idle, W [range]", "power", "idle", interval=True),
    Column("energy_per_token", "J per token [range]", "energy_per_token", interval=True),
    Column("energy", "Window, J [range]", "energy", interval=True),
    Column("net", "", "net_energy", interval=True),
    Column("energy_delay", "", "energy_delay", interval=True),
    Column("tokens_per_second", "Tokens/s"),
    Column("state", "Provenance"),
)
_OVERHEAD = {
    "name": "Model",
    "phase": "Phase",
    "seq_len": "Seq len",
    "mode": "Mode",
    "wall": "Wall time, % [interval]",
    "cpu": "Processor time, % [interval]",
    "plain_ms": "Bare call, ms",
    "pass_ms": "Closest call, ms",
    "n": "Pairs",
}
# Part of a bar -> the operations in it; others are "other".
_PARTS = {
    "attention": "attention_fused rope cache",
    "projections": "q_proj k_proj v_proj qkv_proj out_proj",
    "MLP": "gate up activation down",
    "norm, embedding, head": "norm embedding head residual",
    "gaps": "between",
    "other": "other",
}
_PART_OF = {operation: part for part, names in _PARTS.items() for operation in names.split()}
_SPOKEN = {"attention_fused": "fused attention", "between": "gaps between operations"}
_NO_READING = "No sensor here. Hollow: a range that is estimated from how busy the cores were, and no reading."
_REPLAYED = "Hollow: replayed from a recording, and no reading of this machine."
_NOTHING = Estimate.exact(0.0, "the bare call")


@cached
def energy_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per phase, shape and source.

    Returns:
        Columns: `name`, `phase`, `seq_len`, `batch_size`, `source`, `of`, `provenance`, `power`,
        `idle_power` (W), `energy` (J, of the window), `energy_per_token`, `net_per_token` (J;
        above idle), `energy_delay` (J·s), each with `_low` and `_high`, `tokens_per_second`,
        `status`, `message`.
    """
    rows = of_experiment(rows, "energy")
    if "factor.look" in rows:  # what looks into layers has a table of its own
        rows = rows[rows["factor.look"].isna()]
    table = case_rows(rows, ["name", "phase", "seq_len", "batch_size"], "phase")
    if table.empty:
        return table
    table = add_metric_columns(
        table, rows, [Column("tokens_per_second", metric="tokens_per_second")]
    )
    rows = rows.assign(
        source=rows["method"],
        of=[details.get("of", "") for details in rows["details"]],
        scope=rows["scope"].where(rows["scope"] == "idle", ""),
    )
    found = rows[rows["metric"] == "energy"]
    found = found[[*CASE, "source", "of", "provenance", "status", "message"]]
    table = table.merge(found, on=list(CASE), how="left", suffixes=("_of_case", ""))
    for name in ("status", "message"):
        table[name] = table[name].fillna(table.pop(f"{name}_of_case"))
    table = table.fillna(dict.fromkeys(("source", "of", "provenance"), ""))
    table = add_metric_columns(table, rows, _ENERGY, [*CASE, "source", "of"])
    share = table["energy_per_token"] / table["energy"].where(table["energy"] != 0)
    for end in ("", "_low", "_high"):
        table[f"net_per_token{end}"] = table[f"net{end}"] * share
    table = with_state(table)
    return table.assign(state=table["state"].where(table["state"] != "ok", table["provenance"]))


def energy_per_token(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Joules per token by phase, with bounds: filled as a sensor read them, hollow otherwise."""
    table = drop_missing(energy_table(rows), "energy_per_token")
    if table.empty:
        return empty_chart("Energy per token", why_empty(rows, "energy"))
    phase = table["phase"].str.replace("_", " ")
    estimated = table["provenance"] == Provenance.ESTIMATED
    replayed = table["provenance"] == Provenance.REPLAYED
    low, high = table["energy_per_token_low"], table["energy_per_token_high"]
    ends = low.map("{:.2g}".format) + " to " + high.map("{:.2g}".format)
    data = pd.DataFrame(
        {
            "series": phase + ", n = " + table["seq_len"].astype(int).astype(str),
            "panel": table["name"],
            "x": table["energy_per_token"],
            "low": low,
            "high": high,
            "sure": table["provenance"] == Provenance.MEASURED,
            "hue": phase.map(hues(phase)),
            "text": ends.where(estimated, table["energy_per_token"].map(format_number)) + " J",
            "note": table["provenance"] + ", " + table["source"] + " " + table["of"],
            **links(table),
        }
    )
    return plot(
        data,
        "Energy per token",
        "rows",
        subtitle=[
            "Bars: the bounds that the source allows.",
            _NO_READING if estimated.any() else "",
            _REPLAYED if replayed.any() else "",
        ],
        unit="Energy per token (J)",
        log="x",
        fmt=".2~g",
    )


def power_over_time(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """The course of the power in each window as a sensor read it, the idle window before it."""
    found = pick(of_experiment(rows, "energy"), "power")
    parts = []
    for row in found.to_dict("records"):
        course = row["details"].get("course_s")
        if not course or row["provenance"] == Provenance.ESTIMATED:
            continue
        # idle comes before the work
        shift = course[-1] if row["scope"] == "idle" else 0.0
        line = {
            "series": row["scope"].replace("_", " "),
            "x": [at - shift for at in course],
            "y": row["details"]["course_w"],
            "sure": row["provenance"] == Provenance.MEASURED,
            "run_id": row["run_id"],
            "seq_len": row["factor.seq_len"],
        }
        parts.append(pd.DataFrame(line))
    if not parts:
        why = "no sensor read this machine's power" if len(found) else why_empty(rows, "energy")
        return empty_chart("Power over time", why)
    data = pd.concat(parts, ignore_index=True)
    return plot(
        followed(data),
        "Power over time",
        subtitle=[
            "Read from a sensor." if data["sure"].any() else "",
            "" if data["sure"].all() else _REPLAYED,
        ],
        unit="Power (W)",
        xunit="Seconds since the work began",
    )


def _looked_into(rows: pd.DataFrame, metric: str) -> list[dict[str, object]]:
    """Each row of a metric: what names its case, and the row itself as `row`."""
    found = pick(of_experiment(rows, "energy"), metric)
    lines = []
    for row in found.to_dict("records"):
        line = {name: row[f"factor.{name}"] for name in ("name", "phase", "seq_len")}
        case = f"{line['phase'].replace('_', ' ')}, n = {int(line['seq_len'])}"
        case += f", {line['name']}" if found["factor.name"].nunique() > 1 else ""
        lines.append({"run_id": row["run_id"], **line, "case": case, "row": row})
    return lines


def _operations(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per layer and operation: its ms in a deep pass."""
    lines = []
    for line in _looked_into(rows, "layer_time"):
        for name, ms in line.pop("row")["details"].get("operations_ms", {}).items():
            operation = name if name in _PART_OF else "other"
            lines.append(line | {"operation": operation, "part": _PART_OF[operation], "ms": ms})
    return pd.DataFrame(lines)


def operation_breakdown(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """All layers' operations as shares of a call, a bar per phase."""
    data = _operations(rows)
    if data.empty:
        return empty_chart("Where the time goes", "no layer was profiled; set profiling to [deep]")
    only = f": {data['name'].iloc[0]}" if data["name"].nunique() == 1 else ""
    data = followed(data)
    total = data.groupby(["case", *link_columns(data), "part"], sort=False)["ms"].sum()
    total = total.reset_index().rename(columns={"case": "series"})
    total["x"] = total["ms"] / total.groupby("series")["ms"].transform("sum")
    return plot(
        total.drop(columns="ms").sort_values(
            "part", key=lambda parts: parts.map([*_PARTS].index), kind="stable"
        ),
        f"Where the time goes{only}",
        "bars",
        subtitle=["Share of a call. Gaps: Python, launching kernels, freeing memory."],
        unit="Share of the time",
        fmt=".0%",
    )


@cached
def overhead_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per mode of profiling, phase and shape.

    Returns:
        Columns: `run_id`, `case`, `name`, `phase`, `seq_len`, `mode`, `wall` and `cpu` with `_low`
        and `_high` (shares of the bare call), `plain_ms`, `pass_ms`, `n`.
    """
    lines = []
    for line in _looked_into(rows, "overhead"):
        row = line.pop("row")
        details = row["details"]
        line |= {"mode": row["scope"].split()[-1], "n": row["n"]}
        line |= {"wall": row["estimate"], "wall_low": row["low"], "wall_high": row["high"]}
        line |= dict(zip(("cpu_low", "cpu", "cpu_high"), details["cpu"], strict=True))
        pass_ms = details["pass_ms"] or float("nan")
        lines.append(line | {"plain_ms": details["plain_ms"], "pass_ms": pass_ms})
    return pd.DataFrame(lines)


def overhead_percent(rows: pd.DataFrame) -> pd.DataFrame:
    """The table with its shares in per cent."""
    table = overhead_table(rows)
    shares = [name for name in table if name.startswith(("wall", "cpu"))]
    return table.assign(**{name: 100 * table[name] for name in shares})


@cached
def verdict(rows: pd.DataFrame) -> list[Finding]:
    """What a token costs in each phase and by which source, and where the time goes."""
    table = energy_table(rows)
    if table.empty:
        nothing = "No energy was measured or estimated, so there is no verdict"
        return [Finding(nothing, next_step="nano run quick energy")]
    told = drop_missing(table, "energy_per_token")
    by_source = told.groupby(["name", "seq_len", "source"], sort=False)
    findings = [_per_token(*key, group) for key, group in by_source]
    estimated = (table["provenance"] == Provenance.ESTIMATED).any()
    if estimated:
        why = "the ranges follow from how busy its cores were, and no difference rests on them"
        next_step = "nano doctor says why, and what would help"
        findings.append(Finding("No sensor tells this machine's power", why, next_step))
    for row in table[table["status"] != "ok"].to_dict("records"):
        about = f"{row['name']}, n = {int(row['seq_len'])}"
        findings.append(Finding(f"{row['phase']} has no energy", row["message"], about=about))
    operations, overheads = _operations(rows), overhead_table(rows)
    if len(operations):
        findings += [_most(case, part) for case, part in operations.groupby("case", sort=False)]
    if len(overheads):
        modes = overheads[overheads["mode"] != "again"]
        findings += [_costs(case, part) for case, part in modes.groupby("case", sort=False)]
    return findings


def _per_token(name: str, seq_len: float, source: str, group: pd.DataFrame) -> Finding:
    """What a token costs in each phase, by one source: all its figures are of one provenance."""
    provenance = group["provenance"].iloc[0]
    estimated = provenance == Provenance.ESTIMATED
    parts, figures = [], []
    for row in group.to_dict("records"):
        if estimated:
            low, high = row["energy_per_token_low"], row["energy_per_token_high"]
            joules = f"{low:.2g} to {high:.2g} J"
        else:
            joules = f"{with_ends(row, 'energy_per_token')} J at {row['power']:.0f} W"
        parts.append(f"{row['phase'].replace('_', ' ')} {joules}")
        figures.append(Estimate.of(row, "energy_per_token", "energy_per_token", name=row["phase"]))
    told = "a recording that was replayed" if provenance == Provenance.REPLAYED else source
    answer = f"By {told}, a token {'is estimated at' if estimated else 'takes'} {'; '.join(parts)}"
    return Finding(answer, about=f"{name}, n = {int(seq_len)}", figures=tuple(figures))


def _most(case: str, part: pd.DataFrame) -> Finding:
    """At least three operations, and as many as take half of the time."""
    total = part.groupby("operation")["ms"].sum().sort_values(ascending=False)
    shares = total / total.sum()
    most = shares.head(max(3, int((shares.cumsum() <= 0.5).sum()) + 1))
    text = ", ".join(f"{_SPOKEN.get(name, name)} {share:.0%}" for name, share in most.items())
    between, evidence, next_step = shares.get("between", 0), "", ""
    if between > 0.2:
        evidence, next_step = (
            "much lies between operations",
            "larger batches or compiling would help",
        )
        next_step += ", more than faster kernels" if between > 0.5 else ""
    # a profiler sees the forward calls of modules, in a training step too
    what = "most of its forward pass" if case.startswith("training step") else "most of the time"
    return Finding(f"{what} goes to {text}", evidence, next_step, case)


def _costs(case: str, modes: pd.DataFrame) -> Finding:
    """What each mode of profiling costs beside the bare call."""
    costs, compared = [], []
    for row in modes.to_dict("records"):
        cost = comparing(Estimate.of(row, "wall", "overhead", name=row["mode"]), _NOTHING)
        shares = (100 * row[name] for name in ("wall", "wall_low", "wall_high"))
        ends = f"{format_with_interval(*shares)} %"
        unclear = cost[0][1] is Order.NO_DIFFERENCE
        told = f", not distinguishable from zero ({ends})" if unclear else f" {ends}"
        costs.append(row["mode"] + told)
        compared += cost
    text = f"profiling costs: {'; '.join(costs)}"
    return Finding(text, about=case, compared=tuple(compared))


SECTION = Section(
    "energy",
    "What does a token cost in joules?",
    {
        "energy_per_token": energy_per_token,
        "operation_breakdown": operation_breakdown,
        "power_over_time": power_over_time,
    },
    {
        "Joules, power and time": CaseTable(energy_table, titles(_ENERGY)),
        "Profiling overhead": CaseTable(overhead_percent, _OVERHEAD),
    },
    verdict,
)
