"""Warm-up: the curves from the first step, what each setting would report, and how many steps are enough."""

from __future__ import annotations

import altair as alt
import pandas as pd

from nanolib.measurement import Flag
from nanolib.report import overview
from nanolib.report.claim import Claim, Figure, Order, comparing
from nanolib.report.in_turns import ONE
from nanolib.report.linking import links
from nanolib.report.overview import cached, having, pick, why_empty
from nanolib.report.plot import plot
from nanolib.report.section import CaseTable, Section
from nanolib.report.tables import CASE, base, worst
from nanolib.report.theme import empty_chart
from nanolib.stats.steady import MOVED

WARMUP_COLUMNS = {
    "direction": "Direction",
    "warmup_steps": "Warm-up steps",
    "processes": "Fresh processes",
    "mean": "Mean, ms [range]",
    "sd": "SD, ms",
    "cv": "CV",
    "median": "Median, ms [range]",
    "difference": "Mean over that after 5 steps, less 1 [range]",
    "status": "Status",
}
_FEWEST = 5  # processes, whose range says something
_REFERENCE = 5  # steps, after which others are looked at
_SETTING = ["run_id", "seq_len", "direction", "warmup_steps"]
_DIFFERENCE = ("difference", "difference_low", "difference_high")
_FIGURES = ("mean", "sd", "cv", "median", "ratio")


