"""Who holds the memory: the live bytes at the peak by kind, module and operation, on tensors with data or without."""

from __future__ import annotations

import contextlib
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from nanolib.measurement import MemoryKind
from nanolib.meters.memory import LiveBytes

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


class Part(NamedTuple):
    """What holds some of the memory.

    Attributes:
        kind: One of `Held`.
        module: Whose; blocks of a stack count as one, `blocks.*`.
        operation: By which it was made, such as `aten::addmm`; empty for what was there before.
        line: Module and line of the code that saved it for the backward pass.
    """

    kind: str
    module: str = ""
    operation: str = ""
    line: str = ""


@dataclass(frozen=True)
class MemoryBreakdown:
    """What is alive at a peak.

    Attributes:
        parts: What holds it → bytes; they add up to the peak.
    """

    parts: Mapping[Part, int]

    @property
    def peak(self) -> int:
        """Bytes alive at once."""
        return sum(self.parts.values())

    @property
    def by_kind(self) -> dict[str, int]:
        """Kind → bytes, in the order of `Held`, then others; what holds nothing is left out."""
        found = self._summed(lambda part: part.kind)
        return {kind: found[kind] for kind in dict.fromkeys((*MemoryKind, *found)) if found[kind]}

    @property
    def by_module(self) -> dict[tuple[str, str], int]:
        """Kind and module → bytes."""
        return dict(self._summed(lambda part: part[:2]))

    def _summed(self, by: Callable[[Part], Any]) -> Counter[Any]:
        found: Counter[Any] = Counter()
        for part, size in self.parts.items():
            found[by(part)] += size
        return found

    def largest(self, most: int) -> list[tuple[Part, int]]:
        """The parts that hold most, in order."""
        return sorted(self.parts.items(), key=lambda item: -item[1])[:most]

    def grown(self, higher: MemoryBreakdown, blocks: int) -> MemoryBreakdown:
        """What a stack holds that is so many blocks higher, if one block more holds what `higher` does."""
        parts = self.parts | higher.parts
        sizes = {part: (self.parts.get(part, 0), higher.parts.get(part, 0)) for part in parts}
        grown = {part: low + (high - low) * blocks for part, (low, high) in sizes.items()}
        return MemoryBreakdown({part: size for part, size in grown.items() if size})


@dataclass
class _Life:
    """A storage's: what it holds for whom, and after how many events it was born and died."""

    size: int
    module: str
    operation: str
    born: int
    died: float = math.inf
    kind: str = ""
    line: str = ""

    @property
    def part(self) -> Part:
        module = _NUMBER.sub("*", self.module)
        return Part(self.kind or MemoryKind.TEMPORARIES, module, self.operation, self.line)


class MemoryTracker(LiveBytes):
    """Counts as `LiveBytes` does, and remembers each storage's birth and death, its module, and what it turned out to be.

    What a storage is may be known after its birth alone: whether it is saved for the backward pass, or is a gradient. So all is
    written down, and told when the call is over.

    Args:
        model: Whose modules are named.

    Attributes:
        existing: Bytes that `hold` counted.
        section: In which part of the work we are, as `begin` named it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._lives: list[_Life] = []
        self._living: dict[int, _Life] = {}  # by their storage's key
        self._course: list[tuple[Any, int]] = []  # section and live bytes after each event
        self._operation = ""
        self._inside: list[str] = []
        self.existing = 0
        self.section: Any = None

    def begin(self, section: Any) -> None:
        """A section begins, or goes on, and the one before it ends."""
        self.section = section
        self._course.append((section, self.current))

    def hold(
        self,
        kind: str,
        tensors: Iterable[torch.Tensor],
        owners: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        """Count tensors that existed before, as of this kind; weights under their modules, and states under their weights'.

        Args:
            kind: One of `Held`.
            tensors: Those.
            owners: A tensor's `id` → the weight that it belongs to.
        """
        names = {
            id(p): name
            for name, p in (*self._model.named_parameters(), *self._model.named_buffers())
        }
        for tensor in tensors:
            owner = (owners or {}).get(id(tensor), tensor)
            self._inside = [names.get(id(owner), "").rpartition(".")[0]]
            self.watch(tensor)
            self._mark(tensor, kind)
        self._inside, self.existing = [], self.current

    def left(self, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        """Say of what kind tensors are that the call has left behind, such as a cache."""
        for tensor in tensors:
            self._mark(tensor, kind)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """See `LiveBytes`; what is born is remembered to be of this operation."""
        self._operation = func.name()
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._operation = ""

    def _count(self, key: int, size: int) -> None:
        super()._count(key, size)
        if size > 0:
            module = self._inside[-1] if self._inside else ""
            self._living[key] = _Life(size, module, self._operation, len(self._course))
            self._lives.append(self._living[key])
        else:
            self._living.pop(key).died = len(self._course)
        self._course.append((self.section, self.current))

    def _mark(self, tensor: torch.Tensor, kind: str, module: str | None = None) -> None:
        """Say what a storage is, and whose; what it was found to be first, it stays."""
        life = self._living.get(tensor.untyped_storage()._cdata)
        if life is None or life.kind:
            return
        life.kind = kind
        if kind == MemoryKind.SAVED:
            life.line = _line()
        if module is not None:
            life.module = module

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it the model's modules are followed, and what they save and the gradients that they get are marked."""

        def entered(name: str) -> Any:
            return lambda *_: self._inside.append(name)

        def left(*_: Any) -> None:
            self._inside.pop()

        def saved(tensor: torch.Tensor) -> torch.Tensor:
            self._mark(tensor, MemoryKind.SAVED)
            return (
                tensor.detach() if tensor.requires_grad else tensor
            )  # an output that holds itself would never die

        with contextlib.ExitStack() as hooks:
            for name, module in self._model.named_modules():
                hooks.callback(module.register_forward_pre_hook(entered(name)).remove)
                hooks.callback(module.register_forward_hook(left, always_call=True).remove)
            for name, weight in self._model.named_parameters():
                if weight.requires_grad:
                    of = name.rpartition(".")[0]
                    hook = weight.register_post_accumulate_grad_hook(
                        lambda p, of=of: self._mark(p.grad, MemoryKind.GRADIENTS, of)
                    )
                    hooks.callback(hook.remove)
            hooks.enter_context(
                torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor)
            )
            yield

    def breakdowns(self) -> dict[Any, MemoryBreakdown]:
        """Section → what was alive at its peak; the whole call's is the largest of them."""
        peaks: dict[Any, tuple[int, int]] = {}  # bytes, and after which event
        for event, (section, live) in enumerate(self._course):
            if section not in peaks or live > peaks[section][0]:
                peaks[section] = live, event
        found = {}
        for section, (_, event) in peaks.items():
            parts: Counter[Part] = Counter()
            for life in self._lives:
                if life.born <= event < life.died:
                    parts[life.part] += life.size
            found[section] = MemoryBreakdown(parts)
        return found


def _line() -> str:
    """Where the code of a model runs now: the innermost module and line that is neither torch's nor this one's."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name != __name__ and name.partition(".")[0] != "torch":
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
