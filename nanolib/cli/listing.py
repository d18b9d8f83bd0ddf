"""The names that a command line takes, and the parameters of a notebook."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import click

from nanolib.cli.common import command, echo
from nanolib.paths import checkout, find_checkout


@command("nano list", name="list")
def list_names() -> None:
    """List notebooks, suites, scenarios, attention kinds, patterns and presets."""
    for title, lines in _names().items():
        width = max(map(len, lines))
        echo(title, *(f"  {name:{width}}  {text}".rstrip() for name, text in lines.items()), "")


def _names() -> dict[str, dict[str, str]]:
    """Return title → name → description."""
    from nanolib.config import ATTENTION_KINDS, ATTENTION_PATTERNS, PRESETS
    from nanolib.run.jobs import SCENARIOS, notebooks, scenarios, suites

    root = checkout()
    params = root / "params"
    asked = {name: _title(root / "notebooks" / f"{name}.ipynb") for name in notebooks()}
    in_suites = {}
    for suite in suites():
        files = [name for name in notebooks() if (params / suite / f"{name}.yml").is_file()]
        in_suites[suite] = ", ".join(files)
    commented = {}
    for name in scenarios():
        text = (params / SCENARIOS / f"{name}.yml").read_text(encoding="utf-8")
        commented[name] = text.splitlines()[0].lstrip("# ")
    return {
        "Notebooks (nano run NOTEBOOK)": asked,
        "Suites (nano run SUITE)": in_suites,
        "Scenarios (nano run SCENARIO)": commented,
        "Attention (-p attention_types='[{kind: KIND}]')": ATTENTION_KINDS,
        "Patterns (-p attention_types='[{kind: sparse, pattern: PATTERN}]')": ATTENTION_PATTERNS,
        "Presets (-p presets='[PRESET]')": {name: _sizes(name) for name in PRESETS},
    }


def _title(notebook: Path) -> str:
    """Return the question in the notebook's title."""
    first = json.loads(notebook.read_text())["cells"][0]["source"]
    return "".join(first).splitlines()[0].lstrip("# ")


def _sizes(preset: str) -> str:
    from nanolib.config import NanoConfig

    config = NanoConfig.from_preset(preset)
    count = config.parameter_count
    parameters = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"
    return (
        f"{parameters:>5} parameters, {config.num_layers} layers, d_model {config.d_model}, "
        f"{config.num_heads} heads, context {config.context_length:,}"
    )


class NotebookCommand(click.Command):
    """A command whose help shows the parameters of the first notebook on its command line."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Remember the notebook: `--help` ends the command before its arguments are read."""
        ctx.obj = next((path for name in args if (path := _notebook(name))), None)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, then the parameters that the notebook's cell declares."""
        super().format_options(ctx, formatter)
        if not ctx.obj:
            return
        main, settings = _parameters(ctx.obj)
        title = f"Parameters of {ctx.obj.stem} (-p NAME=VALUE)"
        for heading, lines in {title: main, "Its settings (-p NAME=VALUE too)": settings}.items():
            if lines:
                with formatter.section(heading):
                    formatter.write_dl(lines, col_max=34)


def _parameters(notebook: Path) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """The parameters of a notebook's cell, and its settings: name and default, and the comment."""
    cells = json.loads(notebook.read_text())["cells"]
    source = next(cell for cell in cells if "parameters" in cell["metadata"].get("tags", []))
    text = "".join(source["source"])
    return (
        re.findall(r"^(?!settings)(\w+: .*?)  # (.*)$", text, re.MULTILINE),
        [
            (f"{name}: {type(ast.literal_eval(default)).__name__} = {default}", comment)
            for name, default, comment in re.findall(
                r'^    "(\w+)": (.*?),  # (.*)$', text, re.MULTILINE
            )
        ],
    )


def _notebook(name: str) -> Path | None:
    """Return the notebook of that name, if there is one."""
    root = find_checkout()
    path = root / "notebooks" / f"{name}.ipynb" if root else None
    return path if path and path.is_file() else None
