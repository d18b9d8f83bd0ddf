"""Warm-up: the curves from the first step, what each setting would report, and how many steps are enough."""

from __future__ import annotations

from typing import Any

import altair as alt
import pandas as pd

from nanolib.report.filters import links
from nanolib.report.finding import Estimate, Finding, Order, comparing
from nanolib.report.in_turns import ONE
from nanolib.report.overview import cached, of_experiment, pick, rows_with_factor, why_empty
from nanolib.report.plot import plot
from nanolib.report.section import CaseTable, Section
from nanolib.report.tables import (
    CASE,
    Column,
    add_metric_columns,
    case_rows,
    drop_missing,
    joined,
    worst,
)
from nanolib.report.theme import empty_chart
from nanolib.stats.steady import MOVED

_FEWEST = 5  # processes, whose range says something
_REFERENCE = 5  # steps, after which others are looked at
# Columns of a curve's row -> of its steps.
_CURVE = {
    "scope": "direction",
    "factor.process": "process",
    "factor.seq_len": "seq_len",
    "samples": "ms",
}
_SETTING = ["run_id", "seq_len", "direction", "warmup_steps"]
# What each process says of a setting.
_OF_PROCESS = (
    Column("mean", metric="latency", detail="mean"),
    Column("sd", metric="latency", detail="sd"),
    Column("cv", metric="latency", detail="cv"),
    Column("median", metric="latency", interval=True),
)


