"""Measurements across ranks as tables: decoding, its components, whole sequences and training."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from nanolib.measurement import OVER, Flag
from nanolib.report.finding import Estimate, Order, comparing
from nanolib.report.in_turns import Pairs, with_speed_ups
from nanolib.report.overview import cached, pick, rows_with_factor
from nanolib.report.tables import CASE, Column, add_metric_columns, case_rows, titles, with_state

EXPERIMENT = "distributed"
KINDS = ("compute", "wait", "communication")
UNCLEAR = "unclear"
ONE_RANK = "one rank"  # attends to the whole sequence while the others wait
_SENT = (
    Column("communication_steps", "", "communication_steps"),
    Column("sent", "Sent, B", "wire_bytes", method="formula"),
    Column("counted", "", "wire_bytes", method="interface"),
    Column("relative_error", "", "relative_error"),
    Column("state", "State"),
)
_SHAPE = (Column("ranks", "Ranks"), Column("seq_len", "Seq len"), Column("algorithm", "Algorithm"))
_EFFICIENCY = Column("efficiency", "Efficiency [95 %]")
_DECODE = (
    *_SHAPE,
    Column("latency", "Token, ms [95 %]", "latency", "", interval=True),
    *(
        Column(kind, f"{kind.capitalize()}, ms [95 %]", "component_time", kind, interval=True)
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
    Column("weights", "Weights of a rank, MiB", "weight_memory"),
    Column("sent", "Sent, B", "wire_bytes"),
    Column("state", "State"),
)
TRAINING_COLUMNS = titles(_TRAINING)
COMPONENT_COLUMNS = {
    "ranks": "Ranks",
    "seq_len": "Seq len",
    "algorithm": "Algorithm",
    "component": "Component",
    "ms": "Slowest rank, ms [95 %]",
    "mean": "Mean of ranks, ms",
    "sd": "SD, ms",
}


@cached
def decode_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Make a line per algorithm, number of ranks and length.

    Returns:
        Columns of `_DECODE` and those that `_lines` adds, and `binds` (see `limit_of`).
    """
    rows = rows_with_factor(rows, EXPERIMENT, "algorithms")
    if rows.empty:
        return pd.DataFrame()
    parts = rows["scope"].str.partition(": ")
    named = rows.assign(algorithm=parts[0], scope=parts[2])
    own = [
        algorithm in algorithms
        for algorithm, algorithms in zip(parts[0], rows["factor.algorithms"], strict=True)
    ]
    names = ["seq_len", "dtype", "algorithm"]
    table = _lines(rows, named[own], "algorithms", names, _DECODE, ONE_RANK)
    table["binds"] = [limit_of(line)[0] for _, line in table.iterrows()]
    return table.sort_values(["dtype", "seq_len", "world_size"], kind="stable", ignore_index=True)


@cached
def prefill_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Make a line per algorithm, direction, number of ranks and length."""
    rows = rows_with_factor(rows, EXPERIMENT, "prefill_algorithms")
    if rows.empty:
        return pd.DataFrame()
    parts = rows["scope"].str.partition(" ")  # bytes are stored for the algorithm alone
    named = rows.assign(algorithm=parts[0], direction=parts[2].replace("", "forward"))
    names = ["seq_len", "dtype", "algorithm", "direction"]
    return _lines(rows, named, "prefill_algorithms", names, _PREFILL, "dense ")


@cached
def training_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Make a line per strategy and number of ranks; each rank trains on a batch of its own."""
    rows = rows_with_factor(rows, EXPERIMENT, "strategies")
    if rows.empty:
        return pd.DataFrame()
    named = rows.assign(strategy=rows["scope"])
    return _lines(rows, named, "strategies", ["name", "strategy"], _TRAINING, "alone")


