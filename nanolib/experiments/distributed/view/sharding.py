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
    ranks_words,
    with_gain,
)
from nanolib.measurement import Flag, Provenance, format_number, format_with_interval
from nanolib.report.claim import Claim, Figure, Order, comparing
from nanolib.report.in_turns import ONE, OVER, gains, not_slower, over, with_speed_ups
from nanolib.report.linking import links
from nanolib.report.overview import cached, having, listed, pick, why_empty
from nanolib.report.plot import plot
from nanolib.report.tables import CASE, Column, filled, known, titles, with_ends, with_state
from nanolib.report.theme import empty_chart, hues

_PREFILL = (
    Column("ranks", "Ranks"),
    Column("seq_len", "Seq len"),
    Column("form", "Algorithm"),
    Column("direction", "Direction"),
    Column("latency", "Time, ms [95 %]", "latency", interval=True),
    Column("memory", "Peak per rank, MiB", "peak_memory", interval=True),
    Column("memory_predicted", "Planned, MiB"),
    *SENT,
    Column("state", "State"),
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
    Column("state", "State"),
)
TRAINING_COLUMNS = titles(_TRAINING)


@cached
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
    return with_state(with_speed_ups(table, rows, table["form"] + " " + table["direction"]))


def _what(form: pd.Series, world_size: pd.Series) -> pd.Series:
    """The form with the ranks that take part."""
    ranks = world_size.where(~form.isin(["dense", "flash", "math"]), 1).astype(int).astype(str)
    return form + ", " + ranks + " rank" + ranks.map(lambda count: "" if count == "1" else "s")


