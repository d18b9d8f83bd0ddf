"""Draw the charts and build the findings of the distributed notebook."""

from collections.abc import Iterator

import pandas as pd

from nanolib.experiments.distributed.tables import (
    BASELINE,
    COMPONENT_COLUMNS,
    DECODE_COLUMNS,
    KINDS,
    PREFILL_COLUMNS,
    component_table,
    decode_table,
    drop_oversubscribed,
    prefill_table,
    rank_table,
)
from nanolib.measurement import Provenance
from nanolib.numbers import format_number
from nanolib.report.finding import Estimate, Finding, Order, unclear
from nanolib.report.overview import (
    explain_missing,
    join_words,
    pick,
    rows_with_factor,
    why_empty,
)
from nanolib.report.plot import links, plot, point_columns
from nanolib.report.section import CaseTable, Section
from nanolib.report.tables import ONE, drop_missing, gains, in_ms, not_slower, times
from nanolib.report.theme import Drawing, empty_chart


def decode_scaling(rows: pd.DataFrame) -> Drawing:
    """Draw the measured and the predicted time per token by number of ranks."""
    title = "Time per token by number of ranks"
    table = drop_missing(decode_table(rows), "latency")
    if table.empty:
        return empty_chart(title, why_empty(rows, "distributed"))
    # One rank computes the baseline in every launch. The last launch has the most ranks.
    is_base = table["algorithm"] == BASELINE
    table = table.assign(world_size=table["world_size"].mask(is_base, 1))
    shape = ["run_id", "dtype", "seq_len", "algorithm", "world_size"]
    table = table.drop_duplicates(shape, keep="last")
    modelled = pick(rows_with_factor(rows, "distributed", "phase"), "latency")
    modelled = drop_oversubscribed(modelled[modelled["provenance"] == Provenance.MODELLED])
    modelled = modelled.rename(columns=lambda name: name.removeprefix("factor."))
    # The dashed line of predictions starts at the largest measured number of ranks.
    most = modelled["world_size"].max()
    modelled = modelled[modelled["world_size"] == most]
    ranks = [details["world_size"] for details in modelled["details"]]
    both = pd.concat([table, modelled.assign(world_size=ranks)], ignore_index=True)
    start = both["latency"].where(both["world_size"] == most)
    data = pd.DataFrame(
        {
            "panel": _format_lengths(both) + ", " + both["dtype"],
            "series": both["algorithm"].str.replace("_", " "),
            "x": both["world_size"].astype(int),
            "pred": both["estimate"].fillna(start),
            "note": both["provenance"].fillna(""),
            "sure": both["state"] == "ok",
            **point_columns(both, "latency", "y"),
        }
    )
    return plot(
        data,
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


def decode_shares(rows: pd.DataFrame) -> Drawing:
    """Draw the time per token of each component, such as local attention or waiting."""
    title = "Time per token by component"
    table = component_table(rows)
    if len(table):
        table = table[(table["phase"] == "decode") & (table["algorithm"] != BASELINE)]
    if table.empty:
        return empty_chart(title, why_empty(rows, "distributed"))
    for column in ("world_size", "seq_len"):
        table = table[table[column] == table[column].max()]
    ends = table[["ms", "ms_low", "ms_high"]]
    data = pd.DataFrame(
        {
            "panel": table["algorithm"].str.replace("_", " ") + ", " + table["dtype"],
            "series": table["component"].str.split(": ").str[-1],
            "part": table["component"].str.split(":").str[0],
            "x": table["ms"],
            "text": [f"{format_number(*one)} ms" for one in ends.to_numpy()],
            **links(table),
        }
    )
    return plot(
        data,
        f"{title}: {_format_lengths(table).iloc[0]}, {table['ranks'].iloc[0]} ranks",
        "bars",
        subtitle=[
            "Slowest rank. Ranks synchronize before each communication step, "
            "so waiting does not count as communication."
        ],
        unit="Median time (ms)",
    )


def sharded_memory(rows: pd.DataFrame) -> Drawing:
    """Draw the measured and the planned peak memory of a rank over the sequence length."""
    title = "Peak memory per rank"
    peaks = pick(rows_with_factor(rows, "distributed", "phase"), "peak_memory")
    peaks = peaks[peaks["scope"].isin(["forward", "memory"])]
    if peaks.empty:
        return empty_chart(title, why_empty(rows, "distributed"))
    algorithm, ranks = peaks["factor.algorithm"], peaks["factor.world_size"]
    is_whole = algorithm.isin([BASELINE, "math"])
    several = ranks.where(~is_whole, 1).max()
    series = algorithm + is_whole.map({True: ", 1 rank", False: f", {several:.0f} ranks"})
    if peaks["factor.dtype"].nunique() > 1:
        series += ", " + peaks["factor.dtype"]
    data = {
        "series": series,
        "x": peaks["factor.seq_len"].astype(int),
        "y": (peaks["estimate"] / 1024).where(peaks["provenance"] == Provenance.MEASURED),
        "pred": peaks["predicted"].fillna(peaks["estimate"]) / 1024,
    }
    data = pd.DataFrame(data | links(peaks))
    return plot(
        data[is_whole | (ranks == several)].sort_values(["series", "x"]),
        title,
        subtitle=["Points: measured. Dashed: planned without allocating memory."],
        unit="Peak memory (GiB)",
        xunit="Sequence length (tokens)",
        log="xy",
    )


def verdict(rows: pd.DataFrame) -> list[Finding]:
    """Return findings about the scaling of attention over ranks, and the parts of decoding."""
    table = drop_missing(rank_table(rows), "latency")
    scaling, parts = [], []
    for (phase, dtype), group in (
        table.groupby(["phase", "dtype"], sort=False) if len(table) else ()
    ):
        n = int(group["seq_len"].max())
        lines = group[group["seq_len"] == n]
        what = f"Prefill of {n:,} tokens ({phase})"
        if phase == "decode":
            what = f"Decoding over {n:,} keys"
        several = lines[lines["algorithm"] != BASELINE]
        usable = drop_oversubscribed(several)
        if len(usable):
            fastest = _select_fastest(usable)
            scaling.append(_compare_scaling(fastest, what, dtype))
            if phase == "decode":
                parts += _list_parts(fastest.iloc[0], f"at {n:,} keys", dtype)
            continue
        why, next_step = "only one rank was used", "set world_sizes to [1, 2]"
        if len(several):
            why = "the ranks need more cores than this machine has"
            next_step = "reduce world_sizes or threads"
        text = f"The scaling of {what[0].lower()}{what[1:]} was not measured"
        scaling.append(Finding(text, why, next_step, dtype))
    found = [*scaling[:2], *parts[:1], *scaling[2:]]
    return found or explain_missing(rows, "distributed", "Attention across ranks")


def _select_fastest(table: pd.DataFrame) -> pd.DataFrame:
    """Return the lines of the launch with the most ranks, sorted by latency."""
    most = table[table["world_size"] == table["world_size"].max()]
    most = most.sort_values("latency", kind="stable")
    return most[most["run_id"] == most.iloc[0]["run_id"]]


def _compare_scaling(lines: pd.DataFrame, what: str, about: str) -> Finding:
    """Compare the fastest algorithm with one rank, and with other algorithms in the same launch."""
    best = lines.iloc[0]
    algorithm, ranks = best["algorithm"].replace("_", " "), f"{best['ranks']} ranks"
    rivals = {figure.name for figure in best["speed_up_over"]} - {BASELINE}
    which = f"The {'fastest' if rivals else 'only'} algorithm is {algorithm}, at "
    which += in_ms(best, "latency")
    if ties := not_slower(best, lines["algorithm"]):
        tied = lines[lines["algorithm"].isin([best["algorithm"], *ties])]
        ms = join_words(in_ms(line, "latency") for _, line in tied.iterrows())
        names = join_words(tied["algorithm"].str.replace("_", " "))
        which = ": ".join(unclear(names, ms))
    compared = gains(best, algorithm, "gain") + gains(best, algorithm, among=rivals)
    if pd.isna(best["gain"]):
        text = f"{what} on {ranks} was not compared with one rank"
        return Finding(text, which, about=about, compared=compared)
    order, gain = Estimate.of(best, "gain").compare_to(ONE), times(best, "gain")
    text = f"{what} is {'faster' if order is Order.ABOVE else 'slower'} on {ranks} than on one"
    share = Estimate.of(best, "efficiency").percent
    evidence = f"the speed-up is {gain}, {share} of perfect scaling"
    if order is Order.NO_DIFFERENCE:
        text, evidence = unclear(f"{ranks} and one rank for {what.lower()}", gain)
    return Finding(text, f"{evidence}. {which}", about=about, compared=compared)


def _list_parts(best: pd.Series, where: str, about: str) -> Iterator[Finding]:
    """Yield the parts of the time of a decoded token. The finding states no order of the parts."""
    if best[[*KINDS]].notna().all():
        text = f"A decoded token {where} on {best['ranks']} ranks has three parts"
        evidence = ", ".join(f"{kind} {in_ms(best, kind)}" for kind in KINDS)
        figures = tuple(Estimate.of(best, kind, "component_time", kind) for kind in KINDS)
        yield Finding(text, evidence, about=about, figures=figures)


SECTION = Section(
    "distributed",
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
    },
    verdict,
)
