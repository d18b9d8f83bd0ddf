"""What a person sees of ranks: scaling, the parts of a token, memory, and the findings."""

from __future__ import annotations

import math
from collections.abc import Iterator

import altair as alt
import pandas as pd

from nanolib.experiments.distributed.tables import (
    COMPONENT_COLUMNS,
    DECODE_COLUMNS,
    EXPERIMENT,
    KINDS,
    PREFILL_COLUMNS,
    TRAINING_COLUMNS,
    UNCLEAR,
    component_table,
    decode_table,
    limit_of,
    prefill_table,
    training_table,
    with_cores,
)
from nanolib.measurement import Flag, Provenance
from nanolib.numbers import format_number
from nanolib.report.filters import links
from nanolib.report.finding import Estimate, Finding, Order, comparing
from nanolib.report.in_turns import ONE, gains, not_slower
from nanolib.report.overview import cached, join_words, pick, rows_with_factor, why_empty
from nanolib.report.plot import plot
from nanolib.report.section import CaseTable, Section
from nanolib.report.tables import drop_missing, in_ms, percent, times
from nanolib.report.theme import empty_chart

_SCALES = Estimate.exact(0.8)  # of perfect scaling: from here on one more rank is worth its cores
# What limits a token -> the answer, and what to do.
_LIMITS = {
    "": ("Parts of a token: not measured", ""),
    UNCLEAR: (
        "No clear difference between what limits a token (the intervals overlap)",
        "raise budget_s",
    ),
    "compute": ("Compute-bound", ""),
    "wait": ("Limited by waiting", "give each rank a core and an equal shard"),
    "communication": (
        "Communication-bound",
        "use longer sequences per rank, or fewer ranks",
    ),
}