@cached
def warmup_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per direction and warm-up setting, of all its fresh processes.

    Returns:
        Columns: `run_id`, `seq_len`, `direction`, `warmup_steps`, `processes`; `mean`, `sd`, `cv`,
        `median` (ms; the median of the processes, of `mean` and `median` with the range as `_low`
        and `_high`); `difference` of the mean to that after five steps of the same process (a
        share, with its range; missing where 5 was not asked for); `busy`, `status`, `message`.
    """
    rows = rows_with_factor(rows, "warmup", "process")
    if rows.empty:
        return pd.DataFrame()
    table = case_rows(rows, ["seq_len", "direction", "warmup_steps", "process"], "process")
    table = table.explode("warmup_steps", ignore_index=True)
    table["scope"] = table["direction"] + " after " + table["warmup_steps"].astype(str)
    table = add_metric_columns(table, rows, _OF_PROCESS, [*CASE, "scope"])
    table = table.astype(dict.fromkeys(("mean", "sd", "cv"), float))
    reference = table["mean"].where(table["warmup_steps"] == _REFERENCE)
    of_process = reference.groupby([table["run_id"], table["case_id"]]).transform("max")
    table = table.assign(
        difference=table["mean"] / of_process - 1, busy=table["median_busy"].eq(True)
    )
    settings = table.groupby(_SETTING, sort=False)
    ranged = settings[["mean", "median", "difference"]]
    parts = [
        settings["mean"].count().rename("processes"),
        settings[["mean", "sd", "cv", "median", "difference"]].median(),
        ranged.min().add_suffix("_low"),
        ranged.max().add_suffix("_high"),
        settings.agg({"busy": "any", "status": worst, "message": joined}),
    ]
    return pd.concat(parts, axis=1).reset_index()


def curve_table(rows: pd.DataFrame) -> pd.DataFrame:
    """The per-step curves; needs samples.

    Returns:
        Columns: `direction`, `process`, `step`, `ms`, `phase` (`warm-up`, `steady` or `not settled`), `run_id`, `seq_len`.
    """
    found = rows_with_factor(rows, "warmup", "process")
    curves = pick(found, "latency")
    if curves.empty:
        return pd.DataFrame()
    curves = curves[curves["scope"] == curves["factor.direction"]]
    needed = pick(found, "warmup_needed")[[*CASE, "estimate"]].rename(columns={"estimate": "cut"})
    table = curves[[*CASE, *_CURVE]].merge(needed, on=list(CASE), how="left")
    table = table.rename(columns=_CURVE).explode("ms", ignore_index=True).dropna(subset="ms")
    table["step"] = table.groupby(list(CASE)).cumcount() + 1
    phase = (table["step"] <= table["cut"]).map({True: "warm-up", False: "steady"})
    table["phase"] = phase.mask(table["cut"].isna(), "not settled")
    return table.drop(columns="cut").astype({"process": int, "ms": float})


def warmup_curve(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """Each step's time from the first one of each fresh process, warm-up and steady state told apart; needs samples."""
    title = "Each step from the first, of fresh processes"
    data = curve_table(rows)
    if data.empty:
        return empty_chart(title, why_empty(rows, "warmup"))
    of_process = data.groupby(["run_id", "direction", "process"])["ms"]
    steady = of_process.transform(lambda ms: ms.tail(len(ms) // 2).median())
    points = pd.DataFrame(
        {
            "panel": data["direction"].str.replace("_", " + "),
            "series": "process " + data["process"].astype(str),
            "x": data["step"],
            "y": (100 * data["ms"] / steady).round(1),
            "sure": data["phase"] == "steady",
            "note": data["phase"],
            "text": " ",
            **links(data),
        }
    )
    return plot(
        points,
        title,
        subtitle=[
            "In % of the steady time: the median of each process's second half. Hollow: warm-up, or not settled."
        ],
        unit="% of the steady time",
        xunit="Step",
        ref=100.0,
        width=680,
    )


def warmup_settings(rows: pd.DataFrame) -> alt.TopLevelMixin:
    """What each warm-up setting does to the mean: the median of the fresh processes and their range."""
    title = "What skipping the warm-up does to the mean"
    table = drop_missing(warmup_table(rows), "difference")
    if len(table):
        table = table[table["warmup_steps"] != _REFERENCE]
    if table.empty:
        return empty_chart(title, why_empty(rows, "warmup"))
    steps = table["warmup_steps"].astype(int).astype(str)
    data = pd.DataFrame(
        {
            "series": table["direction"].str.replace("_", " + ") + " after " + steps,
            "x": 100 * table["difference"],
            "low": 100 * table["difference_low"],
            "high": 100 * table["difference_high"],
            "sure": table["processes"] >= _FEWEST,
            "hue": "c1",
            "text": table["difference"].map("{:+.0%}".format),
            **links(table),
        }
    )
    return plot(
        data,
        title,
        "rows",
        subtitle=[
            f"Against the mean after {_REFERENCE} steps of the same process. Bars: the range of the processes."
        ],
        unit="Difference of the mean (%)",
        ref=0.0,
        band=(-100 * MOVED, 100 * MOVED),
        fmt="+,.3~r",
    )


@cached
def verdict(rows: pd.DataFrame) -> list[Finding]:
    """How many warm-up steps are enough on this machine."""
    found = of_experiment(rows, "warmup")
    curves = found[found["metric"] == "warmup_needed"]
    if curves.empty:
        nothing = "No warm-up curve was measured, so there is no verdict"
        return [Finding(nothing, next_step="nano run quick warmup")]
    cold = drop_missing(warmup_table(rows), "difference")
    if len(cold):
        cold = cold[(cold["warmup_steps"] == 0) & (cold["processes"] >= _FEWEST)]
    without = cold.to_dict("records")
    slower = {(line["run_id"], line["direction"]): line["difference"] for line in without}
    return [
        *(
            _enough(part, slower.get(key, 0.0))
            for key, part in curves.groupby(["run_id", "scope"], sort=False)
        ),
        *(_without(line) for line in without),
    ]


def _enough(curves: pd.DataFrame, slower: float) -> Finding:
    """What the curves of all fresh processes of one direction say.

    Args:
        curves: Their `warmup_needed` rows.
        slower: The share by which the mean without warm-up is above that after five steps.
    """
    needed = curves["estimate"].dropna().astype(int)
    about, count = curves["scope"].iloc[0].replace("_", " + "), len(curves)
    of_each = ", ".join(map(str, needed))
    if unclear := count - len(needed):
        why = curves.loc[curves["estimate"].isna(), "message"].iloc[0]
        why += f"; the others needed {of_each}" if of_each else ""
        next_step = "raise curve_steps, or repeat it on a quieter machine"
        return Finding(
            f"no clear answer in {unclear} of {count} fresh processes", why, next_step, about
        )
    steady = pd.Series([details["steady_median"] for details in curves["details"]]).median()
    evidence, next_step, most = f"a step then takes {steady:.3g} ms", "", int(needed.max())
    if most:
        steps = "1 warm-up step is" if most == 1 else f"{most} warm-up steps are"
        answer = f"{steps} enough in all {count} fresh processes"
        evidence = f"they needed {of_each}; {evidence}" if needed.nunique() > 1 else evidence
    elif slower > MOVED:
        answer, next_step = "no clear answer", "use 5 steps, or measure again"
        evidence = (
            f"the curves show no warm-up, but without it the mean was {slower:+.0%}; {evidence}"
        )
    else:
        answer = f"no warm-up was detected in any of {count} fresh processes"
    return Finding(answer, evidence, next_step, about, figures=(Estimate.exact(float(most)),))


def _without(line: dict[str, Any]) -> Finding:
    """What no warm-up does to the mean, within each process."""
    ends = [line[f"difference{end}"] for end in ("_low", "", "_high")]
    name = "the mean without warm-up over that after 5 steps"
    ratio = Estimate(*(end + 1 for end in ends), name=name, busy=line["busy"])
    compared = comparing(ratio, ONE)
    low, share, high = (f"{end:+.0%}" for end in ends)
    answer = f"without warm-up the mean is {share} [{low} … {high}] against that after {_REFERENCE} steps"
    if compared[0][1] is Order.NO_DIFFERENCE:
        answer += ", which cannot be told from that after 5"
    evidence = f"the range of {line['processes']} fresh processes, with a CV of {line['cv']:.0%}"
    return Finding(answer, evidence, about=line["direction"].replace("_", " + "), compared=compared)


SECTION = Section(
    "warmup",
    "How much warm-up is enough?",
    {"warmup_curve": warmup_curve, "warmup_settings": warmup_settings},
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
                "difference": "Mean over that after 5 steps, less 1 [range]",
                "status": "Status",
            },
        )
    },
    verdict,
)
