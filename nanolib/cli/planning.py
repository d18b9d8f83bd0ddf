"""The command that says whether a model fits into memory, and what uses it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from nanolib.cli.command import (
    EXIT_FAILED,
    EXIT_OK,
    NewFile,
    command,
    echo,
    echo_table,
    pairs_option,
)


@command(
    "nano plan gpt_6.7B --memory 80GiB --seq-len 8192 --dtype bfloat16",
    "nano plan hf:LlamaForCausalLM --memory 24GB -p num_hidden_layers=16",
)
@click.argument("model")
@click.option(
    "--memory", required=True, metavar="SIZE", help="Memory of one rank, such as 80GiB or 24GB."
)
@click.option(
    "--seq-len", default=1024, show_default=True, metavar="N", help="Sequence length, tokens."
)
@click.option(
    "--batch-size",
    default=1,
    show_default=True,
    metavar="N",
    help="Sequences per step, over all ranks.",
)
@click.option(
    "--dtype", default="float32", show_default=True, help="Dtype of weights and activations."
)
@click.option(
    "--optimizer", default="adamw", show_default=True, help="Optimizer: adamw, sgd or momentum."
)
@click.option(
    "--attention-type",
    default="dense",
    show_default=True,
    help="Attention of a preset: dense, sparse, ...",
)
@click.option(
    "--ranks",
    default=1,
    show_default=True,
    metavar="N",
    help="Ranks over which FSDP shards the model; modelled.",
)
@pairs_option
@click.option("--json", "json_file", type=NewFile(), metavar="FILE", help="Write the plan as JSON.")
def plan(
    model: str,
    memory: str,
    seq_len: int,
    batch_size: int,
    dtype: str,
    optimizer: str,
    attention_type: str,
    ranks: int,
    pairs: dict[str, str],
    json_file: Path | None,
) -> None:
    """Say whether a model fits into memory, and what uses it.

    Nothing is run: it is counted on tensors without data.

    MODEL: a preset, hf:LlamaForCausalLM, a config.json of transformers, or package.module:build.
    Peaks are of live tensors, to the byte; what the process and its allocator need comes on top.
    Exit code 1 where nothing fits.
    """
    from nanolib.experiments.model import planning
    from nanolib.params import read_value

    found = planning.plan(
        model,
        memory,
        seq_len=seq_len,
        batch_size=batch_size,
        dtype=dtype,
        optimizer=optimizer,
        attention_type=attention_type,
        ranks=ranks,
        options={name: read_value(name, value) for name, value in pairs.items()},
    )
    if json_file:
        json_file.write_text(json.dumps(found.to_dict(), indent=1), encoding="utf-8")
    echo(found.title, *found.sentences, "")
    echo_table(found.table())
    echo("", f"{found.largest.name}: the largest parts of the peak")
    echo_table(found.parts(found.largest))
    sys.exit(EXIT_OK if any(use.fits for use in found.uses) else EXIT_FAILED)
