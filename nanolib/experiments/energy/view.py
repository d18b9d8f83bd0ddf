"""Draw the charts and build the findings of energy, power, operations and profiling overhead."""

import pandas as pd

from nanolib.experiments.energy.tables import (
    ENERGY_COLUMNS,
    OVERHEAD_COLUMNS,
    PARTS,
    energy_table,
    operation_table,
    overhead_table,
)
from nanolib.measurement import Provenance
from nanolib.numbers import format_number
from nanolib.report.finding import Estimate, Finding, Order, comparing
from nanolib.report.overview import (
    explain_missing,
    join_words,
    of_experiment,
    pick,
    why_empty,
)
from nanolib.report.plot import links, plot, point_columns
from nanolib.report.section import CaseTable, Section
from nanolib.report.tables import drop_missing
from nanolib.report.theme import Drawing, empty_chart, hues

_SPOKEN = {"attention_fused": "fused attention", "between": "gaps between operations"}
_REPLAYED = "Hollow: replayed from a recording, not a reading of this machine."
_NOTHING = Estimate.exact(0.0, "the baseline")


def energy_per_token(rows: pd.DataFrame) -> Drawing:
    """Draw the energy per token by phase. Points that are not measured are hollow."""
    table = drop_missing(energy_table(rows), "energy_per_token")
    if table.empty:
        return empty_chart("Energy per token", why_empty(rows, "energy"))
    phase = table["phase"].str.replace("_", " ")
    estimated = table["provenance"] == Provenance.ESTIMATED
    low, high = (table[f"energy_per_token_{end}"].map("{:.2g}".format) for end in ("low", "high"))
    joules = table["energy_per_token"].map(format_number).mask(estimated, low + " to " + high)
    subtitle = ["Bars: bounds of the power source."]
    if estimated.any():
        subtitle.append("No power sensor. Hollow: a range estimated from CPU utilization.")
    if (table["provenance"] == Provenance.REPLAYED).any():
        subtitle.append(_REPLAYED)
    data = {
        "series": phase + ", seq len " + table["seq_len"].astype(int).astype(str),
        "panel": table["name"],
        "sure": table["provenance"] == Provenance.MEASURED,
        "hue": phase.map(hues(phase)),
        "text": joules + " J",
        "note": table["provenance"] + ", " + table["source"] + " " + table["of"],
    }
    return plot(
        pd.DataFrame(data | point_columns(table, "energy_per_token")),
        "Energy per token",
        "rows",
        subtitle=subtitle,
        unit="Energy per token (J)",
        log="x",
        fmt=".2~g",
    )


def power_over_time(rows: pd.DataFrame) -> Drawing:
    """Draw the power in each measurement window and in the preceding idle window."""
    found = pick(of_experiment(rows, "energy"), "power")
    parts = []
    for row in found.to_dict("records"):
        course = row["details"].get("course_s")
        if not course or row["provenance"] == Provenance.ESTIMATED:
            continue
        # The work begins when the idle window ends.
        shift = course[-1] if row["scope"] == "idle" else 0.0
        points = {
            "series": row["scope"].replace("_", " "),
            "x": [at - shift for at in course],
            "y": row["details"]["course_w"],
            "sure": row["provenance"] == Provenance.MEASURED,
        }
        parts.append(pd.DataFrame(points | links(row)))
    if not parts:
        why = "no sensor measured this machine's power" if len(found) else why_empty(rows, "energy")
        return empty_chart("Power over time", why)
    data = pd.concat(parts, ignore_index=True)
    subtitle = ["Measured by a sensor."] if data["sure"].any() else []
    return plot(
        data,
        "Power over time",
        subtitle=subtitle if data["sure"].all() else [*subtitle, _REPLAYED],
        unit="Power (W)",
        xunit="Time since the work began (s)",
    )


