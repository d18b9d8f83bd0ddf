"""Run suites and notebooks, and prepare runs: copy the workbook, list names, plan memory."""

import shlex
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import click

from nanolib.cli.common import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    NotebookCommand,
    cells_of,
    command,
    echo,
    echo_json,
    echo_table,
    file_option,
    json_option,
    option,
    output_option,
    pairs_option,
    to_json,
)
from nanolib.cli.results import write_report
from nanolib.experiments import ALL
from nanolib.measurement import BadInput, quote
from nanolib.paths import DATABASE, expand_home, installed_workbook, output_folder
from nanolib.store import Store


@command("nano init benchmarks")
@click.argument("folder", metavar="DIR")
def init(folder: str) -> None:
    """Copy the notebooks, params files and docs to DIR.

    DIR must be empty or new. Start nano, papermill or JupyterLab in DIR. Results go to DIR/outputs.
    """
    target, source = expand_home(folder), installed_workbook()
    is_empty = target.is_dir() and not any(target.iterdir())
    if target.exists() and not is_empty:
        raise BadInput(f"init: {quote(folder)} is not an empty folder; name a new folder")
    unwanted = shutil.ignore_patterns(".*", "*.py", "__pycache__")
    for name in ("notebooks", "params", "docs"):
        shutil.copytree(source / name, target / name, ignore=unwanted)
    echo(
        f"copied notebooks/, params/ and docs/ to {target}",
        f"next: cd {shlex.quote(str(target))} && nano run quick",
    )


@command("nano list", name="list")
def list_names() -> None:
    """List the names that a command line can contain.

    These are the names of notebooks, suites, scenarios, attention functions, patterns and presets.
    """
    for title, lines in _names().items():
        width = max(map(len, lines))
        echo(title, *(f"  {name:{width}}  {text}".rstrip() for name, text in lines.items()), "")


def _names() -> dict[str, dict[str, str]]:
    """Return the names of each list, as title → name → description."""
    from nanolib.config import ATTENTION_KINDS, ATTENTION_PATTERNS, PRESETS
    from nanolib.paths import SCENARIOS, params_files

    suites = params_files()
    scenarios = suites.pop(SCENARIOS, {})
    return {
        "Notebooks (nano run NOTEBOOK)": {
            name: "".join(cells_of(name)[0]["source"]).splitlines()[0].lstrip("# ")
            for files in suites.values()
            for name in files
        },
        "Suites (nano run SUITE)": {suite: ", ".join(files) for suite, files in suites.items()},
        "Scenarios (nano run SCENARIO)": {
            name: file.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
            for name, file in scenarios.items()
        },
        "Attention (-p attention_types='[{kind: KIND}]')": ATTENTION_KINDS,
        "Patterns (-p attention_types='[{kind: sparse, pattern: PATTERN}]')": ATTENTION_PATTERNS,
        "Presets (-p presets='[PRESET]')": {name: _sizes(name) for name in PRESETS},
    }


def _sizes(preset: str) -> str:
    from nanolib.config import NanoConfig

    config = NanoConfig.from_preset(preset)
    return f"{config.parameter_count / 1e6:,.0f}M parameters, context {config.context_length:,}"


@command(
    "nano plan gpt_6.7B --memory 80GiB --seq-len 8192 --dtype bfloat16",
    "nano plan hf:LlamaForCausalLM --memory 24GB -p num_hidden_layers=16",
)
@click.argument("model")
@click.option(
    "--memory", required=True, metavar="SIZE", help="Memory per rank, such as 80GiB or 24GB."
)
@option("--seq-len", 1024, "Sequence length, in tokens.", "N")
@option("--batch-size", 1, "Batch size, in sequences.", "N")
@option("--dtype", None, "Dtype of weights and activations. Default: that of MODEL, or float32.")
@option(
    "--precision", None, "Training precision: mixed or pure. Default: mixed, or pure with a dtype."
)
@option("--kv-dtype", None, "Dtype of the cache. Default: same as --dtype.")
@option("--ranks", 1, "Number of FSDP ranks. A formula estimates the memory per rank.", "N")
@pairs_option
@file_option("json", "Write the plan as JSON.")
def plan(model: str, memory: str, pairs: dict[str, str], json_file: Path | None, **rest) -> None:
    """Check whether a model fits in memory, and show what uses the memory.

    MODEL is a preset, hf:LlamaForCausalLM, a Hugging Face config.json, or package.module:build.

    The peaks are exact for live tensors. The process and its allocator need more memory. Mixed
    precision computes in bfloat16, and keeps weights and optimizer states in float32. Exit code 1
    reports that the model does not fit for any use.
    """
    from nanolib.experiments.model import planning
    from nanolib.params import read_value

    found = planning.plan(
        model,
        memory,
        options={name: read_value(name, value) for name, value in pairs.items()},
        **rest,
    )
    if json_file:
        json_file.write_text(to_json(found.to_dict()), encoding="utf-8")
    echo(*str(found).split("\n"))
    sys.exit(EXIT_OK if any(use.fits for use in found.uses) else EXIT_FAILED)


