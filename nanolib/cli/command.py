"""What every command shares: how it ends, where it reads and writes, and how wrong use is told."""

from __future__ import annotations

import math
import os
import re
import shutil
import sqlite3
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nanolib.measurement import BadInput, printable, shown
from nanolib.paths import OUTPUT_VARIABLE, database_path, expanded, output_folder

if TYPE_CHECKING:
    import pandas as pd

_ENDLESS = re.compile(r"(\S{100})\S{400,}(\S{100})")  # longer than any name of a file
_NUMBER = re.compile(r"[-+]?\d|—$|yes$|no$")  # what a column of numbers holds
EXIT_OK, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 0, 1, 2, 130
EXIT_CLOSED = 141  # as of what SIGPIPE ends: 1 would tell of a regression


class Amount(click.ParamType):
    """A number that may carry its unit: `60s`, `5%`, `30d`.

    Args:
        unit: What it may end with.
        most: It is below this.
        remedy: What would be right, for who gave something else.
        above: Whether it is above 0; else 0 will do.
    """

    name = "amount"

    def __init__(self, unit: str, most: float, remedy: str, *, above: bool = True) -> None:
        self.unit, self.most, self.remedy, self.above = unit, most, remedy, above

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """See `click.ParamType.convert`."""
        text = str(value)
        try:
            found = float(text.removesuffix(self.unit)) / (
                100 if self.unit == "%" and text.endswith("%") else 1
            )
        except ValueError:
            found = math.nan
        if not (0 < found < self.most or (found == 0 and not self.above)):
            field = param.opts[0] if param else self.name
            raise BadInput(f"{field}: {shown(text)} is not valid; give {self.remedy}")
        return found


class NewFile(click.ParamType):
    """A file to write in a folder that exists, known before anything is measured for it."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """See `click.ParamType.convert`."""
        path = Path(value)
        if not path.absolute().parent.is_dir():
            raise BadInput(f"{path}: {path.parent} is not a folder; create it or name another one")
        if path.is_dir():
            raise BadInput(f"{path}: is a folder; name a file")
        return path


SECONDS = Amount("s", 1e6, "seconds, such as 60s")
SHARE = Amount("%", 1.0, "a share such as 5% or 0.05")
DAYS = Amount("d", 1e6, "days, such as 30d", above=False)


def echo(*lines: Any, err: bool = False) -> None:
    """Print lines; what was stored or typed and stands in them does nothing to the terminal. Commands print by this alone.

    Args:
        lines: What to print.
        err: To the standard error.
    """
    for line in lines:
        click.echo(printable(str(line)), err=err)


def complain(*lines: str) -> None:
    """Print to the standard error what is wrong, a line each; of an endless word its two ends."""
    echo(*("nano: " + _ENDLESS.sub(r"\1...\2", line) for line in lines), err=True)


def terminal_width() -> int:
    """How many characters a line of the terminal has, or COLUMNS says; 120 if neither does."""
    return shutil.get_terminal_size((120, 0)).columns


def echo_table(table: pd.DataFrame) -> None:
    """Print a table, words to the left and numbers to the right; no cell of it breaks its line."""
    shown = {}
    for name, column in table.items():
        cells, title = [printable(str(cell)) for cell in column], printable(str(name))
        if not all(_NUMBER.match(cell) for cell in cells if cell):
            width = max(map(len, (title, *cells)))
            cells, title = [cell.ljust(width) for cell in cells], title.ljust(width)
        shown[title] = cells
    echo(*(line.rstrip() for line in table.__class__(shown).to_string(index=False).split("\n")))


def _pairs_of(
    _context: click.Context, _option: click.Parameter, pairs: tuple[str, ...]
) -> dict[str, str]:
    """Parameters given as `-p name=value`, name → text."""
    values = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise BadInput(
                f"-p: {shown(pair)} is not a NAME=VALUE pair; write -p seq_lens='[1024, 4096]'"
            )
        if name in values:
            raise BadInput(f"-p: {shown(name)} is given twice; give it once")
        values[name] = value
    return values


def _use_output(_context: click.Context, _option: click.Parameter, folder: str | None) -> None:
    """Make `--output` the output folder of this process and those it starts."""
    if folder:
        os.environ[OUTPUT_VARIABLE] = str(expanded(folder).absolute())
    output = output_folder()
    if output.exists() and not output.is_dir():
        raise BadInput(f"--output: {output} is not a folder; name another one")


output_option = click.option(
    "--output",
    metavar="DIR",
    help="Output folder; default: $NANOLIB_OUTPUT, or outputs/.",
    callback=_use_output,
    expose_value=False,
)
pairs_option = click.option(
    "-p",
    "--param",
    "pairs",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_pairs_of,
    help="A parameter of the notebook, or a field of the model's config; repeatable.",
)


def selected(store: Any, names: tuple[str, ...]) -> list[str]:
    """Run ids that the names stand for; without a name, each experiment's newest run."""
    from nanolib.experiments.summary.cases import select_runs

    return select_runs(store, list(names) or ["newest"])


class Command(click.Command):
    """A command whose help ends with examples.

    Args:
        examples: Command lines.
    """

    def __init__(self, *args: Any, examples: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The examples, each on a line of its own, so that it can be copied."""
        with formatter.section("Examples"):
            for example in self.examples:
                formatter.write(f"{' ' * formatter.current_indent}{example}\n")


def command(
    *examples: str, cls: type[Command] = Command, **attributes: Any
) -> Callable[[Callable[..., Any]], Command]:
    """Declare a command, with examples for its help."""
    return click.command(cls=cls, examples=examples, **attributes)


class Commands(click.Group):
    """Commands that end bad input, wrong use and files that cannot be used with one line."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that the command line names."""
        try:
            return super().invoke(ctx)
        except BadInput as error:
            complain(*error.lines)
        except sqlite3.DatabaseError as error:
            from nanolib.store.connection import unusable

            complain(unusable(database_path(), error))
        except BrokenPipeError:  # whoever read has seen enough; what is left to flush goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(EXIT_CLOSED)
        except OSError as error:
            said = error.strerror or error
            complain(f"{error.filename or output_folder()}: {said}; name another place")
        sys.exit(EXIT_BAD_INPUT)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Read the command line, run its command, and end."""
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
