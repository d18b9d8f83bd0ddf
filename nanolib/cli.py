"""The `nano` command: run, look at, share and tidy measurements."""

from __future__ import annotations

import functools
import json
import os
import sqlite3
import sys
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

import nanolib
from nanolib.measurement import BadInput
from nanolib.paths import OUTPUT_VARIABLE, database_path, output_folder

EXIT_OK, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 0, 1, 2, 130


def _told(command: Callable[..., Any]) -> Callable[..., Any]:
    """Bad input, or a file that cannot be used, ends a command with one line and exit code 2; Ctrl-C with 130."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except BadInput as error:
            for line in error.lines:
                click.echo(f"nano: {line}", err=True)
            sys.exit(EXIT_BAD_INPUT)
        except sqlite3.DatabaseError as error:
            click.echo(
                f"nano: database: {database_path()} cannot be used ({error}); move it away or name another", err=True
            )
            sys.exit(EXIT_BAD_INPUT)
        except OSError as error:
            click.echo(f"nano: {error.filename or output_folder()}: {error.strerror}; name another place", err=True)
            sys.exit(EXIT_BAD_INPUT)
        except KeyboardInterrupt:
            click.echo("nano: stopped", err=True)
            sys.exit(EXIT_INTERRUPTED)

    return wrapped


def _pairs(pairs: tuple[str, ...]) -> dict[str, str]:
    values = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise BadInput(f"-p: {pair!r} is no name=value pair; write -p seq_lens='[1024, 4096]'")
        values[name] = value
    return values


def _use_output(folder: str | None) -> Path:
    if folder:
        os.environ[OUTPUT_VARIABLE] = str(Path(folder).expanduser().absolute())
    return output_folder()


_output = click.option("--output", metavar="DIR", help="Output folder; default: $NANOLIB_OUTPUT, or outputs/.")


class _Commands(click.Group):
    """Commands that tell a wrong use in one line, as they do bad input."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command that the command line names, and end."""
        try:
            sys.exit(super().main(*args, **kwargs | {"standalone_mode": False}) or EXIT_OK)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
        except click.ClickException as error:
            context = getattr(error, "ctx", None)
            path = context.command_path if context else "nano"
            click.echo(f"nano: {' '.join(error.format_message().split())} See: {path} --help", err=True)
        except click.Abort:
            sys.exit(EXIT_INTERRUPTED)
        sys.exit(EXIT_BAD_INPUT)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(nanolib.__version__, prog_name="nano")
def main() -> None:
    """Measure transformers on this machine; every number says how it was made and how sure it is."""


@main.command()
@click.argument("targets", nargs=-1, metavar="[SUITE] [NOTEBOOK]...")
@click.option(
    "-p", "--param", "pairs", multiple=True, metavar="NAME=VALUE", help="A parameter of the one notebook named."
)
@click.option("--label", default="", help="Your name for these runs.")
@click.option("--resume", is_flag=True, help="Continue the last run with the same parameters, version and machine.")
@click.option("--dry-run", is_flag=True, help="List the cases with predicted time and memory; measure nothing.")
@click.option("--no-report", is_flag=True, help="Do not write the report at the end.")
@click.option(
    "--on", "place", type=click.Choice(["here", "ray"]), default="here", help="Where: on this machine, or as Ray tasks."
)
@click.option(
    "--parts", type=click.IntRange(1, 1000), default=1, help="Share each notebook's cases among so many runs."
)
@_output
@_told
def run(
    targets: tuple[str, ...],
    pairs: tuple[str, ...],
    label: str,
    resume: bool,
    dry_run: bool,
    no_report: bool,
    place: str,
    parts: int,
    output: str | None,
) -> None:
    """Run a suite (default: quick), or some of its notebooks, then write the report."""
    from nanolib.suite.jobs import in_parts, plan

    folder = _use_output(output)
    jobs = in_parts(plan(targets, _pairs(pairs), {"label": label, "resume": resume}), parts)
    if dry_run:
        _show_plan(jobs)
        return
    from nanolib.suite.runner import closing_table, run_jobs

    if place == "ray":
        from nanolib.suite.on_ray import run_on_ray as run_jobs
    ended, log = run_jobs(jobs, folder, click.echo)
    click.echo("")
    for line in closing_table(ended):
        click.echo(line)
    for end in ended:
        if end.message:
            click.echo(f"{end.name}: {end.message}")
    run_ids = [end.run_id for end in ended if end.run_id]
    if run_ids:
        _show_failures(run_ids)
    click.echo(f"\nnotebooks  {folder}\ndatabase   {database_path()}\nlog        {log}")
    if run_ids and not no_report:
        click.echo(f"report     {_write_report(run_ids, folder / 'report')}")
    if any(end.status == "interrupted" for end in ended):
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(EXIT_OK if all(end.status == "done" for end in ended) else EXIT_FAILED)


