"""What a person sees of ranks: scaling, the parts of a token, memory, and the findings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import altair as alt
import pandas as pd

from nanolib.experiments.distributed.tables import (
    COMPONENT_COLUMNS,
    DECODE_COLUMNS,
    EXPERIMENT,
    KINDS,
    ONE_RANK,
    PREFILL_COLUMNS,
    TRAINING_COLUMNS,
    UNCLEAR,
    component_table,
    decode_table,
    part_figures,
    prefill_table,
    training_table,
    with_cores,
)
from nanolib.measurement import Flag, Provenance
from nanolib.numbers import format_number
from nanolib.report.claim import Claim, Figure, Order, comparing
from nanolib.report.in_turns import ONE, gains, not_slower, over
from nanolib.report.linking import links
from nanolib.report.overview import cached, having, listed, pick, why_empty
from nanolib.report.plot import plot
from nanolib.report.section import CaseTable, Section
from nanolib.report.tables import in_ms, known, percent, times
from nanolib.report.theme import empty_chart

_SCALES = Figure.exactly(0.8)  # of perfect scaling: from here on one more rank is worth its cores


def decode_scaling(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Draw the time of a token over ranks: measured with intervals, the cost model dashed."""
    title = "Time per token over ranks"
    table = known(decode_table(rows), "latency")
    if table.empty:
        return empty_chart(title, why_empty(rows, EXPERIMENT))
    measured = _curve(table, table["form"], table["world_size"]).assign(
        y=table["latency"],
        low=table["latency_low"],
        high=table["latency_high"],
        sure=[Flag.OVERSUBSCRIBED not in flags for flags in table["flags"]],
        note=[f"limited by {kind}" if kind else "" for kind in table["binds"]],
    )
    modelled = pick(having(rows, EXPERIMENT, "forms"), "latency")
    modelled = modelled[modelled["provenance"] == Provenance.MODELLED]
    fair = with_cores(modelled)
    modelled = fair if len(fair) else modelled
    if len(modelled):  # from the most ranks that were measured, where the dashed line begins
        most = modelled["factor.world_size"].max()
        modelled = modelled[modelled["factor.world_size"] == most]
        details = pd.DataFrame(list(modelled["details"]), index=modelled.index)
        dashed = modelled.rename(columns=lambda name: name.removeprefix("factor."))
        dashed = _curve(dashed, details["form"], details["world_size"])
        dashed = dashed.assign(pred=modelled["estimate"], note="modelled", sure=True)
        measured["pred"] = measured["y"].where(measured["x"] == most)
        measured = pd.concat([measured, dashed], ignore_index=True)
    note = "95 % intervals. Hollow: more ranks than cores, no claim of speed. Dashed: cost model."
    return plot(
        measured,
        title,
        subtitle=[f"Slowest rank, {note}"],
        unit="Time per token (ms)",
        xunit="Ranks",
        log="xy",
        width=680,
    )


def _curve(table: pd.DataFrame, form: pd.Series, ranks: pd.Series) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "panel": _shapes(table),
            "series": form.str.replace("_", " "),
            "x": ranks.astype(int),
            **links(table),
        }
    )


def _shapes(table: pd.DataFrame) -> pd.Series:
    return "n = " + table["seq_len"].astype(int).map("{:,}".format) + ", " + table["dtype"]


