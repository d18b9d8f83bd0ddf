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
    over_ranks,
    part_figures,
    ranks_words,
    with_ranks,
)
from nanolib.measurement import Flag, Provenance, format_number
from nanolib.report.claim import Claim, Figure, Order, comparing
from nanolib.report.drawing import HEIGHT, WIDTH, colour_and_shape, coloured
from nanolib.report.frame import Drawn, framed, panels, tooltips, with_interval
from nanolib.report.in_turns import ONE, gains, not_slower, over
from nanolib.report.linking import links
from nanolib.report.overview import having, listed, pick
from nanolib.report.palette import PALETTE
from nanolib.report.tables import drawn_ends, in_ms, known, percent, times


@framed("Decoding over a sharded cache: time per token", EXPERIMENT)
def decode_scaling(rows: pd.DataFrame) -> Drawn | None:
    """Time of a token over the number of ranks: measured with intervals; what the cost model says of more ranks dashed."""
    table = known(decode_table(rows), "latency")
    if table.empty:
        return None
    table = _beside_several(table)
    measured = pd.DataFrame(
        {
            "panel": _panel_names(table),
            "form": table["form"].str.replace("_", " "),
            "ranks": table["world_size"].astype(int),
            "ms": table["latency"],
            **drawn_ends(table, "latency"),
            "bound": table["bound"].fillna(""),
            "oversubscribed": [Flag.OVERSUBSCRIBED.value in flags for flags in table["flags"]],
            **links(table),
        }
    )
    modelled = _modelled(rows)
    colour, shape = colour_and_shape("form", "Algorithm", measured["form"])
    ticks = sorted({*measured["ranks"], *(modelled["ranks"] if len(modelled) else [])})
    x = alt.X(
        "ranks:Q",
        title="Ranks",
        scale=alt.Scale(type="log", base=2, domain=[min(ticks) / 1.2, max(ticks) * 1.2], nice=False),
        axis=alt.Axis(values=ticks, format="d", grid=False),
    )
    y = {"title": "Time per token (ms)", "scale": alt.Scale(type="log", nice=False, padding=12)}

    def draw(part: pd.DataFrame) -> alt.TopLevelMixin:
        base = alt.Chart(part).encode(x=x, color=colour)
        tooltip = tooltips("form bound oversubscribed", "ranks ms low high", form="algorithm")
        layers = over_ranks(base, ("ms", "low", "high"), y, colour, shape=shape, tooltip=tooltip)
        more = modelled[modelled["panel"] == part["panel"].iloc[0]] if len(modelled) else modelled
        if len(more):
            joint = part[part["ranks"] == more["from"].iloc[0]][["panel", "form", "ranks", "ms", *links(table)]]
            dashed = alt.Chart(pd.concat([joint, more], ignore_index=True)).mark_line(
                strokeDash=[4, 4], strokeWidth=1.4
            )
            tooltip = tooltips("form", "ranks ms", form="algorithm")
            layers.insert(0, dashed.encode(x=x, color=colour, y=alt.Y("ms:Q", **y), tooltip=tooltip))
        return alt.layer(*layers, width=WIDTH, height=HEIGHT)

    subtitle = "Slowest rank, 95 % intervals. Hollow: more ranks than cores, no claim of speed. Dashed: the cost model (model)."
    return panels(measured, draw), subtitle


def _panel_names(table: pd.DataFrame) -> pd.Series:
    return over_nodes("n = " + table["seq_len"].astype(int).map("{:,}".format) + ", " + table["dtype"], table["nodes"])


def _beside_several(table: pd.DataFrame) -> pd.DataFrame:
    """One rank, which is on one machine, beside the ranks over each number of machines."""
    alone, several = table[table["world_size"] == 1], table[table["world_size"] > 1]
    beside = several[["seq_len", "dtype", "nodes"]].drop_duplicates()
    placed = alone.drop(columns="nodes").merge(beside, how="left").fillna({"nodes": 1})
    return pd.concat([placed, several], ignore_index=True)


