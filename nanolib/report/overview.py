"""Report changes between runs, and summarize runs, machines, failures and flags."""

from collections.abc import Sequence

import pandas as pd

from nanolib.compare.findings import (
    CASE_KEY,
    NEW,
    Comparison,
    case_names,
    cases_in,
    share_words,
)
from nanolib.compare.history import RECENT_RUNS, History, histories, repeats
from nanolib.compare.runs import compare_rows
from nanolib.measurement import METRICS, Flag
from nanolib.numbers import format_number
from nanolib.report.plot import plot
from nanolib.report.section import Finding, Part, failed_rows
from nanolib.report.tables import pick
from nanolib.report.theme import Drawing
from nanolib.stats.changes import LEAST_HISTORY
from nanolib.stats.compare import MARGIN, Kind
from nanolib.store import Store

_HUES = {
    Kind.REGRESSED: "c2",
    Kind.SUSPECT: "c4",
    Kind.EQUIVALENT: "c1",
    Kind.IMPROVED: "c3",
}
_MOST_SHOWN = 40  # Largest number of ratios in a chart.
_MOST_NAMED = 5  # Largest number of changes in a verdict.
_QUIET = (Kind.INCONCLUSIVE, Kind.EQUIVALENT, NEW)  # nanolib only counts these findings.


def changes(store: Store, runs: pd.DataFrame) -> Part:
    """Return the part of the report about changes of timings on the machines of some runs.

    The newest run of each experiment, suite and machine is compared with the run before.

    Args:
        store: Store with the runs.
        runs: Runs to report, the oldest first.
    """
    newest = runs.drop_duplicates(["experiment", "machine_id", "suite"], keep="last")
    figures = store.figures("latency", runs["machine_id"].unique(), RECENT_RUNS)
    verdict, charts, tables = history_verdict(histories(figures)), {}, {}
    if since := compare_with_earlier(store, newest["run_id"], figures):
        verdict += comparison_verdict(since)
        charts = {"since_the_run_before": comparison_chart(since)}
        table = since.table(everything=False)
        tables = {"All but equivalent cases": (table, table)}
    return Part("changes", "What changed?", verdict, charts, tables)


def compare_with_earlier(
    store: Store, run_ids: Sequence[str], figures: pd.DataFrame
) -> Comparison | None:
    """Compare runs with earlier runs of the same experiment, suite and machine.

    The comparison has the cases that both have.

    Args:
        store: Store with the runs.
        run_ids: IDs of the newer runs.
        figures: Recent latencies on the machines of the runs, from `Store.figures`.

    Returns:
        The comparison, or None if there is no earlier run.
    """
    before = store.runs_before(run_ids)
    if not before:
        return None
    base, current = (store.measurements(ids, samples=True) for ids in (before, run_ids))
    common = base[CASE_KEY].merge(current[CASE_KEY]).drop_duplicates()
    return compare_rows(
        base.merge(common),
        current.merge(common),
        runs=[store.runs_of([*before, *run_ids])],
        repeats=repeats([figures]),
    )


def comparison_verdict(found: Comparison) -> list[Finding]:
    """Return the findings of a comparison of the newest runs with the runs before."""
    counts = ", ".join(f"{count} {finding}" for finding, count in found.counts.items())
    findings = [Finding("The newest runs were compared with earlier runs", counts)]
    for line in [line for line in found.lines if line.finding not in _QUIET][:_MOST_NAMED]:
        evidence = ", ".join(filter(None, [line.change.strip("—"), line.message]))
        findings.append(Finding(f"{line.finding.capitalize()}: {line.name}", evidence))
    findings += [Finding("The comparison has a limitation", noise) for noise in found.noise]
    drift = Finding(
        "The runs were measured at different times, so machine drift is not controlled",
        next_step="run nano ab REV_A REV_B to measure the two revisions in turns",
    )
    return [*findings, drift]


def comparison_chart(found: Comparison) -> Drawing:
    """Draw the ratios of the newest runs to earlier runs, with a panel for each experiment.

    The chart shows at most 40 timings, those that changed first, and the band of ratios that count
    as no change.
    """
    timed = [line for line in found.lines if line.verdict]
    timed.sort(key=lambda line: line.finding in _QUIET)
    drawn = timed[:_MOST_SHOWN]
    data = pd.DataFrame(
        [line.verdict.interval for line in drawn], columns=["low", "x", "high"]
    ).assign(
        panel=[line.experiment for line in drawn],
        # All timings are latencies, so their names do not need the metric.
        series=[f"{line.case} {line.metric.removeprefix('latency')}".strip() for line in drawn],
        text=[line.finding for line in drawn],
        hue=[_HUES.get(line.finding, "rest") for line in drawn],
    )
    for experiment, names in data.groupby("panel")["series"]:
        shared, short = share_words(list(names))
        data.loc[names.index, "series"] = short
        data.loc[names.index, "panel"] = " ".join([experiment, *shared])
    return plot(
        data,
        "Changes since earlier runs",
        "rows",
        subtitle=[
            "A: earlier runs. B: the newest runs, measured at another time.",
            f"The chart shows {_MOST_SHOWN} of {len(timed)} timings."
            if len(timed) > _MOST_SHOWN
            else "",
            f"Green: no change (±{MARGIN:.0%}). Changes below {found.threshold:.0%} do not count.",
        ],
        unit="Ratio B / A (higher is slower)",
        log="x",
        fmt=".2~f",
        ref=1.0,
        band=(1 - MARGIN, 1 + MARGIN),
        empty="no timing has enough blocks in both A and B",
    )


