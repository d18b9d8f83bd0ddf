"""The command that copies the notebooks and params files to a folder of your own."""

from __future__ import annotations

import shutil

import click

from nanolib.cli.common import command, echo
from nanolib.measurement import BadInput, shown
from nanolib.paths import expanded, installed_workbook

_FOLDERS = ("notebooks", "params")


@command("nano init benchmarks")
@click.argument("folder", metavar="DIR")
def init(folder: str) -> None:
    """Copy the notebooks and params files to DIR.

    DIR must be empty or new. Start nano, papermill or JupyterLab there; results go to DIR/outputs.
    """
    target, source = expanded(folder), installed_workbook()
    is_empty = target.is_dir() and not any(target.iterdir())
    if target.exists() and not is_empty:
        raise BadInput(f"init: {shown(folder)} is not an empty folder; name a new one")
    for name in _FOLDERS:
        hidden = shutil.ignore_patterns(".*")  # JupyterLab's checkpoints
        shutil.copytree(source / name, target / name, ignore=hidden)
    echo(
        f"copied {' and '.join(f'{name}/' for name in _FOLDERS)} to {target}",
        f"next: cd {target} && nano run quick",
    )
