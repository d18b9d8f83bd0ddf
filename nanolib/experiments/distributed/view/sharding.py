"""Whole sequences across ranks, how far memory goes, and training steps over ranks."""

from __future__ import annotations

from dataclasses import replace

import altair as alt
import pandas as pd

from nanolib.experiments.distributed.view.decode_tables import (
    EXPERIMENT,
    SENT,
    fair,
    lines_of,
    over_nodes,
    over_ranks,
    ranks_words,
    with_gain,
)
from nanolib.measurement import Flag, Provenance, format_with_interval
from nanolib.report.claim import Claim, Figure, Order, comparing
from nanolib.report.drawing import HEIGHT, WIDTH, colour_and_shape
from nanolib.report.frame import Drawn, framed, panels, tooltips, with_interval
from nanolib.report.in_turns import ONE, OVER, gains, not_slower, over, with_speed_ups
from nanolib.report.linking import links
from nanolib.report.overview import cached, having, listed, pick
from nanolib.report.palette import GUIDE
from nanolib.report.tables import CASE, Column, drawn_ends, filled, known, titles, with_ends

_PREFILL = (
    Column("ranks", "Ranks"),
    Column("seq_len", "n"),
    Column("dtype", "Type"),
    Column("form", "Algorithm"),
    Column("direction", "Direction"),
    Column("latency", "Time, ms [95 %]", "latency", interval=True),
    Column("memory", "Peak per rank, MiB", "peak_memory", interval=True),
    Column("memory_predicted", "Planned, MiB"),
    *SENT,
    Column("status", "Status"),
    Column("message", "Why"),
    Column("flags", "Flags"),
)
PREFILL_COLUMNS = titles(_PREFILL)
_TRAINING = (
    Column("name", "Model"),
    Column("ranks", "Ranks"),
    Column("strategy", "Strategy"),
    Column("latency", "Step, ms [95 %]", "latency", interval=True),
    Column("tokens_per_second", "Tokens/s [95 %]", "tokens_per_second", interval=True),
    Column("efficiency", "Efficiency [95 %]"),
    Column("exposed", "Exposed communication, ms [95 %]", "exposed_communication", interval=True),
    Column("weights", "Weights of a rank, MiB", "footprint"),
    Column("sent", "Sent, B", "wire_bytes"),
    Column("status", "Status"),
    Column("message", "Why"),
    Column("flags", "Flags"),
)
TRAINING_COLUMNS = titles(_TRAINING)


_BINARY = "datum.value >= 1048576 ? datum.value / 1048576 + 'M' : datum.value >= 1024 ? datum.value / 1024 + 'K' : datum.value"


@cached("distributed")
def prefill_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per form, direction, number of ranks and length; columns as in `_PREFILL`, and `run_id`, `case_id`."""
    rows = having(rows, EXPERIMENT, "prefill_forms")
    if rows.empty:
        return pd.DataFrame()
    parts = rows["scope"].str.partition(" ")
    # what is sent is told of the form alone
    rows = rows.assign(form=parts[0], direction=parts[2].replace("", "forward"))
    table = lines_of(rows, "prefill_forms", ["seq_len", "dtype"], ["form", "direction"])
    table = filled(table, rows, _PREFILL, [*CASE, "form", "direction"])
    return with_speed_ups(table, rows, table["form"] + " " + table["direction"])


def _what(form: pd.Series, world_size: pd.Series) -> pd.Series:
    """The form with the ranks that take part."""
    ranks = world_size.where(~form.isin(["dense", "flash", "math"]), 1).astype(int).astype(str)
    return form + ", " + ranks + " rank" + ranks.map(lambda count: "" if count == "1" else "s")


@framed("Attention over a sequence that is sharded", EXPERIMENT)
def prefill_times(rows: pd.DataFrame) -> Drawn | None:
    """Attention over a whole sequence: one rank's dense beside the forms across ranks."""
    table = known(prefill_table(rows), "latency")
    if table.empty:
        return None
    data = pd.DataFrame(
        {
            "panel": "n = " + table["seq_len"].astype(int).map("{:,}".format) + ", " + table["direction"],
            "what": over_nodes(
                _what(table["form"], table["world_size"]), table["nodes"].where(table["form"] != "dense", 1)
            ),
            "form": table["form"],
            "ms": table["latency"],
            **drawn_ends(table, "latency"),
            "flags": [", ".join(flags) or "none" for flags in table["flags"]],
            **links(table),
        }
    )
    colour, shape = colour_and_shape("form", "Algorithm", data["form"])
    order = list(dict.fromkeys(data["what"]))
    tooltip = tooltips("what flags", "ms low high")

    def draw(part: pd.DataFrame) -> alt.TopLevelMixin:
        base = alt.Chart(part).encode(y=alt.Y("what:N", title=None, sort=order), color=colour)
        scale = alt.Scale(domain=[0, float(part["high"].max()) * 1.05], nice=False)
        x = {"title": "Time (ms)", "scale": scale}
        marks = with_interval(base, "x", ("ms", "low", "high"), x, size=70, stroke=3, shape=shape, tooltip=tooltip)
        return alt.layer(*marks, width=WIDTH, height=30 * len(order))

    subtitle = "Slowest rank, 95 % intervals, interleaved in one launch; every rank has as many threads as the one that is alone."
    return panels(data, draw, columns=2), subtitle