def _show_plan(jobs: list[Any]) -> None:
    from nanolib.experiments.plan import dry_run_table, known_ceilings
    from nanolib.meters.machine import this_machine
    from nanolib.store import Store

    ceilings: dict[str, float] = {}
    if database_path().exists():
        with Store(create=False) as store:
            ceilings = known_ceilings(store, this_machine().machine_id)
    for job in jobs:
        if cases := job.cases():
            click.echo(f"\n{job.name}: {len(cases)} cases")
            click.echo(dry_run_table(job.module, job.params, ceilings).to_string(index=False))
        else:
            click.echo(f"\n{job.name}: reads the database, measures nothing")
    if not ceilings:
        click.echo("\nTimes are predicted from this machine's ceilings, which are not known yet: run nano doctor")


def _show_failures(run_ids: list[str]) -> None:
    from nanolib.report.overview import failures
    from nanolib.store import Store

    with Store(create=False) as store:
        bad = failures(store.measurements(run_ids))
    for _, row in bad.iterrows():
        click.echo(f"  {row['status']}: {row['experiment']} {row['case']}: {row['message']}")


def _write_report(run_ids: list[str], folder: Path) -> Path:
    from nanolib.report.page import build
    from nanolib.store import Store

    with Store(create=False) as store:
        return build(store, run_ids, folder)


def _selected(store: Any, names: tuple[str, ...] | list[str]) -> list[str]:
    from nanolib.experiments.summary import select_runs

    return select_runs(store, list(names) or ["newest"])


@main.command()
@click.argument("rendezvous", metavar="HOST:PORT")
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="End when nothing has been asked for so long.",
)
@_told
def join(rendezvous: str, wait_s: float) -> None:
    """Lend this machine to a distributed notebook on another: `nano run distributed -p nodes=2 -p rendezvous=HOST:PORT`."""
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "ERROR"
    )  # that the asker has ended is nothing to print a C++ stack for
    from nanolib.experiments import nodes

    nodes.join(rendezvous, wait_s=wait_s, say=click.echo)


@main.command()
@_output
@_told
def runs(output: str | None) -> None:
    """List what is in the database."""
    from nanolib.store import Store

    _use_output(output)
    with Store(create=False) as store:
        frame = store.runs()
    if frame.empty:
        click.echo("no runs yet; run: nano run quick")
        return
    frame = frame.assign(
        run=frame.run_id.str[:8],
        started=frame.started.str[:19].str.replace("T", " "),
        took=[
            f"{seconds:.0f} s" if seconds == seconds and seconds is not None else "—" for seconds in frame.duration_s
        ],
    )
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
    click.echo(frame[columns].to_string(index=False))


