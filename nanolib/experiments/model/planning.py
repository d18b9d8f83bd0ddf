"""Does a model fit into memory, what uses it, and what would fit? Counted on tensors without data, for any hardware."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
import pydantic

from nanolib.experiments.model.case import ModelCase
from nanolib.experiments.model.own_model import check_hugging_face, valid_model
from nanolib.experiments.model.planner import MAX_BATCH, MAX_MASKED, USES, Use, lengthened, uses_of
from nanolib.experiments.model.steps import OPTIMIZERS
from nanolib.measurement import BadInput, MemoryKind, shown
from nanolib.models.functions import cause
from nanolib.params import StrictModel
from nanolib.run import params as shared
from nanolib.run.worker import answers_of

MIB, GIB = 2**20, 2**30
_UNITS = {"B": 1}
for _power, _prefix in enumerate("KMGT", 1):
    _UNITS |= {f"{_prefix}iB": 1024**_power, f"{_prefix}B": 1000**_power}
_NO_FIELDS = {"architectures", "auto_map", "dtype", "model_type", "torch_dtype"}
_NO_FIELDS |= {"transformers_version", "_name_or_path"}  # of a config file: they build nothing
_LIMIT_S = 120.0  # of one use of a model that is code of the user's


def memory_bytes(amount: str | int) -> int:
    """Bytes of `80GiB`, `24GB` or a number of bytes.

    Raises:
        BadInput: It is neither.
    """
    found = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)", str(amount).strip())
    size = int(float(found[1]) * _UNITS.get(found[2] or "B", 0)) if found else 0
    if size <= 0:
        raise BadInput(f"memory: {shown(str(amount))} is no amount; give one such as 80GiB or 24GB")
    return size


class Request(StrictModel):
    """What `plan` is asked; its arguments."""

    model: str
    memory: Annotated[int, pydantic.BeforeValidator(memory_bytes)]
    seq_len: shared.Length = 1024
    batch_size: shared.Batch = 1
    dtype: str = "float32"
    optimizer: Literal[tuple(OPTIMIZERS)] = "adamw"  # type: ignore[valid-type]
    attention_type: str = "dense"
    ranks: int = pydantic.Field(1, gt=0)
    options: dict[str, Any] = pydantic.Field(default_factory=dict)

    _model = pydantic.field_validator("model")(
        lambda name: valid_model(name) if ":" in name else shared.known_presets([name])[0]
    )
    _dtype = pydantic.field_validator("dtype")(lambda name: shared.known_dtypes([name])[0])
    _kind = pydantic.field_validator("attention_type")(lambda kind: shared.known_kinds([kind])[0])

    @pydantic.model_validator(mode="after")
    def _fits_together(self) -> Request:
        for name in {"dtype", "attention_type"} & set(self.options):
            raise ValueError(f"options: {name} is none of them; give --{name.replace('_', '-')}")
        if self.batch_size % self.ranks:
            raise ValueError(f"ranks: {self.ranks} does not divide batch_size {self.batch_size}")
        case = self.case
        if self.attention_type != "dense":
            if case.own:
                raise ValueError(f"attention_type: {self.model} has its own; leave it out")
            if self.seq_len > MAX_MASKED:
                raise ValueError(f"seq_len: {self.seq_len} is planned with dense attention only")
        if case.own and not case.runs_code:
            check_hugging_face(self.model, self.options, self.seq_len, "seq_len")
        if not case.own and self.seq_len > (most := case.config.context_length):
            raise ValueError(f"seq_len: {self.seq_len} exceeds the context_length {most}; raise it")
        if reason := case.not_planned():
            raise ValueError(f"attention_type: {self.attention_type} cannot be planned: {reason}")
        return self

    @property
    def case(self) -> ModelCase:
        """The case that all others are made from."""
        options, kind = self.options, self.attention_type
        if ":" in self.model:
            kind = "own"
        elif "context_length" not in options:
            options = options | lengthened(self.model, options, self.seq_len)
        shape = (self.seq_len, self.batch_size, self.dtype)
        return ModelCase("cpu", self.model, self.model, options, kind, *shape, "inference")


@dataclass(frozen=True)
class MemoryPlan:
    """Whether a model fits, and what uses the memory.

    Attributes:
        title: Model, shape and memory, for people.
        uses: One per use.
    """

    title: str
    uses: tuple[Use, ...]

    @property
    def planned(self) -> list[Use]:
        """The uses that could be planned."""
        return [use for use in self.uses if not use.refused]

    @property
    def largest(self) -> Use:
        """The use that needs the most."""
        return max(self.planned, key=lambda use: use.breakdown.peak)

    @property
    def sentences(self) -> list[str]:
        """What fits and what does not, and what would."""
        fitting = [use.name for use in self.planned if use.fits]
        lines = [f"fits: {'; '.join(fitting)}" if fitting else "nothing fits as it is"]
        lines += [_remedy(use) for use in self.planned if not use.fits]
        refused = [use for use in self.uses if use.refused]
        return lines + [f"{use.name} is not known: {use.refused}" for use in refused]

    @property
    def _unit(self) -> tuple[str, int]:
        return ("GiB", GIB) if self.largest.breakdown.peak >= GIB else ("MiB", MIB)

    def table(self) -> pd.DataFrame:
        """A column per use: what it needs, of which kinds, whether that fits, and the most that fits."""
        name, unit = self._unit
        lines = {}
        for use in self.planned:
            sizes = {f"needs ({name})": use.breakdown.peak} | use.breakdown.by_kind
            lines[use.name] = {kind: f"{size / unit:.2f}" for kind, size in sizes.items()} | {
                "fits": "yes" if use.fits else "no",
                "largest batch": _most(use.largest_batch, MAX_BATCH),
                "longest": _most(use.longest, MAX_MASKED, shared.MAX_SEQ_LEN),
            }
        order = [f"needs ({name})", *map(str, MemoryKind), "fits", "largest batch", "longest"]
        table = pd.DataFrame(lines).reindex(order).dropna(how="all").fillna("")
        return table.rename_axis("").reset_index()

    def parts(self, use: Use, most: int = 6) -> pd.DataFrame:
        """The largest parts of a use's peak, with the line that saved them or the operation that made them."""
        name, unit = self._unit
        return pd.DataFrame(
            {
                "kind": part.kind,
                "module": part.module or "—",
                "saved or made by": part.line or part.operation or "—",
                name: f"{size / unit:.2f}",
                "share": f"{size / use.breakdown.peak:.0%}",
            }
            for part, size in use.breakdown.largest(most)
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON types; bytes."""
        uses = []
        for use in self.uses:
            found = {"use": use.name, "refused": use.refused, "memory": use.memory}
            found |= {"largest_batch": use.largest_batch, "longest": use.longest}
            parts = use.breakdown.parts.items()
            found |= {"bytes": use.breakdown.peak, "fits": use.fits, "kinds": use.breakdown.by_kind}
            found["parts"] = [part._asdict() | {"bytes": size} for part, size in parts]
            uses.append(found)
        return {"title": self.title, "sentences": self.sentences, "uses": uses}

    def __str__(self) -> str:
        """The sentences and the table."""
        return "\n".join([self.title, *self.sentences, "", self.table().to_string(index=False)])


def plan(model: str, memory: str | int, **rest: Any) -> MemoryPlan:
    """Plan whether a model fits into memory, and what uses it.

    For inference, decoding and training, on tensors without data.

    Args:
        model: A preset; `package.module:build`; `hf:` and a class of transformers; or the path of a
            `config.json` of transformers.
        memory: Such as `80GiB`; of one rank.
        **rest: `seq_len` (1024 tokens); `batch_size` (1), over all ranks; `dtype` (float32) of weights and activations;
            `optimizer` (adamw, sgd or momentum); `attention_type` (dense) of a preset; `ranks` (1), over which FSDP shares
            weights, gradients and states, modelled; `options`: fields of `NanoConfig` that differ from the preset, or what
            the model's function or configuration takes.

    Returns:
        What each use needs. A peak counts live tensors to the byte; the process and its allocator need some more.

    Raises:
        BadInput: A value is not valid.

    Example:
        >>> found = plan("decoder_tiny", "1GiB", seq_len=128, batch_size=2, options={"num_layers": 2})
        >>> [use.name for use in found.uses if use.fits]
        ['inference', 'decoding', 'training', 'training, checkpointed']
    """
    name = model
    if isinstance(model, str) and model.endswith(".json"):
        name, fields = _read_config(model)
        rest["options"] = fields | rest.get("options", {})
    asked = Request(model=name, memory=memory, **rest)
    source, reason = asked.case, ""
    arguments = (source, asked.optimizer, asked.ranks, asked.memory)
    if source.runs_code:
        found, reason = answers_of(uses_of, *arguments, limit_s=_LIMIT_S)
    else:
        found = list(uses_of(*arguments))
    uses = [*found, *(Use(name, asked.memory, refused=reason) for name in [*USES][len(found) :])]
    if all(use.refused for use in uses):
        refused = uses[0].refused.removeprefix("model: ")
        raise BadInput(f"model: {shown(model)} cannot be planned: {refused}")
    ranks = f" over {asked.ranks} ranks (FSDP, modelled)" if asked.ranks > 1 else ""
    shape = f"{model} in {asked.dtype}, {asked.batch_size} × {asked.seq_len} tokens{ranks}"
    each = " each" if ranks else ""
    return MemoryPlan(f"{shape}, {asked.optimizer}, into {_size(asked.memory)}{each}", tuple(uses))


def _read_config(path: str) -> tuple[str, dict[str, Any]]:
    """Read the name of a model, and its options, from a config file of transformers."""
    try:
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
        known = {name: fields[name] for name in fields.keys() - _NO_FIELDS}
        return f"hf:{fields['architectures'][0]}", known
    except (OSError, ValueError, AttributeError, LookupError, TypeError) as error:
        raise BadInput(
            f"model: {shown(path)} is no config file of transformers ({cause(error)}); "
            "give a config.json that names its architectures"
        ) from None


def _remedy(use: Use) -> str:
    """What a use that does not fit lacks, what uses the most of it, and what would fit."""
    peak, by_kind = use.breakdown.peak, use.breakdown.by_kind
    kind = max(by_kind, key=lambda kind: by_kind[kind])
    ways = [f"batch {use.largest_batch}"] if use.largest_batch else []
    ways += [f"{use.longest} tokens"] if use.longest else []
    remedy = ", or ".join(ways) or "a smaller model, or more ranks, each with a sequence"
    return (
        f"{use.name} needs {_size(peak)}, {_size(peak - use.memory)} more than there is; "
        f"{kind} are {by_kind[kind] / peak:.0%} of it. Next: {remedy}"
    )


def _most(value: int, *limits: int) -> str:
    """A largest number, with a sign if no larger one was tried."""
    return f"{value}{'+' if value in limits else ''}" if value else "—"


def _size(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"
