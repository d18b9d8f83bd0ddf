"""The `nano` command: run, look at, compare, share and tidy measurements.

A command imports what it needs when it is called, so that `nano --help` comes at once. Nothing in nanolib imports from here.
"""

from __future__ import annotations

import click

import nanolib
from nanolib.cli import comparing, listing, planning, results, running, side_by_side
from nanolib.cli.command import Commands


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(nanolib.__version__, prog_name="nano")
def main() -> None:
    """Measure transformers on this machine; every number says how it was made and how sure it is."""


for command in (
    *(running.run, listing.list_names, running.doctor, planning.plan),
    *(comparing.compare, side_by_side.ab, comparing.history),
    *(results.runs, results.report, results.export, results.merge, results.clean),
):
    main.add_command(command)
