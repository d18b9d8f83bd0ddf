"""Build the tables, the charts and the findings about the speed and the loss of FP8."""

import pandas as pd

from nanolib.experiments.model.tables import bytes_by_kind
from nanolib.measurement import LEARNING_STEPS, MemoryKind, Provenance
from nanolib.numbers import MIB, format_number
from nanolib.report.plot import plot, point_columns
from nanolib.report.section import (
    CaseTable,
    Estimate,
    Finding,
    Order,
    Section,
    comparing,
    drop_missing,
    explain_missing,
    join_words,
    of_experiment,
)
from nanolib.report.shared import chart_of, drop_short, table_of
from nanolib.report.tables import (
    CASE,
    ONE,
    Column,
    add_speed_ups,
    case_table,
    gains,
    pick,
    times,
    titles,
)
from nanolib.report.theme import Drawing

_PARITY_METRIC = "loss_difference_from_bf16"
_SPEED = (
    Column("what", "Model"),
    Column("precision", "Precision"),
    Column("latency", "Latency, ms [95 %]", "latency"),
    Column("parameters", "", "latency", detail="parameters"),
    Column("speed_up", "Speed-up over bf16, × [95 %]"),
    Column("bound", "", "converted_share", detail="amdahl_bound"),
    Column("tokens_per_second", "Tokens/s", "tokens_per_second"),
    Column("mfu", "Share of the peak rate", "mfu"),
    Column("parts", "", "peak_memory", detail="parts"),
    Column("weights", "Weights, MiB"),
    Column("optimizer", "Optimizer, MiB"),
    Column("activations", "Activations, MiB"),
    Column("state", "State"),
)
# Column → kinds of memory use.
_MEMORY = {
    "weights": (MemoryKind.WEIGHTS,),
    "optimizer": (MemoryKind.STATES,),
    "activations": (MemoryKind.SAVED, MemoryKind.TEMPORARIES),
}
_PARITY = (
    Column("recipe", "Recipe"),
    Column("verdict", "Verdict against bf16", _PARITY_METRIC, detail="verdict"),
    Column("difference", "Loss difference, nats/byte [95 %]", _PARITY_METRIC),
    Column("margin_nats", "Margin, nats/byte", _PARITY_METRIC, detail="margin_nats"),
    Column("control", "", _PARITY_METRIC, detail="control"),
    Column("not_finite", "", _PARITY_METRIC, detail="not_finite"),
    Column("loss", "Loss, nats/byte [95 %]", "loss"),
    Column("sqnr", "Signal-to-noise, dB"),
    Column("seeds", "Seeds"),
    Column("steps", "Steps"),
    Column("provenance", "Products", _PARITY_METRIC, detail="provenance"),
    Column("state", "State"),
)


@table_of("fp8", "precision")
def speed_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a table of models by precision and mode. `bound` is the largest possible speed-up.

    The memory columns are parts of the peak. `activations` are saved activations and temporaries.
    """
    factors = ["name", "mode", "precision", "compiled", "seq_len", "batch_size"]
    table = case_table(rows, factors, _SPEED)
    model = table["name"] + ", " + table["mode"].str.replace("_", " ")
    compiled = table["compiled"].map({True: ", compiled"}).fillna("")
    sizes = pd.DataFrame(map(_memory_use, table.pop("parts")), table.index, [*_MEMORY])
    table = table.join(sizes).assign(what=model + compiled)
    return add_speed_ups(table, rows, table["mode"])


def _memory_use(parts) -> dict[str, float]:
    """Return the columns of `_MEMORY`, MiB, from the parts of a peak, if the parts are known."""
    if not isinstance(parts, list):
        return {}
    sizes = bytes_by_kind({"parts": parts}) / MIB
    return {name: float(sizes.reindex(kinds).sum()) for name, kinds in _MEMORY.items()}


@table_of("fp8", "recipe")
def parity_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a table of the trained recipes. `not_finite` is the reason for a missing loss.

    `sqnr` is the median signal-to-noise ratio of the products of all layers, dB.
    """
    rows = rows[(rows["metric"] != "loss") | (rows["scope"] == rows["factor.recipe"])]
    table = case_table(rows, ["recipe", "seq_len", "seeds", "steps"], _PARITY)
    medians = pick(rows, "sqnr").groupby(CASE)["estimate"].median()
    table = table.join(medians.rename("sqnr"), on=CASE)
    is_short = (table["steps"] < LEARNING_STEPS) & table["verdict"].notna()
    return table.assign(
        recipe=table["recipe"].str.replace("_", " "),
        control=table["control"].eq(True),
        verdict=table["verdict"].mask(is_short, "smoke test"),
    )


