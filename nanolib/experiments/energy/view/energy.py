"""Energy by phase: readings solid, estimates hatched by their range and never beside a reading as if they were one."""

from __future__ import annotations

import altair as alt
import pandas as pd

from nanolib.experiments.energy.view.layers import layer_words
from nanolib.measurement import Provenance, format_number
from nanolib.report.claim import Claim, Figure
from nanolib.report.linking import followed, links
from nanolib.report.overview import cached, of_experiment, pick, why_empty
from nanolib.report.plot import plot
from nanolib.report.tables import CASE, Column, base, filled, known, titles, with_ends, with_state
from nanolib.report.theme import empty_chart, hues

_ENERGY = (
    Column("name", "Model"),
    Column("phase", "Phase"),
    Column("seq_len", "Seq len"),
    Column("batch_size", ""),
    Column("source", "Source"),
    Column("provenance", ""),
    Column("power", "Power, W [range]", "power", "", interval=True),
    Column("idle_power", "Idle, W [range]", "power", "idle", interval=True),
    Column("energy_per_token", "J per token [range]", "energy_per_token", interval=True),
    Column("net_per_token", ""),
    Column("energy", "Window, J [range]", "energy", interval=True),
    Column("net", "", "net_energy", interval=True),
    Column("energy_delay", "", "energy_delay", interval=True),
    Column("tokens_per_second", "Tokens/s"),
    Column("state", "Provenance"),
)
ENERGY_COLUMNS = titles(_ENERGY)
_NO_READING = "No sensor here. Hollow: a range that is estimated from how busy the cores were, and no reading."
_REPLAYED = "Hollow: replayed from a recording, and no reading of this machine."


@cached
def energy_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per phase, shape and source.

    Returns:
        Columns: `name`, `phase`, `seq_len`, `batch_size`, `source`, `of`, `provenance`, `power`, `idle_power` (W), `energy` (J, of
        the window), `energy_per_token`, `net_per_token` (J; above idle), `energy_delay` (J·s), each with `_low` and `_high`,
        `tokens_per_second`, `status`, `message`.
    """
    rows = of_experiment(rows, "energy")
    if "factor.look" in rows:  # what looks into layers has a table of its own
        rows = rows[rows["factor.look"].isna()]
    table = base(rows, ["name", "phase", "seq_len", "batch_size"], "phase")
    if table.empty:
        return table
    table = filled(table, rows, [Column("tokens_per_second", "Tokens/s", "tokens_per_second")])
    of = pd.Series([details.get("of", "") for details in rows["details"]], index=rows.index)
    windows = rows["scope"].where(rows["scope"] == "idle", "")
    rows = rows.assign(source=rows["method"], of=of, scope=windows)
    found = rows[rows["metric"] == "energy"]
    found = found[[*CASE, "source", "of", "provenance", "status", "message"]]
    table = table.merge(found, on=list(CASE), how="left", suffixes=("_of_case", ""))
    for name in ("status", "message"):
        table[name] = table[name].fillna(table.pop(f"{name}_of_case"))
    table = table.fillna(dict.fromkeys(("source", "of", "provenance"), ""))
    table = filled(table, rows, _ENERGY, [*CASE, "source", "of"])
    share = table["energy_per_token"] / table["energy"].where(table["energy"] != 0)
    table = table.assign(
        **{f"net_per_token{end}": table[f"net{end}"] * share for end in ("", "_low", "_high")}
    )
    known_state = with_state(table)["state"]
    return table.assign(state=known_state.where(known_state != "ok", table["provenance"]))


def energy_per_token(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Joules per token by phase, with bounds: filled as a sensor read them, hollow if estimated or replayed."""
    table = known(energy_table(rows), "energy_per_token")
    if table.empty:
        return empty_chart("Energy per token", why_empty(rows, "energy"))
    several = table["name"].nunique() > 1
    phase, case = table["phase"].str.replace("_", " "), table["seq_len"].astype(int).astype(str)
    estimated = table["provenance"] == Provenance.ESTIMATED
    ends = (
        table["energy_per_token_low"].map("{:.2g}".format)
        + " to "
        + table["energy_per_token_high"].map("{:.2g}".format)
    )
    data = pd.DataFrame(
        {
            "series": phase + ", n = " + case + (", " + table["name"] if several else ""),
            "x": table["energy_per_token"],
            "low": table["energy_per_token_low"],
            "high": table["energy_per_token_high"],
            "sure": table["provenance"] == Provenance.MEASURED,
            "hue": phase.map(hues(phase)),
            "text": ends.where(estimated, table["energy_per_token"].map(format_number)) + " J",
            "note": table["provenance"] + ", " + table["source"] + " " + table["of"],
            **links(table),
        }
    )
    subtitle = ["Bars: the bounds that the source allows.", _NO_READING if estimated.any() else ""]
    return plot(
        data,
        "Energy per token" + ("" if several else f": {table['name'].iloc[0]}"),
        "rows",
        subtitle=[
            *subtitle,
            _REPLAYED if (table["provenance"] == Provenance.REPLAYED).any() else "",
        ],
        unit="Energy per token (J)",
        log="x",
        fmt=".2~g",
    )


