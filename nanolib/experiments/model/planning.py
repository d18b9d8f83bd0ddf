"""Describe in tables and sentences how much memory each use of a model needs."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from nanolib.config import DTYPES
from nanolib.experiments.model.planner import MAX_BATCH, Request, Use, format_bytes, uses_of
from nanolib.experiments.model.tables import largest_parts
from nanolib.measurement import BadInput, MemoryKind, cause, quote
from nanolib.models.user import list_options

_FUSED = "The reason is dropout or the head size of the values; a GPU may need less memory"
_AMOUNT = r"\s*\d*\.?\d+\s*[a-zA-Z]+\s*"  # Amount of memory with its unit.
# These fields describe a config file, not a model.
_NO_FIELDS = {
    "_name_or_path",
    "architectures",
    "auto_map",
    "dtype",
    "model_type",
    "torch_dtype",
    "transformers_version",
}


@dataclass(frozen=True)
class MemoryPlan:
    """Memory plan of each use of a model. Its text has the sentences and the tables.

    Attributes:
        title: Model, dtypes, shape and memory of the request.
        uses: Plan of each use of the model, in the order of `USES`.
        notes: Sentences about a config file.
    """

    title: str
    uses: tuple[Use, ...]
    notes: tuple[str, ...] = ()

    @property
    def sentences(self) -> list[str]:
        """Return sentences about the uses of the model that fit, do not fit, or have no plan."""
        fitting = [use.name for use in self.uses if use.fits]
        lines = [f"These uses fit: {'; '.join(fitting)}" if fitting else "No use fits"]
        for use in self.uses:
            if use.refused:
                lines.append(f"{use.name} was not planned: {use.refused}")
            elif not use.fits:
                lines.append(use.remedy)
            if use.small_cache:
                size = format_bytes(use.small_cache)
                lines.append(f"After the first token, the cache of {use.name} shrinks to {size}")
        if split := [use.name for use in self.uses if use.splits_attention]:
            lines.append(f"Attention computes all scores in {'; '.join(split)}. {_FUSED}")
        return [*lines, *self.notes]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON types, with sizes in bytes."""
        uses = [
            {
                "use": use.name,
                "refused": use.refused,
                "memory": use.memory,
                "largest_batches": use.batches,
                "fits": use.fits,
                "bytes": use.breakdown.peak,
                "kinds": use.breakdown.bytes_by_kind,
                "parts": [
                    part._asdict() | {"bytes": size} for part, size in use.breakdown.parts.items()
                ],
            }
            for use in self.uses
        ]
        return {"title": self.title, "sentences": self.sentences, "uses": uses}

    def __str__(self) -> str:
        """Return the sentences, and the tables of memory, batch sizes and the largest parts."""
        uses = [use for use in self.uses if not use.refused]
        largest = max(uses, key=lambda use: use.breakdown.peak)
        parts = largest_parts([[*part, size] for part, size in largest.breakdown.parts.items()])
        parts = parts.assign(size=parts["size"].map(format_bytes))
        lines = [
            self.title,
            *self.sentences,
            "",
            _kinds(uses).to_string(index=False),
            "",
            "The largest batch that fits, by context length (tokens)",
            _batches(uses).to_string(index=False),
            "",
            f"{largest.name}: the largest parts of the peak",
            parts.rename(columns={"by": "saved or allocated by"}).to_string(index=False),
        ]
        return "\n".join(lines)


def _kinds(uses: Sequence[Use]) -> pd.DataFrame:
    """Return a table of each use's peak memory, by `MemoryKind`, and whether the use fits."""
    sizes = {use.name: {"needs": use.breakdown.peak} | use.breakdown.bytes_by_kind for use in uses}
    table = pd.DataFrame(sizes).reindex(["needs", *MemoryKind]).dropna(how="all")
    table = table.map(format_bytes, na_action="ignore").fillna("")
    table.loc["fits"] = ["yes" if use.fits else "no" for use in uses]
    return table.rename_axis("").reset_index()