def _modelled(rows: pd.DataFrame) -> pd.DataFrame:
    """What the model says of more ranks, from the largest number measured that has a core each."""
    chosen = pick(having(rows, EXPERIMENT, "forms"), "latency")
    chosen = chosen[chosen["provenance"] == Provenance.MODELLED.value]
    if chosen.empty:
        return pd.DataFrame()
    chosen = chosen.assign(**{"factor.nodes": chosen.get("factor.nodes", 1)})
    data = pd.DataFrame(
        {
            "panel": _panel_names(chosen.rename(columns=lambda name: name.removeprefix("factor."))),
            "form": [details["form"].replace("_", " ") for details in chosen["details"]],
            "ranks": [details["world_size"] for details in chosen["details"]],
            "ms": chosen["estimate"],
            "from": chosen["factor.world_size"],
            **links(chosen),
        }
    )
    data = data.loc[(fair(chosen) if len(fair(chosen)) else chosen).index]
    return data[data["from"] == data.groupby("panel")["from"].transform("max")]


@framed("Where the time of a token goes", EXPERIMENT)
def decode_shares(rows: pd.DataFrame) -> Drawn | None:
    """Where the time of a token goes, by form: compute, wait, communication, stacked."""
    table = known(decode_table(rows), "latency")
    if table.empty:
        return None
    lines = [
        {
            "panel": f"Ranks: {row['ranks']}, n = {int(row['seq_len']):,}, {row['dtype']}",
            "form": row["form"].replace("_", " "),
            "kind": kind,
            "place": place,
            "ms": row[kind],
            "link_run": row["run_id"][:8],
            "link_n": row["seq_len"],
        }
        for _, row in table.iterrows()
        for place, kind in enumerate(KINDS)
    ]
    data = pd.DataFrame(lines)
    colour = coloured("kind", "Part", dict(zip(KINDS, PALETTE[:3], strict=True)), sort=list(KINDS))
    words = "Median over calls, each part on its slowest rank (ms)"

    def draw(part: pd.DataFrame) -> alt.TopLevelMixin:
        bars = alt.Chart(part, width=WIDTH, height=26 * data["form"].nunique()).mark_bar()
        y, x = alt.Y("form:N", title=None, sort=None), alt.X("ms:Q", title=words, stack="zero")
        tooltip = tooltips("form kind", "ms", form="algorithm")
        return bars.encode(y=y, x=x, color=colour, order=alt.Order("place:Q"), tooltip=tooltip)

    subtitle = "Timed part by part: the ranks wait for each other before they communicate, so that a straggler is no communication."
    return panels(data, draw, columns=2), subtitle


_BYTES = "datum.value >= 1048576 ? datum.value / 1048576 + ' MiB' : datum.value / 1024 + ' KiB'"


@framed("What sending costs here", why="no collective was measured: that takes at least two ranks")
def link_model(rows: pd.DataFrame) -> Drawn | None:
    """Collectives over bytes: measured, and the cost per message and byte that was fitted to them."""
    rows = having(rows, EXPERIMENT, "forms")
    sent = pick(rows, "latency")
    sent = sent[[isinstance(d, dict) and "collective" in d for d in sent["details"]]] if len(sent) else sent
    if sent.empty:
        return None
    details = list(sent["details"])
    data = pd.DataFrame(
        {
            "panel": "Ranks: " + with_ranks(sent.rename(columns=lambda name: name.removeprefix("factor.")))["ranks"],
            "collective": [d["collective"].replace("_", " ") for d in details],
            "payload": [d["payload"] for d in details],
            "ms": sent["estimate"],
            **drawn_ends(sent),
            "predicted": sent["predicted"],
            "case": sent["case_id"],
            **links(sent, but="link_n"),  # it sends bytes, of any length
        }
    )
    data = data[data["case"].isin(data.groupby("panel")["case"].first())]  # one fit per number of ranks
    colour, shape = colour_and_shape("collective", "Collective", data["collective"])
    x = alt.X("payload:Q", title="Bytes that a rank holds", scale=alt.Scale(type="log", base=2, nice=False, padding=12))
    x = x.axis(labelExpr=_BYTES, values=sorted(set(data["payload"])), grid=False, labelOverlap=False)
    y = {"title": "Time (ms)", "scale": alt.Scale(type="log", nice=False, padding=12)}
    tooltip = tooltips("collective", "payload ms low high predicted")

    def draw(part: pd.DataFrame) -> alt.TopLevelMixin:
        base = alt.Chart(part).encode(x=x, color=colour)
        dashed = base.mark_line(strokeDash=[4, 4], strokeWidth=1.4).encode(y=alt.Y("predicted:Q", **y))
        marks = with_interval(base, "y", ("ms", "low", "high"), y, size=55, shape=shape, tooltip=tooltip)
        return alt.layer(dashed, *marks, width=WIDTH, height=HEIGHT)

    return panels(data, draw), _link_words(rows) or "Points: measured, slowest rank."


