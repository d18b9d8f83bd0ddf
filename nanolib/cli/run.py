"""Run suites and notebooks with `nano run`, and examine this machine with `nano doctor`."""

import signal
import sys
from contextlib import nullcontext
from typing import Any

import click

from nanolib.cli.common import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    command,
    echo,
    echo_json,
    echo_table,
    json_option,
    option,
    output_option,
    pairs_option,
)
from nanolib.cli.prepare import NotebookCommand
from nanolib.cli.results import write_report
from nanolib.measurement import BadInput
from nanolib.paths import database_path, output_folder


@command(
    "nano run",
    "nano run full attention --label before",
    "nano run model -p seq_lens='[512, 1024]' -p dtypes='[bfloat16]'",
    "nano run full --dry-run",
    cls=NotebookCommand,
)
@click.argument("targets", nargs=-1, metavar="[SUITE] [NOTEBOOK]...")
@click.option("--quick", is_flag=True, help="Run the quick suite.")
@click.option("--full", is_flag=True, help="Run the full suite.")
@pairs_option
@click.option("--label", default="", help="Name of these runs in the database. Default: none.")
@click.option(
    "--resume",
    is_flag=True,
    help="Continue the last run with the same parameters, version and machine.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="List the cases with predicted time and memory, without measuring them.",
)
@click.option("--no-report", is_flag=True, help="Do not write the report.")
@click.option(
    "--on",
    "place",
    type=click.Choice(["here", "ray"]),
    default="here",
    show_default=True,
    help="Run on this machine, or as Ray tasks.",
)
@output_option
def run(
    targets: tuple[str, ...],
    quick: bool,
    full: bool,
    pairs: dict[str, str],
    label: str,
    resume: bool,
    dry_run: bool,
    no_report: bool,
    place: str,
) -> None:
    """Run a suite, notebooks or scenarios, then write the report.

    By default, nano runs the quick suite. `nano list` shows the names of suites, notebooks and
    scenarios. If you name a notebook, --help shows its parameters too.
    """
    from nanolib.experiments import ALL
    from nanolib.run.jobs import plan

    if label and "label" in pairs:
        raise BadInput("label: --label and -p label are both set; set one of them")
    suites = [name for name, chosen in (("quick", quick), ("full", full)) if chosen]
    jobs = plan(ALL, (*suites, *targets), pairs, {"label": label, "resume": resume})
    if dry_run:
        _show_plan(jobs)
        return
    from nanolib.run.notebooks import Command, closing_table, run_jobs

    folder = output_folder()
    shared = Command(folder)
    if place == "ray":
        from nanolib.run.on_ray import run_on_ray

        results = run_on_ray(jobs, shared, echo)
    else:
        # A cluster ends a job with SIGTERM. The job then stops as after Ctrl-C.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        results = run_jobs(jobs, shared, echo, _conclude)
    echo("")
    echo_table(closing_table(results))
    echo(*(f"{result.name}: {result.message}" for result in results if result.message))
    run_ids = [result.run_id for result in results if result.run_id]
    if run_ids:
        _show_failures(run_ids)
    echo("", f"notebooks  {folder}", f"database   {database_path()}")
    echo(f"logs       {shared.logs}")
    if run_ids and not no_report:
        echo(f"report     {write_report(run_ids, folder / 'report')}")
    statuses = {result.status for result in results}
    if "interrupted" in statuses:
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(EXIT_OK if statuses <= {"done"} else EXIT_FAILED)


def _conclude(result: Any) -> list[str]:
    """Return the question of a finished notebook and its first conclusion as lines of text."""
    from nanolib.experiments import sections
    from nanolib.store import Store

    run_ids = [result.run_id] if result.status == "done" else []
    with Store(create=False) as store:
        rows = store.measurements(run_ids, samples=True)
    for section in sections():
        if section.experiment in set(rows["experiment"]):
            first = (f"  {finding}" for finding in section.verdict(rows)[:1])
            return [section.question, *first, ""]
    return []


def _show_plan(jobs: list[Any]) -> None:
    """Print the cases of a dry run, and the expected duration of each notebook."""
    from nanolib.meters.machine import this_machine
    from nanolib.run.dry_run import dry_run_table, expected_s
    from nanolib.run.peaks_case import ceilings_of
    from nanolib.store import Store

    machine_id, exists = this_machine().machine_id, database_path().exists()
    expected = []
    with Store(create=False) if exists else nullcontext() as store:
        ceilings = ceilings_of(store, machine_id) if store else {}
        for job in jobs:
            cases = job.cases()
            if not cases:
                echo("", f"{job.name}: no cases (reads stored results)")
                continue
            expected.append(store and expected_s(job.params, cases, store, machine_id))
            echo("", f"{job.name}: {len(cases)} cases{_duration(expected[-1])}")
            echo_table(dry_run_table(cases, ceilings))
    if known := [interval for interval in expected if interval]:
        total = [sum(ends) for ends in zip(*known, strict=True)]
        echo("", f"all notebooks with an estimate{_duration(total)}")
    if not ceilings:
        echo("", "No time predictions yet. To measure this machine's peak rates, run: nano doctor")


def _duration(seconds: Any) -> str:
    """Return a duration as `: about 90 s (75 to 110 s) inside cases`, or no text if unknown."""
    if not seconds:
        return ""
    low, estimate, high = (f"{value:.0f}" for value in seconds)
    return f": about {estimate} s ({low} to {high} s) inside cases"


def _show_failures(run_ids: list[str]) -> None:
    from nanolib.report.overview import failures
    from nanolib.store import Store

    with Store(create=False) as store:
        bad = failures(store.measurements(run_ids))
    key = ["status", "experiment", "message"]
    for (status, experiment, message), rows in bad.groupby(key, sort=False):
        others = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
        reason = f": {message}" if message else ""  # An interrupted case has no message.
        echo(f"  {status}: {experiment} {rows['case'].iloc[0]}{others}{reason}")


@command("nano doctor", "nano doctor --json")
@json_option
@option("--budget", 2.0, "Time limit per peak rate, in seconds.", "SECONDS")
@output_option
def doctor(as_json: bool, budget: float) -> None:
    """Show what this machine can measure, and measure its peak rates."""
    from nanolib.experiments.doctor import examine

    found = examine(budget)
    if as_json:
        echo_json(found)
        return
    for title, lines in found.items():
        echo(title, *(f"  {name:<22} {value}" for name, value in lines.items()))
