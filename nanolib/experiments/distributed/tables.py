"""Build the tables of the distributed notebook: decoding, components of a call, and prefill."""

from collections.abc import Sequence

import pandas as pd

from nanolib.measurement import OVER, Flag
from nanolib.report.finding import Estimate, Order, Pairs, comparing
from nanolib.report.overview import pick, table_of
from nanolib.report.tables import (
    CASE,
    Column,
    add_metric_columns,
    case_rows,
    titles,
    with_speed_ups,
    with_state,
)

KINDS = ("compute", "wait", "communication")
UNCLEAR = "unclear"
_SENT = (
    Column("communication_steps", "", "communication_steps"),
    Column("sent", "Sent data, B", "wire_bytes", method="formula"),
    Column("counted", "", "wire_bytes", method="interface"),
    Column("relative_error", "", "relative_error"),
    Column("state", "State"),
)
_SHAPE = (
    Column("shape", "Ranks, dtype"),
    Column("seq_len", "Seq len"),
    Column("algorithm", "Algorithm"),
)
_BASELINE = "dense"  # Only one rank computes this algorithm. The other ranks are idle.
_EFFICIENCY = Column("efficiency", "Efficiency [95 %]")
_DECODE = (
    *_SHAPE,
    Column("latency", "Time per token, ms [95 %]", "latency", ""),
    *(Column(kind, f"{kind.capitalize()}, ms [95 %]", "component_time", kind) for kind in KINDS),
    _EFFICIENCY,
    *_SENT,
)
DECODE_COLUMNS = titles(_DECODE)
_PREFILL = (
    *_SHAPE,
    Column("direction", "Direction"),
    Column("latency", "Time, ms [95 %]", "latency"),
    Column("memory", "Peak memory per rank, MiB", "peak_memory"),
    Column("memory_predicted", "Planned memory, MiB"),
    _EFFICIENCY,
    *_SENT,
)
PREFILL_COLUMNS = titles(_PREFILL)
COMPONENT_COLUMNS = {
    "shape": "Ranks, dtype",
    "seq_len": "Seq len",
    "algorithm": "Algorithm",
    "component": "Component",
    "ms": "Slowest rank, ms [95 %]",
    "mean": "Mean of ranks, ms",
    "sd": "SD, ms",
}
_WORDS = {
    "comp": "compute:",
    "comm": "communication:",
    "kv": "keys and values",
    "lse": "log-sum-exp",
    "num": "numerator",
    "den": "denominator",
}


@table_of("distributed", "algorithms")
def decode_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a table with one line per decoding algorithm, number of ranks and sequence length.

    `gain` is the speed-up over one rank, and `efficiency` is the share of perfect scaling. `binds`
    is the result of `find_limit`, which names what limits the decoding time.
    """
    parts = rows["scope"].str.partition(": ")
    named = rows.assign(algorithm=parts[0], scope=parts[2])
    listed = zip(parts[0], rows["factor.algorithms"], strict=True)
    is_own = [algorithm in algorithms for algorithm, algorithms in listed]
    table = _make_lines(rows, named[is_own], "algorithms", ["algorithm"], _DECODE, "one rank")
    table["binds"] = [find_limit(line)[0] for _, line in table.iterrows()]
    return table.sort_values(["dtype", "seq_len", "world_size"], kind="stable", ignore_index=True)


@table_of("distributed", "prefill_algorithms")
def prefill_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a table with one line per prefill algorithm, direction, rank count and length.

    `gain` is the speed-up over one rank, and `efficiency` is the share of perfect scaling.
    """
    # nanolib counts only the bytes of forward passes, so these scopes name no direction.
    parts = rows["scope"].str.partition(" ")
    named = rows.assign(algorithm=parts[0], direction=parts[2].replace("", "forward"))
    called = ["algorithm", "direction"]
    return _make_lines(rows, named, "prefill_algorithms", called, _PREFILL, f"{_BASELINE} ")