# If the FP8 precisions or models differ, the finding states the first of these orders.
_SPEEDS = {
    Order.ABOVE: "FP8 is faster than bf16",
    Order.NO_DIFFERENCE: "No clear difference between FP8 and bf16",
    Order.BELOW: "FP8 is slower than bf16",
}
_LOSSES = {
    "equivalent": "has a loss equivalent to bf16",
    "worse": "has a higher loss than bf16",
    "better": "has a lower loss than bf16",
    "inconclusive": "shows no clear difference in loss from bf16",
}


@chart_of(
    speed_table, "latency", "Time by precision", otherwise="no case measured this; set precisions"
)
def fp8_precisions(table: pd.DataFrame, title: str) -> Drawing:
    """Draw the time of each model in each precision, with its speed-up over bf16."""
    ends = table[["latency", "latency_low", "latency_high"]].to_numpy()
    gain = table["speed_up"].map(", {:.3g}× as fast as bf16".format, na_action="ignore").fillna("")
    data = pd.DataFrame(
        {
            "series": table["precision"],
            "panel": table["what"],
            "hue": table["precision"].eq("bfloat16").map({True: "base", False: "c1"}),
            "text": [format_number(*time) + " ms" for time in ends] + gain,
            **point_columns(table, "latency"),
        }
    )
    return plot(data, title, "rows", subtitle=["With 95 % intervals."], unit="Latency (ms)")


@chart_of(
    parity_table,
    "difference",
    "Loss difference from bf16, paired by seed",
    otherwise="no case measured this; set parity_recipes",
)
def fp8_parity(table: pd.DataFrame, title: str) -> Drawing:
    """Draw the loss difference of each recipe from bf16 at the end of training, and the margin."""
    data = {
        "series": table["recipe"] + table["control"].map({True: " (control)", False: ""}),
        "sure": (table["provenance"] == Provenance.MEASURED) & (table["verdict"] != "smoke test"),
        "hue": table["control"].map({True: "c2", False: "c1"}),
        "text": table["verdict"],
    }
    margins = table["margin_nats"].dropna().round(4)
    # Runs with different margins share no band.
    band = (-margins.min(), margins.min()) if margins.nunique() == 1 else None
    return plot(
        pd.DataFrame(data | point_columns(table, "difference")),
        title,
        "rows",
        subtitle=[
            "Mean over seeds, 95 % interval. Hollow: emulated, or too few steps.",
            "Green: the margin, declared before the run." if band else "",
            "A control must be worse.",
        ],
        unit="Loss minus bf16 loss (nats/byte)",
        fmt="+.2~g",
        ref=0.0,
        band=band,
    )


def verdict(rows: pd.DataFrame) -> list[Finding]:
    """Return findings about the speed and the loss of FP8."""
    if of_experiment(rows, "fp8").empty:
        return explain_missing(rows, "fp8", "FP8")
    return [*_compare_speed(speed_table(rows)), *_compare_losses(parity_table(rows))]


