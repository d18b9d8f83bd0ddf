"""Energy by phase: readings solid, estimates hatched by their range and never beside a reading as if they were one."""

from __future__ import annotations

import altair as alt
import pandas as pd

from nanolib.experiments.energy.view.layers import layer_words
from nanolib.measurement import Provenance
from nanolib.report.claim import Claim, Figure
from nanolib.report.drawing import HEIGHT, WIDTH, coloured, domain_of
from nanolib.report.frame import HOLLOW, Drawn, framed, tooltips, with_interval
from nanolib.report.linking import followed, links
from nanolib.report.log_axes import drawable
from nanolib.report.overview import cached, of_experiment, pick
from nanolib.report.palette import FRAME, PALETTE
from nanolib.report.tables import CASE, Column, base, filled, known, titles, with_ends

_ENERGY = (
    Column("name", "Model"),
    Column("phase", "Phase"),
    Column("seq_len", "n"),
    Column("batch_size", "Batch"),
    Column("source", "Source"),
    Column("provenance", "Provenance"),
    Column("power", "Power, W [range]", "power", "", interval=True),
    Column("idle_power", "Idle, W [range]", "power", "idle", interval=True),
    Column("energy_per_token", "J per token [range]", "energy_per_token", interval=True),
    Column("net_per_token", "Above idle, J per token [range]"),
    Column("energy", "Window, J [range]", "energy", interval=True),
    Column("net", "", "net_energy", interval=True),
    Column("energy_delay", "Energy × delay, J·s [range]", "energy_delay", interval=True),
    Column("tokens_per_second", "Tokens/s"),
    Column("status", "Status"),
    Column("message", "Why"),
)
ENERGY_COLUMNS = titles(_ENERGY)
NO_READING = "no sensor read this machine's power; what is estimated from how busy its cores were stands in the table"
_HOLLOW_SAYS = "Hollow and dotted: replayed from a recording, and no reading of this machine."


@cached("energy")
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
    table = filled(table, rows, [Column("tokens_per_second", "", "tokens_per_second")])
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
    return table.assign(**{f"net_per_token{end}": table[f"net{end}"] * share for end in ("", "_low", "_high")})


@framed("Energy per token", "energy")
def energy_per_token(rows: pd.DataFrame) -> Drawn | str | None:
    """Joules per token by phase, as a sensor read them, with bounds. What is estimated stands in the table alone."""
    table = known(energy_table(rows), "energy_per_token")
    if table.empty:
        return None
    table = table[table["provenance"] != Provenance.ESTIMATED.value]
    if table.empty:
        return NO_READING
    case = "n = " + table["seq_len"].astype(int).astype(str) + ", " + table["phase"].str.replace("_", " ")
    several = table["name"].nunique() > 1
    of_model = "" if several else f": {table['name'].iloc[0]}"
    case = case + ", " + table["name"] if several else case  # the name may be so long that it is cut
    data = pd.DataFrame(
        {
            "case": case,
            "phase": table["phase"].str.replace("_", " "),
            "source": table["source"] + " " + table["of"],
            "replayed": table["provenance"] == Provenance.REPLAYED.value,
            "joules": table["energy_per_token"],
            "low": table["energy_per_token_low"],
            "high": table["energy_per_token_high"],
            **links(table),
        }
    )
    data["low"] = data["low"].clip(lower=drawable(data["joules"]).min() / 100)
    scale = alt.Scale(type="log", domain=domain_of(data[["joules", "low", "high"]], log=True), nice=False)
    order = list(dict.fromkeys(data["case"]))
    colours = dict(zip(dict.fromkeys(data["phase"]), PALETTE, strict=False))
    colour = coloured("phase", alt.Undefined, colours, legend=None)  # the labels name the phase
    tooltip = tooltips("case source", "joules low high")
    x = {"title": "Energy per token (J)", "scale": scale}
    y = alt.Y("case:N", title=None, sort=order, axis=alt.Axis(labelLimit=420))
    base = alt.Chart(data).encode(y=y, color=colour, tooltip=tooltip)
    ends = ("joules", "low", "high")
    layers = with_interval(base.transform_filter("!datum.replayed"), "x", ends, x, size=70)
    layers += with_interval(base.transform_filter("datum.replayed"), "x", ends, x, size=70, mark=HOLLOW)
    return alt.layer(*layers, width=int(1.6 * WIDTH), height=alt.Step(26)), _sources(data["replayed"]), of_model


