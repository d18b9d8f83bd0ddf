"""Commands that compare what is stored: runs, and each case over its runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from nanolib.cli.command import (
    EXIT_FAILED,
    EXIT_OK,
    SHARE,
    NewFile,
    command,
    echo,
    echo_table,
    output_option,
    terminal_width,
)
from nanolib.measurement import BadInput
from nanolib.paths import DATABASE


def findings(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a command that compares."""
    for option in (
        click.option(
            "--markdown",
            "markdown_file",
            type=NewFile(),
            metavar="FILE",
            help="Write the findings as Markdown.",
        ),
        click.option(
            "--json",
            "json_file",
            type=NewFile(),
            metavar="FILE",
            help="Write the findings as JSON.",
        ),
        click.option(
            "--threshold",
            type=SHARE,
            default="5%",
            show_default=True,
            metavar="SHARE",
            help="Smallest change that fails the gate.",
        ),
    ):
        command = option(command)
    return command


@command(
    "nano compare latest~1 latest",
    "nano compare before after --threshold 3% --markdown summary.md",
    "nano compare outputs/reference/NAME latest --across-machines",
)
@click.argument("base")
@click.argument("current")
@click.option("--all", "everything", is_flag=True, help="Show unchanged cases too.")
@click.option(
    "--strict",
    is_flag=True,
    help="Exit with 1 if notebooks, cases or metrics of BASE are missing or failed.",
)
@click.option(
    "--across-machines",
    is_flag=True,
    help="Scale the times of BASE by both machines' measured peak rates.",
)
@findings
@click.option(
    "--chart",
    "chart_file",
    type=NewFile(),
    metavar="FILE",
    help="Write a chart of the findings: .html, .png or .svg.",
)
@output_option
def compare(
    base: str,
    current: str,
    threshold: float,
    everything: bool,
    strict: bool,
    across_machines: bool,
    json_file: Path | None,
    markdown_file: Path | None,
    chart_file: Path | None,
) -> None:
    """Compare two runs; exit code 1 on a regression. BASE, CURRENT: id, label, suite, latest~1, or a database.

    The two were measured at different times. A slower timing is a regression only beyond the spread between three or more
    earlier runs of one committed revision on this machine. With fewer runs it is suspect at most, and nano ab decides.
    """
    from nanolib.compare.across import overall_shift, scale_by_peaks
    from nanolib.compare.runs import compare_rows
    from nanolib.compare.spread import repeats

    (then, noise, runs), (now, noise_now, runs_now) = (
        _rows_of("base", base),
        _rows_of("current", current),
    )
    shared = then[["experiment", "case_id"]].merge(now[["experiment", "case_id"]])
    if shared.empty:
        sides = [
            f"{name!r} ({', '.join(rows['experiment'].unique())})"
            for name, rows in ((base, then), (current, now))
        ]
        raise BadInput(
            f"compare: {sides[0]} and {sides[1]} have no case in common; name runs with the same parameters"
        )
    unscaled = 0
    if across_machines:
        then, unscaled = scale_by_peaks(then, now)
    found = compare_rows(then, now, threshold, noise | noise_now, repeats([runs, runs_now]))
    if chart_file:
        from nanolib.report.regressions import comparison_chart
        from nanolib.report.renderer import save_as

        save_as(
            comparison_chart(found, "Two sets of runs", f"A: {base}. B: {current}."),
            chart_file,
        )
    show_comparison(found, everything, json_file, markdown_file)
    if across_machines:
        echo(overall_shift(found.lines))
    if unscaled:
        echo(f"left out: {unscaled} latencies without a prediction from measured peak rates")
    echo(
        "note: measured at different times, so machine drift is not controlled; `nano ab` controls it"
    )
    if not found.same_machine:
        echo("note: different machines, so the exit code is 0 for any result")
    sys.exit(
        EXIT_FAILED
        if found.regressed or (strict and found.same_machine and found.lost)
        else EXIT_OK
    )


def show_comparison(
    found: Any, everything: bool, json_file: Path | None, markdown_file: Path | None
) -> None:
    """Print a comparison, and write it to the files that were named."""
    from nanolib.report.page import markdown_table

    summary = ", ".join(f"{n} {finding}" for finding, n in found.counts.items())
    said = [*found.noise, *([f"A → B: {', '.join(found.differ)}"] if found.differ else [])]
    echo(*said)
    echo_findings(found.table(everything))
    echo(summary)
    if json_file:
        json_file.write_text(json.dumps(found.to_dict(), indent=1), encoding="utf-8")
    if markdown_file:
        text = "\n\n".join([summary, *said, markdown_table(found.table())]) + "\n"
        markdown_file.write_text(text, encoding="utf-8")