def _lines(
    rows: pd.DataFrame,
    named: pd.DataFrame,
    listed: str,
    names: Sequence[str],
    columns: Sequence[Column],
    baseline: str,
) -> pd.DataFrame:
    """Make a line per timed call of a case; a case without times has one that says why.

    Args:
        rows: Of the cases.
        named: Those of the calls, with what names a call in columns of its own.
        listed: The factor that lists what the case calls.
        names: Columns of a line: factors, and what names its call.
        columns: Of the table.
        baseline: How the name of the call on one rank begins, which is timed in the same rounds.

    Returns:
        The columns, `ranks`, `call` (the scope of its time), what `with_speed_ups` gives, `gain`
        over one rank, and `efficiency`: its share of perfect scaling.
    """
    called = [name for name in names if f"factor.{name}" not in rows]
    factors = [name for name in names if name not in called]
    table = case_rows(rows, [*factors, "world_size", "nodes", listed], listed)
    timed = pick(named, "latency")[[*CASE, *called, "flags"]]
    table = _with_ranks(table.merge(timed, on=list(CASE), how="left"))
    table["flags"] = [flags if isinstance(flags, list) else [] for flags in table["flags"]]
    table[called[0]] = table[called[0]].fillna(table[listed].str.join(", "))
    table = table.drop(columns=listed).fillna(dict.fromkeys(called, ""))
    table = with_state(add_metric_columns(table, named, columns, [*CASE, *called]))
    table["call"] = table[called].agg(" ".join, axis=1)
    of_one_rank = rows[rows["scope"].str.contains(OVER + baseline, regex=False)]
    table = with_speed_ups(table, rows, table["call"])
    table = with_speed_ups(table, of_one_rank, table["call"], "gain")
    ranks = 1 if listed == "strategies" else table["world_size"]  # there each has work of its own
    ends = ("_low", "", "_high")
    return table.assign(**{f"efficiency{end}": table[f"gain{end}"] / ranks for end in ends})


def _with_ranks(table: pd.DataFrame) -> pd.DataFrame:
    """Add `ranks`: how many, and on how many machines if there are several."""
    several = zip(table["world_size"].astype(int), table["nodes"], strict=True)
    ranks = [
        f"{ranks} on {nodes:.0f} nodes" if nodes > 1 else str(ranks) for ranks, nodes in several
    ]
    return table.assign(world_size=table["world_size"].astype(int), ranks=ranks)


def limit_of(line: pd.Series) -> tuple[str, Pairs]:
    """Name what limits a decoded token, and give the orders by which it does.

    Returns:
        One of `KINDS`, `unclear` if the intervals overlap, or nothing if no parts were measured.
    """
    if not all(f"{kind}_low" in line and pd.notna(line[kind]) for kind in KINDS):
        return "", ()
    compute, wait, communication = (
        Estimate.of(line, kind, "component_time", f"{line['algorithm']}: {kind}", line["ranks"])
        for kind in KINDS
    )
    ends = ("low", "estimate", "high")
    sending = Estimate(*(getattr(wait, end) + getattr(communication, end) for end in ends))
    within = comparing(wait, communication)
    if compute.compare_to(sending) is not Order.BELOW:
        is_clear = compute.compare_to(sending) is Order.ABOVE
        return "compute" if is_clear else UNCLEAR, comparing(compute, sending)
    if within[0][1] is Order.NO_DIFFERENCE:
        return UNCLEAR, within
    longer = "wait" if within[0][1] is Order.ABOVE else "communication"
    return longer, comparing(sending, compute) + within


def with_cores(table: pd.DataFrame) -> pd.DataFrame:
    """Keep the lines with a core for each rank: a claim of speed may rest on no others."""
    return table.loc[[Flag.OVERSUBSCRIBED not in flags for flags in table["flags"]]]


@cached
def component_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Make a line per component of a call; columns of `COMPONENT_COLUMNS` and ids."""
    found = pick(rows_with_factor(rows, EXPERIMENT, "world_size"), "component_time")
    if found.empty:
        return pd.DataFrame()
    names = found["scope"].str.split(": ", expand=True)
    found = found.assign(algorithm=names[0], component=names[1].map(_spoken))
    found = found[~names[1].isin(["compute", "communication"])].reset_index(drop=True)
    spread = [pd.DataFrame(details["ranks"])[["mean", "sd"]].mean() for details in found["details"]]
    found = found.join(pd.DataFrame(spread)).rename(
        columns=lambda name: name.removeprefix("factor.").replace("estimate", "ms")
    )
    found = found.rename(columns={"low": "ms_low", "high": "ms_high"})
    ids = ["run_id", "case_id", "world_size", "dtype", "nodes"]
    found = _with_ranks(found.reindex(columns=[*ids, *COMPONENT_COLUMNS, "ms_low", "ms_high"]))
    return found.drop(columns="nodes")


_WORDS = {
    "comp": "compute:",
    "comm": "communication:",
    "kv": "keys and values",
    "lse": "log-sum-exp",
    "num": "numerator",
    "den": "denominator",
}


def _spoken(component: str) -> str:
    """A timer's name in words: `comm_max_lse` as `communication: max log-sum-exp`."""
    return " ".join(_WORDS.get(word, word) for word in component.split("_"))
