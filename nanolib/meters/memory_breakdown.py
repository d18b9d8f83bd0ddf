"""Attribute the peak memory of a call to kinds of memory use, modules and operations.

The tensors may be real or fake.
"""

import contextlib
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import nn

from nanolib.measurement import MemoryKind
from nanolib.meters.memory import LiveBytes, storage_key

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


class Part(NamedTuple):
    """A group of tensors whose bytes nanolib adds up.

    Attributes:
        kind: Kind of memory use, a `MemoryKind`.
        module: Name of the module that made the tensors, with `*` for the number of a block.
        operation: Operation that made the tensors, such as `aten::addmm`, or an empty string if
            the tensors existed before the call.
        line: Python module and line of the code that saved the tensors for the backward pass.
    """

    kind: str
    module: str = ""
    operation: str = ""
    line: str = ""


@dataclass(frozen=True)
class MemoryBreakdown:
    """Memory use of a call at the moment of its peak.

    Attributes:
        parts: Bytes of each part, which add up to the peak.
    """

    parts: Mapping[Part, int]

    @property
    def peak(self) -> int:
        """Live bytes at the peak."""
        return sum(self.parts.values())

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes of each kind of memory use above 0, in the order of `MemoryKind`."""
        found = Counter()
        for part, size in self.parts.items():
            found[part.kind] += size
        return {kind: found[kind] for kind in MemoryKind if found[kind]}

    def extrapolate(self, higher: Self, blocks: int) -> Self:
        """Predict the memory use with more blocks, if each block adds the same number of bytes.

        Args:
            higher: Memory use of the same model with one more block.
            blocks: Number of blocks to add.
        """
        parts = {}
        for part in {**self.parts, **higher.parts}:
            low, high = self.parts.get(part, 0), higher.parts.get(part, 0)
            if size := low + (high - low) * blocks:
                parts[part] = size
        return MemoryBreakdown(parts)


@dataclass(slots=True)
class _Life:
    """Part and size in bytes of a storage, and the indices of the events that made and freed it."""

    part: Part
    size: int
    born: int
    died: float = math.inf


class MemoryTracker(LiveBytes):
    """Count bytes as `LiveBytes` does, and record each storage's lifetime, module and kind.

    A storage may become a gradient, or be saved for the backward pass, after torch made the
    storage. Therefore, `breakdowns` attributes the bytes when the call is over.

    Args:
        model: Model to whose modules nanolib attributes the bytes.

    Attributes:
        existing: Bytes that `track_existing` has counted.
        section: Name of the current section of the call, from `begin`.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self._model = model
        self._lives = []  # lifetimes of all storages, in the order in which torch made the storages
        self._living = {}  # key of a live storage → its lifetime
        self._events = []  # section of each event
        self._inside = [""]  # names of the running modules without numbers, outermost first
        self.existing = 0
        self.section = None

    def begin(self, section) -> None:
        """Begin or continue a section, and end the previous section."""
        self.section = section
        self._events.append(section)

    def track_existing(
        self,
        kind: str,
        tensors: Iterable[torch.Tensor],
        owners: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        """Count tensors that existed before the call. Each weight counts in its module.

        Args:
            kind: Kind of memory use of the tensors, a `MemoryKind`.
            tensors: Existing tensors of the kind.
            owners: `id` of a tensor of optimizer state → its weight. The state counts in the
                module of this weight.
        """
        named = (*self._model.named_parameters(), *self._model.named_buffers())
        names = {id(tensor): name for name, tensor in named}
        self._operation = None
        for tensor in tensors:
            owner = (owners or {}).get(id(tensor), tensor)
            self._inside = [_module_of(names.get(id(owner), ""))]
            self.watch(tensor)
            self._mark(tensor, kind)
        self._inside, self.existing = [""], self.current

    def mark_results(self, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        """Set the kind of memory use of new tensors that outlive the call, such as a cache."""
        for tensor in tensors:
            self._mark(tensor, kind)

    def _count(self, key: int, size: int):
        super()._count(key, size)
        if size > 0:
            operation = self._operation.name() if self._operation else ""
            part = Part(MemoryKind.TEMPORARIES, self._inside[-1], operation)
            self._living[key] = _Life(part, size, len(self._events))
            self._lives.append(self._living[key])
        else:
            self._living.pop(key).died = len(self._events)
        self._events.append(self.section)

    def _mark(self, tensor: torch.Tensor, kind: str, **changes: str):
        """Set the kind, and other fields of the part, of a storage that counts as a temporary."""
        life = self._living.get(storage_key(tensor))
        if life and life.part.kind == MemoryKind.TEMPORARIES:
            life.part = life.part._replace(kind=kind, **changes)

    @contextmanager
    def follow_modules(self) -> Iterator[None]:
        """Follow the model's modules within the context, and mark saved tensors and gradients."""

        def enter(name: str, *_):
            self._inside.append(name)

        def leave(*_):
            self._inside.pop()

        def accumulate(module: str, weight: torch.Tensor):
            self._mark(weight.grad, MemoryKind.GRADIENTS, module=module)

        def save(tensor: torch.Tensor) -> torch.Tensor:
            self._mark(tensor, MemoryKind.SAVED, line=_line())
            # An output that saves itself would refer to itself, and torch would never free it.
            return tensor if tensor.is_leaf else tensor.detach()

        with contextlib.ExitStack() as hooks:
            for name, module in self._model.named_modules():
                before = partial(enter, _without_numbers(name))
                hooks.enter_context(module.register_forward_pre_hook(before))
                hooks.enter_context(module.register_forward_hook(leave, always_call=True))
            for name, weight in self._model.named_parameters():
                if weight.requires_grad:
                    after = partial(accumulate, _module_of(name))
                    hooks.enter_context(weight.register_post_accumulate_grad_hook(after))
            hooks.enter_context(
                torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor)
            )
            yield

    @property
    def operations(self) -> set[str]:
        """Names of the operations that made a storage."""
        return {life.part.operation for life in self._lives}

    @property
    def sizes(self) -> list[int]:
        """Bytes of each storage, in the order in which torch made the storages."""
        return [life.size for life in self._lives]

    def breakdowns(self, sizes: Sequence[int] | None = None) -> dict[Any, MemoryBreakdown]:
        """Return the memory use at the peak of each section. The largest peak is the call's peak.

        Args:
            sizes: Bytes of each storage in a call of another shape. By default, `self.sizes`.
        """
        sizes = self.sizes if sizes is None else sizes
        changes = Counter()
        for life, size in zip(self._lives, sizes, strict=True):
            changes[life.born] += size
            changes[life.died] -= size
        peaks = {}  # section → live bytes and event of its peak
        live = 0
        for event, section in enumerate(self._events):
            live += changes[event]
            if section not in peaks or live > peaks[section][0]:
                peaks[section] = live, event
        found = {}
        for section, (_, event) in peaks.items():
            parts = Counter()
            for life, size in zip(self._lives, sizes, strict=True):
                if life.born <= event < life.died:
                    parts[life.part] += size
            found[section] = MemoryBreakdown(parts)
        return found


def _module_of(tensor: str) -> str:
    """Return the name of the module that contains a tensor, with `*` for each number."""
    return _without_numbers(tensor.rpartition(".")[0])


def _without_numbers(module: str) -> str:
    """Replace each number in the name of a module with `*`."""
    return _NUMBER.sub("*", module)


def _line() -> str:
    """Return the module and line number of the innermost caller outside torch and this module."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name != __name__ and name.partition(".")[0] != "torch":
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