@framed("Power over time", "energy")
def power_over_time(rows: pd.DataFrame) -> Drawn | str | None:
    """The course of the power in each window, as a sensor read it, the idle one before it."""
    rows = of_experiment(rows, "energy")
    found = pick(rows, "power")
    parts = []
    for _, row in found[found["provenance"] != Provenance.ESTIMATED.value].iterrows():
        idle = row["scope"] == "idle"
        course, watts = row["details"].get("course_s", []), row["details"].get("course_w", [])
        shift = -(course[-1] if idle and course else 0.0)  # idle comes before the work, which begins at zero
        parts.append(
            pd.DataFrame(
                {
                    "seconds": [at + shift for at in course],
                    "watts": watts,
                    "phase": row["scope"].replace("_", " "),
                    "replayed": row["provenance"] == Provenance.REPLAYED.value,
                    "run_id": row["run_id"],
                    "name": row["factor.name"],
                    "seq_len": row["factor.seq_len"],
                    "series": f"{row['case_id']} {row['scope']} {row['details'].get('of', '')}",
                }
            )
        )
    data = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
    if data.empty:
        return NO_READING if len(pick(rows, "power")) else None
    data = followed(data)
    phases = enumerate(dict.fromkeys(data["phase"]))
    colours = {phase: FRAME if phase == "idle" else PALETTE[i % len(PALETTE)] for i, phase in phases}
    chart = (
        alt.Chart(data)
        .mark_line(strokeWidth=1.5)
        .encode(
            x=alt.X("seconds:Q", title="Seconds since the work began; idle before it"),
            y=alt.Y("watts:Q", title="Power (W)", scale=alt.Scale(zero=True)),
            color=coloured("phase", "Phase", colours),
            strokeDash=alt.condition("datum.replayed", alt.value([1, 3]), alt.value([1, 0])),
            detail=alt.Detail("series:N"),
            tooltip=tooltips("phase", "seconds watts"),
        )
    )
    return chart.properties(width=2 * WIDTH, height=HEIGHT), _sources(data["replayed"])


def _sources(replayed: pd.Series) -> list[str]:
    read = [] if replayed.all() else ["Read from a sensor, with bounds."]
    return [*read, *([_HOLLOW_SAYS] if replayed.any() else [])]


@cached("energy")
def verdict(rows: pd.DataFrame) -> list[Claim]:
    """What a token costs in each phase, and by which source."""
    table = energy_table(rows)
    if table.empty:
        return [Claim("No energy was measured or estimated, so there is no verdict", advice="nano run quick energy")]
    told = known(table, "energy_per_token")
    claims = [
        _per_token(f"{name}, n = {int(seq_len)}", source, group)
        for (name, seq_len, source), group in told.groupby(["name", "seq_len", "source"], sort=False)
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
    parts = [f"{row['phase'].replace('_', ' ')} {_joules(row, estimated)}" for _, row in group.iterrows()]
    told = "a recording that was replayed" if provenance == Provenance.REPLAYED.value else source
    answer = f"by {told}, a token {'is estimated at' if estimated else 'takes'} {'; '.join(parts)}"
    figures = [Figure.of(row, "energy_per_token", "energy_per_token", name=row["phase"]) for _, row in group.iterrows()]
    return Claim(answer, about=about, figures=tuple(figures))


def _joules(row: pd.Series, estimated: bool) -> str:
    if estimated:
        low, high = row["energy_per_token_low"], row["energy_per_token_high"]
        return f"{low:.2g} to {high:.2g} J"
    return f"{with_ends(row, 'energy_per_token')} J at {row['power']:.0f} W"


# What the report draws of it, in this order.
CHARTS = {
    "energy_per_token": energy_per_token,
    "power_over_time": power_over_time,
}