def _batches(uses: Sequence[Use]) -> pd.DataFrame:
    """Return a table of the largest batch that fits, by context length and use of the model."""
    table = pd.DataFrame({use.name: use.batches for use in uses}).sort_index().map(_batch)
    return table.rename_axis("context").reset_index()


def _batch(most: float) -> str:
    """Format the largest batch, with a plus if nanolib did not try larger batches."""
    if pd.isna(most):
        return "not planned"
    return f"{most:.0f}{'+' if most == MAX_BATCH else ''}" if most else "—"


def plan(model: str, memory: str | int, **rest) -> MemoryPlan:
    """Predict whether a model fits in memory, and what uses the memory.

    nanolib plans inference, decoding and training with AdamW, on tensors without data. A user's
    code runs in this process, and must not keep the tensors of the plan.

    Args:
        model: Model to plan: a preset, `package.module:build`, `hf:` and a class in the package
            transformers, or the path of a `config.json` of that package.
        memory: Available memory of one rank, such as `80GiB`.
        **rest: Options of `nano plan`, with their defaults.
            `seq_len` (1024): Tokens per sequence.
            `batch_size` (1): Number of sequences over all ranks.
            `dtype`: Dtype of weights and activations, by default the dtype in a `config.json`, or
                float32.
            `precision`: Precision of training, `mixed` or `pure`. The default without a dtype
                is `mixed`: bfloat16 by autocast, with weights and optimizer states in float32.
            `kv_dtype`: Dtype of the cache, by default the dtype of the model.
            `ranks` (1): Number of FSDP ranks, which share weights, gradients and optimizer states.
            `options`: Fields of `NanoConfig`, or arguments of the model's function or
                configuration.

    Returns:
        Plan of each use of the model. A peak contains the bytes of all live tensors.

    Raises:
        BadInput: A value is not valid.

    Example:
        >>> options = {"num_layers": 2}
        >>> found = plan("decoder_tiny", "1GiB", seq_len=128, batch_size=2, options=options)
        >>> [use.name for use in found.uses if use.fits]
        ['inference', 'decoding', 'training', 'training, checkpointed']
    """
    # Without this check, "80,5GB" would mean 80 bytes.
    if isinstance(memory, str) and not re.fullmatch(_AMOUNT, memory):
        raise BadInput(f"memory: {quote(memory)} is not an amount with a unit, such as 80GiB")
    name, notes = model, []
    if str(model).endswith(".json"):
        name, fields, dtype = _read_config(model)
        if dtype and rest.get("dtype") is None:
            if dtype not in DTYPES:
                raise BadInput(f"dtype: the file sets {quote(dtype)}; use --dtype {DTYPES[0]}")
            rest["dtype"] = dtype
            notes.append(f"The file sets the dtype {dtype}; to plan another dtype, use --dtype")
        known = list_options(name)
        if unused := sorted(fields.keys() - known):
            notes.append(f"The model does not read these fields of the file: {', '.join(unused)}")
        read = {field: value for field, value in fields.items() if field in known}
        rest["options"] = read | rest.get("options", {})
    request = Request(model=name, memory=memory, **rest)
    uses = uses_of(request)
    if all(use.refused for use in uses):
        refused = uses[0].refused.removeprefix("BadInput: model: ")
        raise BadInput(f"model: {quote(model)} cannot be planned, because {refused}")
    return MemoryPlan(f"{model} in {request.title}", tuple(uses), tuple(notes))


def _read_config(path: str) -> tuple[str, dict[str, Any], str]:
    """Read a model's name, options and dtype from a config file of the package transformers."""
    try:
        fields = json.loads(Path(path).read_text(encoding="utf-8-sig"))
        known = {name: fields[name] for name in fields.keys() - _NO_FIELDS}
        dtype = fields.get("dtype") or fields.get("torch_dtype") or ""
        return f"hf:{fields['architectures'][0]}", known, dtype
    except (OSError, ValueError, AttributeError, LookupError, TypeError) as error:
        raise BadInput(
            f"model: {quote(path)} is not a config file of a Hugging Face model ({cause(error)}); "
            "use a config.json with the field architectures"
        ) from None