def power_over_time(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """The course of the power in each window as a sensor read it, the idle window before it."""
    found = pick(of_experiment(rows, "energy"), "power")
    parts = []
    for _, row in (
        found[found["provenance"] != Provenance.ESTIMATED].iterrows() if len(found) else ()
    ):
        course = row["details"].get("course_s", [])
        shift = (
            -course[-1] if row["scope"] == "idle" and course else 0.0
        )  # idle comes before the work
        parts.append(
            pd.DataFrame(
                {
                    "series": row["scope"].replace("_", " "),
                    "x": [at + shift for at in course],
                    "y": row["details"].get("course_w", []),
                    "sure": row["provenance"] == Provenance.MEASURED,
                    "run_id": row["run_id"],
                    "name": row["factor.name"],
                    "seq_len": row["factor.seq_len"],
                }
            )
        )
    data = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
    if data.empty:
        why = "no sensor read this machine's power" if len(found) else why_empty(rows, "energy")
        return empty_chart("Power over time", why)
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


@cached
def verdict(rows: pd.DataFrame) -> list[Claim]:
    """What a token costs in each phase, and by which source."""
    table = energy_table(rows)
    if table.empty:
        return [
            Claim(
                "No energy was measured or estimated, so there is no verdict",
                advice="nano run quick energy",
            )
        ]
    told = known(table, "energy_per_token")
    claims = [
        _per_token(f"{name}, n = {int(seq_len)}", source, group)
        for (name, seq_len, source), group in told.groupby(
            ["name", "seq_len", "source"], sort=False
        )
    ]
    if (table["provenance"] == Provenance.ESTIMATED.value).any():
        why = "the ranges follow from how busy its cores were, and no difference rests on them"
        advice = "nano doctor says why, and what would help"
        claims.append(Claim("No sensor tells this machine's power", why, advice))
    for _, row in table[(table["status"] != "ok")].iterrows():
        about = f"{row['name']}, n = {int(row['seq_len'])}"
        claims.append(Claim(f"{row['phase']} has no energy", row["message"], about=about))
    if len(told) and not (table["provenance"] == Provenance.ESTIMATED.value).any():
        question = "does a larger batch lower the joules per token?"
        claims.append(Claim("The joules are those of this batch size", advice=question))
    return [*claims, *layer_words(rows)]


def _per_token(about: str, source: str, group: pd.DataFrame) -> Claim:
    """What a token costs in each phase, by one source."""
    (provenance,) = set(group["provenance"]) if group["provenance"].nunique() == 1 else ("",)
    estimated = provenance == Provenance.ESTIMATED.value
    parts = [
        f"{row['phase'].replace('_', ' ')} {_joules(row, estimated)}" for _, row in group.iterrows()
    ]
    told = "a recording that was replayed" if provenance == Provenance.REPLAYED.value else source
    answer = f"By {told}, a token {'is estimated at' if estimated else 'takes'} {'; '.join(parts)}"
    figures = [
        Figure.of(row, "energy_per_token", "energy_per_token", name=row["phase"])
        for _, row in group.iterrows()
    ]
    return Claim(answer, about=about, figures=tuple(figures))


def _joules(row: pd.Series, estimated: bool) -> str:
    if estimated:
        low, high = row["energy_per_token_low"], row["energy_per_token_high"]
        return f"{low:.2g} to {high:.2g} J"
    return f"{with_ends(row, 'energy_per_token')} J at {row['power']:.0f} W"
