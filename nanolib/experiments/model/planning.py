"""Plan the memory of a model, and find the batch sizes that fit in the available memory."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pandas as pd
from pydantic import BeforeValidator, ByteSize, Field, TypeAdapter, field_validator, model_validator

from nanolib.config import DTYPES, PRESETS
from nanolib.experiments.model.case import ModelCase
from nanolib.experiments.model.cases import check_hugging_face, preset_or_model
from nanolib.experiments.model.planner import MAX_BATCH, USES, Use, uses_of
from nanolib.experiments.model.tables import largest_parts
from nanolib.measurement import BadInput, MemoryKind, cause, shown
from nanolib.models.user import known_options
from nanolib.params import StrictModel
from nanolib.run import params as shared
from nanolib.run.timeout import answers_of

# These fields describe a config file, not a model.
_NO_FIELDS = {"architectures", "auto_map", "dtype", "model_type", "torch_dtype"}
_NO_FIELDS |= {"transformers_version", "_name_or_path"}
_LIMIT_S = 120.0  # Time limit to plan each use of a user's model, s.


def memory_bytes(amount: str | int) -> int:
    """Convert an amount of memory, such as `80GiB` or `24GB`, to a number of bytes.

    Raises:
        BadInput: The text is not an amount of memory.
    """
    try:
        size = TypeAdapter(ByteSize).validate_python(amount)
    except (ValueError, OverflowError):
        size = 0
    if size <= 0 or (isinstance(amount, str) and amount.strip().isdecimal()):
        raise BadInput(f"memory: {shown(amount)} is not valid; use an amount such as 80GiB or 24GB")
    return size


class Request(StrictModel):
    """Arguments of `plan`."""

    model: str
    memory: Annotated[int | str, BeforeValidator(memory_bytes)]
    seq_len: shared.Length = 1024
    batch_size: shared.Batch = 1
    dtype: Literal[DTYPES] | None = None
    precision: Literal["mixed", "pure"] | None = None
    kv_dtype: Literal["float32", "bfloat16", "float16", "float8_e4m3fn"] | None = None
    attention_type: shared.Kind = "dense"
    ranks: int = Field(1, gt=0)
    options: dict[str, Any] = Field(default_factory=dict)

    _model = field_validator("model")(preset_or_model)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for name in {"dtype", "attention_type"} & set(self.options):
            raise ValueError(
                f"options: {name} is not an option of the model; use --{name.replace('_', '-')}"
            )
        if self.batch_size % self.ranks:
            raise ValueError(f"ranks: must divide batch_size {self.batch_size}, got {self.ranks}")
        case = self.case
        if self.attention_type != "dense" and case.own:
            raise ValueError(
                f"attention_type: {self.model} has its own attention; leave attention_type out"
            )
        if case.own and not case.runs_code:
            check_hugging_face(self.model, self.options, "seq_len", self.seq_len)
        if reason := case.not_planned():
            raise ValueError(
                f"attention_type: {self.attention_type} has no plan ({reason}); use dense"
            )
        return self

    @property
    def is_mixed(self) -> bool:
        """Return whether training uses mixed precision."""
        return self.precision == "mixed" or (self.precision is None and self.dtype is None)

    @property
    def title(self) -> str:
        """Describe the dtypes, the shape and the memory of the request."""
        precision = self.case.dtype + (", training in mixed precision" if self.is_mixed else "")
        cache = f", cache in {self.kv_dtype}" if self.kv_dtype else ""
        shape = f"{self.batch_size} × {self.seq_len} tokens"
        ranks = f" over {self.ranks} ranks (FSDP, modelled)" if self.ranks > 1 else ""
        memory = f"{format_bytes(self.memory)}{' each' if ranks else ''}"
        return f"{precision}{cache}, {shape}{ranks}, memory {memory}"

    @property
    def case(self) -> ModelCase:
        """Return the case from which nanolib derives the case of each use of the model."""
        options, kind = self.options, self.attention_type
        if ":" in self.model:
            kind = "own"
        else:  # The context of a preset grows with the sequence, unless an option sets the context.
            context = PRESETS[self.model]["context_length"]
            options = {"context_length": max(context, self.seq_len)} | options
        shape = (self.seq_len, self.batch_size, self.dtype or "float32")
        return ModelCase("cpu", self.model, self.model, options, kind, *shape, "inference")


def format_bytes(size: int) -> str:
    """Format an amount of memory with its unit."""
    return ByteSize(size).human_readable(separator=" ")


@dataclass(frozen=True)
class MemoryPlan:
    """Memory plan of each use of a model, as tables and sentences.

    Attributes:
        title: Model, dtypes, shape and memory of the request.
        uses: Plan of each use of the model, in the order of `USES`.
        notes: Sentences about a config file.
    """

    title: str
    uses: tuple[Use, ...]
    notes: tuple[str, ...] = ()

    @property
    def planned(self) -> list[Use]:
        """Return the uses of the model that have a plan."""
        return [use for use in self.uses if not use.refused]

    @property
    def largest(self) -> Use:
        """Return the use of the model with the highest memory peak."""
        return max(self.planned, key=lambda use: use.breakdown.peak)

    @property
    def sentences(self) -> list[str]:
        """Return sentences about the uses of the model that fit, do not fit, or have no plan."""
        fitting = [use.name for use in self.planned if use.fits]
        lines = [f"These uses fit: {'; '.join(fitting)}" if fitting else "No use fits"]
        lines += [_remedy(use) for use in self.planned if not use.fits]
        refused = [use for use in self.uses if use.refused]
        lines += [f"{use.name} was not planned: {use.refused}" for use in refused]
        return [*lines, *self.notes]

    def table(self) -> pd.DataFrame:
        """Return a table of each use's peak memory, by `MemoryKind`, and whether the use fits."""
        lines = {}
        for use in self.planned:
            sizes = {"needs": use.breakdown.peak} | use.breakdown.by_kind
            lines[use.name] = {kind: format_bytes(size) for kind, size in sizes.items()}
            lines[use.name]["fits"] = "yes" if use.fits else "no"
        order = ["needs", *map(str, MemoryKind), "fits"]
        table = pd.DataFrame(lines).reindex(order).dropna(how="all").fillna("")
        return table.rename_axis("").reset_index()

    def batches(self) -> pd.DataFrame:
        """Return a table of the largest batch that fits, by context length and use of the model."""
        lengths = sorted({length for use in self.planned for length in use.batches})
        columns = {
            use.name: {length: _batch(use.batches.get(length)) for length in lengths}
            for use in self.planned
        }
        return pd.DataFrame(columns).rename_axis("context").reset_index()

    def parts(self, use: Use) -> pd.DataFrame:
        """Return a table of a peak's largest parts, with the code that allocated each part."""
        table = largest_parts([[*part, size] for part, size in use.breakdown.parts.items()])
        table["size"] = table["size"].map(format_bytes)
        return table.rename(columns={"by": "saved or allocated by"})

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON types, with sizes in bytes."""
        uses = []
        for use in self.uses:
            found = {"use": use.name, "refused": use.refused, "memory": use.memory}
            found["largest_batches"] = use.batches
            parts = use.breakdown.parts.items()
            found |= {"bytes": use.breakdown.peak, "fits": use.fits, "kinds": use.breakdown.by_kind}
            found["parts"] = [part._asdict() | {"bytes": size} for part, size in parts]
            uses.append(found)
        return {"title": self.title, "sentences": self.sentences, "uses": uses}

    def __str__(self) -> str:
        """Return the sentences and the tables as text."""
        lines = [
            self.title,
            *self.sentences,
            "",
            self.table().to_string(index=False),
            "",
            "The largest batch that fits, by context length (tokens)",
            self.batches().to_string(index=False),
            "",
            f"{self.largest.name}: the largest parts of the peak",
            self.parts(self.largest).to_string(index=False),
        ]
        return "\n".join(lines)


def plan(model: str, memory: str | int, **rest: Any) -> MemoryPlan:
    """Predict whether a model fits in memory, and what uses the memory.

    nanolib plans inference, decoding and training with AdamW, on tensors without data.

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
            `attention_type` (dense): Attention of a preset.
            `ranks` (1): Number of simulated FSDP ranks, which share weights, gradients and states.
            `options`: Fields of `NanoConfig`, or arguments of the model's function or configuration.

    Returns:
        Plan of each use of the model. A peak contains the bytes of all live tensors.

    Raises:
        BadInput: A value is not valid.

    Example:
        >>> found = plan("decoder_tiny", "1GiB", seq_len=128, batch_size=2, options={"num_layers": 2})
        >>> [use.name for use in found.uses if use.fits]
        ['inference', 'decoding', 'training', 'training, checkpointed']
    """
    name, notes = model, []
    if isinstance(model, str) and model.endswith(".json"):
        name, fields, dtype = _read_config(model)
        if dtype and rest.get("dtype") is None:
            rest["dtype"] = dtype
            notes.append(f"The file sets the dtype {dtype}; to plan another dtype, use --dtype")
        known = known_options(name)
        if unused := sorted(fields.keys() - known):
            notes.append(f"The model does not read these fields of the file: {', '.join(unused)}")
        read = {field: value for field, value in fields.items() if field in known}
        rest["options"] = read | rest.get("options", {})
    asked = Request(model=name, memory=memory, **rest)
    found, reason = [], ""
    if asked.case.runs_code:
        found, reason = answers_of(uses_of, asked, limit_s=_LIMIT_S)
    else:
        found += uses_of(asked)
    uses = [*found, *(Use(name, asked.memory, refused=reason) for name in [*USES][len(found) :])]
    if all(use.refused for use in uses):
        refused = uses[0].refused.removeprefix("model: ")
        raise BadInput(f"model: {shown(model)} cannot be planned, because {refused}")
    return MemoryPlan(f"{model} in {asked.title}", tuple(uses), tuple(notes))


def _read_config(path: str) -> tuple[str, dict[str, Any], str]:
    """Read a model's name, options and dtype from a config file of the package transformers."""
    try:
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
        known = {name: fields[name] for name in fields.keys() - _NO_FIELDS}
        dtype = fields.get("dtype") or fields.get("torch_dtype") or ""
        return f"hf:{fields['architectures'][0]}", known, dtype
    except (OSError, ValueError, AttributeError, LookupError, TypeError) as error:
        raise BadInput(
            f"model: {shown(path)} is not a config file of a Hugging Face model ({cause(error)}); "
            "use a config.json with the field architectures"
        ) from None


def _remedy(use: Use) -> str:
    """Describe the missing memory, the largest kind of memory, and a batch size that fits."""
    peak, by_kind = use.breakdown.peak, use.breakdown.by_kind
    kind = max(by_kind, key=lambda kind: by_kind[kind])
    ways = [f"batch size {most} at {length} tokens" for length, most in use.batches.items() if most]
    remedy = ways[-1] if ways else "a smaller model, or more ranks with a sequence each"
    return (
        f"{use.name} needs {format_bytes(peak)}, "
        f"{format_bytes(peak - use.memory)} more than available; "
        f"{kind} are {by_kind[kind] / peak:.0%} of the peak. Next: use {remedy}"
    )


def _batch(most: int | None) -> str:
    """Format the largest batch, with a plus if nanolib did not try larger batches."""
    if most is None:
        return "not planned"
    return f"{most}{'+' if most == MAX_BATCH else ''}" if most else "—"
