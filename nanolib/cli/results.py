"""Commands for what has been measured: list it, report it, share it, tidy it."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Any

import click

from nanolib.cli.command import (
    DAYS,
    command,
    echo,
    echo_table,
    output_option,
    selected,
)
from nanolib.measurement import BadInput
from nanolib.paths import database_path, expanded, output_folder


@command(
    "nano runs",
    "nano runs --json",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@output_option
def runs(as_json: bool) -> None:
    """List what is in the database."""
    from nanolib.store import Store

    with Store(create=False) as store:
        frame = store.runs()
    if as_json:
        echo(*frame.to_json(orient="records", indent=1, default_handler=str).split("\n"))
        return
    if frame.empty:
        echo("no runs yet; run: nano run quick")
        return
    frame = _listed(frame)
    columns = [
        "run",
        "experiment",
        "suite",
        "label",
        "started",
        "took",
        "cases",
        "status",
        "machine_id",
        "git_revision",
    ]
    echo_table(frame[columns])


def _listed(frame: Any) -> Any:
    """Runs as people see them: a short id, and when."""
    return frame.assign(
        run=frame.run_id.str[:8],
        started=frame.started.str[:19].str.replace("T", " "),
        took=[
            f"{seconds:.0f} s" if seconds == seconds and seconds is not None else "—"
            for seconds in frame.duration_s
        ],
    )


@command(
    "nano report --open",
    "nano report latest --to report",
)
@click.argument("names", nargs=-1, metavar="[RUN]...")
@click.option(
    "--to",
    "folder",
    metavar="DIR",
    help="Folder to write to; default: report/ in the output folder.",
)
@click.option("--open", "show", is_flag=True, help="Open the page in a browser.")
@output_option
def report(names: tuple[str, ...], folder: str | None, show: bool) -> None:
    """Write the report: index.html, Markdown, pictures, tables. RUN: id, label, experiment, latest, latest~1, all."""
    from nanolib.experiments import sections
    from nanolib.report.page import build
    from nanolib.store import Store

    target = expanded(folder) if folder else output_folder() / "report"
    with Store(create=False) as store:
        page = build(store, selected(store, names), target, sections())
    echo(str(page))
    if show:
        webbrowser.open(page.absolute().as_uri())


@command(
    "nano export share.sqlite",
    "nano export table.csv --run latest",
)
@click.argument("target", metavar="FILE")
@click.option(
    "--run",
    "names",
    multiple=True,
    metavar="RUN",
    help="Run to write; repeatable. Default: each experiment's newest.",
)
@output_option
def export(target: str, names: tuple[str, ...]) -> None:
    """Write runs to FILE (.sqlite, .json, .csv or .md) without user, host and folder names."""
    from nanolib.report.export import write
    from nanolib.store import Store

    with Store(create=False) as store:
        write(store, selected(store, names), Path(target))
    echo(target)


@command(
    "nano merge theirs.sqlite",
)
@click.argument("databases", nargs=-1, required=True, metavar="DATABASE...")
@output_option
def merge(databases: tuple[str, ...]) -> None:
    """Add the runs of other databases to this one; known runs are skipped."""
    from nanolib.store import Store, check_mergeable

    for path in databases:  # all are looked at before any is taken in
        check_mergeable(Path(path), database_path())
    with Store() as store:
        for path in databases:
            echo(f"{path}: {store.merge(path)} run(s) came in")


@command(
    "nano clean --older-than 30d --dry-run",
    "nano clean --run 1a2b3c4d",
)
@click.option(
    "--older-than",
    "days",
    type=DAYS,
    metavar="30d",
    help="Delete runs that are older than this many days.",
)
@click.option("--keep", type=click.IntRange(min=0), help="Delete all but the N newest runs.")
@click.option(
    "--run",
    "names",
    multiple=True,
    metavar="RUN",
    help="Delete this run too; repeatable.",
)
@click.option("--dry-run", is_flag=True, help="List the runs and delete nothing.")
@output_option
def clean(days: float | None, keep: int | None, names: tuple[str, ...], dry_run: bool) -> None:
    """Delete old or named runs and free their space."""
    from nanolib.store import Store

    if days is None and keep is None and not names:
        raise BadInput(
            "--older-than, --keep, --run: none given; name the runs to delete, for example --older-than 30d"
        )
    with Store(create=False) as store:
        named = {run_id for name in names for run_id in store.resolve(name)}
        known = store.runs()
        gone = store.cleanup_old_runs(days, max_runs=keep, run_ids=named, dry_run=dry_run)
    if gone:
        echo_table(
            _listed(known[known["run_id"].isin(gone)])[
                ["run", "experiment", "suite", "label", "started"]
            ]
        )
    echo(f"{len(gone)} run(s) {'would be' if dry_run else 'were'} deleted")
