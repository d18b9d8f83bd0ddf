"""Will it fit, and what holds the memory? Answered on tensors without data, for hardware that one does not have."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from nanolib.config import NanoConfig
from nanolib.experiments.model.model_cases import ModelCase
from nanolib.experiments.model.own_model import check_hugging_face
from nanolib.experiments.model.planner import MAX_BATCH, MAX_MASKED, USES, Use, room, uses_of
from nanolib.experiments.model.steps import OPTIMIZERS
from nanolib.measurement import BadInput, Held, shown
from nanolib.meters.holders import Holding
from nanolib.models import attention, text
from nanolib.models.user import check_name, runs_code
from nanolib.run.helper import answers_of
from nanolib.run.params import MAX_SEQ_LEN, known_dtypes, known_kinds, known_presets

MIB, GIB = 2**20, 2**30
_UNITS = (
    {"B": 1}
    | {f"{p}iB": 1024**n for n, p in enumerate("KMGT", 1)}
    | {f"{p}B": 1000**n for n, p in enumerate("KMGT", 1)}
)
_LIMIT_S = 120.0  # what a use of a model that is code may take


def memory_bytes(text: str | int) -> int:
    """Bytes of `80GiB`, `24GB` or a number of bytes.

    Raises:
        BadInput: It is neither.
    """
    found = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)", str(text).strip())
    size = int(float(found[1]) * _UNITS.get(found[2] or "B", 0)) if found else 0
    if size <= 0:
        raise BadInput(f"memory: {shown(str(text))} is no amount; give one such as 80GiB or 24GB")
    return size


@dataclass(frozen=True)
class MemoryPlan:
    """Whether a model fits, and who holds the memory.

    Attributes:
        title: Model, shape and memory, for people.
        uses: One per use.
        memory: Bytes that there are, of one rank.
        shared: Whether ranks may be able to share the model out.
    """

    title: str
    uses: tuple[Use, ...]
    memory: int
    shared: bool = True

    @property
    def most_wanting(self) -> Use | None:
        """The use that needs the most; None where none could be planned."""
        return max(
            (use for use in self.uses if not use.refused),
            key=lambda use: use.holding.peak,
            default=None,
        )

    @property
    def sentences(self) -> list[str]:
        """What fits and what does not, and what would."""
        known = [use for use in self.uses if not use.refused]
        fitting = [use.name for use in known if use.fits]
        lines = [f"fits: {'; '.join(fitting)}" if fitting else "nothing fits as it is"]
        for use in known:
            if not use.fits:
                short = f"{use.name} needs {_size(use.holding.peak)}, {_size(use.holding.peak - self.memory)} more than there is"
                kind, size = max(use.holding.by_kind.items(), key=lambda item: item[1])
                lines.append(
                    f"{short}; {kind} hold {size / use.holding.peak:.0%} of it. {self._remedy(use)}"
                )
        return [
            *lines,
            *(f"{use.name} is not known: {use.refused}" for use in self.uses if use.refused),
        ]

    def _remedy(self, use: Use) -> str:
        ways = [f"batch {use.largest_batch}"] * bool(use.largest_batch) + [
            f"{use.longest} tokens"
        ] * bool(use.longest)
        rest = (
            "more ranks, each with a sequence, or a smaller model"
            if self.shared
            else "a smaller model"
        )
        return "Next: " + (", or ".join(ways) or rest)

    @property
    def _unit(self) -> tuple[str, int]:
        """What tables count in."""
        use = self.most_wanting
        return ("GiB", GIB) if use and use.holding.peak >= GIB else ("MiB", MIB)

    def table(self) -> pd.DataFrame:
        """One line per use: what it needs, whether that fits, and the most that fits."""
        name, unit = self._unit
        return pd.DataFrame(
            {
                "use": use.name,
                f"needs ({name})": f"{use.holding.peak / unit:.2f}",
                "fits": "yes" if use.fits else "no",
                "largest batch": _most(use.largest_batch, use.unbounded[0]),
                "longest": _most(use.longest, use.unbounded[1]),
            }
            for use in self.uses
            if not use.refused
        )

    def kinds(self) -> pd.DataFrame:
        """What fills the peaks: a line per kind, a column per use."""
        name, unit = self._unit
        sizes = {use.name: use.holding.by_kind for use in self.uses if not use.refused}
        held = [
            kind for kind in Held if any(of.get(kind, 0) / unit >= 0.005 for of in sizes.values())
        ]
        uses = {
            use: [f"{of[kind] / unit:.2f}" if kind in of else "" for kind in held]
            for use, of in sizes.items()
        }
        return pd.DataFrame({f"{name} of": [str(kind) for kind in held], **uses})

    def holders(self, use: Use, most: int = 6) -> pd.DataFrame:
        """Who holds a use's peak: the largest parts, with the line that saved them or the operation that made them."""
        name, unit = self._unit
        return pd.DataFrame(
            {
                "kind": part.kind,
                "module": part.module or "—",
                "saved or made by": part.line or part.operation or "—",
                name: f"{size / unit:.2f}",
                "share": f"{size / use.holding.peak:.0%}",
            }
            for part, size in use.holding.largest(most)
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON types; bytes."""
        uses = [
            {"use": use.name, "refused": use.refused}
            if use.refused
            else {
                "use": use.name,
                "bytes": use.holding.peak,
                "fits": use.fits,
                "largest_batch": use.largest_batch,
                "longest": use.longest,
                "kinds": use.holding.by_kind,
                "parts": [
                    part._asdict() | {"bytes": size} for part, size in use.holding.parts.items()
                ],
            }
            for use in self.uses
        ]
        return {"title": self.title, "memory": self.memory, "said": self.sentences, "uses": uses}

    def __str__(self) -> str:
        """The sentences, and who holds the memory."""
        tables = [table.to_string(index=False) for table in (self.table(), self.kinds())]
        return "\n".join([self.title, *self.sentences, "", *tables])


def plan(
    model: str,
    memory: str | int,
    *,
    seq_len: int = 1024,
    batch_size: int = 1,
    dtype: str = "float32",
    optimizer: str = "adamw",
    attention_type: str = "dense",
    ranks: int = 1,
    options: Mapping[str, Any] | None = None,
) -> MemoryPlan:
    """Plan whether a model fits into memory, and who holds it.

    For inference, decoding and training, on tensors without data.

    Args:
        model: A preset; `package.module:build`; or `hf:` and a class of transformers.
        memory: Such as `80GiB`; of one rank.
        seq_len: Tokens of a sequence.
        batch_size: Sequences, over all ranks.
        dtype: Of weights and activations.
        optimizer: `adamw`, `sgd` or `momentum`.
        attention_type: Of a preset.
        ranks: Over so many FSDP shares weights, gradients and optimizer states out; modelled.
        options: Fields of `NanoConfig` that differ from the preset, or what the model's function or configuration takes.

    Returns:
        What each use needs. A peak counts live tensors to the byte; what the process and its allocator need comes on top.

    Raises:
        BadInput: Something of this will not do.

    Example:
        >>> found = plan("decoder_tiny", "1GiB", seq_len=128, batch_size=2, options={"num_layers": 2})
        >>> [use.name for use in found.uses if use.fits]
        ['inference', 'decoding', 'training', 'training, checkpointed']
    """
    available = memory_bytes(memory)
    for name, value in {"model": model, "dtype": dtype, "attention_type": attention_type}.items():
        if not isinstance(value, str):
            raise BadInput(f"{name}: {shown(value)} will not do; give a name")
    for name, value, most in (
        ("seq_len", seq_len, MAX_SEQ_LEN),
        ("batch_size", batch_size, MAX_BATCH),
    ):
        if type(value) is not int or not 0 < value <= most:
            raise BadInput(f"{name}: {shown(value)} will not do; give a number from 1 to {most}")
    if optimizer not in [*OPTIMIZERS]:
        raise BadInput(
            f"optimizer: {shown(optimizer)} is unknown; use one of {', '.join(OPTIMIZERS)}"
        )
    if attention_type != "dense" and seq_len > MAX_MASKED:
        raise BadInput(
            f"seq_len: {seq_len} is planned with dense attention alone; give {MAX_MASKED} or less"
        )
    if type(ranks) is not int or ranks < 1 or batch_size % ranks:
        raise BadInput(
            f"ranks: {shown(ranks)} does not divide batch_size {batch_size}; give a divisor of it"
        )
    source = checked(model, seq_len, batch_size, dtype, attention_type, dict(options or {}))
    asked = (source, optimizer, ranks, available)
    answers, reason = (
        answers_of(uses_of, *asked, limit_s=_LIMIT_S) if source.runs_code else (uses_of(*asked), "")
    )
    found = {use.name: use for use in answers}
    uses = [found.get(name) or Use(name, Holding({}), available, refused=reason) for name in USES]
    if all(use.refused for use in uses):
        raise BadInput(
            f"model: {shown(model)} cannot be planned: {uses[0].refused.removeprefix('model: ')}"
        )
    of = f" over {ranks} ranks (FSDP, modelled)" if ranks > 1 else ""
    title = f"{model} in {dtype}, {batch_size} × {seq_len} tokens{of}, {optimizer}, into {_size(available)}{' each' if of else ''}"
    return MemoryPlan(title, tuple(uses), available, shared=not source.runs_code)


def checked(
    model: str,
    seq_len: int,
    batch_size: int,
    dtype: str,
    attention_type: str,
    options: dict[str, Any],
) -> ModelCase:
    """The case that all others are made from.

    Raises:
        BadInput: Something of this will not do; the line names it as `plan` calls it.
    """
    for name in ("dtype", "attention_type"):
        if name in options:
            raise BadInput(
                f"options: {name} is none of them; give --{name.replace('_', '-')}, or {name}= in Python"
            )
    _known("dtype", known_dtypes, dtype)
    _known("attention_type", known_kinds, attention_type)
    own = ":" in model
    if own:
        if attention_type != "dense":
            raise BadInput(
                f"attention_type: {shown(attention_type)} is of presets; leave it out, {model} has its own"
            )
        check_name(model)
        if not runs_code(model):
            _check_hugging_face(model, options, seq_len)
    else:
        _known("model", known_presets, model)
        if "context_length" not in options:
            options = options | room(model, options, seq_len)
        _check_preset(model, options | {"attention_type": attention_type}, seq_len)
    kind = "own" if own else attention_type
    case = ModelCase("cpu", model, model, options, kind, seq_len, batch_size, dtype, "inference")
    if reason := case.not_planned():
        raise BadInput(
            f"attention_type: {shown(kind)} cannot be planned: {reason}; use dense, or sparse by position"
        )
    return case


def _known(field: str, check: Callable[[list[str]], object], value: str) -> None:
    try:
        check([value])
    except ValueError as error:
        raise BadInput(f"{field}: {error}") from None


def _check_preset(model: str, options: dict[str, Any], seq_len: int) -> None:
    try:
        config = NanoConfig.from_preset(model, **options)
        attention.shared_options(config.attention_type, config.attention_options)
    except BadInput as error:
        raise BadInput(f"options: {error.lines[0].removeprefix('config.')}") from None
    if seq_len > config.context_length:
        raise BadInput(
            f"seq_len: {seq_len} exceeds the context_length {config.context_length}; "
            f"shorten it or give -p context_length={seq_len}"
        )


def _check_hugging_face(model: str, options: dict[str, Any], seq_len: int) -> None:
    vocabulary = options.get("vocab_size")
    if type(vocabulary) is int and vocabulary > 0:  # no text is read here
        options = options | {"vocab_size": max(vocabulary, text.VOCAB_SIZE)}
    try:
        check_hugging_face(model, options, seq_len, "seq_len")
    except BadInput as error:
        raise BadInput(error.lines[0].replace("model_options:", "options:")) from None


def _most(value: int | None, unbounded: bool) -> str:
    return "—" if value is None else f"{value}{'+' if unbounded else ''}"


def _size(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"