@framed("Peak memory of a rank", EXPERIMENT)
def sharded_memory(rows: pd.DataFrame) -> Drawn | None:
    """Peak memory of a rank over the length of the sequence: measured points, planned dashed."""
    peaks = pick(having(rows, EXPERIMENT, "world_size"), "peak_memory")
    peaks = peaks[peaks["scope"].str.endswith(" forward")]
    if peaks.empty:
        return None
    sharded = ~peaks["scope"].isin(["dense forward", "math forward", "flash forward"])
    peaks = peaks[~sharded | (peaks["factor.world_size"] == peaks["factor.world_size"].max())]
    data = pd.DataFrame(
        {
            "what": _what(
                peaks["scope"].str.removesuffix(" forward").replace("dense", "flash"), peaks["factor.world_size"]
            ),
            "n": peaks["factor.seq_len"].astype(int),
            "gib": peaks["estimate"] / 1024,
            "planned": peaks["predicted"].fillna(peaks["estimate"]) / 1024,
            "measured": peaks["provenance"] == Provenance.MEASURED.value,
            **links(peaks),
        }
    ).sort_values(["what", "n"])
    colour, shape = colour_and_shape("what", "Algorithm", data["what"])
    x = alt.X(
        "n:Q",
        title="Sequence length (tokens)",
        scale=alt.Scale(type="log", base=2, nice=False, padding=12),
        axis=alt.Axis(values=sorted(set(data["n"])), labelExpr=_BINARY, grid=False, labelOverlap=True),
    )
    y_scale = alt.Scale(type="log", nice=False, padding=12)
    base = alt.Chart(data).encode(x=x, color=colour)
    tooltip = [*tooltips("what measured", "gib planned"), alt.Tooltip("n:Q", format=",")]
    layers = alt.layer(
        base.mark_line(strokeDash=[4, 4], strokeWidth=1.4).encode(
            y=alt.Y("planned:Q", title="Peak live memory (GiB)", scale=y_scale), tooltip=tooltip
        ),
        base.transform_filter("datum.measured")
        .mark_point(filled=True, size=60, opacity=1)
        .encode(y=alt.Y("gib:Q", scale=y_scale), shape=shape, tooltip=tooltip),
    )
    subtitle = "Points: counted while it ran. Dashed: planned on tensors without data, up to lengths that nobody could run here."
    return layers.properties(width=2 * WIDTH, height=HEIGHT), subtitle


@cached("distributed")
def training_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per strategy and number of ranks; columns as in `_TRAINING`, and `run_id`, `case_id`."""
    rows = having(rows, EXPERIMENT, "strategies")
    if rows.empty:
        return pd.DataFrame()
    rows = rows.assign(strategy=rows["scope"])
    table = lines_of(rows, "strategies", ["name"], ["strategy"])
    table = filled(table, rows, _TRAINING, [*CASE, "strategy"])
    return with_gain(with_speed_ups(table, rows, table["strategy"]), "alone", 1)  # each rank has a batch of its own


@framed("Training over ranks", why="no training step was measured; set training_preset")
def training_scaling(rows: pd.DataFrame) -> Drawn | None:
    """Tokens per second over ranks, each with a batch of its own; grey: one rank's, as many times."""
    table = known(training_table(rows), "tokens_per_second")
    if table.empty:
        return None
    data = pd.DataFrame(
        {
            "strategy": over_nodes(
                table["strategy"].replace({"local": "each by itself", "alone": "one rank"}),
                table["nodes"].where(table["strategy"] != "alone", 1),
            ),
            "ranks": table["world_size"].where(table["strategy"] != "alone", 1).astype(int),
            "rate": table["tokens_per_second"],
            **drawn_ends(table, "tokens_per_second"),
            "flags": [", ".join(flags) or "none" for flags in table["flags"]],
            "oversubscribed": [Flag.OVERSUBSCRIBED.value in flags for flags in table["flags"]],
            **links(table),
        }
    )
    colour, shape = colour_and_shape("strategy", "Strategy", data["strategy"])
    ticks = sorted(set(data["ranks"]))
    x = alt.X("ranks:Q", title="Ranks", axis=alt.Axis(values=ticks, format="d", grid=False))
    x = x.scale(domain=[min(ticks) - 0.3, max(ticks) + 0.3], nice=False)
    y = {"title": "Tokens per second, all ranks", "scale": alt.Scale(domainMin=0)}
    base = alt.Chart(data).encode(x=x, color=colour)
    tooltip = tooltips("strategy flags", "ranks rate low high", ",.0f")
    layers = over_ranks(base, ("rate", "low", "high"), y, colour, shape=shape, tooltip=tooltip)
    one = data[data["strategy"] == "one rank"]
    if len(one):
        ideal = pd.DataFrame({"ranks": ticks, "rate": [float(one["rate"].iloc[0]) * rank for rank in ticks]})
        layers.insert(0, alt.Chart(ideal).mark_line(color=GUIDE, strokeDash=[2, 2]).encode(x=x, y=alt.Y("rate:Q")))
    subtitle = "95 % intervals; hollow: more ranks than cores. Grey: one rank's rate, as many times."
    return alt.layer(*layers, width=WIDTH, height=HEIGHT), subtitle