def history_verdict(found: list[History]) -> list[Finding]:
    """Return findings about the latest changes, with the revisions before and after."""
    if not found:
        return [
            Finding(
                "There is no history yet",
                "no value above 0 was measured in two runs of one machine",
            )
        ]
    changed = [series for series in found if series.changes]
    runs = max(len(history.points) for history in found)
    what = "timings" if found[0].metric == "latency" else "series"
    findings = [
        Finding(f"{len(changed)} of {len(found)} {what} changed their level over up to {runs} runs")
    ]
    if runs < LEAST_HISTORY:
        few = f"nanolib needs at least {LEAST_HISTORY} runs to find a change of level"
        findings.append(Finding(few, next_step="run nano compare latest~1 latest until then"))
    for series in changed[:_MOST_NAMED]:
        name, last = f"{series.experiment} {series.case} {series.scope}".strip(), series.changes[-1]
        text = f"{name} became {'worse' if last.worse else 'better'}"
        findings.append(Finding(text, str(last), f"run {series.command}" if series.command else ""))
    return findings


def newest_machine(rows: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of each experiment from the machine of its newest run.

    Args:
        rows: Measurements of any experiments.
        runs: Runs with the columns `experiment` and `machine_id`, newest last.
    """
    newest = runs.groupby("experiment")["machine_id"].last()
    return rows[rows["machine_id"] == rows["experiment"].map(newest)]


def run_facts(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a line per run for people, with start time, duration and versions."""
    seconds = runs["duration_s"].astype(float)
    return pd.DataFrame(
        {
            "Run": runs["run_id"].str[:8],
            "Experiment": runs["experiment"],
            "Suite": runs["suite"],
            "Label": runs["label"],
            "Started": runs["started"].str[:19].str.replace("T", " ") + " UTC",
            "Duration": seconds.map("{:.0f} s".format).replace("nan s", "—"),
            "Status": runs["status"],
            "Machine": runs["machine_id"].str[:6],
            "torch": [versions.get("torch", "") for versions in runs["versions"]],
            "Revision": runs["git_revision"],
            "Interference": runs["interference"].map("; ".join).replace("", "none found"),
        }
    )


def failures(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the failed cases, with the columns `experiment`, `case`, `status` and `message`."""
    bad = failed_rows(rows)
    names = case_names(cases_in(bad))
    keys = bad[CASE_KEY].itertuples(index=False, name=None)
    return bad.assign(case=[names[key] for key in keys])[
        ["experiment", "case", "status", "message"]
    ]


def flag_lines(rows: pd.DataFrame) -> list[Finding]:
    """Return a finding per flag with the number of timings and the meaning of the flag."""
    timed = pick(rows, "latency")
    counts = timed["flags"].explode().value_counts()
    return [
        Finding(f"{count} of {len(timed)} timings have the flag {flag}", Flag(flag).text)
        for flag, count in counts.items()
    ]


def hardware_table(rows: pd.DataFrame, machines: pd.DataFrame) -> pd.DataFrame:
    """Return the hardware table for people, with a line per machine.

    Args:
        rows: Measurements of any runs.
        machines: Table from `Store.machines`.

    Returns:
        A table with the capabilities of each machine of `rows`, and the measured peak rates.
    """
    lines = []
    used = machines["machine_id"].isin(rows["machine_id"])
    for machine in machines[used].to_dict("records"):
        gpus = machine["gpus"]
        gpu = gpus[0] if gpus else {}
        line = {
            "Machine": machine["machine_id"],
            "CPU": machine["cpu"],
            "Cores": machine["cores"],
            "RAM (GiB)": machine["ram_gib"],
            "GPU": gpu.get("name", "no GPU") + (f" × {len(gpus)}" if len(gpus) > 1 else ""),
            "GPU memory (GiB)": gpu.get("memory_gib"),
            "Compute capability": gpu.get("compute_capability"),
            "Native FP8": "yes" if gpu.get("fp8") else "no",
            "torch": machine["torch"],
            **machine["dtypes"],
        }
        own = rows[rows["machine_id"] == machine["machine_id"]]
        for metric in ("ceiling_flops", "ceiling_bytes"):
            # Rows are in order of time, so the newest peak rate replaces older peak rates.
            for row in pick(own, metric).to_dict("records"):
                line[f"{row['scope']} ({METRICS[metric].unit})"] = format_number(
                    row["estimate"], row["low"], row["high"]
                )
        lines.append(line)
    return pd.DataFrame(lines).astype(object).fillna("—")
