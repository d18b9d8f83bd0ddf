"""Define exit codes, output, options, help and error messages for all commands."""

from __future__ import annotations

import json
import math
import os
import re
import select
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nanolib.experiments import ALL
from nanolib.measurement import BadInput, printable, quote
from nanolib.paths import (
    OUTPUT_VARIABLE,
    expand_home,
    find_checkout,
    installed_workbook,
    output_folder,
)

if TYPE_CHECKING:
    import pandas as pd

# A table aligns cells to the right if the cells match this pattern.
_NUMBER = re.compile(r"[-+]?\d|—$|yes$|no$")
EXIT_OK, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 0, 1, 2, 130
# The shell uses this code for SIGPIPE. Exit code 1 would report a regression.
EXIT_CLOSED = 141


class Amount(click.FloatRange):
    """A number that may end with its unit, such as `60s`, `5%` or `30d`.

    Args:
        unit: Symbol of the unit.
        limit: Exclusive upper limit of the number.
        zero: Whether 0 is valid too.
    """

    def __init__(self, unit: str, limit: float, *, zero: bool = False):
        super().__init__(0, limit, min_open=not zero, max_open=True)
        self.unit = unit

    def convert(self, value, param: click.Parameter | None, ctx) -> float:
        """See `click.ParamType.convert`."""
        number = click.FLOAT.convert(str(value).removesuffix(self.unit), param, ctx)
        if math.isnan(number):
            self.fail("nan is not a number.", param, ctx)
        return super().convert(number / 100 if str(value).endswith("%") else number, param, ctx)


class NewFile(click.ParamType):
    """Path of a file to write. The command checks the path before a measurement starts."""

    name = "file"

    def convert(self, value, param, ctx) -> Path:
        """See `click.ParamType.convert`."""
        path = Path(value)
        if not path.absolute().parent.is_dir():
            raise BadInput(f"{path}: {path.parent} is not a folder; create it, or name a folder")
        if path.is_dir():
            raise BadInput(f"{path}: is a folder; name a file")
        return path


SECONDS = Amount("s", 1e6)
SHARE = Amount("%", 1)
DAYS = Amount("d", 1e6, zero=True)


def echo(*lines, err: bool = False) -> None:
    """Print lines, without control characters that could change the terminal's state.

    Args:
        lines: Values to print, one per line.
        err: Whether to print to standard error.
    """
    for line in lines:
        click.echo(printable(str(line)), err=err)


def to_json(value) -> str:
    """Return a value as JSON text, with null for infinite numbers and NaN."""
    import pydantic_core

    return pydantic_core.to_json(value, indent=1, inf_nan_mode="null", fallback=str).decode()


def echo_json(value) -> None:
    """Print a value as JSON."""
    echo(*to_json(value).split("\n"))


def complain(*lines: str) -> None:
    """Print errors to standard error, one line each."""
    echo(*(f"nano: {line}" for line in lines), err=True)


def echo_table(table: pd.DataFrame) -> None:
    """Print a table with one line per row. Text is aligned to the left, numbers to the right."""
    columns = {}
    for name, column in table.items():
        cells = [printable(str(cell)) for cell in (name, *column)]
        if not all(_NUMBER.match(cell) for cell in cells[1:] if cell):
            width = max(map(len, cells))
            cells = [cell.ljust(width) for cell in cells]
        columns[cells[0]] = cells[1:]
    text = table.__class__(columns).to_string(index=False)
    echo(*(line.rstrip() for line in text.split("\n")))


def echo_cases(table):
    """Print a table of cases, without empty columns, under the words that all its cases share."""
    from nanolib.compare.findings import share_words

    shared, names = share_words(list(table["experiment"] + " " + table["case"]))
    lines = table.drop(columns="experiment").assign(case=names)
    echo("", *([f"all: {' '.join(shared)}"] if shared else []))
    echo_table(lines.loc[:, lines.astype(bool).any()])


def _parse_pairs(_context, _option, pairs: tuple[str, ...]) -> dict[str, str]:
    """Return the parameters of `-p NAME=VALUE` as name → text. The last value of a name counts."""
    values = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise BadInput(
                f"-p: {quote(pair)} is not a NAME=VALUE pair; write -p seq_lens='[1024, 4096]'"
            )
        values[name] = value
    return values


