"""Build the tables of the distributed notebook: decoding, components of a call, and prefill."""

from collections.abc import Sequence

import pandas as pd

from nanolib.measurement import OVER, Flag
from nanolib.report.overview import pick, table_of
from nanolib.report.tables import (
    CASE,
    Column,
    IntervalColumn,
    add_metric_columns,
    case_rows,
    titles,
    with_speed_ups,
    with_state,
)

KINDS = ("compute", "wait", "communication")
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
    IntervalColumn("latency", "Time per token, ms [95 %]", "latency", ""),
    *(
        IntervalColumn(kind, f"{kind.capitalize()}, ms [95 %]", "component_time", kind)
        for kind in KINDS
    ),
    _EFFICIENCY,
    *_SENT,
)
DECODE_COLUMNS = titles(_DECODE)
_PREFILL = (
    *_SHAPE,
    Column("direction", "Direction"),
    IntervalColumn("latency", "Time, ms [95 %]", "latency"),
    IntervalColumn("memory", "Peak memory per rank, MiB", "peak_memory"),
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
}


@table_of("distributed", "algorithms")
def decode_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a table with one line per decoding algorithm, number of ranks and sequence length.

    `gain` is the speed-up over one rank, and `efficiency` is the share of perfect scaling.
    """
    parts = rows["scope"].str.partition(": ")
    named = rows.assign(algorithm=parts[0], scope=parts[2])
    listed = zip(parts[0], rows["factor.algorithms"], strict=True)
    is_own = [algorithm in algorithms for algorithm, algorithms in listed]
    table = _make_lines(rows, named[is_own], "algorithms", ["algorithm"], _DECODE, "one rank")
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
    component = names[1].str.replace("_", " ")
    for start, kind in (("comp ", "compute: "), ("comm ", "communication: ")):
        component = component.str.replace(start, kind)
    found = found.assign(algorithm=names[0], component=component)
    found = found[~names[1].isin(["compute", "communication"])].reset_index(drop=True)
    found = found.rename(columns=lambda name: name.removeprefix("factor."))
    found = found.rename(columns={"estimate": "ms", "low": "ms_low", "high": "ms_high"})
    ids = ["run_id", "case_id", "world_size", "dtype", "nodes"]
    found = _add_ranks(found.reindex(columns=[*ids, *COMPONENT_COLUMNS, "ms_low", "ms_high"]))
    return found.drop(columns="nodes")