def prefill_times(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Attention over a whole sequence: one rank's dense attention and the algorithms across ranks."""
    title = "Attention over a sequence that is sharded"
    table = known(prefill_table(rows), "latency")
    if table.empty:
        return empty_chart(title, why_empty(rows, EXPERIMENT))
    data = pd.DataFrame(
        {
            "panel": "n = "
            + table["seq_len"].astype(int).map("{:,}".format)
            + ", "
            + table["direction"],
            "series": over_nodes(
                _what(table["form"], table["world_size"]),
                table["nodes"].where(table["form"] != "dense", 1),
            ),
            "x": table["latency"],
            "low": table["latency_low"],
            "high": table["latency_high"],
            "sure": [Flag.OVERSUBSCRIBED not in flags for flags in table["flags"]],
            "hue": (table["form"] == "dense").map({True: "base", False: "c1"}),
            "text": table["latency"].map(format_number) + " ms",
            **links(table),
        }
    )
    return plot(
        data,
        title,
        "rows",
        subtitle=[
            "Slowest rank, 95 % intervals; every rank has as many threads as the one that is alone."
        ],
        unit="Time (ms)",
    )


def sharded_memory(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Peak memory of a rank over the length of the sequence: measured points, planned dashed."""
    peaks = pick(having(rows, EXPERIMENT, "world_size"), "peak_memory")
    peaks = peaks[peaks["scope"].str.endswith(" forward")]
    if peaks.empty:
        return empty_chart("Peak memory of a rank", why_empty(rows, EXPERIMENT))
    sharded = ~peaks["scope"].isin(["dense forward", "math forward", "flash forward"])
    peaks = peaks[~sharded | (peaks["factor.world_size"] == peaks["factor.world_size"].max())]
    form = peaks["scope"].str.removesuffix(" forward").replace("dense", "flash")
    measured = peaks["provenance"] == Provenance.MEASURED
    data = pd.DataFrame(
        {
            "series": _what(form, peaks["factor.world_size"]),
            "x": peaks["factor.seq_len"].astype(int),
            "y": (peaks["estimate"] / 1024).where(measured),
            "pred": peaks["predicted"].fillna(peaks["estimate"]) / 1024,
            **links(peaks),
        }
    ).sort_values(["series", "x"])
    return plot(
        data,
        "Peak memory of a rank",
        subtitle=[
            "Points: counted during a run. Dashed: planned on tensors without data, up to lengths that did not run here."
        ],
        unit="Peak live memory (GiB)",
        xunit="Sequence length (tokens)",
        log="xy",
    )


@cached
def training_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per strategy and number of ranks; columns as in `_TRAINING`, and `run_id`, `case_id`."""
    rows = having(rows, EXPERIMENT, "strategies")
    if rows.empty:
        return pd.DataFrame()
    rows = rows.assign(strategy=rows["scope"])
    table = lines_of(rows, "strategies", ["name"], ["strategy"])
    table = filled(table, rows, _TRAINING, [*CASE, "strategy"])
    return with_state(
        with_gain(with_speed_ups(table, rows, table["strategy"]), "alone", 1)
    )  # each rank has a batch of its own


def training_scaling(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Tokens per second over ranks, each with a batch of its own; dashed: one rank's, as many times."""
    table = known(training_table(rows), "tokens_per_second")
    if table.empty:
        return empty_chart(
            "Training over ranks", "no training step was measured; set training_preset"
        )
    alone = table["strategy"] == "alone"
    names = table["strategy"].replace({"local": "each rank by itself", "alone": "one rank"})
    data = pd.DataFrame(
        {
            "series": over_nodes(names, table["nodes"].where(~alone, 1)),
            "x": table["world_size"].where(~alone, 1).astype(int),
            "y": table["tokens_per_second"],
            "low": table["tokens_per_second_low"],
            "high": table["tokens_per_second_high"],
            "sure": [Flag.OVERSUBSCRIBED not in flags for flags in table["flags"]],
            **links(table),
        }
    )
    one = data[data["series"] == "one rank"]
    if len(one):
        ranks = sorted(set(data["x"]))
        ideal = {
            "series": "perfect scaling",
            "x": ranks,
            "pred": [float(one["y"].iloc[0]) * rank for rank in ranks],
        }
        data = data.assign(hue=data["series"].map(hues(data["series"])))
        data = pd.concat(
            [data, pd.DataFrame(ideal | {"hue": "rest", "sure": True})], ignore_index=True
        )
    return plot(
        data,
        "Training over ranks",
        subtitle=[
            "95 % intervals. Hollow: more ranks than cores. Dashed: one rank's rate, as many times."
        ],
        unit="Tokens per second, all ranks",
        xunit="Ranks",
    )


def prefill_words(rows: pd.DataFrame) -> list[Claim]:
    """Which form across ranks is the fastest, and what it takes of one rank's time and memory."""
    timed = known(prefill_table(rows), "latency")
    claims = []
    for (seq_len, direction), group in (
        timed.groupby(["seq_len", "direction"], sort=False) if len(timed) else ()
    ):
        dense = group[group["form"] == "dense"]
        across = fair(group[group["form"] != "dense"])
        if across.empty:
            continue
        across = across.sort_values("latency", kind="stable")
        best = across.iloc[0]
        across, dense = (
            part[(part["run_id"] == best["run_id"]) & (part["case_id"] == best["case_id"])]
            for part in (across, dense)
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
            compared += (
                comparing(replace(gain, name=f"{named[0]}{OVER}one rank"), ONE) if gain else ()
            )
        claims.append(
            Claim(
                answer, sure, about=f"Over {int(seq_len):,} tokens, {direction}", compared=compared
            )
        )
    return claims


def training_words(rows: pd.DataFrame) -> list[Claim]:
    """What each strategy's communication costs a step."""
    table = known(training_table(rows), "exposed")
    claims = []
    for _, row in fair(table).iterrows() if len(table) else ():
        figure, zero = Figure.of(row, "exposed"), Figure.exactly(0.0)
        share = min(
            max(row["exposed"] / row["latency"], 0.0), 1.0
        )  # a difference of two times may be below zero
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
