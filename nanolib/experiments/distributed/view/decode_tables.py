"""Decoding over a sharded cache as tables: a line per algorithm, and its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from nanolib.measurement import Flag
from nanolib.report.claim import Figure, Order
from nanolib.report.in_turns import over, with_speed_ups
from nanolib.report.overview import cached, having, pick
from nanolib.report.tables import CASE, Column, base, filled, titles, with_state

EXPERIMENT = "distributed"
KINDS = ("compute", "wait", "communication")
ONE_RANK = "one rank"  # attends to the whole sequence while the others wait
SENT = (
    Column("rounds", "", "rounds"),
    Column("sent", "Sent, B", "wire_bytes", method="formula"),
    Column("counted", "", "wire_bytes", method="interface"),
    Column("relative_error", "", "relative_error"),
)
_DECODE = (
    Column("ranks", "Ranks"),
    Column("seq_len", "Seq len"),
    Column("form", "Algorithm"),
    Column("latency", "Token, ms [95 %]", "latency", "", interval=True),
    *(
        Column(kind, f"{kind.capitalize()}, ms [95 %]", "part_time", kind, interval=True)
        for kind in KINDS
    ),
    Column("critical", "", "time_share", KINDS[0], detail="rank"),
    *(Column(f"{kind}_share", "", "time_share", kind, interval=True) for kind in KINDS),
    Column("efficiency", "Efficiency [95 %]"),
    *SENT,
    Column("state", "State"),
)
DECODE_COLUMNS = titles(_DECODE)
COMPONENT_COLUMNS = {
    "ranks": "Ranks",
    "seq_len": "Seq len",
    "form": "Algorithm",
    "component": "Component",
    "ms": "Slowest rank, ms [95 %]",
    "mean": "Mean of ranks, ms",
    "sd": "sd, ms",
}


def with_ranks(table: pd.DataFrame) -> pd.DataFrame:
    """With `world_size`, `nodes`, and `ranks`: both in words, where there is more than one machine."""
    world = table["world_size"].astype(int)
    nodes = table.get("nodes", pd.Series(1, index=table.index)).fillna(1).astype(int)
    ranks = world.astype(str)
    ranks = ranks.where(nodes == 1, ranks + " on " + nodes.astype(str) + " nodes")
    return table.assign(world_size=world, nodes=nodes, ranks=ranks)


def lines_of(
    rows: pd.DataFrame, asked: str, factors: Sequence[str], names: Sequence[str]
) -> pd.DataFrame:
    """One line per timed scope of a case; a case without times has one, of all that it was asked for.

    Args:
        rows: With the parts of each scope in columns of their own.
        asked: Factor that lists the scopes.
        factors: Others that the lines show, beside `world_size`, `nodes` and `ranks`.
        names: Columns of the scope's parts, the one that is listed first.
    """
    table = base(rows, [*factors, "world_size", "nodes", asked], asked)
    if table.empty:
        return table
    timed = pick(rows, "latency")
    table = table.merge(timed[[*CASE, *names, "flags"]], on=list(CASE), how="left")
    table["flags"] = [flags if isinstance(flags, list) else [] for flags in table["flags"]]
    table[names[0]] = table[names[0]].fillna(table.pop(asked).str.join(", "))
    return with_ranks(table).fillna(dict.fromkeys(names, ""))


def ranks_words(row: pd.Series) -> str:
    """`4 ranks`, or `4 ranks over 2 nodes`, of a line that has `world_size` and `nodes`."""
    return f"{int(row['world_size'])} ranks" + (
        f" over {int(row['nodes'])} nodes" if row["nodes"] > 1 else ""
    )


def over_nodes(names: pd.Series, nodes: pd.Series) -> pd.Series:
    """The names, with the number of machines where there are several."""
    nodes = nodes.fillna(1).astype(int)
    return names.where(nodes == 1, names + ", " + nodes.astype(str) + " nodes")


@cached
def decode_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per form, number of ranks and length.

    Returns:
        Columns: `run_id`, `case_id`, `world_size`, `nodes` and those of `_DECODE`: `latency`, `compute`, `wait`, `communication`
        (ms, slowest rank), `gain` over one rank that was timed in the same rounds, its time `alone`, and `efficiency` (the gain per
        rank), each with `_low` and `_high`; what `with_speed_ups` gives; `binds`, a kind or `unclear`; `ranks` in words;
        `sent` and `counted` of one rank; `critical`, the rank for which the others wait, and each kind's share of its own time.
    """
    measured = having(rows, EXPERIMENT, "forms")
    if measured.empty:
        return pd.DataFrame()
    parts = measured["scope"].str.partition(": ")
    rows = measured.assign(form=parts[0], scope=parts[2])
    ofs = [form in forms for form, forms in zip(rows["form"], rows["factor.forms"], strict=True)]
    rows = rows[
        pd.Series(ofs, index=rows.index) | (rows["metric"] == "case_time")
    ]  # and not of a link
    table = filled(
        lines_of(rows, "forms", ["seq_len", "dtype"], ["form"]), rows, _DECODE, [*CASE, "form"]
    )
    lines = table.reindex(columns=[f"{kind}{end}" for kind in KINDS for end in _ENDS]).to_dict(
        "records"
    )
    table["binds"] = [what_binds(line) for line in lines]
    table["bound"] = [
        _bound_words(line, kind) for line, kind in zip(lines, table["binds"], strict=True)
    ]
    table = with_gain(with_speed_ups(table, measured, table["form"]), ONE_RANK, table["world_size"])
    one = pick(measured, "latency", ONE_RANK)
    table = filled(table, one, [Column("alone", "", "latency", ONE_RANK, interval=True)])
    table = table.sort_values(["dtype", "seq_len", "world_size"], kind="stable").reset_index(
        drop=True
    )
    return with_state(table)