def decode_shares(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Draw a bar per component of a token: the seven parts of tree attention and the wait."""
    title = "Where the time of a token goes"
    table = component_table(having(rows, EXPERIMENT, "forms"))
    if table.empty:
        return empty_chart(title, why_empty(rows, EXPERIMENT))
    for column in ("world_size", "seq_len"):
        table = table[table[column] == table[column].max()]
    table = table[table["dtype"] == table["dtype"].iloc[0]]
    data = pd.DataFrame(
        {
            "panel": table["form"].str.replace("_", " "),
            "series": table["component"].str.split(": ").str[-1],
            "part": table["component"].str.split(":").str[0],
            "x": table["ms"],
            "text": table["ms"].map(format_number) + " ms",
            **links(table, but="link_n"),
        }
    )
    return plot(
        data,
        f"{title}: {_shapes(table).iloc[0]}, {table['ranks'].iloc[0]} ranks",
        "bars",
        subtitle=["Ranks wait for each other before they communicate. Each part: slowest rank."],
        unit="Median over calls (ms)",
    )


def sharded_memory(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Draw a rank's peak memory over the sequence length: measured points, the plan dashed."""
    title = "Peak memory of a rank"
    peaks = pick(having(rows, EXPERIMENT, "world_size"), "peak_memory")
    peaks = peaks[peaks["scope"].str.endswith(" forward")]
    if peaks.empty:
        return empty_chart(title, why_empty(rows, EXPERIMENT))
    form = peaks["scope"].str.removesuffix(" forward").replace("dense", "flash")
    is_sharded = ~form.isin(["flash", "math"])
    ranks = peaks["factor.world_size"].where(is_sharded, 1).astype(int)
    measured = peaks["provenance"] == Provenance.MEASURED
    data = pd.DataFrame(
        {
            "series": form
            + ", "
            + ranks.astype(str)
            + " rank"
            + (ranks > 1).map({True: "s", False: ""}),
            "x": peaks["factor.seq_len"].astype(int),
            "y": (peaks["estimate"] / 1024).where(measured),
            "pred": peaks["predicted"].fillna(peaks["estimate"]) / 1024,
            **links(peaks),
        }
    )
    data = data[~is_sharded | (ranks == ranks.max())].sort_values(["series", "x"])
    return plot(
        data,
        title,
        subtitle=["Points: measured. Dashed: planned on tensors without data, at any length."],
        unit="Peak live memory (GiB)",
        xunit="Sequence length (tokens)",
        log="xy",
    )


@cached
def verdict(rows: pd.DataFrame) -> list[Claim]:
    """Say how attention scales, what limits it, and how much communication training exposes."""
    decoded = known(decode_table(rows), "latency")
    scaling, limits = [], []
    for about, group in _longest(decoded, "Decoding over {n} keys, {dtype}", "dtype"):
        several = group[group["world_size"] > 1]
        fair = with_cores(several)
        if several.empty:
            claim = Claim("Only one rank was measured", "", "set world_sizes: [1, 2]", about)
            scaling.append(claim)
        elif fair.empty:
            answer = "No speed is claimed: the ranks need more cores than this machine has"
            scaling.append(Claim(answer, "bytes and errors are valid", about=about))
        else:
            claim, alike = _scaling(fair, ONE_RANK, about)
            scaling.append(claim)
            limits.append(replace(_limit(alike.iloc[0]), about=about))
    whole = known(prefill_table(rows), "latency")
    whole = with_cores(whole[whole["form"] != "dense"]) if len(whole) else whole
    prefill = [
        _scaling(group, f"dense {group['direction'].iloc[0]}", about)[0]
        for about, group in _longest(whole, "Attention over {n} tokens, {direction}", "direction")
    ]
    found = [*scaling[:2], *limits[:1], *prefill[:1], *_training(rows)]
    nothing = Claim("Attention across ranks: not measured", advice="nano run quick distributed")
    return found or [nothing]


def _longest(table: pd.DataFrame, about: str, by: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """Give the longest sequence's lines for each value of a column, and what they are about."""
    for value, group in table.groupby(by, sort=False) if len(table) else ():
        n = group["seq_len"].max()
        yield about.format(n=f"{int(n):,}", **{by: value}), group[group["seq_len"] == n]


def _scaling(fair: pd.DataFrame, baseline: str, about: str) -> tuple[Claim, pd.DataFrame]:
    """Compare the fastest algorithm on the most ranks with one rank and with the others.

    Returns:
        The claim; and the fastest line with those that are not slower.
    """
    most = fair[fair["world_size"] == fair["world_size"].max()]
    most = most.sort_values("latency", kind="stable")
    best = most.iloc[0]
    most = most[(most["run_id"] == best["run_id"]) & (most["case_id"] == best["case_id"])]
    suffix = baseline.removeprefix("dense") if baseline != ONE_RANK else ""
    ties = not_slower(best, (most["form"] + suffix)[1:])
    alike = most[(most["form"] + suffix).isin(ties) | (most["form"] == best["form"])]
    form, ranks = best["form"].replace("_", " "), f"{best['ranks']} ranks"
    rivals = {figure.name for figure in best["speed_up_over"]} - {baseline}
    which = f"{form} is the fastest algorithm" if rivals else f"{form} is the only algorithm"
    if ties:
        names = listed(name.replace("_", " ") for name in alike["form"])
        which = f"no clear difference between {names} (the intervals overlap)"
    gain = over(best, baseline)
    if gain is None:
        answer, scale = f"On {ranks}, {which}", "one rank: not measured"
    elif gain.against(ONE) is Order.ALIKE:
        answer = f"No clear difference between {ranks} and one rank (the intervals overlap)"
        scale = f"{times(best, 'gain')} the speed of one rank; {which}"
    else:
        answer = f"{ranks} are {times(best, 'gain')} as fast as one rank"
        scale = f"{percent(best, 'efficiency', math.inf)} of perfect scaling; {which}"
    claim = Claim(
        answer,
        f"{form} takes {in_ms(best, 'latency')}, {scale}",
        about=about,
        compared=gains(best, form, among=rivals | {baseline}),
    )
    return claim, alike


def _limit(best: pd.Series) -> Claim:
    """Say what limits a decoded token, if the intervals of its parts tell."""
    if best["binds"] is None:
        return Claim("Parts of a token: not measured")
    figures = part_figures(best)
    ms = ", ".join(f"{kind} {in_ms(best, kind)}" for kind in KINDS)
    compute, sending = figures["compute"], figures["sending"]
    within_sending = comparing(figures["wait"], figures["communication"])
    if best["binds"] == UNCLEAR:
        answer = "No clear difference between what limits a token (the intervals overlap)"
        is_below = compute.against(sending) is Order.BELOW  # then what overlaps is within sending
        compared = within_sending if is_below else comparing(compute, sending)
        return Claim(answer, ms, "raise budget_s", compared=compared)
    if best["binds"] == "compute":
        compared = comparing(compute, sending)
        efficiency = Figure.of(best, "efficiency")
        if efficiency.against(_SCALES) is not Order.ABOVE:
            return Claim("Compute-bound", ms, compared=compared)
        compared += comparing(efficiency, _SCALES)
        return Claim("Compute-bound", ms, "add ranks that have their own cores", compared=compared)
    compared = comparing(sending, compute) + within_sending
    if best["binds"] == "wait":
        advice = "give each rank a core and an equal shard"
        return Claim("Limited by waiting", ms, advice, compared=compared)
    advice = "use longer sequences per rank, or fewer ranks"
    return Claim("Communication-bound", ms, advice, compared=compared)


def _training(rows: pd.DataFrame) -> Iterator[Claim]:
    """Say how much of a training step is communication that computing does not hide."""
    table = known(training_table(rows), "exposed")
    for _, row in with_cores(table).iterrows() if len(table) else ():
        exposed, zero = Figure.of(row, "exposed"), Figure.exactly(0.0)
        share = min(max(row["exposed"] / row["latency"], 0.0), 1.0)  # a difference may be negative
        answer = f"{in_ms(row, 'exposed')} of a step ({share:.0%}) is exposed communication"
        if exposed.against(zero) is not Order.ABOVE:
            answer += ": no clear difference from zero"
        sure = f"{percent(row, 'efficiency', math.inf)} of perfect scaling"
        about = f"Training {row['name']} on {row['ranks']} ranks with {row['strategy']}"
        yield Claim(
            answer,
            sure if pd.notna(row["efficiency"]) else "",
            about=about,
            compared=comparing(exposed, zero),
        )


SECTION = Section(
    EXPERIMENT,
    "How well does attention scale across ranks?",
    {
        "decode_scaling": decode_scaling,
        "decode_shares": decode_shares,
        "sharded_memory": sharded_memory,
    },
    {
        "Decoding": CaseTable(decode_table, DECODE_COLUMNS),
        "Components of a call": CaseTable(component_table, COMPONENT_COLUMNS),
        "Whole sequences": CaseTable(prefill_table, PREFILL_COLUMNS),
        "Training": CaseTable(training_table, TRAINING_COLUMNS),
    },
    verdict,
)
