"""What to type in the place of options that other suites have, and `nano run` has not."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, get_origin

import click

_SUITES = ("quick", "full")


def hint(error: click.ClickException, arguments: Sequence[str]) -> str:
    """The command line that was meant, as a sentence; empty where nobody knows.

    Args:
        error: What click says of the arguments.
        arguments: Those of the command line.
    """
    if not isinstance(error, click.NoSuchOption) or (error.ctx and error.ctx.info_name) != "run":
        return ""
    name = error.option_name.lstrip("-").replace("-", "_")
    asked = [word for word in arguments if word in _notebooks()]
    if name in _SUITES:
        return f"Write: nano run {' '.join([name, *asked])}"
    if name in ("f", "file", "params_file", "config"):
        file = _value_of(error.option_name, arguments) or "file.yml"
        notebook = (asked or [_notebook_of(file)])[0]
        return f"Write: papermill notebooks/{notebook}.ipynb {notebook}.ipynb -f {shlex.quote(file)}"
    if with_it := _notebooks_with(name):
        value = _value_of(error.option_name, arguments)
        named = next((word for word in arguments if word in with_it), "")
        notebook = named or next(iter(with_it))
        others = "" if named or len(with_it) == 1 else f" (or of {', '.join(list(with_it)[1:])})"
        return f"Write: nano run {notebook} -p {name}='{_as_yaml(value or '…', with_it[notebook])}'{others}"
    return ""


def _notebooks_with(name: str) -> dict[str, Any]:
    """Notebook → the field of its parameters that has this name."""
    from nanolib.experiments import ALL

    fields = {notebook: getattr(load(), "Params", None) for notebook, load in ALL.items()}
    return {
        notebook: kind.model_fields[name] for notebook, kind in fields.items() if kind and name in kind.model_fields
    }


def _notebooks() -> Sequence[str]:
    from nanolib.experiments import ALL

    return list(ALL)


def _notebook_of(file: str) -> str:
    return next((name for name in _notebooks() if name in PurePath(file).name), "NOTEBOOK")


def _value_of(option: str, arguments: Sequence[str]) -> str:
    names = _notebooks()
    for at, word in enumerate(arguments):
        given, equals, value = word.partition("=")
        if given == option:
            taken = itertools.takewhile(lambda word: not (word.startswith("-") or word in names), arguments[at + 1 :])
            return value if equals else ",".join(taken)
    return ""


def _as_yaml(value: str, field: Any) -> str:
    several = get_origin(field.annotation) is list and not value.startswith("[")
    return f"[{value}]" if several else value