_ENDS = ("", "_low", "_high")
UNCLEAR = "unclear"


def part_figures(line: Mapping[str, Any], name: str = "", ranks: str = "") -> dict[str, Figure]:
    """The parts of a token's time as figures, and `sending`: what is not computing."""
    found = {kind: Figure.of(line, kind, "part_time", f"{name}: {kind}", ranks) for kind in KINDS}
    wait, communication = found["wait"], found["communication"]
    ends = (getattr(wait, end) + getattr(communication, end) for end in ("low", "estimate", "high"))
    return found | {"sending": Figure(*ends)}


def what_binds(line: Mapping[str, Any]) -> str | None:
    """What a decoded token is bound by, as far as the intervals of its parts allow: for the table, the chart and the sentence.

    Returns:
        One of `KINDS`; `unclear` where intervals overlap; None where there are no parts.
    """
    parts = part_figures(line)
    compute, sending, wait, communication = (
        parts[name] for name in ("compute", "sending", *KINDS[1:])
    )
    if not compute.estimate + sending.estimate > 0:
        return None
    if compute.against(sending) is Order.ABOVE:
        return "compute"
    more = wait.against(communication)
    if compute.against(sending) is not Order.BELOW or more is Order.ALIKE:
        return UNCLEAR
    return "wait" if more is Order.ABOVE else "communication"


def _bound_words(line: Mapping[str, Any], kind: str | None) -> str | None:
    """What binds, and its share of the parts as they are drawn."""
    return (
        f"{kind} ({line[kind] / sum(line[name] for name in KINDS):.0%})" if kind in KINDS else kind
    )


def fair(table: pd.DataFrame) -> pd.DataFrame:
    """The lines on which a claim of speed may rest: those with a core for each rank."""
    return table.loc[[Flag.OVERSUBSCRIBED.value not in flags for flags in table["flags"]]]


def with_gain(table: pd.DataFrame, alone: str, share: pd.Series | int) -> pd.DataFrame:
    """With what ranks gain over one rank that was timed in the same rounds: `gain`, and `efficiency`, of perfect scaling.

    Args:
        table: From `with_speed_ups`.
        alone: What the one rank is called among the baselines.
        share: By how many its work was shared out.
    """
    nothing = Figure(*(float("nan"),) * 3)
    found = [over(line, alone) or nothing for line in table.to_dict("records")]
    gain = {
        "gain_low": [figure.low for figure in found],
        "gain": [figure.estimate for figure in found],
        "gain_high": [figure.high for figure in found],
    }
    table = table.assign(**gain, gain_busy=[figure.busy for figure in found])
    return table.assign(
        **{name.replace("gain", "efficiency"): table[name] / share for name in gain}
    )


@cached
def component_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per component: columns `run_id`, `ranks`, `seq_len`, `form`, `component`, `ms` (with ends), `mean`, `sd`."""
    found = pick(having(rows, EXPERIMENT, "world_size"), "part_time")
    if found.empty:
        return pd.DataFrame()
    parts = found["scope"].str.split(": ", expand=True)
    found = found.rename(columns=lambda name: name.removeprefix("factor."))
    found = with_ranks(found.assign(form=parts[0], component=parts[1]))
    found = found[~found["component"].isin(KINDS)]
    of_ranks = [
        pd.DataFrame(details["ranks"])[["mean", "sd"]].mean() for details in found["details"]
    ]
    spread = pd.DataFrame(of_ranks, index=found.index, columns=["mean", "sd"])
    ends = {"estimate": "ms", "low": "ms_low", "high": "ms_high"}
    names = ["run_id", "world_size", "nodes", "ranks", "seq_len", "form", "component"]
    found = found.assign(component=found["component"].map(_spoken))
    return found[[*names, *ends]].rename(columns=ends).join(spread).reset_index(drop=True)


_WORDS = {
    "comp": "compute:",
    "comm": "communication:",
    "lse": "log-sum-exp",
    "num": "numerator",
    "den": "denominator",
}


def _spoken(component: str) -> str:
    """A timer's name in words: `comm_max_lse` as `communication: max log-sum-exp`."""
    return " ".join(_WORDS.get(word, word) for word in component.split("_"))
