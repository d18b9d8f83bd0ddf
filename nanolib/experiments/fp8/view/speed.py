"""FP8: does it pay, from which size, and at what loss; emulated numbers look unlike measured ones."""

from __future__ import annotations

import altair as alt
import pandas as pd

from nanolib.measurement import Status, format_number
from nanolib.report.claim import Claim, Order
from nanolib.report.in_turns import gains, with_speed_ups
from nanolib.report.linking import links
from nanolib.report.overview import cached, having, leaders, listed, why_empty
from nanolib.report.plot import plot
from nanolib.report.tables import Column, base, filled, known, titles, with_ends, with_state
from nanolib.report.theme import empty_chart

_SPEED = (
    Column("what", "Model"),
    Column("precision", "Precision"),
    Column("latency", "Step, ms [95 %]", "latency", interval=True),
    Column("parameters", "", "latency", detail="parameters"),
    Column("speed_up", "Over bf16, × [95 %]"),
    Column("bound", "", "converted_share", detail="amdahl_bound"),
    Column("tokens_per_second", "Tokens/s", "tokens_per_second"),
    Column("mfu", "Of the peak rate", "ceiling_share"),
    Column("weights", "Weights, MiB", "memory_part", "weights"),
    Column("gradients", "", "memory_part", "gradients"),
    Column("optimizer", "Optimizer, MiB", "memory_part", "optimizer"),
    Column("activations", "Activations, MiB", "memory_part", "activations"),
    Column("state", "State"),
)
SPEED_COLUMNS = titles(_SPEED)


@cached
def speed_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per model, precision and mode, with its speed-up over bf16 of the same run.

    Returns:
        Columns: `run_id`, `seq_len`, `batch_size`, those of `_SPEED` (`bound`: Amdahl's, of the converted share), and what
        `with_speed_ups` gives.
    """
    rows = having(rows, "fp8", "precision")
    factors = ["name", "mode", "precision", "compiled", "seq_len", "batch_size"]
    table = filled(base(rows, factors, "preset"), rows, _SPEED)
    if table.empty:
        return table
    compiled = table["compiled"].map({True: ", compiled"}).fillna("")
    table = table.assign(what=table["name"] + ", " + table["mode"].str.replace("_", " ") + compiled)
    return with_state(with_speed_ups(table, rows, table["mode"]))


def fp8_precisions(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Time of each model in each precision, and how many times as fast as bf16 it is."""
    table = known(speed_table(rows), "latency")
    if table.empty:
        return empty_chart("Time of a step by precision", why_empty(rows, "fp8"))
    compiled = table["compiled"].map({True: ", compiled", False: ""}).fillna("")
    several = table["name"].nunique() > 1 or table["mode"].nunique() > 1
    gain = table["speed_up"].map(lambda ratio: "" if pd.isna(ratio) else f"  {ratio:.2f}× bf16")
    data = pd.DataFrame(
        {
            "series": table["precision"] + compiled,
            "x": table["latency"],
            "low": table["latency_low"],
            "high": table["latency_high"],
            "hue": table["precision"].eq("bfloat16").map({True: "base", False: "c1"}),
            "text": table["latency"].map(format_number) + " ms" + gain,
            **(
                {"panel": table["name"] + ", " + table["mode"].str.replace("_", " ")}
                if several
                else {}
            ),
            **links(table),
        }
    )
    return plot(
        data,
        "Time of a step by precision",
        "rows",
        subtitle=["With 95 % intervals."],
        unit="Latency (ms)",
    )


def speed_words(table: pd.DataFrame) -> list[Claim]:
    """Whether a step in FP8 is faster than one in bf16, and from which size on."""
    if table.empty:
        return []
    fp8 = table[table["precision"].str.startswith("fp8")]
    timed = known(fp8, "speed_up")
    if timed.empty:
        reasons = [said for said in fp8["message"].dropna().unique() if said]
        why = reasons[0] if reasons else "no fp8 case was run to its end"
        cannot = len(fp8) and (fp8["status"] == Status.UNSUPPORTED).all()
        answer = "FP8 gains no time here" if cannot else "No FP8 case gave a time"
        return [Claim(answer, why)]
    return [_pays(str(mode), group) for mode, group in timed.groupby("mode", sort=False)]


def _pays(mode: str, group: pd.DataFrame) -> Claim:
    """At which of the sizes measured FP8 is faster."""
    compared = tuple(
        pair
        for _, row in group.iterrows()
        for pair in gains(row, f"{row['name']} {row['precision']}")
    )
    faster, slower = (
        [order is one for _, order, _ in compared] for one in (Order.ABOVE, Order.BELOW)
    )
    sizes = group.assign(pays=faster).groupby(["parameters", "name"], sort=True)["pays"].any()
    if sizes.any():
        pays = f"FP8 is faster than bf16 at {listed(name for _, name in sizes[sizes].index)}"
        pays += (
            ""
            if sizes.all()
            else f", and not shown to be at {listed(name for _, name in sizes[~sizes].index)}"
        )
    elif all(slower):
        pays = "FP8 is slower than bf16 at every size measured"
    else:
        pays = "FP8 is not shown to be faster than bf16 at any size measured"
    found = leaders(group, "speed_up", ascending=False)
    best = found.iloc[0]
    who = listed(found["name"] + " in " + found["precision"]) + (
        ", not told apart" if len(found) > 1 else ""
    )
    allowed = (
        f", where Amdahl allows {best['bound']:.2f}"
        if sizes.any() and pd.notna(best["bound"])
        else ""
    )
    return Claim(
        pays,
        f"at best {with_ends(best, 'speed_up')} times bf16 ({who}){allowed}",
        about=mode.replace("_", " "),
        compared=compared,
    )
