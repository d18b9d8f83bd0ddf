"""Decoding across ranks: what each form takes, where its time goes, what sending costs, and what more ranks would do."""

from __future__ import annotations

import math
from dataclasses import replace

import altair as alt
import pandas as pd

from nanolib.experiments.distributed.view.decode_tables import (
    EXPERIMENT,
    KINDS,
    ONE_RANK,
    decode_table,
    fair,
    over_nodes,
    part_figures,
    ranks_words,
)
from nanolib.measurement import Flag, Provenance, format_number
from nanolib.report.claim import Claim, Figure, Order, comparing
from nanolib.report.in_turns import ONE, gains, not_slower, over
from nanolib.report.linking import link_columns, links
from nanolib.report.overview import having, listed, pick, why_empty
from nanolib.report.plot import plot
from nanolib.report.tables import in_ms, known, percent, times
from nanolib.report.theme import empty_chart


def decode_scaling(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Time of a token over the number of ranks: measured with intervals; what the cost model says of more ranks dashed."""
    title = "Time per token over ranks"
    table = known(decode_table(rows), "latency")
    if table.empty:
        return empty_chart(title, why_empty(rows, EXPERIMENT))
    table = _with_one_rank(table)
    data = pd.DataFrame(
        {
            "panel": _panel_names(table),
            "series": table["form"].str.replace("_", " "),
            "x": table["world_size"].astype(int),
            "y": table["latency"],
            "low": table["latency_low"],
            "high": table["latency_high"],
            "sure": [Flag.OVERSUBSCRIBED not in flags for flags in table["flags"]],
            "note": table["bound"].fillna("").radd("bound by ").where(table["bound"].notna(), ""),
            **links(table),
        }
    )
    modelled = _modelled(rows)
    if len(modelled):  # the dashed line begins at the last point that was measured
        keys = ["panel", "series", "x"]
        joints = data.merge(modelled.rename(columns={"from": "x"})[keys].drop_duplicates(), on=keys)
        joints = joints.assign(pred=joints["y"])[[*keys, "pred", *link_columns(data)]]
        data = pd.concat(
            [data, joints, modelled.rename(columns={"ranks": "x"}).drop(columns="from")],
            ignore_index=True,
        )
        data["sure"] = data["sure"].fillna(True).astype(bool)
        data["note"] = data["note"].fillna("modelled")
    return plot(
        data,
        title,
        subtitle=[
            "Slowest rank, 95 % intervals. Hollow: more ranks than cores, no claim of speed. Dashed: the cost model."
        ],
        unit="Time per token (ms)",
        xunit="Ranks",
        log="xy",
        width=680,
    )


def _panel_names(table: pd.DataFrame) -> pd.Series:
    return over_nodes(
        "n = " + table["seq_len"].astype(int).map("{:,}".format) + ", " + table["dtype"],
        table["nodes"],
    )


def _with_one_rank(table: pd.DataFrame) -> pd.DataFrame:
    """One rank, which is on one machine, with the ranks over each number of machines."""
    alone, several = table[table["world_size"] == 1], table[table["world_size"] > 1]
    places = several[["seq_len", "dtype", "nodes"]].drop_duplicates()
    placed = alone.drop(columns="nodes").merge(places, how="left").fillna({"nodes": 1})
    return pd.concat([placed, several], ignore_index=True)


def _modelled(rows: pd.DataFrame) -> pd.DataFrame:
    """What the model says of more ranks, from the largest number measured that has a core each."""
    chosen = pick(having(rows, EXPERIMENT, "forms"), "latency")
    chosen = chosen[chosen["provenance"] == Provenance.MODELLED]
    if chosen.empty:
        return pd.DataFrame()
    chosen = chosen.assign(**{"factor.nodes": chosen.get("factor.nodes", 1)})
    data = pd.DataFrame(
        {
            "panel": _panel_names(chosen.rename(columns=lambda name: name.removeprefix("factor."))),
            "series": [details["form"].replace("_", " ") for details in chosen["details"]],
            "ranks": [details["world_size"] for details in chosen["details"]],
            "pred": chosen["estimate"],
            "from": chosen["factor.world_size"].astype(int),
            **links(chosen),
        }
    )
    data = data.loc[(fair(chosen) if len(fair(chosen)) else chosen).index]
    return data[data["from"] == data.groupby("panel")["from"].transform("max")]


def decode_shares(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Where the time of a token goes, by algorithm: compute, wait, communication."""
    table = known(decode_table(rows), "latency")
    table = table[table["world_size"] == table["world_size"].max()] if len(table) else table
    if table.empty:
        return empty_chart("Where the time of a token goes", why_empty(rows, EXPERIMENT))
    table = table.assign(
        panel="n = " + table["seq_len"].astype(int).map("{:,}".format) + ", " + table["dtype"],
        series=table["form"].str.replace("_", " "),
        text=table["latency"].map(format_number) + " ms",
        **links(table),
    )
    kept = ["panel", "series", "text", *link_columns(table)]
    return plot(
        table.melt(kept, list(KINDS), "part", "x"),
        f"Where the time of a token goes on {table['ranks'].iloc[0]} ranks",
        "bars",
        subtitle=[
            "Timed part by part: the ranks wait for each other before they communicate. At the right: the whole call."
        ],
        unit="Median over calls, each part on its slowest rank (ms)",
    )


def decode_words(rows: pd.DataFrame) -> list[Claim]:
    """Which form, how well it scales, and what bounds it; with one remedy."""
    table = known(decode_table(rows), "latency")
    claims = []
    for (seq_len, dtype), group in (
        table.groupby(["seq_len", "dtype"], sort=False) if len(table) else []
    ):
        about = f"Decoding over {int(seq_len):,} keys, {dtype}"
        several = group[group["world_size"] > 1]
        with_cores = fair(several)
        if several.empty:
            claims.append(
                Claim("only one rank was measured", advice="world_sizes: [1, 2]", about=about)
            )
            continue
        if with_cores.empty:
            answer = "all ranks together want more cores than there are"
            claims.append(Claim(answer, "bytes and errors are results, speed is not", about=about))
            continue
        most = with_cores[with_cores["world_size"] == with_cores["world_size"].max()]
        most = most.sort_values("latency", kind="stable")
        best = most.iloc[0]
        tied = [
            best["form"],
            *not_slower(best, (form for form in most["form"] if form != best["form"])),
        ]
        claims += [_fastest(best, tied, about), replace(_bound(most, tied), about=about)]
    return claims


def _fastest(best: pd.Series, tied: list[str], about: str) -> Claim:
    """How far the most ranks that have cores scale, by the fastest form, and which forms are as fast."""
    form, ranks = best["form"].replace("_", " "), ranks_words(best)
    one, others = (
        over(best, ONE_RANK),
        gains(best, form, among={figure.name for figure in best["speed_up_over"]} - {ONE_RANK}),
    )
    takes = f"{form} takes {in_ms(best, 'latency')} per token"
    if len(tied) > 1:
        which = f"no clear difference between {listed(name.replace('_', ' ') for name in tied)}"
    else:
        which = f"{form} is the fastest algorithm" if others else f"{form} was measured alone"
    if one is None:
        return Claim(
            f"on {ranks} {which}",
            f"{takes}; one rank was not measured",
            about=about,
            compared=others,
        )
    answer = f"{ranks} are {times(best, 'gain')} as fast as one rank"
    if one.against(ONE) is Order.ALIKE:
        answer = f"no clear difference between {ranks} and one rank"
    more = (
        " (more than 100% where a rank's part fits its cache)"
        if best["efficiency_high"] > 1
        else ""
    )
    sure = f"{takes}, {percent(best, 'efficiency', math.inf)} of perfect scaling{more}; "
    sure += f"one rank takes {in_ms(best, 'alone')}; {which}"
    return Claim(answer, sure, about=about, compared=gains(best, form, among={ONE_RANK}) + others)


_SCALES = 0.8  # of perfect scaling: from here on one more rank is worth its cores


def _bound(most: pd.DataFrame, tied: list[str]) -> Claim:
    """What bounds the first form where the intervals of its parts tell; as a remedy only a form that is not slower."""
    found = most.set_index("form", drop=False).loc[tied]
    best = found.iloc[0]
    figures = part_figures(best, best["form"], best["ranks"])
    compute, wait, communication, sending = (figures[name] for name in (*KINDS, "sending"))
    parts = {kind: best[kind] for kind in KINDS}
    ms = ", ".join(f"{kind} {format_number(value)} ms" for kind, value in parts.items())
    if best["binds"] == "compute":
        compared = comparing(compute, sending)
        efficiency, scales = Figure.of(best, "efficiency"), Figure.exactly(_SCALES)
        if efficiency.against(scales) is Order.ABOVE:
            advice = "more ranks would help as long as each has cores of its own"
            return Claim(
                "compute-bound", ms, advice, compared=compared + comparing(efficiency, scales)
            )
        known = pd.notna(best["efficiency"])
        why = (
            f"only {best['efficiency']:.0%} of perfect scaling was reached"
            if known
            else "one rank was not measured"
        )
        sure = f"{ms}, and {why}: nothing says that more ranks would help"
        return Claim("compute-bound", sure, "one rank with as many threads", compared=compared)
    if best["binds"] not in KINDS:
        sure = f"{ms}: the intervals of computing and of wait + communication overlap"
        return Claim("what bounds it cannot be told", sure, "raise budget_s")
    compared = comparing(sending, compute) + comparing(wait, communication)
    if best["binds"] == "wait":
        sure = f"{ms}: ranks are not ready at the same time"
        return Claim(
            "bound by waiting", sure, "a core for each, or equal shards", compared=compared
        )
    fewest = found.sort_values("rounds").iloc[0]
    if fewest["rounds"] < best["rounds"]:
        advice = f"{fewest['form'].replace('_', ' ')} meets {int(fewest['rounds'])} time(s)"
    else:
        advice = "longer sequences per rank, or fewer ranks"
    share = parts["communication"] / sum(parts.values())
    return Claim("communication-bound", f"{ms}, {share:.0%}", advice, compared=compared)