def _link_words(rows: pd.DataFrame) -> str:
    """The fit with its largest residual, for the largest number of ranks that has a core each."""
    found = pick(rows, "link_latency")
    if found.empty:
        return ""
    row = (fair(found) if len(fair(found)) else found).iloc[-1]
    speed = pick(rows[rows["case_id"] == row["case_id"]], "link_bandwidth", row["scope"])
    rate = f", then {speed['estimate'].iloc[0] / 1e9:.2f} GB/s" if len(speed) else ""
    largest = row["details"]["largest_residual"]
    return f"Dashed: the model, {row['estimate'] * 1e3:.0f} µs per message{rate} ({row['scope']}); off by up to {largest:.0%}."


def decode_words(rows: pd.DataFrame) -> list[Claim]:
    """Which form, how well it scales, and what bounds it; with one remedy."""
    table = known(decode_table(rows), "latency")
    claims = []
    for (seq_len, dtype), group in table.groupby(["seq_len", "dtype"], sort=False) if len(table) else []:
        about = f"Decoding over {int(seq_len):,} keys, {dtype}"
        several = group[group["world_size"] > 1]
        with_cores = fair(several)
        if several.empty:
            claims.append(Claim("only one rank was measured", advice="world_sizes: [1, 2]", about=about))
            continue
        if with_cores.empty:
            answer = "all ranks together want more cores than there are"
            claims.append(Claim(answer, "bytes and errors are results, speed is not", about=about))
            continue
        most = with_cores[with_cores["world_size"] == with_cores["world_size"].max()]
        most = most.sort_values("latency", kind="stable")
        best = most.iloc[0]
        tied = [best["form"], *not_slower(best, (form for form in most["form"] if form != best["form"]))]
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
        return Claim(f"on {ranks} {which}", f"{takes}; one rank was not measured", about=about, compared=others)
    answer = f"{ranks} are {times(best, 'gain')} as fast as one rank"
    if one.against(ONE) is Order.ALIKE:
        answer = f"no clear difference between {ranks} and one rank"
    more = " (more than 100% where a rank's part fits its cache)" if best["efficiency_high"] > 1 else ""
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
            return Claim("compute-bound", ms, advice, compared=compared + comparing(efficiency, scales))
        known = pd.notna(best["efficiency"])
        why = f"only {best['efficiency']:.0%} of perfect scaling was reached" if known else "one rank was not measured"
        sure = f"{ms}, and {why}: nothing says that more ranks would help"
        return Claim("compute-bound", sure, "one rank with as many threads", compared=compared)
    if best["binds"] not in KINDS:
        sure = f"{ms}: the intervals of computing and of wait + communication overlap"
        return Claim("what bounds it cannot be told", sure, "raise budget_s")
    compared = comparing(sending, compute) + comparing(wait, communication)
    if best["binds"] == "wait":
        sure = f"{ms}: ranks are not ready at the same time"
        return Claim("bound by waiting", sure, "a core for each, or equal shards", compared=compared)
    fewest = found.sort_values("rounds").iloc[0]
    if fewest["rounds"] < best["rounds"]:
        advice = f"{fewest['form'].replace('_', ' ')} meets {int(fewest['rounds'])} time(s)"
    else:
        advice = "longer sequences per rank, or fewer ranks"
    share = parts["communication"] / sum(parts.values())
    return Claim("communication-bound", f"{ms}, {share:.0%}", advice, compared=compared)


# What the report draws of it, in this order.
CHARTS = {
    "decode_scaling": decode_scaling,
    "decode_shares": decode_shares,
    "link_model": link_model,
}
