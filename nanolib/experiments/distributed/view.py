"""Build the tables, the charts and the findings of the distributed notebook."""

import pandas as pd

from nanolib.measurement import OVER, Flag, Provenance
from nanolib.report.plot import links, plot, point_columns
from nanolib.report.section import (
    CaseTable,
    Estimate,
    Finding,
    Section,
    drop_missing,
    explain_empty,
    explain_missing,
)
from nanolib.report.shared import chart_of, compare_speed, find_fastest, pick_fastest, table_of
from nanolib.report.tables import (
    Column,
    add_speed_ups,
    case_table,
    format_ms,
    gains,
    pick,
    titles,
)
from nanolib.report.theme import Drawing, empty_chart

KINDS = ("compute", "wait", "communication")
BASELINE = "dense"  # Only one rank computes this algorithm. The other ranks are idle.
_SHAPE = ["dtype", "nodes", "seq_len", "world_size", "phase", "algorithm"]
_COLUMNS = (
    Column("shape", "Ranks, dtype"),
    Column("seq_len", "Seq len"),
    Column("call", "Phase, algorithm"),
    Column("latency", "Time, ms [95 %]", "latency", "call"),
    *(Column(kind, f"{kind.capitalize()}, ms [95 %]", "component_time", kind) for kind in KINDS),
    Column("memory", "Peak memory per rank, MiB (phase memory: planned)", "peak_memory"),
    Column("efficiency", "Efficiency [95 %]"),
    Column("communication_steps", "", "communication_steps"),
    Column("sent", "", "wire_bytes", method="formula"),
    Column("counted", "", "wire_bytes", method="interface"),
    Column("relative_error", "", "relative_error"),
    Column("state", "State"),
)
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
    # The scope of the time of a call is the phase. Other latencies are predictions or collectives.
    own = rows.assign(scope=rows["scope"].where(rows["scope"] != rows["factor.phase"], "call"))
    table = case_table(own, _SHAPE, _COLUMNS)
    table = add_speed_ups(table, rows, table["phase"])
    over_one_rank = rows[rows["scope"].str.endswith(OVER + BASELINE)]
    table = add_speed_ups(table, over_one_rank, table["phase"], "gain")
    for end in ("_low", "", "_high"):
        table[f"efficiency{end}"] = table[f"gain{end}"] / table["world_size"]
    table["call"] = table["phase"] + ", " + table["algorithm"].str.replace("_", " ")
    order = ["dtype", "seq_len", "world_size"]
    return _add_ranks(table).sort_values(order, kind="stable", ignore_index=True)


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
    found = found[~found["scope"].isin(["compute", "communication"])]
    words = {"^comp_": "compute: ", "^comm_": "communication: ", "_": " "}
    found = found.rename(columns=lambda name: name.removeprefix("factor."))
    found = found.rename(columns={"estimate": "ms", "low": "ms_low", "high": "ms_high"})
    found = found.assign(component=found["scope"].replace(words, regex=True))
    ids = ["run_id", "case_id", "world_size", "dtype", "nodes"]
    return _add_ranks(found.reindex(columns=[*ids, *COMPONENT_COLUMNS, "ms_low", "ms_high"]))


def decode_scaling(rows: pd.DataFrame) -> Drawing:
    """Draw the measured and the predicted time per token by number of ranks."""
    title = "Time per token by number of ranks"
    table = drop_missing(rank_table(rows), "latency")
    if len(table):
        table = table[table["phase"] == "decode"]
    if table.empty:
        return empty_chart(title, explain_empty(rows, "distributed"))
    # One rank computes the baseline in every launch.
    shape = ["run_id", "dtype", "seq_len", "algorithm", "world_size"]
    table = table.drop_duplicates(shape, keep="last")
    modelled = pick(rows, "latency")
    modelled = drop_oversubscribed(modelled[modelled["provenance"] == Provenance.MODELLED])
    modelled = modelled.rename(columns=lambda name: name.removeprefix("factor."))
    modelled = modelled[modelled["world_size"] == modelled["world_size"].max()]
    ranks = [details["world_size"] for details in modelled["details"]]
    both = pd.concat([table, modelled.assign(world_size=ranks)], ignore_index=True)
    data = {
        "panel": _format_lengths(both) + ", " + both["dtype"],
        "series": both["algorithm"].str.replace("_", " "),
        "x": both["world_size"].astype(int),
        "pred": both["estimate"],
        "note": both["provenance"].fillna(""),
        "sure": both["state"] == "ok",
    }
    return plot(
        pd.DataFrame(data | point_columns(both, "latency", "y")),
        title,
        subtitle=[
            "Slowest rank, 95 % intervals. Dashed: cost model.",
            "Hollow: the state in the table is not ok.",
        ],
        unit="Time per token (ms)",
        xunit="Number of ranks",
        log="xy",
    )


def _format_lengths(table: pd.DataFrame) -> pd.Series:
    return "seq len " + table["seq_len"].astype(int).map("{:,}".format)


