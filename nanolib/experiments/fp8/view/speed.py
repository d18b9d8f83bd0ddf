"""FP8: does it pay, from which size, and at what loss; emulated numbers look unlike measured ones."""

from __future__ import annotations

import altair as alt
import pandas as pd

from nanolib.measurement import Status
from nanolib.report.claim import Claim, Order
from nanolib.report.drawing import WIDTH
from nanolib.report.frame import Drawn, framed, panels, tooltips, with_interval
from nanolib.report.in_turns import gains, with_speed_ups
from nanolib.report.linking import links
from nanolib.report.overview import cached, having, leaders, listed
from nanolib.report.palette import FAILED, PALETTE
from nanolib.report.tables import Column, base, filled, known, titles, with_ends

_SPEED = (
    Column("name", "Model"),
    Column("mode", "What"),
    Column("precision", "Precision"),
    Column("compiled", "Compiled"),
    Column("latency", "Latency, ms [95 %]", "latency", interval=True),
    Column("parameters", "", "latency", detail="parameters"),
    Column("speed_up", "Over bf16 [95 %]"),
    Column("bound", "Bound", "converted_share", detail="amdahl_bound"),
    Column("tokens_per_second", "Tokens/s", "tokens_per_second"),
    Column("mfu", "Of the ceiling", "ceiling_share"),
    Column("weights", "Weights, MiB", "memory_part", "weights"),
    Column("gradients", "Gradients, MiB", "memory_part", "gradients"),
    Column("optimizer", "Optimizer, MiB", "memory_part", "optimizer"),
    Column("activations", "Activations, MiB", "memory_part", "activations"),
    Column("status", "Status"),
    Column("message", "Why"),
)
SPEED_COLUMNS = titles(_SPEED)


