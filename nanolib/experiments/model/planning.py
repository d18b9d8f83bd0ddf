"""Will it fit, and what holds the memory? Answered on tensors without data, for hardware that one does not have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from nanolib.experiments.model.cases import Params
from nanolib.experiments.model.model_cases import ModelCase
from nanolib.experiments.model.planner import MAX_BATCH, MAX_MASKED, USES, Planner, Use, room
from nanolib.experiments.model.steps import OPTIMIZERS
from nanolib.measurement import BadInput, Held, shown
from nanolib.models import text
from nanolib.run.params import MAX_SEQ_LEN

MIB, GIB = 2**20, 2**30
_UNITS = (
    {"B": 1}
    | {f"{p}iB": 1024**n for n, p in enumerate("KMGT", 1)}
    | {f"{p}B": 1000**n for n, p in enumerate("KMGT", 1)}
)
LETTERS = {kind: "w" if kind is Held.GATHERED else kind[0].upper() for kind in Held}  # of bars in a terminal
_ASKED = {  # of the lines about the notebook's parameters → how they are asked for here
    r"^model\.(?:presets|model)(?:\[0\])?:": "model:",
    r"^model\.(seq_len|batch_size|dtype|attention_type)s(?:\[0\])?:": r"\1:",
    r"^model\.overrides: [^:]+: config\.": "options: ",
    r"^model\.(?:overrides|model_options):": "options:",
    r"set (?:overrides|model_options): \{(\w+): (\d+)\}": r"give -p \1=\2",
}


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
        shared: Whether ranks could share the model out.
    """

    title: str
    uses: tuple[Use, ...]
    memory: int
    shared: bool = True

    @property
    def most_wanting(self) -> Use | None:
        """The use that needs the most; None where none could be planned."""
        return max((use for use in self.uses if not use.refused), key=lambda use: use.holding.peak, default=None)

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
                lines.append(f"{short}; {kind} hold {size / use.holding.peak:.0%} of it. {_remedy(use, self.shared)}")
        return [*lines, *(f"{use.name} is not known: {use.refused}" for use in self.uses if use.refused)]

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
                "largest batch": f"{use.largest_batch}{'+' if use.unbounded[0] else ''}",
                "longest": f"{use.longest}{'+' if use.unbounded[1] else ''}",
            }
            for use in self.uses
            if not use.refused
        )

    def kinds(self) -> pd.DataFrame:
        """What fills the peaks: a line per kind, a column per use."""
        name, unit = self._unit
        sizes = {use.name: use.holding.by_kind for use in self.uses if not use.refused}
        held = [kind for kind in Held if any(of.get(kind, 0) / unit >= 0.005 for of in sizes.values())]
        uses = {use: [f"{of[kind] / unit:.2f}" if kind in of else "" for kind in held] for use, of in sizes.items()}
        return pd.DataFrame({f"{name} of": [f"{LETTERS[kind]} {kind}" for kind in held], **uses})

    def bars(self, width: int) -> list[str]:
        """A bar per use in `width` columns, a letter per kind as in `kinds`; `|` stands where the memory ends."""
        uses = [use for use in self.uses if not use.refused]
        names = max((len(use.name) for use in uses), default=0)
        full = max(self.memory, *(use.holding.peak for use in uses))
        cells = max(width - names - 3, 1) / full
        lines = []
        for use in uses:
            bar, held = "", 0
            for kind in sorted(use.holding.by_kind, key=[*Held].index):
                held += use.holding.by_kind[kind]
                bar += LETTERS[kind] * (round(held * cells) - len(bar))
            at = round(self.memory * cells)
            lines.append(f"{use.name:{names}}  {bar[:at]:{at}}|{bar[at:]}")
        return lines

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
                "parts": [part._asdict() | {"bytes": size} for part, size in use.holding.parts.items()],
            }
            for use in self.uses
        ]
        return {"title": self.title, "memory": self.memory, "said": self.sentences, "uses": uses}

    def __str__(self) -> str:
        """The sentences, and who holds the memory."""
        tables = [table.to_string(index=False) for table in (self.table(), self.kinds())]
        return "\n".join([self.title, *self.sentences, "", *self.bars(100), "", *tables])


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
    for name, value, most in (("seq_len", seq_len, MAX_SEQ_LEN), ("batch_size", batch_size, MAX_BATCH)):
        if type(value) is not int or not 0 < value <= most:
            raise BadInput(f"{name}: {shown(value)} will not do; give a number from 1 to {most}")
    if optimizer not in [*OPTIMIZERS]:
        raise BadInput(f"optimizer: {shown(optimizer)} is unknown; use one of {', '.join(OPTIMIZERS)}")
    if attention_type != "dense" and seq_len > MAX_MASKED:
        raise BadInput(f"seq_len: {seq_len} is planned with dense attention alone; give {MAX_MASKED} or less")
    if type(ranks) is not int or ranks < 1 or batch_size % ranks:
        raise BadInput(f"ranks: {shown(ranks)} does not divide batch_size {batch_size}; give a divisor of it")
    source = checked(model, seq_len, batch_size, dtype, attention_type, dict(options or {}))
    planner = Planner(source, optimizer, ranks)
    if ranks > 1 and not planner.depth:
        raise BadInput(
            f"ranks: {model} is not known to be a stack of equal blocks, which FSDP would gather; leave it out"
        )
    uses = [planner.use(name, available) for name in USES]
    if all(use.refused for use in uses):
        raise BadInput(f"model: {shown(model)} cannot be planned: {uses[0].refused.removeprefix('model: ')}")
    of = f" over {ranks} ranks (FSDP, modelled)" if ranks > 1 else ""
    title = f"{model} in {dtype}, {batch_size} × {seq_len} tokens{of}, {optimizer}, into {_size(available)}{' each' if of else ''}"
    return MemoryPlan(title, tuple(uses), available, shared=planner.depth > 0)


