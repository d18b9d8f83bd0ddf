"""What a memory plan is of: a model at one shape, with its dtypes, its optimizer and the memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic

from nanolib.config import PRESETS
from nanolib.experiments.model.case import ModelCase
from nanolib.experiments.model.own_model import check_hugging_face, valid_model
from nanolib.experiments.model.steps import OPTIMIZERS
from nanolib.measurement import BadInput, shown
from nanolib.meters.memory import MIB
from nanolib.params import StrictModel
from nanolib.run import params as shared

GIB = 2**30
MAX_MASKED = 2**17  # tokens, if a mask is made: its tiles are real and grow with the square
_UNITS = {"B": 1}
for _power, _prefix in enumerate("KMGT", 1):
    _UNITS |= {f"{_prefix}iB": 1024**_power, f"{_prefix}B": 1000**_power}


def memory_bytes(amount: str | int) -> int:
    """Return the bytes of `80GiB`, `24GB` or a number of bytes.

    Raises:
        BadInput: The amount has another form.
    """
    found = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)", str(amount).strip())
    size = int(float(found[1]) * _UNITS.get(found[2] or "B", 0)) if found else 0
    if size <= 0:
        raise BadInput(
            f"memory: {shown(str(amount))} is not an amount; use one such as 80GiB or 24GB"
        )
    return size


class Request(StrictModel):
    """The arguments of `plan`."""

    model: str
    memory: Annotated[int, pydantic.BeforeValidator(memory_bytes)]
    seq_len: shared.Length = 1024
    batch_size: shared.Batch = 1
    dtype: str | None = None
    precision: Literal["mixed", "pure"] | None = None
    kv_dtype: Literal["float32", "bfloat16", "float16", "float8_e4m3fn"] | None = None
    optimizer: Literal[tuple(OPTIMIZERS)] = "adamw"  # type: ignore[valid-type]
    attention_type: str = "dense"
    ranks: int = pydantic.Field(1, gt=0)
    options: dict[str, Any] = pydantic.Field(default_factory=dict)

    _model = pydantic.field_validator("model")(
        lambda name: valid_model(name) if ":" in name else shared.known_presets([name])[0]
    )
    _dtype = pydantic.field_validator("dtype")(lambda name: name and shared.known_dtypes([name])[0])
    _kind = pydantic.field_validator("attention_type")(lambda kind: shared.known_kinds([kind])[0])

    @pydantic.model_validator(mode="after")
    def _fits_together(self) -> Request:
        for name in {"dtype", "attention_type"} & set(self.options):
            raise ValueError(f"options: {name} is not one of them; use --{name.replace('_', '-')}")
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
    def is_mixed(self) -> bool:
        """Whether training is in mixed precision."""
        return self.precision == "mixed" or (self.precision is None and self.dtype is None)

    @property
    def title(self) -> str:
        """Dtypes, shape and memory."""
        precision = self.case.dtype + (", training in mixed precision" if self.is_mixed else "")
        cache = f", keys and values in {self.kv_dtype}" if self.kv_dtype else ""
        shape = f"{self.batch_size} × {self.seq_len} tokens"
        ranks = f" over {self.ranks} ranks (FSDP, modelled)" if self.ranks > 1 else ""
        memory = f"{format_bytes(self.memory)}{' each' if ranks else ''}"
        return f"{precision}{cache}, {shape}{ranks}, {self.optimizer}, into {memory}"

    @property
    def case(self) -> ModelCase:
        """The case that all others are made from."""
        options, kind = self.options, self.attention_type
        if ":" in self.model:
            kind = "own"
        elif "context_length" not in options:
            options = options | lengthened(self.model, options, self.seq_len)
        shape = (self.seq_len, self.batch_size, self.dtype or "float32")
        return ModelCase("cpu", self.model, self.model, options, kind, *shape, "inference")


def lengthened(preset: str, options: Mapping[str, Any], seq_len: int) -> dict[str, int]:
    """Return the option that makes a preset's context as long as the sequence."""
    context = options.get("context_length") or PRESETS[preset].get("context_length", 0)
    return {"context_length": seq_len} if context < seq_len else {}


def format_bytes(size: int) -> str:
    """Return an amount of memory with its unit."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"