def echo_findings(table: Any) -> None:
    """Print findings, experiment by experiment; notes that leave no room for the case's name stand below."""
    from nanolib.report.tables import compact

    notes: dict[str, str] = {}
    parts = [part for _, part in table.groupby("experiment", sort=False)] if len(table) else []
    for part in parts:
        shared, lines = compact(part, terminal_width(), notes)
        echo(*([""] if len(parts) > 1 else []), f"all: {shared}")
        echo_table(lines)
    echo(*([""] if notes else []), *(f"{number}: {note}" for note, number in notes.items()))


@command(
    "nano history",
    "nano history attention --all",
)
@click.argument("experiments", nargs=-1, metavar="[EXPERIMENT]...")
@click.option("--metric", default="latency", show_default=True, help="Metric to show.")
@click.option("--all", "everything", is_flag=True, help="Show unchanged cases too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@output_option
def history(
    experiments: tuple[str, ...],
    metric: str,
    everything: bool,
    as_json: bool,
) -> None:
    """Each case over its runs: where its level changed, and when.

    A level is what at least three runs show; one or two that stick out are named and are no change yet. Below stands, for each
    latest step, the nano ab command that measures both revisions around it side by side.
    """
    from nanolib.compare.history import histories, table
    from nanolib.report.tables import compact
    from nanolib.stats.changes import LEAST_HISTORY
    from nanolib.store import Store

    with Store(create=False) as store:
        runs = store.runs()
        if unknown := set(experiments) - set(runs.experiment):
            known = ", ".join(sorted(set(runs.experiment))) or "none yet"
            raise BadInput(
                f"history: no run of {', '.join(sorted(unknown))} is in the database; use {known}"
            )
        found = histories(store, metric, sorted(set(runs.machine_id)))
    found = [one for one in found if not experiments or one.experiment in experiments]
    changed = [one for one in found if one.changes]
    stepped = [one for one in found if one.latest]
    shown = found if everything else stepped
    if as_json:
        told = [one.to_dict() for one in shown]
        echo(
            *json.dumps({"metric": metric, "figures": len(found), "shown": told}, indent=1).split(
                "\n"
            )
        )
    elif shown:
        alike, lines = compact(table(shown), terminal_width())
        echo(*([f"all: {alike}"] if alike else []))
        echo_table(lines)
    runs_of = max((len(one.points) for one in found), default=0)
    said = [
        f"{len(changed)} of {len(found)} {metric} figures changed their level over up to {runs_of} runs"
    ]
    if newest := sum(one.newest is not None for one in found):
        said.append(f"{newest} stuck out in the last run or two: a change, or a spike")
    if not found:
        said = [
            f"no {metric} figure is of two runs on one machine yet; run the same again after a change"
        ]
    elif runs_of < LEAST_HISTORY:
        said.append(
            f"a change of level takes {LEAST_HISTORY} runs to be seen; nano compare tells two of them apart"
        )
    echo(*said, err=as_json)
    if commands := list(dict.fromkeys(filter(None, (one.command for one in stepped)))):
        echo("both revisions of each latest step side by side:", err=as_json)
        echo(*(f"  {line}" for line in commands), err=as_json)


def _rows_of(side: str, name: str) -> tuple[Any, dict[str, list[str]], Any]:
    """The measurements that a name or a database stands for, what disturbed each run, and all timings."""
    from nanolib.compare.history import noise_of
    from nanolib.compare.spread import RECENT_RUNS
    from nanolib.store import Store
    from nanolib.store.connection import is_database

    path = Path(name)  # a label may be the name of a file too, but has no folder in it
    if len(path.parts) > 1 and (path / DATABASE).is_file():
        path = path / DATABASE
    is_file = (
        path.suffix in (".sqlite", ".db")
        or is_database(path)
        or (len(path.parts) > 1 and path.is_file())
    )
    with Store(path if is_file else None, create=False) as store:
        run_ids = store.resolve("all" if is_file else name)
        rows = store.measurements(run_ids, samples=True)
        noise = noise_of(store, run_ids)
        timings = store.figures("latency", sorted(set(rows["machine_id"])), RECENT_RUNS)
    if rows.empty:
        raise BadInput(f"{side}: {name!r} has no measurements; name another run")
    return rows, noise, timings
