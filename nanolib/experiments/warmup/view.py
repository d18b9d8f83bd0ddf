"""Draw the charts and build the table and the findings of the warm-up notebook."""

import math
from typing import Any

import pandas as pd

from nanolib.measurement import Flag
from nanolib.report.plot import links, plot
from nanolib.report.section import (
    CaseTable,
    Estimate,
    Finding,
    Order,
    Section,
    comparing,
    drop_missing,
    explain_empty,
    explain_missing,
    of_experiment,
    unclear,
)
from nanolib.report.shared import table_of
from nanolib.report.tables import CASE, ONE, pick
from nanolib.report.theme import Drawing
from nanolib.stats.changes import MOVED

_REFERENCE = 5  # All means are compared with the mean after this number of warm-up steps.
_SETTING = ["run_id", "factor.name", "factor.seq_len", "factor.direction", "warmup_steps"]


@table_of("warmup", "process")
def warmup_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a table with one line per direction and number of warm-up steps.

    `mean`, `sd`, `cv` and `median` are medians over the fresh processes, in ms except `cv`.
    `difference` is the ratio of the mean to the mean after five warm-up steps of the same process,
    minus 1. Columns that end with `_low` and `_high` contain the range over the processes.

    Args:
        rows: Measurements with samples.
    """
    lines = []
    for row in pick(rows, "latency").to_dict("records"):
        ms = pd.Series(row["samples"], dtype=float)
        length = int(row["factor.steps"])
        measured = {count: ms[count:].head(length) for count in row["factor.warmup_steps"]}
        reference = measured.get(_REFERENCE, pd.Series(dtype=float)).mean()
        for count, steps in measured.items():
            line = row | {
                "warmup_steps": count,
                "mean": steps.mean(),
                "sd": steps.std(),
                "cv": steps.std() / steps.mean(),
                "median": steps.median(),
                "difference": steps.mean() / reference - 1,
                "busy": Flag.BUSY_MACHINE in row["flags"],
            }
            lines.append(line)
    if not lines:
        return pd.DataFrame()
    settings = pd.DataFrame(lines).groupby(_SETTING, sort=False)
    ranged = settings[["mean", "median", "difference"]]
    parts = [
        settings.size().rename("processes"),
        settings[["mean", "sd", "cv", "median", "difference"]].median(),
        ranged.min().add_suffix("_low"),
        ranged.max().add_suffix("_high"),
        settings["busy"].any(),
    ]
    table = pd.concat(parts, axis=1).reset_index()
    return table.rename(columns=lambda name: name.removeprefix("factor."))


def warmup_curve(rows: pd.DataFrame) -> Drawing:
    """Draw the step times of fresh processes. Points are hollow unless the time is steady."""
    found = of_experiment(rows, "warmup")
    needed = pick(found, "warmup_needed").set_index(CASE)["estimate"]
    parts = [pd.DataFrame()]
    for row in pick(found, "latency").to_dict("records"):
        ms = pd.Series(row["samples"], dtype=float)
        steady = ms.tail(len(ms) // 2).median()
        points = {
            "panel": row["scope"].replace("_", " + "),
            "series": f"process {int(row['factor.process'])}",
            "x": ms.index + 1,
            "y": (100 * ms / steady).round(1),
            # If the curve does not settle, no step is steady.
            "sure": ms.index >= needed.get((row["run_id"], row["case_id"]), math.inf),
            "text": " ",
        }
        parts.append(pd.DataFrame(points | links(row)))
    return plot(
        pd.concat(parts, ignore_index=True),
        "Step times of fresh processes",
        subtitle=[
            "Relative to the median of the last half of the steps. Hollow: warm-up, or not settled."
        ],
        unit="Step time (% of the steady time)",
        xunit="Step",
        ref=100.0,
        empty=explain_empty(rows, "warmup"),
    )


def verdict(rows: pd.DataFrame) -> list[Finding]:
    """Return findings about the necessary warm-up and about the mean without warm-up."""
    curves = rows[rows["metric"] == "warmup_needed"]
    if curves.empty:
        return explain_missing(rows, "warmup", "Warm-up")
    cold = drop_missing(warmup_table(rows), "difference")
    lines = [line for line in cold.to_dict("records") if line["warmup_steps"] == 0]
    slower = {(line["run_id"], line["direction"]): line["difference"] for line in lines}
    steps = [
        _count_steps(part, slower.get(key, 0.0))
        for key, part in curves.groupby(["run_id", "scope"], sort=False)
    ]
    return [*steps, *map(_compare_without, lines)]


def _count_steps(curves: pd.DataFrame, slower: float) -> Finding:
    """Return a finding about how many warm-up steps are enough for one direction.

    Args:
        curves: Rows with the metric `warmup_needed` of the fresh processes.
        slower: Mean without warm-up over the mean after five warm-up steps, minus 1.
    """
    needed = curves["estimate"].dropna().astype(int)
    direction, count = curves["scope"].iloc[0].replace("_", " + "), len(curves)
    each = ", ".join(map(str, needed))
    if unclear := count - len(needed):
        text = f"The warm-up of {direction} is unclear in {unclear} of {count} fresh processes"
        why = curves.loc[curves["estimate"].isna(), "message"].iloc[0]
        why += f". Warm-up steps of the other processes: {each}" if each else ""
        return Finding(text, why, "increase curve_steps, or use an idle machine")
    steady = pd.Series([details["steady_median"] for details in curves["details"]]).median()
    most, next_step = int(needed.max()), ""
    if most:
        steps = "1 warm-up step is" if most == 1 else f"{most} warm-up steps are"
        text, evidence = f"{steps} enough for {direction}", f"{count} processes need {each} steps"
    elif slower > MOVED:
        text, next_step = f"Use {_REFERENCE} warm-up steps for {direction}", "repeat the run"
        evidence = f"no curve shows warm-up, but the mean is {slower:.0%} higher without warm-up"
    else:
        text = f"No warm-up step is needed for {direction}"
        evidence = f"none of {count} fresh processes needs a warm-up step"
    evidence += f". The steady step time is {steady:.3g} ms"
    return Finding(text, evidence, next_step)


def _compare_without(line: dict[str, Any]) -> Finding:
    low, share, high = (line[f"difference{end}"] for end in ("_low", "", "_high"))
    name = f"the mean without warm-up over the mean after {_REFERENCE} steps"
    ratio = Estimate(low + 1, share + 1, high + 1, name=name, busy=line["busy"])
    order, direction = ratio.compare_to(ONE), line["direction"].replace("_", " + ")
    higher = "higher" if order is Order.ABOVE else "lower"
    text = f"The mean time of {direction} is {higher} without warm-up than after {_REFERENCE} steps"
    evidence = f"{share:+.0%} [{low:+.0%} … {high:+.0%}]"
    if order is Order.NO_DIFFERENCE:
        what = f"the mean times of {direction} without warm-up and after {_REFERENCE} steps"
        text, evidence = unclear(what, evidence)
    evidence += f", the range over {line['processes']} processes, and a CV of {line['cv']:.0%}"
    return Finding(text, evidence, compared=comparing(ratio, ONE))


SECTION = Section(
    "warmup",
    "How much warm-up is enough?",
    {"warmup_curve": warmup_curve},
    {
        "All settings": CaseTable(
            warmup_table,
            {
                "direction": "Direction",
                "warmup_steps": "Warm-up steps",
                "processes": "Fresh processes",
                "mean": "Mean, ms [range]",
                "sd": "SD, ms",
                "cv": "CV",
                "median": "Median, ms [range]",
                "difference": "Difference from the mean after 5 steps [range]",
            },
        )
    },
    verdict,
)