def _make_lines(
    rows: pd.DataFrame,
    named: pd.DataFrame,
    listed: str,
    called: Sequence[str],
    columns: Sequence[Column],
    baseline: str,
) -> pd.DataFrame:
    """Return one line per timed call. A case without timings has one line with the reason.

    Args:
        rows: Measurements of the cases.
        named: The same measurements, with the columns that `called` names.
        listed: Name of the factor with the algorithms of a case.
        called: Columns with the parts of a call's name, such as the algorithm.
        columns: Columns to add from the measurements.
        baseline: Start of the scope of the call on one rank.
    """
    table = case_rows(rows, [listed, "dtype", "nodes", "seq_len", "world_size"], listed)
    timed = pick(named, "latency")[[*CASE, *called, "flags"]]
    table = table.merge(timed, on=list(CASE), how="left")
    table["flags"] = [flags if isinstance(flags, list) else [] for flags in table["flags"]]
    table["algorithm"] = table["algorithm"].fillna(table[listed].str.join(", "))
    table = _add_ranks(table)
    table = table.drop(columns=listed).fillna(dict.fromkeys(called, ""))
    table = with_state(add_metric_columns(table, named, columns, [*CASE, *called]))
    table["call"] = table[called].agg(" ".join, axis=1)
    over_one_rank = rows[rows["scope"].str.contains(OVER + baseline, regex=False)]
    table = with_speed_ups(table, rows, table["call"])
    table = with_speed_ups(table, over_one_rank, table["call"], "gain")
    for end in ("_low", "", "_high"):
        table[f"efficiency{end}"] = table[f"gain{end}"] / table["world_size"]
    return table


def _add_ranks(table: pd.DataFrame) -> pd.DataFrame:
    size, nodes = table["world_size"].astype(int), table["nodes"]
    on_nodes = nodes.map(" on {:.0f} nodes".format).where(nodes > 1, "")
    ranks = (size.astype(str) + on_nodes).mask(table["algorithm"] == _BASELINE, "1")
    return table.assign(world_size=size, ranks=ranks, shape=ranks + ", " + table["dtype"])


def find_limit(line: pd.Series) -> tuple[str, Pairs]:
    """Return what limits the time of a decoded token, and the comparisons that show the limit.

    Returns:
        The limit and the comparisons. The limit is one of `KINDS`, `unclear` if the intervals
        overlap, or empty if a part was not measured.
    """
    if not all(pd.notna(line.get(kind)) for kind in KINDS):
        return "", ()
    compute, wait, communication = (
        Estimate.of(line, kind, "component_time", line["ranks"]) for kind in KINDS
    )
    ends = ("low", "estimate", "high")
    rest = Estimate(*(getattr(wait, end) + getattr(communication, end) for end in ends))
    of_compute, of_wait = comparing(compute, rest), comparing(wait, communication)
    order = compute.compare_to(rest)
    if order is not Order.BELOW:
        return "compute" if order is Order.ABOVE else UNCLEAR, of_compute
    names = {Order.ABOVE: "wait", Order.BELOW: "communication", Order.NO_DIFFERENCE: UNCLEAR}
    return names[wait.compare_to(communication)], of_wait + of_compute


def drop_oversubscribed(table: pd.DataFrame) -> pd.DataFrame:
    """Drop the lines whose ranks share cores or GPUs, because their speed is not valid."""
    return table.loc[[Flag.OVERSUBSCRIBED not in flags for flags in table["flags"]]]


@table_of("distributed", "world_size")
def component_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a table with one line per component of a call, such as local attention."""
    found = pick(rows, "component_time")
    if found.empty:
        return pd.DataFrame()
    names = found["scope"].str.split(": ", expand=True)
    words = names[1].map(lambda name: " ".join(_WORDS.get(one, one) for one in name.split("_")))
    found = found.assign(algorithm=names[0], component=words)
    found = found[~names[1].isin(["compute", "communication"])].reset_index(drop=True)
    spread = []
    for algorithm, details in zip(found["algorithm"], found["details"], strict=True):
        ranks = details["ranks"][: 1 if algorithm == _BASELINE else None]
        spread.append(pd.DataFrame(ranks)[["mean", "sd"]].mean())
    found = found.join(pd.DataFrame(spread))
    found = found.rename(columns=lambda name: name.removeprefix("factor."))
    found = found.rename(columns={"estimate": "ms", "low": "ms_low", "high": "ms_high"})
    ids = ["run_id", "case_id", "world_size", "dtype", "nodes"]
    found = _add_ranks(found.reindex(columns=[*ids, *COMPONENT_COLUMNS, "ms_low", "ms_high"]))
    return found.drop(columns="nodes")
