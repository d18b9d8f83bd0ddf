"""Build the tables of the distributed notebook: phases and algorithms, and components of a call."""

import pandas as pd

from nanolib.measurement import OVER, Flag
from nanolib.report.overview import pick, table_of
from nanolib.report.tables import (
    Column,
    add_metric_columns,
    case_rows,
    flagged,
    titles,
    with_speed_ups,
    with_state,
)

KINDS = ("compute", "wait", "communication")
BASELINE = "dense"  # Only one rank computes this algorithm. The other ranks are idle.
_SHAPE = ["dtype", "nodes", "seq_len", "world_size", "phase", "algorithm"]
_COLUMNS = (
    Column("shape", "Ranks, dtype"),
    Column("seq_len", "Seq len"),
    Column("call", "Phase, algorithm"),
    Column("latency", "Time, ms [95 %]"),
    *(Column(kind, f"{kind.capitalize()}, ms [95 %]", "component_time", kind) for kind in KINDS),
    Column("memory", "Peak memory per rank, MiB (phase memory: planned)", "peak_memory"),
    Column("efficiency", "Efficiency [95 %]"),
    Column("communication_steps", "", "communication_steps"),
    Column("sent", "", "wire_bytes", method="formula"),
    Column("counted", "", "wire_bytes", method="interface"),
    Column("relative_error", "", "relative_error"),
    Column("state", "State"),
)
RANK_COLUMNS = titles(_COLUMNS)
COMPONENT_COLUMNS = {
    "shape": "Ranks, dtype",
    "seq_len": "Seq len",
    "phase": "Phase",
    "algorithm": "Algorithm",
    "component": "Component",
    "ms": "Slowest rank, ms [95 %]",
}


@table_of("distributed", "phase")
def rank_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a table with one line per phase, algorithm, number of ranks and sequence length.

    `gain` is the speed-up over one rank, and `efficiency` is the share of perfect scaling.
    """
    table = flagged(case_rows(rows, _SHAPE, "phase"), rows)
    # The scope of the time of a call is the phase. Other latencies are predictions or collectives.
    own = rows.assign(scope=rows["scope"].where(rows["scope"] != rows["factor.phase"], "call"))
    latency = Column("latency", "", "latency", "call")
    table = add_metric_columns(table, own, [latency, *_COLUMNS])
    table = with_speed_ups(table, rows, table["phase"])
    over_one_rank = rows[rows["scope"].str.endswith(OVER + BASELINE)]
    table = with_state(with_speed_ups(table, over_one_rank, table["phase"], "gain"))
    for end in ("_low", "", "_high"):
        table[f"efficiency{end}"] = table[f"gain{end}"] / table["world_size"]
    table["call"] = table["phase"] + ", " + table["algorithm"].str.replace("_", " ")
    shape = ["dtype", "seq_len", "world_size"]
    return _add_ranks(table).sort_values(shape, kind="stable", ignore_index=True)


def _add_ranks(table: pd.DataFrame) -> pd.DataFrame:
    """Add the number of ranks that compute, and this number with the dtype as text."""
    size = table["world_size"].astype(int).mask(table["algorithm"] == BASELINE, 1)
    on_nodes = table["nodes"].map(" on {:.0f} nodes".format)
    ranks = size.astype(str) + on_nodes.where((table["nodes"] > 1) & (size > 1), "")
    return table.assign(world_size=size, ranks=ranks, shape=ranks + ", " + table["dtype"])


def drop_oversubscribed(table: pd.DataFrame) -> pd.DataFrame:
    """Drop the lines whose ranks share cores or GPUs, because their speed is not valid."""
    return table.loc[[Flag.OVERSUBSCRIBED not in flags for flags in table["flags"]]]


@table_of("distributed", "phase")
def component_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a table with one line per component of a call, such as local attention."""
    found = pick(rows, "component_time")
    found = found[~found["scope"].isin(["compute", "communication"])].reset_index(drop=True)
    if found.empty:
        return pd.DataFrame()
    words = {"^comp_": "compute: ", "^comm_": "communication: ", "_": " "}
    found = found.rename(columns=lambda name: name.removeprefix("factor."))
    found = found.rename(columns={"estimate": "ms", "low": "ms_low", "high": "ms_high"})
    found = found.assign(component=found["scope"].replace(words, regex=True))
    ids = ["run_id", "case_id", "world_size", "dtype", "nodes"]
    return _add_ranks(found.reindex(columns=[*ids, *COMPONENT_COLUMNS, "ms_low", "ms_high"]))