@command(
    "nano run",
    "nano run full attention --label before",
    "nano run model -p seq_lens='[512, 1024]' -p dtypes='[bfloat16]'",
    "nano run full --dry-run",
    cls=NotebookCommand,
)
@click.argument("targets", nargs=-1, metavar="[SUITE] [NOTEBOOK]...")
@click.option("--quick", "suite", flag_value="quick", help="Run the quick suite.")
@click.option("--full", "suite", flag_value="full", help="Run the full suite.")
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
    suite: str | None,
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
    from nanolib.params import plan_jobs

    targets = (suite, *targets) if suite else targets
    jobs = plan_jobs(ALL, targets, pairs, {"label": label, "resume": resume})
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
    echo("", f"notebooks  {folder}", f"database   {folder / DATABASE}", f"logs       {shared.logs}")
    if run_ids and not no_report:
        echo(f"report     {write_report(run_ids, folder / 'report')}")
    statuses = {result.status for result in results}
    if "interrupted" in statuses:
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(EXIT_OK if statuses <= {"done"} else EXIT_FAILED)


def _conclude(result) -> list[str]:
    """Return the question of a finished notebook and its first conclusion as lines of text."""
    from nanolib.experiments.summary import answers

    run_ids = [result.run_id] if result.status == "done" else []
    with Store(create=False) as store:
        rows = store.measurements(run_ids, samples=True)
    lines = []
    for finding in answers(rows):
        lines += [finding.about, f"  {finding.sentence}", ""]
    return lines


def _show_plan(jobs: list[Any]):
    """Print the cases of a dry run, and the expected duration of each notebook."""
    from nanolib.meters.machine import this_machine
    from nanolib.run.peaks import ceilings_of
    from nanolib.run.prepare import dry_run_table, expected_s

    machine_id, path, expected = this_machine().machine_id, output_folder() / DATABASE, []
    with Store(path if path.exists() else ":memory:") as store:  # A dry run writes no file.
        ceilings = ceilings_of(store, machine_id)
        for job in jobs:
            cases = job.cases()
            if not cases:
                echo("", f"{job.name}: no cases (reads stored results)")
                continue
            expected.append(expected_s(job.params, cases, store, machine_id))
            echo("", f"{job.name}: {len(cases)} cases{_duration(expected[-1])}")
            echo_table(dry_run_table(cases, ceilings))
    if known := [interval for interval in expected if interval]:
        total = [sum(ends) for ends in zip(*known, strict=True)]
        echo("", f"all notebooks with an estimate{_duration(total)}")
    if not ceilings:
        echo("", "No time predictions yet. To measure this machine's peak rates, run: nano doctor")


def _duration(seconds) -> str:
    """Return a duration as `: about 90 s (75 to 110 s) inside cases`, or no text if unknown."""
    if not seconds:
        return ""
    low, estimate, high = (f"{value:.0f}" for value in seconds)
    return f": about {estimate} s ({low} to {high} s) inside cases"


def _show_failures(run_ids: list[str]):
    from nanolib.report.overview import failures

    with Store(create=False) as store:
        bad = failures(store.measurements(run_ids))
    for (status, experiment, message), rows in bad.groupby(
        ["status", "experiment", "message"], sort=False
    ):
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