def decode_scaling(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Draw the time of a token over ranks: measured with intervals, the cost model dashed."""
    title = "Time per token over ranks"
    table = drop_missing(decode_table(rows), "latency")
    if table.empty:
        return empty_chart(title, why_empty(rows, EXPERIMENT))
    measured = table.rename(columns={"latency": "y", "latency_low": "low", "latency_high": "high"})
    measured["sure"] = [Flag.OVERSUBSCRIBED not in flags for flags in table["flags"]]
    measured["note"] = table["binds"].radd("limited by ").where(table["binds"] != "", "")
    modelled = pick(rows_with_factor(rows, EXPERIMENT, "algorithms"), "latency")
    modelled = modelled[modelled["provenance"] == Provenance.MODELLED]
    modelled = with_cores(modelled) if len(with_cores(modelled)) else modelled
    # from the most ranks that were measured, where the dashed line begins
    most = modelled["factor.world_size"].max()
    modelled = modelled[modelled["factor.world_size"] == most]
    measured["pred"] = measured["y"].where(measured["world_size"] == most)
    dashed = modelled.rename(columns=lambda name: name.removeprefix("factor."))
    at = pd.DataFrame(
        [*modelled["details"]], index=modelled.index, columns=["algorithm", "world_size"]
    )
    dashed = dashed.assign(**at, pred=modelled["estimate"], note="modelled", sure=True)
    both = pd.concat([measured, dashed], ignore_index=True)
    data = both.reindex(columns=["y", "low", "high", "pred", "note", "sure"]).assign(
        panel=_shapes(both),
        series=both["algorithm"].str.replace("_", " "),
        x=both["world_size"].astype(int),
        **links(both),
    )
    note = "95 % intervals. Hollow: more ranks than cores, no claim of speed. Dashed: cost model."
    return plot(
        data if len(dashed) else data.drop(columns="pred"),
        title,
        subtitle=[f"Slowest rank, {note}"],
        unit="Time per token (ms)",
        xunit="Ranks",
        log="xy",
        width=680,
    )


def _shapes(table: pd.DataFrame) -> pd.Series:
    return "n = " + table["seq_len"].astype(int).map("{:,}".format) + ", " + table["dtype"]


def decode_shares(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Draw a bar per component of a token: the seven parts of tree attention and the wait."""
    title = "Where the time of a token goes"
    table = component_table(rows_with_factor(rows, EXPERIMENT, "algorithms"))
    if table.empty:
        return empty_chart(title, why_empty(rows, EXPERIMENT))
    for column in ("world_size", "seq_len"):
        table = table[table[column] == table[column].max()]
    table = table[table["dtype"] == table["dtype"].iloc[0]]
    data = pd.DataFrame(
        {
            "panel": table["algorithm"].str.replace("_", " "),
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
    peaks = pick(rows_with_factor(rows, EXPERIMENT, "world_size"), "peak_memory")
    peaks = peaks[peaks["scope"].str.endswith(" forward")]
    if peaks.empty:
        return empty_chart(title, why_empty(rows, EXPERIMENT))
    algorithm = peaks["scope"].str.removesuffix(" forward").replace("dense", "flash")
    is_whole = algorithm.isin(["flash", "math"])
    ranks = peaks["factor.world_size"]
    several = ranks.where(~is_whole, 1).max()
    data = pd.DataFrame(
        {
            "series": algorithm + is_whole.map({True: ", 1 rank", False: f", {several:.0f} ranks"}),
            "x": peaks["factor.seq_len"].astype(int),
            "y": (peaks["estimate"] / 1024).where(peaks["provenance"] == Provenance.MEASURED),
            "pred": peaks["predicted"].fillna(peaks["estimate"]) / 1024,
            **links(peaks),
        }
    )
    return plot(
        data[is_whole | (ranks == several)].sort_values(["series", "x"]),
        title,
        subtitle=["Points: measured. Dashed: planned on tensors without data, at any length."],
        unit="Peak live memory (GiB)",
        xunit="Sequence length (tokens)",
        log="xy",
    )


@cached
def verdict(rows: pd.DataFrame) -> list[Finding]:
    """Say how attention scales, what limits it, and how much communication training exposes."""
    decoded = drop_missing(decode_table(rows), "latency")
    scaling, limits = [], []
    for about, group in _longest(decoded, "Decoding over {n} keys, {by}", "dtype"):
        several = group[group["world_size"] > 1]
        fair = with_cores(several)
        if several.empty:
            only = "Only one rank was measured"
            scaling.append(Finding(only, next_step="set world_sizes: [1, 2]", about=about))
        elif fair.empty:
            answer = "No speed is claimed: the ranks need more cores than this machine has"
            scaling.append(Finding(answer, "bytes and errors are valid", about=about))
        else:
            fastest = _fastest(fair)
            scaling.append(_scaling(fastest, about))
            limits.append(_limit(fastest.iloc[0], about))
    whole = drop_missing(prefill_table(rows), "latency")
    whole = with_cores(whole[whole["algorithm"] != "dense"]) if len(whole) else whole
    prefill = [
        _scaling(_fastest(group), about)
        for about, group in _longest(whole, "Attention over {n} tokens, {by}", "direction")
    ]
    found = [*scaling[:2], *limits[:1], *prefill[:1], *_training(rows)]
    nothing = Finding(
        "Attention across ranks: not measured", next_step="nano run quick distributed"
    )
    return found or [nothing]


def _longest(table: pd.DataFrame, about: str, by: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """Give the longest sequence's lines for each value of a column, and what they are about."""
    for value, group in table.groupby(by, sort=False) if len(table) else ():
        n = int(group["seq_len"].max())
        yield about.format(n=f"{n:,}", by=value), group[group["seq_len"] == n]


def _fastest(fair: pd.DataFrame) -> pd.DataFrame:
    """Take the launch of the fastest call on the most ranks, the fastest first."""
    most = fair[fair["world_size"] == fair["world_size"].max()]
    most = most.sort_values("latency", kind="stable")
    best = most.iloc[0]
    return most[(most["run_id"] == best["run_id"]) & (most["case_id"] == best["case_id"])]


def _scaling(lines: pd.DataFrame, about: str) -> Finding:
    """Compare the fastest algorithm with one rank and with the others of its launch."""
    best = lines.iloc[0]
    algorithm, ranks = best["algorithm"].replace("_", " "), f"{best['ranks']} ranks"
    rivals = {figure.name for figure in best["speed_up_over"]} - {best["gain_baseline"]}
    which = f"{algorithm} is the {'fastest' if rivals else 'only'} algorithm"
    if ties := not_slower(best, lines["call"]):
        names = lines.loc[lines["call"].isin([best["call"], *ties]), "algorithm"]
        names = join_words(names.str.replace("_", " "))
        which = f"no clear difference between {names} (the intervals overlap)"
    if pd.isna(best["gain"]):
        answer, scale = f"On {ranks}, {which}", "one rank: not measured"
    elif Estimate.of(best, "gain").compare_to(ONE) is Order.NO_DIFFERENCE:
        answer = f"No clear difference between {ranks} and one rank (the intervals overlap)"
        scale = f"{times(best, 'gain')} the speed of one rank; {which}"
    else:
        answer = f"{ranks} are {times(best, 'gain')} as fast as one rank"
        scale = f"{percent(best, 'efficiency', math.inf)} of perfect scaling; {which}"
    evidence = f"{algorithm} takes {in_ms(best, 'latency')}, {scale}"
    return Finding(answer, evidence, about=about, compared=gains(best, algorithm))


def _limit(best: pd.Series, about: str) -> Finding:
    """Say what limits a decoded token, if the intervals of its parts tell."""
    kind, compared = limit_of(best)
    answer, next_step = _LIMITS[kind]
    ms = ", ".join(f"{part} {in_ms(best, part)}" for part in KINDS) if kind else ""
    scales = comparing(Estimate.of(best, "efficiency"), _SCALES)
    if kind == "compute" and scales[0][1] is Order.ABOVE:
        next_step, compared = "add ranks that have their own cores", compared + scales
    return Finding(answer, ms, next_step, about, compared)


def _training(rows: pd.DataFrame) -> Iterator[Finding]:
    """Say how much of a training step is communication that computing does not hide."""
    table = drop_missing(training_table(rows), "exposed")
    for _, row in with_cores(table).iterrows() if len(table) else ():
        compared = comparing(Estimate.of(row, "exposed"), Estimate.exact(0.0))
        share = min(max(row["exposed"] / row["latency"], 0.0), 1.0)  # a difference may be negative
        answer = f"{in_ms(row, 'exposed')} of a step ({share:.0%}) is exposed communication"
        if compared[0][1] is not Order.ABOVE:
            answer += ": no clear difference from zero"
        scale = f"{percent(row, 'efficiency', math.inf)} of perfect scaling"
        evidence = scale if pd.notna(row["efficiency"]) else ""
        about = f"Training {row['name']} on {row['ranks']} ranks with {row['strategy']}"
        yield Finding(answer, evidence, about=about, compared=compared)


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