def operation_breakdown(rows: pd.DataFrame) -> Drawing:
    """Draw the operations of all layers as shares of a call, with one bar per phase."""
    data = operation_table(rows)
    if data.empty:
        lacking = "no layer was profiled; set profiling to [deep]"
        return empty_chart("Time by operation", why_empty(rows, "energy", lacking))
    only = f": {data['name'].iloc[0]}" if data["name"].nunique() == 1 else ""
    data = data.assign(**links(data))
    total = data.groupby(["case", "link_run", "link_n", "part"], sort=False)["ms"].sum()
    total = total.reset_index().rename(columns={"case": "series"})
    order = total["part"].map([*PARTS].index)
    total["x"] = total["ms"] / total.groupby("series")["ms"].transform("sum")
    return plot(
        total.drop(columns="ms").loc[order.sort_values(kind="stable").index],
        f"Time by operation{only}",
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
    by = ["name", "seq_len", "source"]
    costs = drop_missing(table, "energy_per_token").groupby(by, sort=False)
    findings = [_state_energy(*key, group) for key, group in costs]
    if (table["provenance"] == Provenance.ESTIMATED).any():
        why = "no power sensor was found, and estimated ranges allow no comparison"
        next_step = "run nano doctor to list the supported sensors"
        findings.append(Finding("This machine's power was not measured", why, next_step))
    for row in table[table["status"] != "ok"].to_dict("records"):
        text = f"The energy of {row['phase'].replace('_', ' ')} was not measured"
        about = f"{row['name']}, {int(row['seq_len'])} tokens"
        findings.append(Finding(text, row["message"], about=about))
    profiles = {_find_largest: operation_table(rows), _compare_overheads: overhead_table(rows)}
    for find, table in profiles.items():
        if len(table):
            findings += [find(case, part) for case, part in table.groupby("case", sort=False)]
    return findings


def _state_energy(name: str, seq_len: float, source: str, group: pd.DataFrame) -> Finding:
    """Return a finding about the energy per token of each phase, according to one source."""
    provenance = group["provenance"].iloc[0]
    parts, figures = [], []
    if provenance == Provenance.ESTIMATED:
        source = "an estimate from CPU utilization"
    for row in group.to_dict("records"):
        scale, unit = (1e3, "mJ") if row["energy_per_token"] < 1 else (1.0, "J")
        low, value, high = (scale * row[f"energy_per_token{end}"] for end in ("_low", "", "_high"))
        energy = Estimate(low, value, high).text(f" {unit}") + f" at {row['power']:.0f} W"
        if provenance == Provenance.ESTIMATED:
            energy = " to ".join(format_number(end, low, high) for end in (low, high)) + f" {unit}"
        parts.append(f"{energy} ({row['phase'].replace('_', ' ')})")
        figures.append(Estimate.of(row, "energy_per_token", "energy_per_token", name=row["phase"]))
    by = "in a replayed trace" if provenance == Provenance.REPLAYED else f"according to {source}"
    text = f"A token uses {join_words(parts)} {by}"
    return Finding(text, about=f"{name}, {int(seq_len)} tokens", figures=tuple(figures))


def _find_largest(case: str, part: pd.DataFrame) -> Finding:
    """Return a finding about the slowest operations, at least three, that take half of the time."""
    total = part.groupby("operation")["ms"].sum().sort_values(ascending=False)
    shares = total / total.sum()
    most = shares.head(max(3, int((shares.cumsum() <= 0.5).sum()) + 1))
    names = join_words(f"{_SPOKEN.get(name, name)} ({share:.0%})" for name, share in most.items())
    return Finding(f"Most of the forward pass is spent in {names}", about=case)


def _compare_overheads(case: str, modes: pd.DataFrame) -> Finding:
    """Return a finding about the overhead of each profiling mode."""
    costs, compared = [], []
    for row in modes[modes["mode"] != "again"].to_dict("records"):
        cost = comparing(Estimate.of(row, "wall", "overhead", name=row["mode"]), _NOTHING)
        share = Estimate.of(row, "wall_percent").text("%")
        if cost[0][1] is Order.NO_DIFFERENCE:
            share = f"{share} (no clear difference)"
        costs.append(f"{share} in mode {row['mode']}")
        compared += cost
    text = f"The profiling overhead is {', '.join(costs)}"
    return Finding(text, about=case, compared=tuple(compared))


SECTION = Section(
    "energy",
    "How much energy does a token need?",
    {
        "energy_per_token": energy_per_token,
        "operation_breakdown": operation_breakdown,
        "power_over_time": power_over_time,
    },
    {
        "Energy, power and time": CaseTable(energy_table, ENERGY_COLUMNS),
        "Profiling overhead": CaseTable(overhead_table, OVERHEAD_COLUMNS),
    },
    verdict,
)