@cached("fp8")
def speed_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per model, precision and mode, with its speed-up over bf16 of the same run.

    Returns:
        Columns: `run_id`, `seq_len`, `batch_size`, those of `_SPEED` (`bound`: Amdahl's, of the converted share), and what
        `with_speed_ups` gives.
    """
    rows = having(rows, "fp8", "precision")
    factors = ["name", "mode", "precision", "compiled", "seq_len", "batch_size"]
    table = filled(base(rows, factors, "preset"), rows, _SPEED)
    return with_speed_ups(table, rows, table["mode"]) if len(table) else table


@framed("Precision: time of a step", "fp8")
def fp8_precisions(rows: pd.DataFrame) -> Drawn | None:
    """Time of each model in each precision; what this machine lacks is a cross that says why."""
    table = speed_table(rows)
    if table.empty:
        return None
    table = table.assign(
        mode=table["mode"].str.replace("_", " "), compiled=table["compiled"].map({True: "compiled", False: "eager"})
    )
    table = table.assign(panel=table["name"] + ", " + table["mode"] + ", " + table["compiled"], **links(table))
    table = table.drop(columns=["run_id", "latency_row", "speed_up_over"], errors="ignore")
    order = list(dict.fromkeys(table["precision"]))
    y = alt.Y("precision:N", sort=order, title=None, scale=alt.Scale(domain=order))
    x = {"title": "Latency (ms)", "scale": alt.Scale(zero=True)}
    ends = ("latency", "latency_low", "latency_high")
    tooltip = [
        *tooltips("precision", " ".join(ends), ",.4~g"),
        *tooltips("", "speed_up", ".3f", speed_up="over bf16"),
        *tooltips("", "mfu", ".1%", mfu="of the ceiling"),
    ]

    def draw(part: pd.DataFrame) -> alt.TopLevelMixin:
        base = alt.Chart(part[part["latency"].notna()]).encode(y=y, color=alt.value(PALETTE[0]))
        layers = with_interval(base, "x", ends, x, size=65, tooltip=tooltip)
        if len(failed := part[part["latency"].isna()]):
            said = alt.Chart(failed).encode(y=y, x=alt.value(6), tooltip=tooltips("precision status message"))
            layers.append(said.mark_text(text="✕", fontSize=14, color=FAILED, align="left"))
            why = said.mark_text(fontSize=11, color=FAILED, align="left", dx=16, limit=WIDTH + 60)
            layers.append(why.encode(text=alt.Text("message:N")))
        return alt.layer(*layers, width=WIDTH + 80, height=alt.Step(26))

    return panels(table, draw, columns=1, spacing=14), "With its 95 % interval; crosses: not here, and why."


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
    compared = tuple(pair for _, row in group.iterrows() for pair in gains(row, f"{row['name']} {row['precision']}"))
    faster, slower = ([order is one for _, order, _ in compared] for one in (Order.ABOVE, Order.BELOW))
    sizes = group.assign(pays=faster).groupby(["parameters", "name"], sort=True)["pays"].any()
    if sizes.any():
        pays = f"FP8 is faster than bf16 at {listed(name for _, name in sizes[sizes].index)}"
        pays += "" if sizes.all() else f", and not shown to be at {listed(name for _, name in sizes[~sizes].index)}"
    elif all(slower):
        pays = "FP8 is slower than bf16 at every size measured"
    else:
        pays = "FP8 is not shown to be faster than bf16 at any size measured"
    found = leaders(group, "speed_up", ascending=False)
    best = found.iloc[0]
    who = listed(found["name"] + " in " + found["precision"]) + (", not told apart" if len(found) > 1 else "")
    allowed = f", where Amdahl allows {best['bound']:.2f}" if sizes.any() and pd.notna(best["bound"]) else ""
    return Claim(
        pays,
        f"at best {with_ends(best, 'speed_up')} times bf16 ({who}){allowed}",
        about=mode.replace("_", " "),
        compared=compared,
    )


_PRODUCTS = {
    "bfloat16": (Column("bf16_ms", "", "latency", "product", interval=True),),
    "fp8": (
        Column("fp8_ms", "", "latency", "product", interval=True),
        Column("fp8_with_cast_ms", "", "latency", "product_with_cast", interval=True),
    ),
}


@cached("fp8")
def shape_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Products: columns `m`, `k`, `n`, those of `_PRODUCTS`, `speed_up` and `with_cast` (see `with_speed_ups`), `message`."""
    rows = having(rows, "fp8", "m")
    cases = base(rows, ["m", "k", "n", "precision"], "m")
    if cases.empty:
        return cases
    sizes, key = ["m", "k", "n"], ["run_id", "m", "k", "n"]
    table = cases.drop_duplicates(key)[key]
    ends = cases[cases["precision"] == "fp8"].drop_duplicates(key, keep="last")
    table = table.merge(ends[[*key, "message"]], on=key, how="left").fillna({"message": ""})
    named = rows.drop(columns="n").rename(columns={f"factor.{name}": name for name in sizes})  # `n`: of blocks
    for precision, columns in _PRODUCTS.items():
        table = filled(table, named[named["factor.precision"] == precision], columns, key)
    own = named[named["factor.precision"] == "fp8"]
    for name, scope in (("speed_up", "product"), ("with_cast", "product_with_cast")):
        table = with_speed_ups(table, own, scope, name, key)
    return table.astype(dict.fromkeys(sizes, int))


def shape_words(rows: pd.DataFrame) -> list[Claim]:
    """The same of single products, with and without their casts."""
    table = known(shape_table(rows), "with_cast")
    if table.empty:
        return []
    table = table.assign(size=lambda t: t["m"] * t["k"] * t["n"]).sort_values("size")
    compared = tuple(
        pair for _, row in table.iterrows() for pair in gains(row, f"{row['m']} x {row['k']} x {row['n']}", "with_cast")
    )
    wins = table[[order is Order.ABOVE for _, order, _ in compared]]
    if wins.empty:
        verb = "gains" if all(order is Order.BELOW for _, order, _ in compared) else "is seen to gain"
        return [Claim(f"No product measured {verb} from fp8 once its cast is paid", compared=compared)]
    least = wins.iloc[0]
    size = f"{least['m']} x {least['k']} x {least['n']}"
    sure = f"{with_ends(least, 'with_cast')} times"
    return [Claim(f"The smallest product that gains with its cast is {size}", sure, compared=compared)]


# What the report draws of it, in this order.
CHARTS = {
    "fp8_precisions": fp8_precisions,
}