def _set_output(_context, _option, folder: str | None):
    """Set the output folder of this process and of its child processes."""
    if folder:
        os.environ[OUTPUT_VARIABLE] = str(expand_home(folder).absolute())
    output = output_folder()
    if output.exists() and not output.is_dir():
        raise BadInput(f"--output: {output} is not a folder; name a folder")


output_option = click.option(
    "--output",
    metavar="DIR",
    help="Output folder. Default: $NANOLIB_OUTPUT, or outputs/ next to notebooks/.",
    callback=_set_output,
    expose_value=False,
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
everything_option = click.option(
    "--all", "everything", is_flag=True, help="Show unchanged cases too. Default: only changes."
)
pairs_option = click.option(
    "-p",
    "--param",
    "pairs",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_parse_pairs,
    help="Set a notebook's parameter or a field of a model's config. Repeatable.",
)


def option(
    name: str, default, text: str, metavar: str | None = None, **more
) -> Callable[[Any], Any]:
    """Return an option whose help shows its default."""
    return click.option(
        name, default=default, show_default=True, metavar=metavar, help=text, **more
    )


def file_option(name: str, text: str) -> Callable[[Any], Any]:
    """Return an option for a file to write. The command's parameter is `NAME_file`."""
    return click.option(f"--{name}", f"{name}_file", type=NewFile(), metavar="FILE", help=text)


def command(*examples: str, **attributes) -> Callable[[Callable[..., Any]], click.Command]:
    """Return a decorator that turns a function into a command with examples in the help.

    Args:
        examples: Command lines that a user can copy.
        attributes: Other arguments of `click.command`.
    """
    lines = "\n".join(f"  {example}" for example in examples)
    return click.command(epilog=f"\b\nExamples:\n{lines}", **attributes)


def _is_output_closed() -> bool:
    """Return whether the program that reads the output has ended."""
    pipe = select.poll()
    pipe.register(1, 0)  # An event mask of 0 reports only errors and hang-ups.
    return bool(pipe.poll(0))


class Commands(click.Group):
    """A group of commands that reports invalid input, options and files without a traceback."""

    def invoke(self, ctx: click.Context):
        """Run the command that the command line names."""
        try:
            return super().invoke(ctx)
        except BadInput as error:
            complain(*error.lines)
        except (OSError, sqlite3.Error) as error:
            if _is_output_closed():
                # A normal exit would flush standard output, and fail again.
                os._exit(EXIT_CLOSED)
            if getattr(error, "filename", None):
                complain(f"{error.filename}: {error.strerror}; name another file or folder")
            else:  # A device, a library, a connection or a database.
                complain(f"{type(error).__name__}: {error}")
        sys.exit(EXIT_BAD_INPUT)

    def main(self, *args, **kwargs):
        """Run the command line, and end the process with the command's exit code."""
        try:
            sys.exit(super().main(*args, **kwargs | {"standalone_mode": False}) or EXIT_OK)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
        except click.ClickException as error:
            context = getattr(error, "ctx", None)
            path = context.command_path if context else "nano"
            complain(f"{' '.join(error.format_message().split())} See: {path} --help")
        except click.Abort:
            complain("stopped")
            sys.exit(EXIT_INTERRUPTED)
        sys.exit(EXIT_BAD_INPUT)


def cells_of(notebook: str) -> list[dict[str, Any]]:
    """Return the cells of a notebook, from the user's workbook if there is one."""
    workbook = find_checkout() or installed_workbook()
    return json.loads((workbook / "notebooks" / f"{notebook}.ipynb").read_text())["cells"]


class NotebookCommand(click.Command):
    """A command whose help shows the parameters of the first notebook on its command line."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Store the notebook's name, because `--help` exits before click reads the arguments."""
        ctx.obj = next((name for name in args if name in ALL), None)
        return super().parse_args(ctx, args)

    def get_help(self, ctx: click.Context) -> str:
        """Return the help, and then the notebook's parameters cell, which declares all names."""
        text = super().get_help(ctx)
        if not ctx.obj:
            return text
        cell = next(
            cell for cell in cells_of(ctx.obj) if "parameters" in cell["metadata"].get("tags", [])
        )
        return f"{text}\n\nParameters of {ctx.obj} (-p NAME=VALUE):\n{''.join(cell['source'])}"