@chart_of(
    component_table,
    "ms",
    "Time per token by component",
    where=f"phase == 'decode' and algorithm != '{BASELINE}'",
)
def decode_shares(table: pd.DataFrame, title: str) -> Drawing:
    """Draw the time per token of each component, such as local attention or waiting."""
    for column in ("world_size", "seq_len"):
        table = table[table[column] == table[column].max()]
    table = table.drop_duplicates(["algorithm", "dtype", "component"], keep="last")
    parts = table["component"].str.split(": ")
    data = {
        "panel": table["algorithm"].str.replace("_", " ") + ", " + table["dtype"],
        "series": parts.str[-1],
        "part": parts.str[0],
        "x": table["ms"],
        "text": [format_ms(line, "ms") for _, line in table.iterrows()],
    }
    return plot(
        pd.DataFrame(data | links(table)),
        f"{title}: {_format_lengths(table).iloc[0]}, {table['ranks'].iloc[0]} ranks",
        "bars",
        subtitle=[
            "Slowest rank. Ranks synchronize before each communication step, "
            "so waiting does not count as communication."
        ],
        unit="Median time (ms)",
    )


@chart_of(rank_table, "memory", "Peak memory per rank", where="phase in ['forward', 'memory']")
def sharded_memory(table: pd.DataFrame, title: str) -> Drawing:
    """Draw the measured and the planned peak memory of a rank over the sequence length."""
    table = table[table["world_size"].isin([1, table["world_size"].max()])]
    data = {
        "series": table["algorithm"] + ", " + table["shape"],
        "x": table["seq_len"].astype(int),
        "y": (table["memory"] / 1024).where(table["phase"] == "forward"),
        "pred": table["memory_predicted"].fillna(table["memory"]) / 1024,
    }
    return plot(
        pd.DataFrame(data | links(table)),
        title,
        subtitle=[
            "Labels: algorithm, number of ranks, dtype.",
            "Points: measured. Dashed: planned without allocating memory.",
        ],
        unit="Peak memory (GiB)",
        xunit="Sequence length (tokens)",
        log="xy",
    )


def verdict(rows: pd.DataFrame) -> list[Finding]:
    """Return findings about the scaling of attention over ranks, and the parts of decoding."""
    table = drop_missing(rank_table(rows), "latency")
    if table.empty:
        return explain_missing(rows, "distributed", "Attention across ranks")
    scaling, parts, fastest = [], [], []
    for (phase, dtype), lines in table.groupby(["phase", "dtype"], sort=False):
        n = lines["seq_len"].max()
        what = f"prefill of {n:,.0f} tokens ({phase})"
        if phase == "decode":
            what = f"decoding over {n:,.0f} keys"
        is_sharded = lines["algorithm"] != BASELINE
        lines = drop_oversubscribed(lines[(lines["seq_len"] == n) & is_sharded])
        if lines.empty:
            scaling.append(
                Finding(
                    f"The scaling of {what} was not measured",
                    "no algorithm ran on several ranks with cores of their own",
                    "set world_sizes to [1, 2], or reduce threads",
                    dtype,
                )
            )
            continue
        lines = lines[lines["world_size"] == lines["world_size"].max()]
        best = pick_fastest(lines, "latency")
        lines = lines[lines["run_id"] == best["run_id"]]
        scaling.append(_compare_with_one_rank(best, what))
        where = f"for {what} on {best['ranks']} ranks"
        fastest += find_fastest(lines, "algorithm", "latency", "algorithm", where, dtype)
        if phase == "decode" and best[[*KINDS]].notna().all():
            text = f"{what.capitalize()} on {best['ranks']} ranks has three parts"
            evidence = ", ".join(f"{kind} {format_ms(best, kind)}" for kind in KINDS)
            figures = tuple(Estimate.of(best, kind, "component_time", kind) for kind in KINDS)
            parts.append(Finding(text, evidence, about=dtype, figures=figures))
    return [*scaling[:2], *parts[:1], *fastest, *scaling[2:]]


def _compare_with_one_rank(best: pd.Series, what: str) -> Finding:
    name = f"{best['algorithm']} on {best['ranks']} ranks"
    latency, about = f"a call takes {format_ms(best, 'latency')}", best["dtype"]
    if pd.isna(best["gain"]):
        return Finding(f"{name} was not compared with one rank for {what}", latency, about=about)
    text, evidence = compare_speed(best, name, f"one rank for {what}", "gain")
    share = f"{Estimate.of(best, 'efficiency').percent} of perfect scaling"
    compared = gains(best, f"{name}, {what},", "gain")
    return Finding(text, f"{evidence}, {share}; {latency}", about=about, compared=compared)


SECTION = Section(
    "distributed",
    "How well does attention scale across ranks?",
    {
        "decode_scaling": decode_scaling,
        "decode_shares": decode_shares,
        "sharded_memory": sharded_memory,
    },
    {
        "Time and memory": CaseTable(rank_table, titles(_COLUMNS)),
        "Components of a call": CaseTable(component_table, COMPONENT_COLUMNS),
    },
    verdict,
)
