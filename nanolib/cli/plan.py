"""The command that checks whether a model fits in memory, and shows what uses it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from nanolib.cli.common import EXIT_FAILED, EXIT_OK, command, echo, echo_table, pairs_option
from nanolib.cli.compare import file_option


def _option(name: str, default: int | str | None, text: str, metavar: str | None = None) -> Any:
    return click.option(name, default=default, show_default=True, metavar=metavar, help=text)


@command(
    "nano plan gpt_6.7B --memory 80GiB --seq-len 8192 --dtype bfloat16",
    "nano plan hf:LlamaForCausalLM --memory 24GB -p num_hidden_layers=16",
)
@click.argument("model")
@click.option(
    "--memory", required=True, metavar="SIZE", help="Memory of one rank, such as 80GiB or 24GB."
)
@_option("--seq-len", 1024, "Sequence length, tokens.", "N")
@_option("--batch-size", 1, "Global batch size, in sequences.", "N")
@_option("--dtype", None, "Dtype of weights and activations (float32).")
@_option("--precision", None, "Training precision: mixed (the default without --dtype) or pure.")
@_option("--kv-dtype", None, "Dtype of cached keys and values, such as float8_e4m3fn.")
@_option("--optimizer", "adamw", "Optimizer: adamw, sgd or momentum.")
@_option("--attention-type", "dense", "Attention of a preset: dense, sparse, ...")
@_option("--ranks", 1, "Number of FSDP ranks. Memory per rank is modelled, not counted.", "N")
@pairs_option
@file_option("json", "Write the plan as JSON.")
def plan(
    model: str,
    memory: str,
    pairs: dict[str, str],
    json_file: Path | None,
    **rest: Any,
) -> None:
    """Check whether a model fits in memory, and show what uses it.

    MODEL is a preset, hf:LlamaForCausalLM, a config.json of transformers, or package.module:build.

    Peaks are of live tensors, to the byte. The process and its allocator need more.
    Mixed precision computes in bfloat16, with weights and optimizer states in float32.
    Exit code 1 if nothing fits.
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
        json_file.write_text(json.dumps(found.to_dict(), indent=1), encoding="utf-8")
    echo(found.title, *found.sentences, "")
    echo_table(found.table())
    echo("", "The largest batch that fits, by context length (tokens)")
    echo_table(found.batches())
    echo("", f"{found.largest.name}: the largest parts of the peak")
    echo_table(found.parts(found.largest))
    sys.exit(EXIT_OK if any(use.fits for use in found.uses) else EXIT_FAILED)