def checked(
    model: str, seq_len: int, batch_size: int, dtype: str, attention_type: str, options: dict[str, Any]
) -> ModelCase:
    """The case that all others are made from, its parameters looked at as the notebook's are.

    Raises:
        BadInput: Something of this will not do; the line names it as `plan` calls it.
    """
    preset, vocabulary = ":" not in model, options.get("vocab_size")
    for name in ("dtype", "attention_type"):
        if name in options:
            raise BadInput(f"options: {name} is none of them; give --{name.replace('_', '-')}, or {name}= in Python")
    if not preset and attention_type != "dense":
        raise BadInput(f"attention_type: {shown(attention_type)} is of presets; leave it out, {model} has its own")
    small = type(vocabulary) is int and 0 < vocabulary < text.VOCAB_SIZE
    read = options | ({"vocab_size": text.VOCAB_SIZE} if small else {})  # no text is read here
    longer = room(model, options, seq_len) if preset and "context_length" not in options else {}
    named = {"presets": [model], "overrides": read | longer} if preset else {"model": model, "model_options": read}
    given = {"seq_lens": [seq_len], "batch_sizes": [batch_size], "dtypes": [dtype], "attention_types": [attention_type]}
    try:
        Params(**named, **given, loss_steps=0, new_tokens=0, device="cpu")
    except BadInput as error:
        line = error.lines[0]
        for pattern, asked in _ASKED.items():
            line = re.sub(pattern, asked, line)
        raise BadInput(line) from None
    kind = attention_type if preset else "own"
    case = ModelCase("cpu", model, model, options | longer, kind, seq_len, batch_size, dtype, "inference")
    if reason := case.not_planned():
        raise BadInput(f"attention_type: {shown(kind)} cannot be planned: {reason}; use dense, or sparse by position")
    return case


def _remedy(use: Use, shared: bool) -> str:
    ways = [
        f"batch {use.largest_batch}" if use.largest_batch else "",
        f"{use.longest} tokens" if use.longest else "",
    ]
    rest = "more ranks, each with a sequence, or a smaller model" if shared else "a smaller model"
    return "Next: " + (", or ".join(filter(None, ways)) or rest)


def _size(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"
