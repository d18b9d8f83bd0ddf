"""The command that copies the notebooks, params files and docs to a folder of your own."""

from __future__ import annotations

import shutil

import click

from nanolib.cli.common import command, echo
from nanolib.measurement import BadInput, shown
from nanolib.paths import expanded, installed_workbook

_FOLDERS = ("notebooks", "params", "docs")


@command("nano init benchmarks")
@click.argument("folder", metavar="DIR")
def init(folder: str) -> None:
    """Copy the notebooks, params files and docs to DIR.

    DIR must be empty or new. Start nano, papermill or JupyterLab there; results go to DIR/outputs.
    """
    target, source = expanded(folder), installed_workbook()
    is_empty = target.is_dir() and not any(target.iterdir())
    if target.exists() and not is_empty:
        raise BadInput(f"init: {shown(folder)} is not an empty folder; name a new one")
    for name in _FOLDERS:
        unwanted = shutil.ignore_patterns(".*", "*.py", "__pycache__")  # checkpoints, build scripts
        shutil.copytree(source / name, target / name, ignore=unwanted)
    echo(
        f"copied {', '.join(f'{name}/' for name in _FOLDERS)} to {target}",
        f"next: cd {target} && nano run quick",
    )
