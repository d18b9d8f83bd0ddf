"""The command that measures two versions in turns: of the code, of its parameters, or of what it runs in."""

from __future__ import annotations

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
    handle_errors,
    output_option,
    pairs_of,
    use_output,
)
from nanolib.cli.comparing import findings, have_folders, show_comparison
from nanolib.measurement import BadInput, shown

_CALLABLE = "PACKAGE.MODULE:FUNCTION"


@command(
    "nano ab main . attention -p seq_lens='[4096]'",
    "nano ab main . --call mypackage.module:step --budget 60s",
    "nano ab --python a/bin/python --python b/bin/python --call mine:step",
)
@click.argument("names", nargs=-1, metavar="[REV_A REV_B] [NOTEBOOK]...")
@click.option(
    "-p",
    "--param",
    "pairs",
    multiple=True,
    metavar="NAME=VALUE",
    help="A parameter of the notebook named.",
)
@click.option(
    "--call", "functions", multiple=True, metavar=_CALLABLE, help="A function of your own."
)
@click.option(
    "--setup", default="", metavar=_CALLABLE, help="Makes what --call is called with, untimed."
)
@click.option(
    "--python",
    "pythons",
    multiple=True,
    metavar="FILE",
    help="Given twice: the interpreters of A and B.",
)
@click.option(
    "--metric",
    default="latency",
    show_default=True,
    help="Or tokens_per_second, peak_memory, flops, ...",
)
@click.option(
    "--budget",
    type=SECONDS,
    default="50s",
    show_default=True,
    metavar="SECONDS",
    help="For one case, the starting of processes included.",
)
@click.option(
    "--total",
    type=SECONDS,
    metavar="SECONDS",
    help="For all cases together; each gets its share, at most --budget.",
)
@click.option(
    "--timeout",
    type=SECONDS,
    default="300s",
    show_default=True,
    metavar="SECONDS",
    help="For one answer of a version.",
)
@click.option("--label", default="", help="Your name for this comparison.")
@findings
@output_option
@handle_errors
def ab(
    names: tuple[str, ...],
    pairs: tuple[str, ...],
    functions: tuple[str, ...],
    setup: str,
    pythons: tuple[str, ...],
    metric: str,
    threshold: float,
    budget: float,
    total: float | None,
    timeout: float,
    label: str,
    json_file: str | None,
    markdown_file: str | None,
    output: str | None,
) -> None:
    """Compare two versions side by side, or two environments.

    REV_A, REV_B: git revisions, `.` for the working tree, or two params files.

    Blocks of both are interleaved in random order, in many pairs of fresh processes, and all pairs are judged once.
    Exit code 1 on a regression. Without a notebook and --call: the timed cases of the quick suite.
    With --python the code is the working tree's, unless a revision is named.
    """
    from nanolib.ab.question import ask, stored
    from nanolib.ab.rounds import Settings
    from nanolib.compare.history import TIMED
    from nanolib.measurement import METRICS
    from nanolib.params import label_of

    use_output(output)
    have_folders(json_file, markdown_file)
    label_of("--label", label)
    revisions, notebooks = _sorted_out(names, bool(pythons))
    question = _question(revisions, notebooks, pairs_of(pairs), functions, setup, metric, pythons)
    settings = Settings(
        threshold,
        budget,
        direction=METRICS[metric].direction,
        timeout_s=timeout,
        pairs=metric in TIMED,
        total_s=total,
    )
    answer = ask(question, settings, lambda line: echo(line, err=True))
    if metric in TIMED and answer.compared:
        from nanolib.store import Store

        with Store() as store:  # before a file that was named may refuse it
            store.add(stored(answer, question, label))
    show_comparison(answer.comparison, True, json_file, markdown_file)
    if any(one.verdicts for one in answer.compared):
        echo("interleaved and paired, in processes of their own")
    elif metric not in TIMED and answer.compared:
        echo("each version ran once, in a process of its own")
    sys.exit(EXIT_FAILED if answer.comparison.regressed else EXIT_OK)


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


def _question(
    names: tuple[str, str],
    notebooks: tuple[str, ...],
    overrides: dict[str, str],
    functions: tuple[str, ...],
    setup: str,
    metric: str,
    pythons: tuple[str, ...],
) -> Any:
    from nanolib.ab.question import Question
    from nanolib.experiments import ALL
    from nanolib.paths import checkout
    from nanolib.run.jobs import plan, read_job

    if functions and (notebooks or overrides):
        raise BadInput("--call: a function takes no notebook and no -p; give one or the other")
    if setup and not functions:
        raise BadInput(f"--setup: {setup!r} needs a --call to set up for")
    files = all(name.endswith((".yml", ".yaml")) for name in names)
    if files and pythons:
        raise BadInput(
            "--python: two params files are compared in one environment; give revisions, or neither"
        )
    rest = {"metric": metric, "environments": _environments(pythons)}
    if functions:
        return Question(names, Path.cwd(), functions=functions, setup=setup, **rest)
    if files:
        experiment, *values = read_job(Path(names[0]), Path(names[1]), notebooks, overrides)
        titles = (Path(names[0]).name, Path(names[1]).name)
        return Question((".", "."), checkout(), [(experiment, *values)], titles=titles, **rest)
    jobs = [
        job
        for job in plan(ALL, notebooks, overrides, {})
        if any(case.interleaves for case in job.cases())
    ]
    if not jobs:
        raise BadInput(
            f"ab: {', '.join(notebooks)} times nothing that can be interleaved; name another notebook"
        )
    return Question(names, checkout(), [(job.name, job.given, job.given) for job in jobs], **rest)


def _environments(pythons: tuple[str, ...]) -> tuple[Any, Any] | None:
    """The environments of A and B, where they have two."""
    from nanolib.ab.environment import inspected

    if not pythons:
        return None
    if len(pythons) != 2:
        given = "once" if len(pythons) == 1 else f"{len(pythons)} times"
        raise BadInput(f"--python: it is given {given}; give it twice, for A and for B")
    return inspected(pythons[0]), inspected(pythons[1])
