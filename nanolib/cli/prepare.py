"""Prepare a run: copy the workbook, list names, and plan the memory of a model."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import click

from nanolib.cli.common import (
    EXIT_FAILED,
    EXIT_OK,
    command,
    echo,
    file_option,
    option,
    pairs_option,
    to_json,
)
from nanolib.measurement import BadInput, shown
from nanolib.paths import checkout, expanded, find_checkout, installed_workbook


@command("nano init benchmarks")
@click.argument("folder", metavar="DIR")
def init(folder: str) -> None:
    """Copy the notebooks, params files and docs to DIR.

    DIR must be empty or new. Start nano, papermill or JupyterLab in DIR. Results go to DIR/outputs.
    """
    target, source = expanded(folder), installed_workbook()
    is_empty = target.is_dir() and not any(target.iterdir())
    if target.exists() and not is_empty:
        raise BadInput(f"init: {shown(folder)} is not an empty folder; name a new folder")
    unwanted = shutil.ignore_patterns(".*", "*.py", "__pycache__")
    for name in ("notebooks", "params", "docs"):
        shutil.copytree(source / name, target / name, ignore=unwanted)
    echo(
        f"copied notebooks/, params/ and docs/ to {target}",
        f"next: cd {target} && nano run quick",
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
    from nanolib.run.jobs import SCENARIOS, params_files

    suites = params_files()
    scenarios = suites.pop(SCENARIOS, {})
    return {
        "Notebooks (nano run NOTEBOOK)": {
            name: _title(checkout() / "notebooks" / f"{name}.ipynb")
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


def _title(notebook: Path) -> str:
    """Return the title of a notebook, such as `When is sparse attention faster?`."""
    first = json.loads(notebook.read_text())["cells"][0]["source"]
    return "".join(first).splitlines()[0].lstrip("# ")


def _sizes(preset: str) -> str:
    from nanolib.config import NanoConfig

    config = NanoConfig.from_preset(preset)
    return f"{config.parameter_count / 1e6:,.0f}M parameters, context {config.context_length:,}"


class NotebookCommand(click.Command):
    """A command whose help shows the parameters of the first notebook on its command line."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Store the notebook's path, because `--help` exits before click reads the arguments."""
        ctx.obj = next((path for name in args if (path := _notebook(name))), None)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, and then the notebook's parameters cell, which declares all names."""
        super().format_options(ctx, formatter)
        if ctx.obj:
            cells = json.loads(ctx.obj.read_text())["cells"]
            cell = next(cell for cell in cells if "parameters" in cell["metadata"].get("tags", []))
            with formatter.section(f"Parameters of {ctx.obj.stem} (-p NAME=VALUE)"):
                formatter.write("".join(cell["source"]) + "\n")


def _notebook(name: str) -> Path | None:
    """Return the path of a notebook, or None if no notebook has that name."""
    root = find_checkout()
    notebooks = (root / "notebooks").glob("*.ipynb") if root else ()
    return next((path for path in notebooks if path.stem == name), None)


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
def plan(
    model: str, memory: str, pairs: dict[str, str], json_file: Path | None, **rest: Any
) -> None:
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
