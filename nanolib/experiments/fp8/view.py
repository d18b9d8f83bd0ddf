"""What a person sees of FP8: speed, loss parity, and what casts do to the products.

Emulated numbers look unlike measured ones: their marks are hollow.
"""

from __future__ import annotations

import altair as alt
import pandas as pd

from nanolib.measurement import LEARNING_STEPS, SMOKE_TEST, Provenance, Status
from nanolib.numbers import format_number
from nanolib.report.filters import links
from nanolib.report.finding import Estimate, Finding, Order, comparing
from nanolib.report.in_turns import gains, with_speed_ups
from nanolib.report.overview import (
    best_and_ties,
    cached,
    join_words,
    of_experiment,
    pick,
    rows_with_factor,
    why_empty,
)
from nanolib.report.plot import plot
from nanolib.report.section import CaseTable, Section
from nanolib.report.tables import (
    CASE,
    Column,
    add_metric_columns,
    case_rows,
    drop_missing,
    titles,
    with_ends,
    with_state,
)
from nanolib.report.theme import empty_chart

_SPEED = (
    Column("what", "Model"),
    Column("precision", "Precision"),
    Column("latency", "Step, ms [95 %]", "latency", interval=True),
    Column("parameters", "", "latency", detail="parameters"),
    Column("speed_up", "Over bf16, × [95 %]"),
    Column("bound", "", "converted_share", detail="amdahl_bound"),
    Column("tokens_per_second", "Tokens/s", "tokens_per_second"),
    Column("mfu", "Of the peak rate", "mfu"),
    Column("weights", "Weights, MiB", "memory_part", "weights"),
    Column("gradients", "", "memory_part", "gradients"),
    Column("optimizer", "Optimizer, MiB", "memory_part", "optimizer"),
    Column("activations", "Activations, MiB", "memory_part", "activations"),
    Column("state", "State"),
)
_PARITY = (
    Column("recipe", "Recipe"),
    Column("verdict", "Against bf16", "loss_difference_from_bf16", detail="verdict"),
    Column(
        "difference",
        "Loss above bf16, nats/byte [95 %]",
        "loss_difference_from_bf16",
        interval=True,
    ),
    Column("margin_nats", "Margin, nats", "loss_difference_from_bf16", detail="margin_nats"),
    Column("control", "", "loss_difference_from_bf16", detail="control"),
    Column("loss", "Loss, nats/byte [95 %]", "loss", interval=True),
    Column("seeds", "Seeds"),
    Column("steps", "Steps"),
    Column("provenance", "Products"),
    Column("state", "State"),
)


