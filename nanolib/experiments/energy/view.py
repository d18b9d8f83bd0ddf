"""Charts and findings of energy: joules per token, power over time, and time by operation.

Charts show readings filled, and estimates hollow with their range.
"""

from __future__ import annotations

import altair as alt
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
from nanolib.report.overview import cached, join_words, of_experiment, pick, why_empty
from nanolib.report.plot import followed, link_columns, plot, point_columns
from nanolib.report.section import CaseTable, Section
from nanolib.report.tables import drop_missing, with_ends
from nanolib.report.theme import empty_chart, hues

_SPOKEN = {"attention_fused": "fused attention", "between": "gaps between operations"}
_NO_READING = "No power sensor. Hollow: a range estimated from CPU utilization."
_REPLAYED = "Hollow: replayed from a recording, not a reading of this machine."
_NOTHING = Estimate.exact(0.0, "the baseline")


def energy_per_token(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Draw joules per token by phase, with bounds: filled if a sensor read them, else hollow."""
    table = drop_missing(energy_table(rows), "energy_per_token")
    if table.empty:
        return empty_chart("Energy per token", why_empty(rows, "energy"))
    phase = table["phase"].str.replace("_", " ")
    estimated = table["provenance"] == Provenance.ESTIMATED
    replayed = table["provenance"] == Provenance.REPLAYED
    low, high = (table[f"energy_per_token_{end}"].map("{:.2g}".format) for end in ("low", "high"))
    data = pd.DataFrame(
        {
            "series": phase + ", n = " + table["seq_len"].astype(int).astype(str),
            "panel": table["name"],
            "sure": table["provenance"] == Provenance.MEASURED,
            "hue": phase.map(hues(phase)),
            "text": (low + " to " + high).where(
                estimated, table["energy_per_token"].map(format_number)
            )
            + " J",
            "note": table["provenance"] + ", " + table["source"] + " " + table["of"],
            **point_columns(table, "energy_per_token"),
        }
    )
    return plot(
        data,
        "Energy per token",
        "rows",
        subtitle=[
            "Bars: the bounds of the source.",
            _NO_READING if estimated.any() else "",
            _REPLAYED if replayed.any() else "",
        ],
        unit="Energy per token (J)",
        log="x",
        fmt=".2~g",
    )


def power_over_time(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Draw the power in each window as a sensor read it, with the idle window before it."""
    found = pick(of_experiment(rows, "energy"), "power")
    parts = []
    for row in found.to_dict("records"):
        course = row["details"].get("course_s")
        if not course or row["provenance"] == Provenance.ESTIMATED:
            continue
        # the idle window ends when the work begins
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


def operation_breakdown(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Draw the operations of all layers as shares of a call, one bar per phase."""
    data = operation_table(rows)
    if data.empty:
        return empty_chart("Time by operation", "no layer was profiled; set profiling to [deep]")
    only = f": {data['name'].iloc[0]}" if data["name"].nunique() == 1 else ""
    data = followed(data)
    total = data.groupby(["case", *link_columns(data), "part"], sort=False)["ms"].sum()
    total = total.reset_index().rename(columns={"case": "series"})
    total["x"] = total["ms"] / total.groupby("series")["ms"].transform("sum")
    return plot(
        total.drop(columns="ms").sort_values(
            "part", key=lambda parts: parts.map([*PARTS].index), kind="stable"
        ),
        f"Time by operation{only}",
        "bars",
        subtitle=["Gaps: Python, kernel launches and freeing memory."],
        unit="Share of a call",
        fmt=".0%",
    )


@cached
def verdict(rows: pd.DataFrame) -> list[Finding]:
    """Return the energy per token in each phase and by each source, and where the time goes."""
    table = energy_table(rows)
    if table.empty:
        return [Finding("Energy was not measured", next_step="nano run quick energy")]
    costs = drop_missing(table, "energy_per_token")
    by_source = costs.groupby(["name", "seq_len", "source"], sort=False)
    findings = [_state_energy(*key, group) for key, group in by_source]
    if (table["provenance"] == Provenance.ESTIMATED).any():
        why = "no power sensor was found, and estimated ranges allow no comparison"
        next_step = "run nano doctor to see which sensors it supports"
        findings.append(Finding("This machine's power was not measured", why, next_step))
    for row in table[table["status"] != "ok"].to_dict("records"):
        about = f"{row['name']}, n = {int(row['seq_len'])}"
        text = f"The energy of {row['phase'].replace('_', ' ')} was not measured"
        findings.append(Finding(text, row["message"], about=about))
    operations, overheads = operation_table(rows), overhead_table(rows)
    if len(operations):
        findings += [
            _find_largest(case, part) for case, part in operations.groupby("case", sort=False)
        ]
    if len(overheads):
        modes = overheads[overheads["mode"] != "again"]
        findings += [
            _compare_overheads(case, part) for case, part in modes.groupby("case", sort=False)
        ]
    return findings


def _state_energy(name: str, seq_len: float, source: str, group: pd.DataFrame) -> Finding:
    """Return the energy per token of each phase by one source."""
    provenance = group["provenance"].iloc[0]
    parts, figures = [], []
    for row in group.to_dict("records"):
        scale, unit = (1e3, "mJ") if row["energy_per_token"] < 1 else (1.0, "J")
        ends = {end: scale * row[f"energy_per_token{end}"] for end in ("", "_low", "_high")}
        if provenance == Provenance.ESTIMATED:
            low, high = ends["_low"], ends["_high"]
            energy = " to ".join(format_number(end, low, high) for end in (low, high)) + f" {unit}"
        else:
            energy = with_ends(ends, "", f" {unit}") + f" at {row['power']:.0f} W"
        parts.append(f"{energy} ({row['phase'].replace('_', ' ')})")
        figures.append(Estimate.of(row, "energy_per_token", "energy_per_token", name=row["phase"]))
    costs = "costs an estimated" if provenance == Provenance.ESTIMATED else "costs"
    by = "by a replayed recording" if provenance == Provenance.REPLAYED else f"by {source}"
    text = f"A token {costs} {join_words(parts)} {by}"
    return Finding(text, about=f"{name}, n = {int(seq_len)}", figures=tuple(figures))


def _find_largest(case: str, part: pd.DataFrame) -> Finding:
    """Return at least three operations, and as many as take half of the time."""
    total = part.groupby("operation")["ms"].sum().sort_values(ascending=False)
    shares = total / total.sum()
    most = shares.head(max(3, int((shares.cumsum() <= 0.5).sum()) + 1))
    names = join_words(f"{_SPOKEN.get(name, name)} ({share:.0%})" for name, share in most.items())
    gaps = shares.get("between", 0)
    evidence = "faster kernels would change less than half of the time" if gaps > 0.5 else ""
    next_step = "increase batch_size to shorten the gaps" if gaps > 0.2 else ""
    # a profiler sees only the forward calls of modules
    what = "forward pass" if case.startswith("training step") else "time"
    return Finding(f"Most of the {what} goes to {names}", evidence, next_step, case)


def _compare_overheads(case: str, modes: pd.DataFrame) -> Finding:
    """Return the overhead of each profiling mode."""
    costs, compared = [], []
    for row in modes.to_dict("records"):
        cost = comparing(Estimate.of(row, "wall", "overhead", name=row["mode"]), _NOTHING)
        share = with_ends(row, "wall_percent", "%")
        is_unclear = cost[0][1] is Order.NO_DIFFERENCE
        text = f"makes no clear difference ({share})" if is_unclear else share
        costs.append(f"{row['mode']} {text}")
        compared += cost
    text = f"Profiling overhead: {', '.join(costs)}"
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
        "Energy, power and time": CaseTable(energy_table, ENERGY_COLUMNS),
        "Profiling overhead": CaseTable(overhead_table, OVERHEAD_COLUMNS),
    },
    verdict,
)
