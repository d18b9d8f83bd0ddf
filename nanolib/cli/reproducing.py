"""The command that runs somebody's cases here, and tells which of their figures come out again."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from nanolib.cli.command import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    command,
    echo,
    echo_table,
    handle_errors,
    output_option,
    use_output,
)
from nanolib.cli.comparing import echo_findings, have_folders, write_text
from nanolib.measurement import MOST_LABEL, BadInput, printable, shown
from nanolib.paths import DATABASE, checkout, expanded


@command(
    "nano reproduce outputs/reference/NAME",
    "nano reproduce theirs.sqlite --all --json findings.json",
)
@click.argument("name", metavar="REFERENCE")
@click.option("--all", "everything", is_flag=True, help="Show what was reproduced too.")
@click.option("--label", default="", help="Your name for the runs; default: reproduce and the reference's name.")
@click.option("--markdown", "markdown_file", metavar="FILE", help="Write the findings as Markdown.")
@click.option("--json", "json_file", metavar="FILE", help="Write the findings as JSON.")
@output_option
@handle_errors
def reproduce(
    name: str, everything: bool, label: str, markdown_file: str | None, json_file: str | None, output: str | None
) -> None:
    """Run the cases of a reference: which figures come out again?

    REFERENCE: a folder of outputs/reference, a folder with a results.sqlite, or a database. A figure is reproduced where the 95 %
    interval of here / there lies within 10 %, and differs where it lies wholly outside; on another machine times are scaled by
    what the ceilings of both predict. Exit code 1 where all is shifted on the same machine.
    """
    from nanolib.compare.reproduce import reproduction
    from nanolib.params import label_of
    from nanolib.run.suite.runner import closing_table, run_jobs
    from nanolib.store import Store

    place = use_output(output)
    have_folders(json_file, markdown_file)
    label_of("--label", label)
    file = _database(name)
    with Store(file, create=False) as store:
        runs = store.runs_of(store.newest_runs())
        there = store.measurements(list(runs["run_id"]))
    jobs, refused = _jobs(runs, label or printable(f"reproduce {Path(name).name}")[:MOST_LABEL])
    if not jobs:
        why = "; ".join(f"{experiment}: {reason}" for experiment, reason in refused.items()) or "it holds no run"
        raise BadInput(f"reference: {shown(name)} holds nothing that can be run here ({why}); name another")
    ended, _ = run_jobs(jobs, place, echo)
    echo("")
    echo_table(closing_table(ended))
    with Store(create=False) as store:
        here = store.measurements([end.run_id for end in ended if end.run_id])
    found = reproduction(there[there["experiment"].isin([*refused, *(job.name for job in jobs)])], here, refused)
    _show(found, everything, json_file, markdown_file)
    if any(end.status == "interrupted" for end in ended):
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(EXIT_FAILED if found.same_machine and found.shifted else EXIT_OK)


def _database(name: str) -> Path:
    """The database that a name stands for."""
    given = expanded(name)
    shipped = checkout() / "outputs" / "reference"
    for place in (given, given / DATABASE, checkout() / name / DATABASE, shipped / name / DATABASE):
        if place.is_file():
            return place
    known = sorted(folder.parent.name for folder in shipped.glob(f"*/{DATABASE}"))
    there = f"outputs/reference has {', '.join(known)}" if known else "outputs/reference has none yet"
    raise BadInput(f"reference: {shown(name)} is no database, nor a folder with one; {there}")


def _jobs(runs: Any, label: str) -> tuple[list[Any], dict[str, str]]:
    """What can be run, with the parameters of the reference; and of the rest why not."""
    from nanolib.experiments import ALL
    from nanolib.models.user import runs_code
    from nanolib.run.suite.jobs import make_job

    jobs, refused = [], {}
    for experiment, params in zip(runs["experiment"], runs["params"], strict=True):
        load = ALL.get(experiment)
        if load is None or not hasattr(load(), "cases"):
            continue  # what nano ab or tests left is of two versions, or of somebody's code
        if runs_code(str(params.get("model", ""))):
            refused[experiment] = "it runs code that the reference names, which you alone may decide"
        else:
            try:
                jobs.append(make_job(experiment, load, _here(params, load().Params, label)))
            except BadInput as error:
                refused[experiment] = "; ".join(error.lines)
    return jobs, refused


def _here(params: Mapping[str, Any], known: Any, label: str) -> dict[str, Any]:
    """The reference's parameters as this version takes them: what they only schedule is ours."""
    mine = {"label": label, "resume": False, "trace": False}
    return {name: value for name, value in params.items() if name in known.model_fields} | mine


def _show(found: Any, everything: bool, json_file: str | None, markdown_file: str | None) -> None:
    from nanolib.report.page import markdown_table

    counts = ", ".join(f"{n} {verdict}" for verdict, n in found.counts.items())
    if json_file:
        write_text("--json", json_file, json.dumps(found.to_dict(), indent=1))
    if markdown_file:
        write_text(
            "--markdown", markdown_file, "\n\n".join([counts, found.sentence, markdown_table(found.table())]) + "\n"
        )
    echo("")
    echo_findings(found.table(everything))
    echo("")
    echo(counts, found.sentence)
