"""Measure two versions of code or packages in turns and compare the results."""

import itertools
import math
import signal
import sys
from pathlib import Path

import click

from nanolib.cli.common import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    EXIT_OK,
    SECONDS,
    command,
    echo,
    option,
    pairs_option,
)
from nanolib.cli.compare import findings, show_comparison
from nanolib.experiments import ALL
from nanolib.measurement import BadInput, quote
from nanolib.paths import checkout

_CALLABLE = "PACKAGE.MODULE:FUNCTION"
_TIME = {"type": SECONDS, "metavar": "SECONDS"}


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
    from nanolib.run.jobs import plan

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
            for job in plan(ALL, notebooks, overrides, {})
            if any(case.supports_ab for case in job.cases())
        ]
    return Spec(revisions, start, jobs, functions, setup, interpreters)
