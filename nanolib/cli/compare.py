"""Compare two stored runs, or two versions of code or packages, measured in turns."""

import itertools
import math
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from nanolib.cli.common import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_OK,
    SECONDS,
    SHARE,
    command,
    echo,
    echo_cases,
    everything_option,
    file_option,
    option,
    output_option,
    pairs_option,
    to_json,
)
from nanolib.experiments import ALL
from nanolib.measurement import BadInput, quote
from nanolib.paths import DATABASE, checkout
from nanolib.store import Store

_CALLABLE = "PACKAGE.MODULE:FUNCTION"
_TIME = {"type": SECONDS, "metavar": "SECONDS"}


def findings(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add to a command the options that `nano compare` and `nano ab` share."""
    command = file_option("markdown", "Write the findings as Markdown.")(command)
    command = file_option("json", "Write the findings as JSON.")(command)
    return option(
        "--threshold",
        "5%",
        "Smallest change that counts as a regression or an improvement.",
        "SHARE",
        type=SHARE,
    )(command)


@command(
    "nano compare latest~1 latest",
    "nano compare before after --threshold 3% --markdown summary.md",
    "nano compare outputs/reference/NAME latest --across-machines",
)
@click.argument("base")
@click.argument("current")
@everything_option
@click.option(
    "--strict",
    is_flag=True,
    help="Exit with code 1 for missing or failed results too.",
)
@click.option(
    "--across-machines",
    is_flag=True,
    help="Scale the times of BASE by the peak rates of both machines.",
)
@findings
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
) -> None:
    """Compare two stored runs. Exit code 1 reports a regression.

    BASE and CURRENT are each an id, a label, a suite, latest, latest~1, or a database file.

    The runs were measured at different times. A slower time is a regression only if the change is
    larger than the spread between other runs. The spread needs three or more runs with one
    committed revision and the same parameters and packages on this machine. With fewer runs, a
    slower time is only suspect. Confirm a suspect time with nano ab. A changed energy, loss or
    error is suspect if its intervals do not overlap.
    """
    from nanolib.compare.findings import describe_differences, overall_shift
    from nanolib.compare.history import repeats
    from nanolib.compare.runs import compare_rows, scale_by_peaks

    sides = _read_side("base", base), _read_side("current", current)
    (then, now), runs, latencies = zip(*sides, strict=True)
    case = ["experiment", "case_id"]
    if then[case].merge(now[case]).empty:
        raise BadInput(
            f"compare: {base!r} and {current!r} have no case in common; name runs with the same "
            "experiment and parameters"
        )
    unscaled = 0
    if across_machines:
        then, unscaled = scale_by_peaks(then, now)
    found = compare_rows(then, now, threshold, runs, repeats(latencies))
    versions = (table["versions"].iloc[-1] for table in runs)
    found = replace(found, differ=describe_differences(*versions))
    show_comparison(found, everything, json_file, markdown_file)
    if across_machines:
        echo(overall_shift(found.lines))
    if unscaled:
        echo(f"excluded: {unscaled} latencies without a prediction from measured peak rates")
    echo("note: the runs were measured at different times, so changes may include machine drift;")
    echo("      for a reliable answer, run: nano ab REV_A REV_B")
    if not found.same_machine:
        echo("note: the machines differ, so the exit code is 0 for any result")
    is_lost = strict and found.same_machine and (found.lost or not found.is_compared)
    sys.exit(EXIT_FAILED if found.has_regressed or is_lost else EXIT_OK)


def show_comparison(
    found, everything: bool, json_file: Path | None, markdown_file: Path | None
) -> None:
    """Print a comparison, and write the findings to the files that the user named."""
    from nanolib.report.tables import markdown_table

    summary = ", ".join(f"{n} {finding}" for finding, n in found.counts.items())
    notes = list(found.noise)
    if found.differ:
        notes.append(f"A → B: {', '.join(found.differ)}")
    echo(*notes)
    _echo_findings(found.table(everything))
    echo(summary)
    if not found.is_compared:
        echo("no case was measured successfully on both sides, so nothing was compared")
    if json_file:
        json_file.write_text(to_json(found.to_dict()), encoding="utf-8")
    if markdown_file:
        text = "\n\n".join([summary, *notes, markdown_table(found.table())]) + "\n"
        markdown_file.write_text(text, encoding="utf-8")


def _echo_findings(table):
    """Print one table per experiment, and below the tables the notes that their rows number."""
    notes = {"": ""}
    for _, part in table.groupby("experiment", sort=False) if len(table) else ():
        numbers = [notes.setdefault(text, str(len(notes))) for text in part["note"]]
        echo_cases(part.assign(note=numbers))
    echo("", *(f"{number}: {note}" for note, number in notes.items() if note))


def _read_side(side: str, name: str):
    """Return the rows of runs, the runs, and recent latencies on the machines of the runs.

    Args:
        side: Name of the command's argument, for the error message.
        name: Name of the runs, or path of a database.
    """
    from nanolib.compare.history import RECENT_RUNS

    path = Path(name)
    path = path / DATABASE if path.is_dir() else path
    is_file = path.is_file()  # Other names are those of runs.
    with Store(path if is_file else None, create=False) as store:
        run_ids = store.resolve("all" if is_file else name)
        rows = store.measurements(run_ids, samples=True)
        if rows.empty:
            raise BadInput(f"{side}: {name!r} has no measurements; name another run")
        latencies = store.figures("latency", rows["machine_id"].unique(), RECENT_RUNS)
        return rows, store.runs_of(run_ids), latencies


@command(
    "nano ab main . attention -p seq_lens='[4096]'",
    "nano ab main . --call mypackage.module:step --budget 60s",
    "nano ab --python a/bin/python --python b/bin/python --call mine:step",
)
@click.argument("names", nargs=-1, metavar="[REV_A REV_B] [NOTEBOOK]...")
@pairs_option
@click.option(
    "--call", "functions", multiple=True, metavar=_CALLABLE, help="Function to time. Repeatable."
)
@click.option(
    "--setup",
    default="",
    metavar=_CALLABLE,
    help="Function that creates the argument of --call. Not timed.",
)
@click.option(
    "--python",
    "pythons",
    multiple=True,
    metavar="FILE",
    help="Interpreter of a version, once for A and once for B. Default: this interpreter.",
)
@option("--budget", "50s", "Time limit per case, including process start-up.", **_TIME)
@option("--total", None, "Time limit for all cases, in equal shares. Default: no limit.", **_TIME)
@findings
def ab(
    names: tuple[str, ...],
    pairs: dict[str, str],
    functions: tuple[str, ...],
    setup: str,
    pythons: tuple[str, ...],
    threshold: float,
    budget: float,
    total: float | None,
    json_file: Path | None,
    markdown_file: Path | None,
) -> None:
    """Compare two versions, measured in turns. Exit code 1 reports a regression or a new failure.

    REV_A and REV_B are git revisions, or `.` for the working tree. Without a notebook or --call,
    nano compares the timed cases of the quick suite. With --python, both interpreters run the
    working tree, unless you name a revision.

    nano alternates blocks of both versions in random order, in many pairs of fresh processes, and
    judges all pairs once. At the default threshold of 5%, nanolib reports a slow-down of exactly 5%
    as a regression in about half of the comparisons. With --threshold 2.5%, nanolib reports the
    same slow-down in most comparisons.
    """
    from nanolib.ab.pairs import Settings
    from nanolib.ab.run import run_ab

    # A canceled job ends with SIGTERM. The worktrees are then removed as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    found = run_ab(
        _spec(names, pairs, functions, setup, pythons),
        Settings(threshold, budget, total or math.inf),
        lambda line: echo(line, err=True),
        _agree,
    )
    show_comparison(found, True, json_file, markdown_file)
    if found.has_regressed or found.lost:
        sys.exit(EXIT_FAILED)
    # If each case fails in both versions, the command line is wrong: for example, its function
    # needs an argument.
    sys.exit(EXIT_OK if found.is_compared else EXIT_BAD_INPUT)


def _agree(seconds: float):
    """In a terminal, ask the user to confirm a comparison of more than five minutes."""
    if seconds > 300 and sys.stdin.isatty() and sys.stderr.isatty():
        click.confirm("Continue?", default=True, abort=True, err=True)


def _spec(
    names: tuple[str, ...],
    overrides: dict[str, str],
    functions: tuple[str, ...],
    setup: str,
    pythons: tuple[str, ...],
):
    """Return what to compare. Two interpreters need no revision, and then run the working tree."""
    from nanolib.ab.run import Spec
    from nanolib.ab.versions import HERE, inspect_interpreter
    from nanolib.params import plan_jobs

    revisions = given = names[:2]
    if pythons:
        given = tuple(itertools.takewhile(lambda name: name not in ALL, given))
        revisions = (given * 2)[:2] or (".", ".")
    notebooks = names[len(given) :]
    if len(revisions) < 2:
        raise BadInput(
            f"revision: {quote(given[0]) if given else 'none'} is given; give two revisions, "
            "such as main and . (the working tree)"
        )
    if functions and (notebooks or overrides):
        raise BadInput(
            "--call: cannot be combined with a notebook or -p; leave out --call or the others"
        )
    if setup and not functions:
        raise BadInput(f"--setup: {setup!r} needs --call; name a function to time with --call")
    if len(pythons) not in (0, 2):
        raise BadInput(
            f"--python: must be given twice, got {len(pythons)}; give one for A and one for B"
        )
    interpreters = tuple(inspect_interpreter(python) for python in pythons) or (HERE, HERE)
    start, jobs = Path.cwd(), []
    if not functions:
        start = checkout()
        jobs = [
            (job.name, job.values)
            for job in plan_jobs(ALL, notebooks, overrides, {})
            if any(case.supports_ab for case in job.cases())
        ]
    return Spec(revisions, start, jobs, functions, setup, interpreters)
