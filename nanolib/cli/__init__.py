"""The `nano` command: run, inspect, compare, share and delete measurements.

Each command imports its slow modules when the user runs the command, so that `nano --help` is fast.
No other package imports `nanolib.cli`.
"""

import click

import nanolib
from nanolib.cli import compare, results, run
from nanolib.cli.common import Commands


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(nanolib.__version__, prog_name="nano")
def main() -> None:
    """Measure transformers on this machine. Each measurement has its method and its interval."""


for command in (
    run.init,
    run.run,
    run.list_names,
    run.doctor,
    run.plan,
    compare.compare,
    compare.ab,
    results.history,
    results.runs,
    results.report,
    results.export,
    results.merge,
    results.clean,
):
    main.add_command(command)