@cached
def speed_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per model, precision and mode, with its speed-up over bf16 of the same run.

    Returns:
        Columns: `run_id`, `seq_len`, `batch_size`, those of `_SPEED` (`bound`: Amdahl's, of the
        converted share), and what `with_speed_ups` gives.
    """
    rows = rows_with_factor(rows, "fp8", "precision")
    factors = ["name", "mode", "precision", "compiled", "seq_len", "batch_size"]
    table = add_metric_columns(case_rows(rows, factors, "preset"), rows, _SPEED)
    if table.empty:
        return table
    model = table["name"] + ", " + table["mode"].str.replace("_", " ")
    compiled = table["compiled"].map({True: ", compiled"}).fillna("")
    table = table.assign(what=model + compiled)
    return with_state(with_speed_ups(table, rows, table["mode"]))


def fp8_precisions(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Time of each model in each precision, and how many times as fast as bf16 it is."""
    table = drop_missing(speed_table(rows), "latency")
    if table.empty:
        return empty_chart("Time of a step by precision", why_empty(rows, "fp8"))
    gain = table["speed_up"].map("  {:.2f}× bf16".format, na_action="ignore").fillna("")
    data = pd.DataFrame(
        {
            "series": table["precision"],
            "panel": table["what"],
            "x": table["latency"],
            "low": table["latency_low"],
            "high": table["latency_high"],
            "hue": table["precision"].eq("bfloat16").map({True: "base", False: "c1"}),
            "text": table["latency"].map(format_number) + " ms" + gain,
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


@cached
def parity_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per recipe that was trained beside bf16.

    Returns:
        Columns: `run_id`, `case_id`, `seq_len`, `recipe`, `control`, `verdict`, `difference` and
        `loss` (nats per byte) each with `_low` and `_high`, `margin_nats`, `seeds`, `steps`,
        `provenance`, `not_finite` (why there is no difference), `status`, `message`.
    """
    rows = rows_with_factor(rows, "fp8", "recipe")
    if rows.empty:
        return pd.DataFrame()
    rows = rows[(rows["metric"] != "loss") | (rows["scope"] == rows["factor.recipe"])]
    table = add_metric_columns(
        case_rows(rows, ["recipe", "seq_len", "seeds", "steps"], "recipe"), rows, _PARITY
    )
    pairs = rows[rows["metric"] == "loss_difference_from_bf16"].rename(
        columns={"message": "not_finite"}
    )
    pairs = pairs[[*CASE, "provenance", "not_finite"]]
    table = table.merge(pairs, on=list(CASE), how="left").fillna({"not_finite": ""})
    smoke = (table["steps"] < LEARNING_STEPS) & table["verdict"].notna()
    return with_state(table.assign(verdict=table["verdict"].mask(smoke, "smoke test")))


def fp8_parity(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """The difference in loss of each recipe at the end, with the margin declared beforehand."""
    table = drop_missing(parity_table(rows), "difference")
    if table.empty:
        return empty_chart("Loss above bf16 after training", why_empty(rows, "fp8"))
    controls = table["control"].eq(True)
    measured = table["provenance"] == Provenance.MEASURED
    names = table["recipe"].str.replace("_", " ")
    data = pd.DataFrame(
        {
            "series": names + controls.map({True: " (control)", False: ""}),
            "x": table["difference"],
            "low": table["difference_low"],
            "high": table["difference_high"],
            "sure": measured & ~(table["steps"] < LEARNING_STEPS),
            "hue": controls.map({True: "c2", False: "c1"}),
            "text": table["verdict"],
            **links(table),
        }
    )
    margin = float(table["margin_nats"].dropna().iloc[0])
    return plot(
        data,
        "Loss above bf16 after training",
        "rows",
        subtitle=[
            "Same weights, text and order; mean over seeds, 95 % interval. Green: the margin, declared beforehand.",
            "Hollow: emulated, or too few steps. A control must be found worse.",
        ],
        unit="Loss above bf16 (nats per byte)",
        fmt="+.2~g",
        ref=0.0,
        band=(-margin, margin),
    )


def numerics_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Signal to noise of emulated products, one line per way to cast, layer and product.

    Returns:
        Columns: `variant`, `layer`, `product`, `sqnr` (dB), and those by which a page's choice is
        followed.
    """
    found = pick(rows_with_factor(rows, "fp8", "variant"), "sqnr")
    if found.empty:
        return pd.DataFrame()
    parts = found["scope"].str.rsplit(" ", n=1, expand=True)
    columns = {"factor.variant": "variant", "estimate": "sqnr"}
    table = found.rename(columns=columns)[[*columns.values()]]
    return table.assign(layer=parts[0], product=parts[1], **links(found))


def fp8_numerics(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Signal to noise of every layer's products by way to cast, with the median of each."""
    title = "Signal to noise of products in 8 bits"
    table = numerics_table(rows)
    if table.empty:
        return empty_chart(title, why_empty(rows, "fp8"))
    medians = table.groupby("variant", sort=False)["sqnr"].transform("median")
    again = table["variant"].duplicated()
    data = table.rename(columns={"variant": "series", "sqnr": "x"}).assign(
        pred=medians.mask(again),
        sure=False,
        hue="c1",
        text=medians.map("{:.1f} dB".format).mask(again, ""),
        note=table["layer"] + ", " + table["product"].str.replace("_", " "),
    )
    return plot(
        data.drop(columns=["layer", "product"]),
        title,
        "rows",
        subtitle=[
            "Emulated, in a small decoder: a mark per product of a layer. Tick and number: the median."
        ],
        unit="Signal to noise (dB)",
        ref=float(medians.max()),
    )


@cached
def verdict(rows: pd.DataFrame) -> list[Finding]:
    """Does fp8 pay here, from which size, and at what loss."""
    if of_experiment(rows, "fp8").empty:
        nothing = "Nothing of fp8 was measured, so there is no verdict"
        return [Finding(nothing, next_step="nano run quick fp8")]
    return [
        *_of_speed(speed_table(rows)),
        *_of_parity(parity_table(rows)),
        *_of_numerics(numerics_table(rows)),
    ]


def _of_speed(table: pd.DataFrame) -> list[Finding]:
    """Whether a step in FP8 is faster than one in bf16, and from which size on."""
    if table.empty:
        return []
    fp8 = table[table["precision"].str.startswith("fp8")]
    timed = drop_missing(fp8, "speed_up")
    if len(timed):
        return [_pays(str(mode), group) for mode, group in timed.groupby("mode", sort=False)]
    why = next(filter(None, fp8["message"]), "no fp8 case was run to its end")
    cannot = len(fp8) and (fp8["status"] == Status.UNSUPPORTED).all()
    return [Finding("FP8 gains no time here" if cannot else "No FP8 case gave a time", why)]


def _pays(mode: str, group: pd.DataFrame) -> Finding:
    """At which of the sizes measured FP8 is faster."""
    pairs = [gains(row, f"{row['name']} {row['precision']}")[0] for _, row in group.iterrows()]
    orders = {order for _, order, _ in pairs}
    group = group.assign(pays=[order is Order.ABOVE for _, order, _ in pairs])
    pays = group.groupby(["parameters", "name"])["pays"].any().droplevel("parameters")
    best, *ties = best_and_ties(group, "speed_up", ascending=False).to_dict("records")
    allowed = ""
    if pays.any():
        answer = f"FP8 is faster than bf16 at {join_words(pays.index[pays])}"
        if not pays.all():
            answer += f", and not shown to be at {join_words(pays.index[~pays])}"
        if pd.notna(best["bound"]):
            allowed = f", where Amdahl allows {best['bound']:.2f}"
    elif orders == {Order.BELOW}:
        answer = "FP8 is slower than bf16 at every size measured"
    else:
        answer = "FP8 is not shown to be faster than bf16 at any size measured"
    who = join_words(f"{one['name']} in {one['precision']}" for one in (best, *ties))
    who += ", not told apart" if ties else ""
    evidence = f"at best {with_ends(best, 'speed_up')} times bf16 ({who}){allowed}"
    return Finding(answer, evidence, about=mode.replace("_", " "), compared=tuple(pairs))


def _of_parity(table: pd.DataFrame) -> list[Finding]:
    """The verdict of every recipe against its pair."""
    if table.empty:
        return []
    named = table.assign(recipe=table["recipe"].str.replace("_", " "))
    ended = named[named["status"] == "ok"]
    short = ended[ended["steps"] < LEARNING_STEPS]
    long = ended.drop(index=short.index)
    findings = [_parity(row) for _, row in long.iterrows()]
    if len(short):
        steps = int(short["steps"].max())
        trained = f"{join_words(short['recipe'])}: trained beside bf16 for {steps} steps"
        findings.insert(0, Finding(trained, SMOKE_TEST, "raise parity_steps"))
    blind = long[long["control"].eq(True) & (long["verdict"] != "worse")]
    if len(blind):
        answer = f"The control {', '.join(blind['recipe'])} was not found worse"
        why = "so these runs are too short or too few to trust an 'equivalent'"
        findings.append(Finding(f"{answer}, {why}", next_step="raise parity_steps or parity_seeds"))
    return findings


def _parity(row: pd.Series) -> Finding:
    about = row["recipe"] + (" (emulated)" if row["provenance"] == "emulated" else "")
    if pd.isna(row["difference"]):
        return Finding("worse than bf16", row["not_finite"], about=about)
    difference = Estimate.of(row, "difference", "loss_difference_from_bf16", name=row["recipe"])
    above = f"{with_ends(row, 'difference')} nats per byte above bf16"
    evidence = f"{above}, margin {row['margin_nats']:.4f}, {int(row['seeds'])} pairs"
    answer = f"{row['verdict']} after {int(row['steps'])} steps"
    if row["verdict"] in ("worse", "better"):
        compared = comparing(difference, Estimate.exact(0.0, "bf16"))
        return Finding(answer, evidence, about=about, compared=compared)
    # equivalent goes by two one-sided tests, at 90 %
    return Finding(answer, evidence, about=about, figures=(difference,))


def _of_numerics(table: pd.DataFrame) -> list[Finding]:
    """Signal to noise by cast, without an order."""
    if table.empty:
        return []
    medians = table.groupby("variant", sort=False)["sqnr"].median().sort_values(ascending=False)
    text = ", ".join(f"{name} {value:.1f} dB" for name, value in medians.items())
    return [Finding("Median signal to noise of the products, emulated", text)]


SECTION = Section(
    "fp8",
    "Is FP8 faster, and does the loss match?",
    {"fp8_precisions": fp8_precisions, "fp8_parity": fp8_parity, "fp8_numerics": fp8_numerics},
    {
        "Speed and memory": CaseTable(speed_table, titles(_SPEED)),
        "Loss beside bf16": CaseTable(parity_table, titles(_PARITY)),
    },
    verdict,
)
