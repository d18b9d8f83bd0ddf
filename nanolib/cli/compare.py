"""Compare two stored runs with `nano compare`, and all stored runs with `nano history`."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from nanolib.cli.common import (
    EXIT_FAILED,
    EXIT_OK,
    SHARE,
    command,
    echo,
    echo_table,
    file_option,
    option,
    output_option,
    to_json,
)
from nanolib.experiments import ALL
from nanolib.measurement import METRICS, BadInput
from nanolib.paths import DATABASE
from nanolib.store import Store

_everything = click.option(
    "--all", "everything", is_flag=True, help="Show unchanged cases too. Default: only changes."
)


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
@_everything
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
        _echo_cases(part.assign(note=numbers))
    echo("", *(f"{number}: {note}" for note, number in notes.items() if note))


def _echo_cases(table):
    """Print a table of cases, without empty columns, under the words that all its cases share."""
    from nanolib.compare.findings import share_words

    shared, names = share_words(list(table["experiment"] + " " + table["case"]))
    lines = table.drop(columns="experiment").assign(case=names)
    echo("", *([f"all: {' '.join(shared)}"] if shared else []))
    echo_table(lines.loc[:, lines.astype(bool).any()])


@command(
    "nano history",
    "nano history attention --all",
)
@click.argument("experiments", nargs=-1, type=click.Choice(ALL), metavar="[EXPERIMENT]...")
@option("--metric", "latency", "Metric to show.", "METRIC", type=click.Choice(METRICS))
@_everything
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
        _echo_cases(table(shown))
    # Without its period, a line ends with a command that you can copy.
    echo(*(str(series).removesuffix(".") for series in history_verdict(found)))


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
