"""Measurements across ranks as tables: decoding, its components, whole sequences and training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from nanolib.measurement import Flag
from nanolib.report.claim import Figure, Order
from nanolib.report.in_turns import over, with_speed_ups
from nanolib.report.overview import cached, having, pick
from nanolib.report.tables import CASE, Column, base, filled, titles, with_state

EXPERIMENT = "distributed"
KINDS = ("compute", "wait", "communication")
UNCLEAR = "unclear"
ONE_RANK = "one rank"  # attends to the whole sequence while the others wait
_SENT = (
    Column("rounds", "", "rounds"),
    Column("sent", "Sent, B", "wire_bytes", method="formula"),
    Column("counted", "", "wire_bytes", method="interface"),
    Column("relative_error", "", "relative_error"),
    Column("state", "State"),
)
_SHAPE = (Column("ranks", "Ranks"), Column("seq_len", "Seq len"), Column("form", "Algorithm"))
_EFFICIENCY = Column("efficiency", "Efficiency [95 %]")
_DECODE = (
    *_SHAPE,
    Column("latency", "Token, ms [95 %]", "latency", "", interval=True),
    *(
        Column(kind, f"{kind.capitalize()}, ms [95 %]", "part_time", kind, interval=True)
        for kind in KINDS
    ),
    *(Column(f"{kind}_share", "", "time_share", kind, interval=True) for kind in KINDS),
    _EFFICIENCY,
    *_SENT,
)
DECODE_COLUMNS = titles(_DECODE)
_PREFILL = (
    *_SHAPE,
    Column("direction", "Direction"),
    Column("latency", "Time, ms [95 %]", "latency", interval=True),
    Column("memory", "Peak per rank, MiB", "peak_memory", interval=True),
    Column("memory_predicted", "Planned, MiB"),
    _EFFICIENCY,
    *_SENT,
)
PREFILL_COLUMNS = titles(_PREFILL)
_TRAINING = (
    Column("name", "Model"),
    Column("ranks", "Ranks"),
    Column("strategy", "Strategy"),
    Column("latency", "Step, ms [95 %]", "latency", interval=True),
    Column("tokens_per_second", "Tokens/s [95 %]", "tokens_per_second", interval=True),
    _EFFICIENCY,
    Column("exposed", "Exposed communication, ms [95 %]", "exposed_communication", interval=True),
    Column("weights", "Weights of a rank, MiB", "footprint"),
    Column("sent", "Sent, B", "wire_bytes"),
    Column("state", "State"),
)
TRAINING_COLUMNS = titles(_TRAINING)
COMPONENT_COLUMNS = {
    "ranks": "Ranks",
    "seq_len": "Seq len",
    "form": "Algorithm",
    "component": "Component",
    "ms": "Slowest rank, ms [95 %]",
    "mean": "Mean of ranks, ms",
    "sd": "SD, ms",
}


@cached
def decode_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Make a line per algorithm, number of ranks and length.

    Returns:
        Columns of `_DECODE`, and `run_id`, `case_id`, `world_size`, `binds` (see `what_binds`),
        `gain` over one rank that was timed in the same rounds, and what `with_speed_ups` gives.
    """
    measured = having(rows, EXPERIMENT, "forms")
    if measured.empty:
        return pd.DataFrame()
    names = measured["scope"].str.partition(": ")
    rows = measured.assign(form=names[0], scope=names[2])
    table = _lines(rows, "forms", ["seq_len", "dtype"], ["form"], _DECODE)
    table["binds"] = [what_binds(line) for _, line in table.iterrows()]
    table = _with_gain(with_speed_ups(table, measured, table["form"]), [ONE_RANK] * len(table))
    return table.sort_values(["dtype", "seq_len", "world_size"], kind="stable", ignore_index=True)


@cached
def prefill_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Make a line per algorithm, direction, number of ranks and length."""
    rows = having(rows, EXPERIMENT, "prefill_forms")
    if rows.empty:
        return pd.DataFrame()
    names = rows["scope"].str.partition(" ")  # bytes are stored for the algorithm alone
    rows = rows.assign(form=names[0], direction=names[2].replace("", "forward"))
    factors = ["seq_len", "dtype"]
    table = _lines(rows, "prefill_forms", factors, ["form", "direction"], _PREFILL)
    timed = with_speed_ups(table, rows, table["form"] + " " + table["direction"])
    return _with_gain(timed, "dense " + table["direction"])


@cached
def training_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Make a line per strategy and number of ranks; each rank trains on a batch of its own."""
    rows = having(rows, EXPERIMENT, "strategies")
    if rows.empty:
        return pd.DataFrame()
    rows = rows.assign(strategy=rows["scope"])
    table = _lines(rows, "strategies", ["name"], ["strategy"], _TRAINING)
    timed = with_speed_ups(table, rows, table["strategy"])
    return _with_gain(timed, ["alone"] * len(table), shares_work=False)


