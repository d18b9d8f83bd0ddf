"""The command that measures two versions in turns: of the code, of its parameters, or of what it runs in."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from nanolib.cli.command import (
    EXIT_FAILED,
    EXIT_OK,
    SECONDS,
    command,
    echo,
    output_option,
    pairs_option,
)
from nanolib.cli.comparing import findings, show_comparison
from nanolib.measurement import BadInput, shown

ASK_FROM_S = 300
_CALLABLE = "PACKAGE.MODULE:FUNCTION"


@command(
    "nano ab main . attention -p seq_lens='[4096]'",
    "nano ab main . --call mypackage.module:step --budget 60s",
    "nano ab --python a/bin/python --python b/bin/python --call mine:step",
)
@click.argument("names", nargs=-1, metavar="[REV_A REV_B] [NOTEBOOK]...")
@pairs_option
@click.option(
    "--call", "functions", multiple=True, metavar=_CALLABLE, help="Function to time; repeatable."
)
@click.option(
    "--setup",
    default="",
    metavar=_CALLABLE,
    help="Function that returns the argument of --call; not timed.",
)
@click.option(
    "--python",
    "pythons",
    multiple=True,
    metavar="FILE",
    help="Interpreter; give it twice, for A and for B.",
)
@click.option(
    "--metric",
    default="latency",
    show_default=True,
    help="Metric to compare: latency, tokens_per_second, peak_memory, flops, ...",
)
@click.option(
    "--budget",
    type=SECONDS,
    default="50s",
    show_default=True,
    metavar="SECONDS",
    help="Time limit per case, start-up included.",
)
@click.option(
    "--total",
    type=SECONDS,
    metavar="SECONDS",
    help="Time limit for all cases together; each case gets an equal share.",
)
@click.option(
    "--timeout",
    type=SECONDS,
    default="300s",
    show_default=True,
    metavar="SECONDS",
    help="Time limit for one response of a version.",
)
@click.option("--label", default="", help="Name this comparison.")
@findings
@output_option
def ab(
    names: tuple[str, ...],
    pairs: dict[str, str],
    functions: tuple[str, ...],
    setup: str,
    pythons: tuple[str, ...],
    metric: str,
    threshold: float,
    budget: float,
    total: float | None,
    timeout: float,
    label: str,
    json_file: Path | None,
    markdown_file: Path | None,
) -> None:
    """Compare two versions, measured in turns; exit code 1 on a regression.

    REV_A, REV_B: git revisions, `.` for the working tree, or two params files. Without a notebook or --call, the timed
    cases of the quick suite are compared. With --python the code is the working tree's, unless you name a revision.

    Blocks of both versions alternate in random order, in many pairs of fresh processes, and are judged once. At the default
    threshold of 5 %, a change of exactly 5 % is reported as a regression half of the time; with --threshold 2.5% always.
    """
    from nanolib.ab.pairs import Settings
    from nanolib.ab.result import to_run
    from nanolib.ab.run import run_ab
    from nanolib.compare.history import TIMED
    from nanolib.measurement import METRICS
    from nanolib.params import label_of

    label_of("--label", label)
    revisions, notebooks = _sorted_out(names, bool(pythons))
    spec = _spec(revisions, notebooks, pairs, functions, setup, metric, pythons)
    settings = Settings(
        threshold,
        budget,
        direction=METRICS[metric].direction,
        timeout_s=timeout,
        timed=metric in TIMED,
        total_s=total or math.inf,
    )
    result = run_ab(spec, settings, lambda line: echo(line, err=True), _agree)
    if metric in TIMED:
        from nanolib.store import Store

        with Store() as store:  # before a file that was named may refuse it
            store.add(to_run(result, spec, label))
    show_comparison(result.comparison, True, json_file, markdown_file)
    if any(one.verdicts for one in result.results):
        echo("measured in turns, in fresh processes")
    elif metric not in TIMED:
        echo("each version ran once, in its own process")
    sys.exit(EXIT_FAILED if result.comparison.regressed else EXIT_OK)


def _agree(seconds: float) -> None:
    """In a terminal, ask before a comparison that may take more than five minutes."""
    if seconds > ASK_FROM_S and sys.stdin.isatty() and sys.stderr.isatty():
        click.confirm("Go on?", default=True, abort=True, err=True)


def _sorted_out(
    names: Sequence[str], environments: bool
) -> tuple[tuple[str, str], tuple[str, ...]]:
    """The two revisions and the notebooks; of two environments one revision will do, or none for the working tree."""
    from nanolib.experiments import ALL

    if not environments:
        if len(names) < 2:
            given = shown(names[0]) if names else "none"
            raise BadInput(
                f"revision: {given} is given; give two, such as main and . for the working tree"
            )
        return (names[0], names[1]), tuple(names[2:])
    count = 0
    while count < min(2, len(names)) and names[count] not in ALL:
        count += 1
    a, b = {0: (".", "."), 1: (names[0],) * 2 if count else (), 2: tuple(names[:2])}[count]
    return (a, b), tuple(names[count:])


def _spec(
    names: tuple[str, str],
    notebooks: tuple[str, ...],
    overrides: dict[str, str],
    functions: tuple[str, ...],
    setup: str,
    metric: str,
    pythons: tuple[str, ...],
) -> Any:
    from nanolib.ab.spec import Spec
    from nanolib.experiments import ALL
    from nanolib.paths import checkout
    from nanolib.run.jobs import plan, read_job

    if functions and (notebooks or overrides):
        raise BadInput("--call: a function takes no notebook and no -p; give one or the other")
    if setup and not functions:
        raise BadInput(f"--setup: {setup!r} needs --call; give a function to time")
    files = all(name.endswith((".yml", ".yaml")) for name in names)
    if files and pythons:
        raise BadInput(
            "--python: two params files are compared in one environment; give revisions, or neither"
        )
    rest = {"metric": metric, "interpreters": _interpreters(pythons)}
    if functions:
        return Spec(names, Path.cwd(), functions=functions, setup=setup, **rest)
    if files:
        experiment, *values = read_job(Path(names[0]), Path(names[1]), notebooks, overrides)
        titles = (Path(names[0]).name, Path(names[1]).name)
        return Spec((".", "."), checkout(), [(experiment, *values)], titles=titles, **rest)
    jobs = [
        job
        for job in plan(ALL, notebooks, overrides, {})
        if any(case.interleaves for case in job.cases())
    ]
    if not jobs:
        raise BadInput(
            f"ab: {', '.join(notebooks)} has no timed case that can be measured in turns; name another notebook"
        )
    return Spec(names, checkout(), [(job.name, job.given, job.given) for job in jobs], **rest)


def _interpreters(pythons: tuple[str, ...]) -> tuple[Any, Any] | None:
    """The interpreters of A and B, if they are two."""
    from nanolib.ab.interpreter import inspect_interpreter

    if not pythons:
        return None
    if len(pythons) != 2:
        given = "once" if len(pythons) == 1 else f"{len(pythons)} times"
        raise BadInput(f"--python: it is given {given}; give it twice, for A and for B")
    return inspect_interpreter(pythons[0]), inspect_interpreter(pythons[1])
