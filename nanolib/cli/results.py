"""List, report, follow, export, import and delete stored runs."""

import webbrowser
from collections.abc import Sequence
from pathlib import Path

import click

from nanolib.cli.common import (
    DAYS,
    NewFile,
    command,
    echo,
    echo_cases,
    echo_json,
    echo_table,
    everything_option,
    json_option,
    option,
    output_option,
)
from nanolib.experiments import ALL, sections
from nanolib.measurement import METRICS, BadInput
from nanolib.paths import expand_home, output_folder
from nanolib.store import Store


@command("nano runs", "nano runs --json")
@json_option
@output_option
def runs(as_json: bool) -> None:
    """List the stored runs."""
    from nanolib.report.overview import run_facts

    with Store(create=False) as store:
        frame = store.runs()
    if as_json:
        echo_json(frame.to_dict("records"))
    elif frame.empty:
        echo("no runs yet; run: nano run quick")
    else:
        echo_table(run_facts(frame).drop(columns=["torch", "Interference"]))


@command(
    "nano report --open",
    "nano report latest --to report",
)
@click.argument("names", nargs=-1, metavar="[RUN]...")
@click.option(
    "--to",
    "folder",
    metavar="DIR",
    help="Folder of the report. Default: report/ in the output folder.",
)
@click.option("--open", "show", is_flag=True, help="Open the report in a browser.")
@output_option
def report(names: tuple[str, ...], folder: str | None, show: bool) -> None:
    """Write the report: index.html, Markdown, images and tables.

    RUN is an id, a label, an experiment, a suite, latest, latest~1 or all. By default, the report
    shows the newest run of each experiment.
    """
    target = expand_home(folder) if folder else output_folder() / "report"
    page = write_report(names, target)
    echo(page)
    if show:
        webbrowser.open(page.absolute().as_uri())


def write_report(names: Sequence[str], folder: Path) -> Path:
    """Write the report of some runs, and return the path of its page.

    Args:
        names: Names of the runs, such as ids or labels. Without a name, the newest run of each
            experiment.
        folder: Folder of the report.
    """
    from nanolib.experiments.summary import select_runs
    from nanolib.report.page import build

    with Store(create=False) as store:
        return build(store, select_runs(store, names), folder, sections())


@command(
    "nano history",
    "nano history attention --all",
)
@click.argument("experiments", nargs=-1, type=click.Choice(ALL), metavar="[EXPERIMENT]...")
@option("--metric", "latency", "Metric to show.", "METRIC", type=click.Choice(METRICS))
@everything_option
@output_option
def history(experiments: tuple[str, ...], metric: str, everything: bool) -> None:
    """Show when and by how much the results of each case changed.

    A change needs at least three runs on each side. To compare the last run with the run before,
    use nano compare latest~1 latest. Below the table, nanolib names the five latest changes, each
    with a nano ab command that measures, in turns, the revisions before and after the change.
    """
    from nanolib.compare.history import histories, table
    from nanolib.report.overview import history_verdict

    with Store(create=False) as store:
        figures = store.figures(metric, store.machines()["machine_id"])
    if experiments:
        figures = figures[figures["experiment"].isin(experiments)]
    found = histories(figures, metric)
    if shown := [series for series in found if everything or series.changes]:
        echo_cases(table(shown))
    # Without its period, a line ends with a command that you can copy.
    echo(*(str(series).removesuffix(".") for series in history_verdict(found)))


@command(
    "nano export share.sqlite",
    "nano export share.json --run latest",
)
@click.argument("target", metavar="FILE", type=NewFile())
@click.option(
    "--run",
    "names",
    multiple=True,
    metavar="RUN",
    help="Run to export. Repeatable. Default: the newest run of each experiment.",
)
@output_option
def export(target: Path, names: tuple[str, ...]) -> None:
    """Export runs to FILE, without user, host and folder names.

    The ending of FILE decides the format: .sqlite or .json.
    """
    from nanolib.experiments.summary import select_runs
    from nanolib.store.export import write

    with Store(create=False) as store:
        write(store, select_runs(store, names), target)
    echo(target)


@command("nano merge theirs.sqlite")
@click.argument("databases", nargs=-1, required=True, metavar="DATABASE...")
@output_option
def merge(databases: tuple[str, ...]) -> None:
    """Import the runs of other databases. A repeated import changes nothing."""
    for path in databases:  # A wrong path must not create an empty database.
        Store(path, create=False).close()
    with Store() as store:
        for path in databases:
            echo(f"{path}: imported {store.merge(path)} run(s)")


@command(
    "nano clean --older-than 30d --dry-run",
    "nano clean --run 1a2b3c4d",
)
@click.option(
    "--older-than",
    "days",
    type=DAYS,
    metavar="DAYS",
    help="Delete runs that are older than this many days, such as 30d.",
)
@click.option(
    "--run",
    "names",
    multiple=True,
    metavar="RUN",
    help="Run to delete. Repeatable.",
)
@click.option(
    "--dry-run", is_flag=True, help="List the runs that would be deleted, without deleting them."
)
@output_option
def clean(days: float | None, names: tuple[str, ...], dry_run: bool) -> None:
    """Delete old or named runs and free their disk space."""
    from nanolib.report.overview import run_facts

    if days is None and not names:
        raise BadInput(
            "clean: no run is chosen; name the runs to delete, with --older-than 30d or --run ID"
        )
    with Store(create=False) as store:
        named = {run_id for name in names for run_id in store.resolve(name)}
        known = store.runs()
        gone = store.cleanup_old_runs(days, run_ids=named, dry_run=dry_run)
    if gone:
        echo_table(run_facts(known[known["run_id"].isin(gone)]).iloc[:, :5])
    echo(f"{len(gone)} run(s) {'would be' if dry_run else 'were'} deleted")