@cached
def warmup_table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per direction and warm-up setting, of all its fresh processes.

    Returns:
        Columns: `run_id`, `seq_len`, `direction`, `warmup_steps`, `processes`; `mean`, `sd`, `cv`, `median` (ms; the median of the
        processes, of `mean` and `median` with the range as `_low` and `_high`); `difference` of the mean to that after five steps
        of the same process (a share, with its range; missing where 5 was not asked for); `busy`, `status`, `message`.
    """
    rows = having(rows, "warmup", "process")
    if rows.empty:
        return pd.DataFrame()
    table = base(rows, ["seq_len", "direction", "warmup_steps", "process"], "process")
    table = table.explode("warmup_steps", ignore_index=True)
    table["scope"] = table["direction"] + " after " + table["warmup_steps"].astype(str)
    timed = pick(rows, "latency")
    of_process = pd.DataFrame(
        {name: [of.get(name) for of in timed["details"]] for name in ("mean", "sd", "cv")}
    )
    of_process = of_process.assign(
        median=list(timed["estimate"]), busy=[Flag.BUSY_MACHINE in of for of in timed["flags"]]
    )
    of_process[[*CASE, "scope"]] = timed[[*CASE, "scope"]].to_numpy()
    table = table.merge(of_process, on=[*CASE, "scope"], how="left")
    reference = table[table["warmup_steps"] == _REFERENCE].set_index(list(CASE))["mean"]
    table["ratio"] = (
        table["mean"].to_numpy()
        / reference.reindex(pd.MultiIndex.from_frame(table[[*CASE]])).to_numpy()
    )
    return pd.DataFrame(
        [_of_setting(key, part) for key, part in table.groupby(_SETTING, sort=False)]
    )


def _of_setting(key: tuple[object, ...], part: pd.DataFrame) -> dict[str, object]:
    line: dict[str, object] = dict(zip(_SETTING, key, strict=True)) | {
        "processes": int(part["mean"].notna().sum())
    }
    for name in _FIGURES:
        values = part[name].astype(float)
        line |= {name: values.median(), f"{name}_low": values.min(), f"{name}_high": values.max()}
    for end in ("", "_low", "_high"):
        line[f"difference{end}"] = float(line.pop(f"ratio{end}")) - 1
    for name in ("sd", "cv"):
        del line[f"{name}_low"], line[f"{name}_high"]
    busy = bool(part["busy"].eq(True).any())
    return line | {
        "busy": busy,
        "status": worst(part["status"]),
        "message": "; ".join(dict.fromkeys(part["message"])),
    }


def curve_table(rows: pd.DataFrame) -> pd.DataFrame:
    """The per-step curves; needs samples.

    Returns:
        Columns: `direction`, `process`, `step`, `ms`, `phase` (`warm-up`, `steady` or `not settled`), `run_id`, `seq_len`.
    """
    found = having(rows, "warmup", "process")
    curves = pick(found, "latency")
    parts = []
    for _, row in (
        curves[curves["scope"] == curves["factor.direction"]].iterrows() if len(curves) else ()
    ):
        own = found[(found["run_id"] == row["run_id"]) & (found["case_id"] == row["case_id"])]
        cut = own[own["metric"] == "warmup_needed"]["estimate"].max()
        steps = range(1, len(row["samples"]) + 1)
        phase = [
            "not settled" if pd.isna(cut) else "warm-up" if step <= cut else "steady"
            for step in steps
        ]
        part = {
            "direction": row["scope"],
            "process": int(row["factor.process"]),
            "step": steps,
            "ms": row["samples"],
        }
        of = {"phase": phase, "run_id": row["run_id"], "seq_len": row.get("factor.seq_len")}
        parts.append(pd.DataFrame(part | of))
    columns = ["direction", "process", "step", "ms", "phase"]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)


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
    table = warmup_table(rows)
    table = (
        table[table["difference"].notna() & (table["warmup_steps"] != _REFERENCE)]
        if len(table)
        else table
    )
    if table.empty:
        return empty_chart(title, why_empty(rows, "warmup"))
    steps = table["warmup_steps"].astype(int).astype(str)
    data = pd.DataFrame(
        {
            "series": table["direction"].str.replace("_", " + ") + " after " + steps,
            **{
                name: 100 * table[column]
                for name, column in zip(("x", "low", "high"), _DIFFERENCE, strict=True)
            },
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
def verdict(rows: pd.DataFrame) -> list[Claim]:
    """How many warm-up steps are enough on this machine."""
    found = overview.of_experiment(rows, "warmup")
    curves = found[found["metric"] == "warmup_needed"]
    if curves.empty:
        return [
            Claim(
                "No warm-up curve was measured, so there is no verdict",
                advice="nano run quick warmup",
            )
        ]
    table = warmup_table(rows)
    if len(table):
        known = table["difference"].notna() & (table["processes"] >= _FEWEST)
        table = table[(table["warmup_steps"] == 0) & known]
    cold = table
    grouped = curves.groupby(["run_id", "scope"], sort=False)
    return [
        *(_enough(part, cold) for _, part in grouped),
        *(_without(row) for _, row in cold.iterrows()),
    ]


def _enough(curves: pd.DataFrame, cold: pd.DataFrame) -> Claim:
    """What the curves of all fresh processes of one direction say."""
    first, needed = curves.iloc[0], curves["estimate"].dropna().astype(int)
    about, count = first["scope"].replace("_", " + "), len(curves)
    if unclear := count - len(needed):
        why = curves.loc[curves["estimate"].isna(), "message"].iloc[0]
        why += f"; the others needed {', '.join(map(str, needed))}" if len(needed) else ""
        advice = "raise curve_steps, or repeat it on a quieter machine"
        return Claim(f"no clear answer in {unclear} of {count} fresh processes", why, advice, about)
    steady = pd.Series([details["steady_median"] for details in curves["details"]]).median()
    took = f"a step then takes {steady:.3g} ms"
    most, figures = int(needed.max()), (Figure.exactly(float(needed.max())),)
    if most:
        answer = f"{most} warm-up step{'s are' if most > 1 else ' is'} enough in all {count} fresh processes"
        of_each = f"they needed {', '.join(map(str, needed))}; " if needed.nunique() > 1 else ""
        return Claim(answer, of_each + took, about=about, figures=figures)
    of = (
        cold[(cold["run_id"] == first["run_id"]) & (cold["direction"] == first["scope"])]
        if len(cold)
        else cold
    )
    if len(of) and (of["difference"] > MOVED).any():
        sure = f"the curves show no warm-up, but without it the mean was {of['difference'].max():+.0%}; {took}"
        return Claim(
            "no clear answer", sure, "use 5 steps, or measure again", about, figures=figures
        )
    return Claim(
        f"no warm-up was detected in any of {count} fresh processes",
        took,
        about=about,
        figures=figures,
    )


def _without(row: pd.Series) -> Claim:
    """What no warm-up does to the mean, within each process."""
    ends = [row[f"difference{end}"] for end in ("_low", "", "_high")]
    ratio = Figure(
        *(end + 1 for end in ends),
        name="the mean without warm-up over that after 5 steps",
        busy=row["busy"],
    )
    low, share, high = (f"{end:+.0%}" for end in ends)
    moved = (
        "" if ratio.against(ONE) is not Order.ALIKE else ", which cannot be told from that after 5"
    )
    answer = f"without warm-up the mean is {share} [{low} … {high}] against that after {_REFERENCE} steps{moved}"
    sure = f"the range of {int(row['processes'])} fresh processes, with a CV of {row['cv']:.0%}"
    return Claim(
        answer, sure, about=row["direction"].replace("_", " + "), compared=comparing(ratio, ONE)
    )


SECTION = Section(
    "warmup",
    "How much warm-up is enough?",
    {"warmup_curve": warmup_curve, "warmup_settings": warmup_settings},
    {"All settings": CaseTable(warmup_table, WARMUP_COLUMNS)},
    verdict,
)