def _lines(
    rows: pd.DataFrame,
    listed: str,
    factors: Sequence[str],
    names: Sequence[str],
    columns: Sequence[Column],
) -> pd.DataFrame:
    """One line per timed call of a case; a case without times has one that says why.

    Args:
        rows: With the parts of each scope in the columns `names`.
        listed: The factor that lists what the case calls.
        factors: Others that the lines show, next to the number of ranks.
        names: Columns that name the call, the listed one first.
        columns: Of the table.
    """
    table = base(rows, [*factors, "world_size", "nodes", listed], listed)
    timed = pick(rows, "latency")
    if listed == "forms":  # and not a collective, a modelled time or one rank
        own = [
            form in forms for form, forms in zip(timed["form"], timed["factor.forms"], strict=True)
        ]
        timed = timed.loc[own]
    table = table.merge(timed[[*CASE, *names, "flags"]], on=list(CASE), how="left")
    table["flags"] = [flags if isinstance(flags, list) else [] for flags in table["flags"]]
    table[names[0]] = table[names[0]].fillna(table.pop(listed).str.join(", "))
    table = _with_ranks(table).fillna(dict.fromkeys(names, ""))
    return with_state(filled(table, rows, columns, [*CASE, *names]))


def _with_ranks(table: pd.DataFrame) -> pd.DataFrame:
    """Add `ranks`: how many, and on how many machines if there are several."""
    world, nodes = table["world_size"].astype(int), table.get("nodes", 1)
    several = pd.Series(nodes, index=table.index).fillna(1).astype(int)
    ranks = world.astype(str)
    return table.assign(
        world_size=world,
        ranks=ranks.where(several == 1, ranks + " on " + several.astype(str) + " nodes"),
    )


def _with_gain(
    table: pd.DataFrame, baselines: Sequence[str], shares_work: bool = True
) -> pd.DataFrame:
    """Add `gain` over one rank of the same rounds, and `efficiency`: its share of perfect."""
    nothing = Figure(*(float("nan"),) * 3)
    lines = zip(table.to_dict("records"), baselines, strict=True)
    gains = [over(line, baseline) or nothing for line, baseline in lines]
    for end, name in (("_low", "low"), ("", "estimate"), ("_high", "high")):
        gain = pd.Series([getattr(one, name) for one in gains], index=table.index, dtype=float)
        share = gain / table["world_size"] if shares_work else gain
        table = table.assign(**{f"gain{end}": gain, f"efficiency{end}": share})
    return table.assign(gain_busy=[one.busy for one in gains])


def part_figures(line: pd.Series) -> dict[str, Figure]:
    """Give the parts of a token's time, and `sending`: wait and communication together."""
    name = f"{line['form']}: {{}}"
    found = {
        kind: Figure.of(line, kind, "part_time", name.format(kind), line["ranks"]) for kind in KINDS
    }
    two = found["wait"], found["communication"]
    ends = (sum(getattr(part, end) for part in two) for end in ("low", "estimate", "high"))
    return found | {"sending": Figure(*ends)}


def what_binds(line: pd.Series) -> str | None:
    """Name what limits a decoded token: one of `KINDS`, or `unclear` if the intervals overlap.

    Returns:
        None if no parts were measured.
    """
    if not all(f"{kind}_low" in line and pd.notna(line[kind]) for kind in KINDS):
        return None
    compute, wait, communication, sending = part_figures(line).values()
    order = compute.against(sending)
    if order is Order.ABOVE:
        return "compute"
    more = wait.against(communication)
    if order is Order.ALIKE or more is Order.ALIKE:
        return UNCLEAR
    return "wait" if more is Order.ABOVE else "communication"


def with_cores(table: pd.DataFrame) -> pd.DataFrame:
    """Keep the lines with a core for each rank: a claim of speed may rest on no others."""
    return table.loc[[Flag.OVERSUBSCRIBED not in flags for flags in table["flags"]]]


@cached
def component_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Make a line per component of a call; columns of `COMPONENT_COLUMNS` and ids."""
    found = pick(having(rows, EXPERIMENT, "world_size"), "part_time")
    if found.empty:
        return pd.DataFrame()
    names = found["scope"].str.split(": ", expand=True)
    found = found.rename(columns=lambda name: name.removeprefix("factor."))
    found = _with_ranks(found.assign(form=names[0], component=names[1]))
    found = found[~found["component"].isin(["compute", "communication"])]
    spread = [pd.DataFrame(details["ranks"])[["mean", "sd"]].mean() for details in found["details"]]
    found["component"] = found["component"].map(_spoken)
    found = found.rename(columns={"estimate": "ms", "low": "ms_low", "high": "ms_high"})
    kept = ["run_id", "case_id", "world_size", "ms_low", "ms_high", "dtype"]
    kept += [name for name in COMPONENT_COLUMNS if name in found]
    spread = pd.DataFrame(spread, index=found.index, columns=["mean", "sd"])
    return found.reindex(columns=kept).join(spread).reset_index(drop=True)


_WORDS = {
    "comp": "compute:",
    "comm": "communication:",
    "kv": "keys and values",
    "lse": "log-sum-exp",
    "num": "numerator",
    "den": "denominator",
}


def _spoken(component: str) -> Any:
    """A timer's name in words: `comm_max_lse` as `communication: max log-sum-exp`."""
    return " ".join(_WORDS.get(word, word) for word in component.split("_"))