@main.command()
@click.argument("names", nargs=-1, metavar="[RUN]...")
@click.option("--to", "folder", metavar="DIR", help="Where to; default: report/ in the output folder.")
@click.option("--open", "show", is_flag=True, help="Open the page in a browser.")
@_output
@_told
def report(names: tuple[str, ...], folder: str | None, show: bool, output: str | None) -> None:
    """Write the report: index.html, Markdown, pictures, tables. RUN: id, label, experiment, latest, latest~1, all."""
    from nanolib.report.page import build
    from nanolib.store import Store

    target = Path(folder) if folder else _use_output(output) / "report"
    _use_output(output)
    with Store(create=False) as store:
        page = build(store, _selected(store, names), target)
    click.echo(str(page))
    if show:
        webbrowser.open(page.absolute().as_uri())


def _findings(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a command that compares."""
    for option in (
        click.option("--markdown", "markdown_file", metavar="FILE", help="Write the findings as Markdown."),
        click.option("--json", "json_file", metavar="FILE", help="Write the findings as JSON."),
        click.option(
            "--threshold", default="5%", show_default=True, metavar="SHARE", help="A change from here on counts."
        ),
    ):
        command = option(command)
    return command


@main.command()
@click.argument("base")
@click.argument("current")
@click.option("--all", "everything", is_flag=True, help="Show the equivalent ones too.")
@_findings
@click.option("--chart", "chart_file", metavar="FILE", help="Draw them: .html, .png or .svg.")
@_output
@_told
def compare(
    base: str,
    current: str,
    threshold: str,
    everything: bool,
    json_file: str | None,
    markdown_file: str | None,
    chart_file: str | None,
    output: str | None,
) -> None:
    """Compare two runs; exit code 1 on a regression. BASE, CURRENT: id, label, suite, latest~1, or a database."""
    from nanolib.regression.compare import compare_rows

    _use_output(output)
    found = compare_rows(_rows_of("base", base), _rows_of("current", current), _share(threshold))
    if not found.lines:
        raise BadInput(f"compare: {base!r} and {current!r} have no case in common; compare runs of one notebook")
    if chart_file:
        from nanolib.report.regressions import comparison_chart
        from nanolib.report.renderer import save_as

        save_as(comparison_chart(found, "Two sets of runs", f"A: {base}. B: {current}."), Path(chart_file))
    _show_comparison(found, everything, json_file, markdown_file)
    click.echo("the two were collected apart: drift between them is not controlled")
    if not found.same_machine:
        click.echo("they come from different machines: a comparison, not a gate")
    sys.exit(EXIT_FAILED if found.regressed else EXIT_OK)


def _show_comparison(found: Any, everything: bool, json_file: str | None, markdown_file: str | None) -> None:
    from nanolib.report.page import markdown_table

    summary = ", ".join(f"{n} {finding}" for finding, n in found.counts.items())
    if json_file:
        Path(json_file).write_text(json.dumps(found.to_dict(), indent=1), encoding="utf-8")
    if markdown_file:
        Path(markdown_file).write_text(f"{summary}\n\n{markdown_table(found.table())}\n", encoding="utf-8")
    table = found.table(everything)
    if len(table):
        click.echo(table.to_string(index=False))
    click.echo(summary)


@main.command()
@click.argument("a", metavar="REV_A")
@click.argument("b", metavar="REV_B")
@click.argument("notebooks", nargs=-1, metavar="[NOTEBOOK]...")
@click.option("-p", "--param", "pairs", multiple=True, metavar="NAME=VALUE", help="A parameter of the notebook named.")
@click.option("--call", "functions", multiple=True, metavar="PACKAGE.MODULE:FUNCTION", help="A function of your own.")
@click.option(
    "--setup", default="", metavar="PACKAGE.MODULE:FUNCTION", help="Makes what --call is called with, untimed."
)
@click.option("--metric", default="latency", show_default=True, help="Or tokens_per_second, peak_memory, flops, ...")
@click.option(
    "--budget", default="50s", show_default=True, metavar="SECONDS", help="For one case, both rounds included."
)
@click.option("--timeout", default="300s", show_default=True, metavar="SECONDS", help="For one answer of a version.")
@click.option("--label", default="", help="Your name for this comparison.")
@_findings
@_output
@_told
def ab(
    a: str,
    b: str,
    notebooks: tuple[str, ...],
    pairs: tuple[str, ...],
    functions: tuple[str, ...],
    setup: str,
    metric: str,
    threshold: str,
    budget: str,
    timeout: str,
    label: str,
    json_file: str | None,
    markdown_file: str | None,
    output: str | None,
) -> None:
    """Compare two versions side by side: git revisions, `.` for the working tree, or two params files.

    Blocks of both are interleaved in random order; a change counts when a second round in fresh processes repeats it.
    Exit code 1 on a regression. Without a notebook and --call: the timed cases of the quick suite.
    """
    from nanolib.measurement import METRICS
    from nanolib.regression.ab import TIMED, ask, stored
    from nanolib.regression.rounds import Settings

    _use_output(output)
    question = _ab_question(a, b, notebooks, _pairs(pairs), functions, setup, metric)
    settings = Settings(
        threshold=_share(threshold),
        budget_s=_seconds("--budget", budget),
        direction=METRICS[metric].direction,
        timeout_s=_seconds("--timeout", timeout),
        pairs=metric in TIMED,
    )
    answer = ask(question, settings, lambda line: click.echo(line, err=True))
    _show_comparison(answer.comparison, True, json_file, markdown_file)
    click.echo("interleaved and paired, in processes of their own")
    if metric in TIMED:
        from nanolib.store import Store

        with Store() as store:
            store.add(stored(answer, question, label))
    sys.exit(EXIT_FAILED if answer.comparison.regressed else EXIT_OK)


@main.command()
@click.argument("experiments", nargs=-1, metavar="[EXPERIMENT]...")
@click.option("--metric", default="latency", show_default=True, help="Which figure.")
@click.option("--all", "everything", is_flag=True, help="Show those that never changed too.")
@_output
@_told
def history(experiments: tuple[str, ...], metric: str, everything: bool, output: str | None) -> None:
    """Each case over its runs on one machine: where its level changed, and between which revisions."""
    from nanolib.regression.history import histories, table
    from nanolib.store import Store

    _use_output(output)
    with Store(create=False) as store:
        runs = store.runs()
        if unknown := set(experiments) - set(runs.experiment):
            known = ", ".join(sorted(set(runs.experiment))) or "none yet"
            raise BadInput(f"history: no run of {', '.join(sorted(unknown))} is in the database; it holds {known}")
        found = histories(store, metric, sorted(set(runs.machine_id)))
    found = [one for one in found if not experiments or one.experiment in experiments]
    changed = [one for one in found if one.changes]
    if shown := found if everything else changed:
        click.echo(table(shown).to_string(index=False))
    runs_of = max((len(one.points) for one in found), default=0)
    click.echo(f"{len(changed)} of {len(found)} {metric} figures changed their level over up to {runs_of} runs")
    if found and runs_of < 4:
        click.echo("a change of level takes four runs to be seen; nano compare tells two of them apart")


def _ab_question(
    a: str,
    b: str,
    notebooks: tuple[str, ...],
    overrides: dict[str, str],
    functions: tuple[str, ...],
    setup: str,
    metric: str,
) -> Any:
    from nanolib.paths import checkout
    from nanolib.regression.ab import Question
    from nanolib.suite.jobs import plan, read_job

    if functions:
        if notebooks or overrides:
            raise BadInput("--call: a function takes no notebook and no -p; give one or the other")
        return Question((a, b), Path.cwd(), functions=functions, setup=setup, metric=metric)
    if setup:
        raise BadInput(f"--setup: {setup!r} needs a --call to set up for")
    if all(name.endswith((".yml", ".yaml")) for name in (a, b)):
        experiment, *values = read_job(Path(a), Path(b), notebooks, overrides)
        return Question(
            (".", "."), checkout(), [(experiment, *values)], metric=metric, titles=(Path(a).name, Path(b).name)
        )
    jobs = [job for job in plan(notebooks, overrides, {}) if any(case.interleaves for case in job.cases())]
    if not jobs:
        raise BadInput(f"ab: {', '.join(notebooks)} times nothing that can be interleaved; name another notebook")
    return Question((a, b), checkout(), [(job.name, job.values, job.values) for job in jobs], metric=metric)


def _seconds(option: str, text: str) -> float:
    try:
        seconds = float(text.removesuffix("s"))
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e6:
        raise BadInput(f"{option}: {text!r} will not do; give seconds, such as 60s")
    return seconds


def _share(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 < share < 1:
        raise BadInput(f"--threshold: {text!r} will not do; give a share such as 5% or 0.05")
    return share


def _rows_of(side: str, name: str) -> Any:
    """The measurements that a name or a database stands for."""
    from nanolib.store import Store

    is_file = name.endswith((".sqlite", ".db")) or Path(name).is_file()
    with Store(name if is_file else None, create=False) as store:
        rows = store.measurements(store.resolve("all" if is_file else name), samples=True)
    if rows.empty:
        raise BadInput(f"{side}: {name!r} holds no measurement; name another run")
    return rows


@main.command()
@click.argument("target", metavar="FILE")
@click.option("--run", "names", multiple=True, metavar="RUN", help="Which runs; default: each experiment's newest.")
@_output
@_told
def export(target: str, names: tuple[str, ...], output: str | None) -> None:
    """Write runs to FILE for sharing: .sqlite, .json, .csv or .md; no user name, host name or path is in it."""
    from nanolib.report.export import write
    from nanolib.store import Store

    _use_output(output)
    with Store(create=False) as store:
        write(store, _selected(store, names), Path(target))
    click.echo(target)


@main.command()
@click.argument("databases", nargs=-1, required=True, metavar="DATABASE...")
@_output
@_told
def merge(databases: tuple[str, ...], output: str | None) -> None:
    """Bring in the runs of other databases; doing it twice changes nothing."""
    from nanolib.store import Store

    _use_output(output)
    for path in databases:  # all are looked at before any is taken in
        Store(path, create=False).close()
    with Store() as store:
        for path in databases:
            click.echo(f"{path}: {store.merge(path)} run(s) came in")


@main.command()
@click.option("--older-than", "age", metavar="30d", help="Delete runs that are older than this many days.")
@click.option("--keep", type=click.IntRange(min=0), help="Delete all but so many of the newest runs.")
@click.option("--dry-run", is_flag=True, help="Only say which.")
@_output
@_told
def clean(age: str | None, keep: int | None, dry_run: bool, output: str | None) -> None:
    """Delete old runs and give their space back."""
    from nanolib.store import Store

    _use_output(output)
    if age is None and keep is None:
        raise BadInput("--older-than, --keep: neither is given; say which runs to delete, such as --older-than 30d")
    days = None if age is None else _days(age)
    with Store(create=False) as store:
        gone = store.cleanup_old_runs(days, max_runs=keep, dry_run=dry_run)
    click.echo(f"{len(gone)} run(s) {'would be' if dry_run else 'were'} deleted")


def _days(age: str) -> float:
    try:
        days = float(age.removesuffix("d"))
    except ValueError:
        days = -1
    if not 0 <= days < 1e6:
        raise BadInput(f"--older-than: {age!r} will not do; give days, such as 30d")
    return days


@main.command()
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option("--budget", default=2.0, show_default=True, help="Seconds for each ceiling.")
@_output
@_told
def doctor(as_json: bool, budget: float, output: str | None) -> None:
    """Tell what this machine can measure, and measure its ceilings."""
    from nanolib.suite.doctor import examine

    _use_output(output)
    found = examine(budget)
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    for title, lines in found.items():
        click.echo(f"{title}")
        for name, value in lines.items():
            click.echo(f"  {name:<22} {value}")


if __name__ == "__main__":
    main()