def prefill_words(rows: pd.DataFrame) -> list[Claim]:
    """Which form across ranks is the fastest, and what it takes of one rank's time and memory."""
    timed = known(prefill_table(rows), "latency")
    claims = []
    for (seq_len, direction), group in timed.groupby(["seq_len", "direction"], sort=False) if len(timed) else ():
        dense = group[group["form"] == "dense"]
        across = fair(group[group["form"] != "dense"])
        if across.empty:
            continue
        across = across.sort_values("latency", kind="stable")
        best = across.iloc[0]
        across, dense = (
            part[(part["run_id"] == best["run_id"]) & (part["case_id"] == best["case_id"])] for part in (across, dense)
        )
        others = [name for form in across["form"] if over(best, name := f"{form} {direction}")]
        alike = not_slower(best, others)
        named = [f"{name.split()[0]} on {ranks_words(best)}" for name in (best["form"], *alike)]
        if not others:
            answer = f"{named[0]} was measured alone across ranks"
        elif not alike:
            answer = f"{named[0]} is the fastest across ranks"
        else:
            answer = f"{listed(named)} cannot be told apart"
        sure = f"{named[0]} takes {with_ends(best, 'latency')} ms"
        compared = gains(best, named[0], among=others)
        if len(dense):
            one, gain = dense.iloc[0], over(best, f"dense {direction}")
            how = {Order.ABOVE: "faster", Order.BELOW: "slower", Order.ALIKE: "not told apart"}
            told = (
                f" ({format_with_interval(gain.estimate, gain.low, gain.high)}×, {how[gain.against(ONE)]})"
                if gain
                else ""
            )
            sure += f", one rank {with_ends(one, 'latency')} ms{told}"
            sure += f"; its peak is {best['memory'] / one['memory']:.2f} of one rank's"
            compared += comparing(replace(gain, name=f"{named[0]}{OVER}one rank"), ONE) if gain else ()
        claims.append(Claim(answer, sure, about=f"Over {int(seq_len):,} tokens, {direction}", compared=compared))
    return claims


def training_words(rows: pd.DataFrame) -> list[Claim]:
    """What each strategy's communication costs a step."""
    table = known(training_table(rows), "exposed")
    claims = []
    for _, row in fair(table).iterrows() if len(table) else ():
        figure, zero = Figure.of(row, "exposed"), Figure.exactly(0.0)
        share = min(max(row["exposed"] / row["latency"], 0.0), 1.0)  # a difference of two times may be below zero
        of_step = f"{with_ends(row, 'exposed')} ms of a step ({share:.0%})"
        answer = f"{of_step} is communication that computing does not hide"
        if figure.against(zero) is not Order.ABOVE:
            answer += ", not distinguishable from zero"
        sure = f"efficiency {with_ends(row, 'efficiency')}" if pd.notna(row["efficiency"]) else ""
        about = f"Training {row['name']} on {ranks_words(row)} with {row['strategy']}"
        claims.append(Claim(answer, sure, about=about, compared=comparing(figure, zero)))
    return claims


def sharding_words(rows: pd.DataFrame) -> list[Claim]:
    """Of prefill and training."""
    return [*prefill_words(rows), *training_words(rows)]


# What the report draws of it, in this order.
CHARTS = {
    "prefill_times": prefill_times,
    "sharded_memory": sharded_memory,
    "training_scaling": training_scaling,
}