def _compare_speed(table: pd.DataFrame) -> list[Finding]:
    """Return a finding per mode about the speed of FP8 compared with bf16."""
    if table.empty:
        return []
    fp8 = table[table["precision"].str.startswith("fp8")]
    timed = drop_missing(fp8, "speed_up")
    if timed.empty:
        why = next(filter(None, fp8["message"]), "no FP8 case was completed")
        return [Finding("FP8 speed was not measured", why)]
    return [_compare_sizes(mode, group) for mode, group in timed.groupby("mode", sort=False)]


def _compare_sizes(mode: str, group: pd.DataFrame) -> Finding:
    """Return a finding about the models at which FP8 gains most, in the order of `_SPEEDS`."""
    orders = [Estimate.of(row, "speed_up").compare_to(ONE) for _, row in group.iterrows()]
    main = next(order for order in _SPEEDS if order in orders)
    chosen = group[[order is main for order in orders]].sort_values("parameters", kind="stable")
    best = chosen.loc[chosen["speed_up"].idxmax()]
    evidence = f"up to {times(best, 'speed_up')} as fast, for {best['name']} in {best['precision']}"
    next_step = ""
    if main is Order.ABOVE and pd.notna(best["bound"]):
        bound = f"the upper bound of {best['bound']:.2f}× by Amdahl's law"
        if best["speed_up_low"] > best["bound"]:
            evidence += f". This is above {bound}, so not only the FP8 products are faster"
            next_step = "compare the shares of the peak rate in the table"
        else:
            evidence += f", within {bound}"
    compared = ()
    for _, row in chosen.iterrows():
        compared += gains(row, f"{row['name']} {row['precision']}")
    return Finding(
        f"{_SPEEDS[main]} for {join_words(chosen['name'])}",
        evidence,
        next_step,
        about=mode.replace("_", " ").capitalize(),
        compared=compared,
    )


def _compare_losses(table: pd.DataFrame) -> list[Finding]:
    """Compare the loss of each recipe with bf16, and report controls that were not detected."""
    ended = table[table["status"] == "ok"] if len(table) else table
    if ended.empty:
        why = next(filter(None, table.get("message", ())), "")
        text = "The loss of FP8 was not compared with bf16"
        return [Finding(text, why, "" if why else "set parity_recipes")]
    ended = ended.sort_values("control", kind="stable")
    long, findings = drop_short(ended, "recipes", "parity_steps")
    findings += [_compare_loss(row) for _, row in long.iterrows()]
    missed = long[long["control"] & (long["verdict"] != "worse")]
    if len(missed):
        findings.append(
            Finding(
                f"The comparison did not detect {join_words(missed['recipe'])} as known-bad",
                "these runs cannot show that a loss is equivalent",
                "increase parity_steps or parity_seeds",
            )
        )
    return findings


def _compare_loss(row: pd.Series) -> Finding:
    """Compare the loss of one recipe with bf16."""
    emulated = " (emulated)" if row["provenance"] == Provenance.EMULATED else ""
    text = f"{row['recipe']}{emulated} {_LOSSES[row['verdict']]} after {int(row['steps'])} steps"
    if pd.isna(row["difference"]):
        return Finding(text, row["not_finite"])
    difference = Estimate.of(row, "difference", _PARITY_METRIC, row["recipe"])
    evidence = f"{difference.text()} nats/byte above bf16, "
    evidence += f"with a margin of ±{row['margin_nats']:.4f} and {int(row['seeds'])} seeds"
    if row["verdict"] in ("worse", "better"):
        compared = comparing(difference, Estimate.exact(0.0, "bf16"))
        return Finding(text, evidence, compared=compared)
    # The interval does not decide the verdict "equivalent", which uses two one-sided tests at 5 %.
    return Finding(text, evidence, figures=(difference,))


SECTION = Section(
    "fp8",
    "Is FP8 faster, and does the loss match?",
    {"fp8_precisions": fp8_precisions, "fp8_parity": fp8_parity},
    {
        "Speed and memory": CaseTable(speed_table, titles(_SPEED)),
        "Loss next to bf16": CaseTable(parity_table, titles(_PARITY)),
    },
    verdict,
)
