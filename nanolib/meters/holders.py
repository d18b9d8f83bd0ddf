"""Who holds the memory: the live bytes at the peak by kind and by module, on tensors with data or without."""

from __future__ import annotations

import contextlib
import re
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nanolib.meters.memory import LiveBytes

WEIGHTS, GRADIENTS, STATES, SAVED, CACHE, INPUTS, TEMPORARIES = KINDS = (
    "weights",
    "gradients",
    "optimizer states",
    "saved activations",
    "cache",
    "inputs",
    "temporaries",
)
Part = tuple[str, str]  # kind, module: blocks of a stack count as one, `blocks.*`
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class Holding:
    """What is alive at a peak.

    Attributes:
        parts: Kind and module → bytes; they add up to the peak.
    """

    parts: Mapping[Part, int]

    @property
    def peak(self) -> int:
        """Bytes alive at once."""
        return sum(self.parts.values())

    @property
    def by_kind(self) -> dict[str, int]:
        """Kind → bytes, in the order of `KINDS`, then others; what holds nothing is left out."""
        found: Counter[str] = Counter()
        for (kind, _), size in self.parts.items():
            found[kind] += size
        return {kind: found[kind] for kind in dict.fromkeys((*KINDS, *found)) if found[kind]}

    def extrapolated(self, higher: Holding, steps: int) -> Holding:
        """The same with `steps` times what another one has more of each part: a stack with so many blocks more."""
        names = {**self.parts, **higher.parts}
        grown = {name: self.parts.get(name, 0) for name in names}
        for name in names:
            grown[name] += steps * (higher.parts.get(name, 0) - grown[name])
        return Holding({name: size for name, size in grown.items() if size})


class Holders(LiveBytes):
    """Counts as `LiveBytes` does, and remembers each storage's birth and death, its module, and what it turned out to be.

    What a storage is may be known after its birth alone: whether it is saved for the backward pass, or is a gradient. So all is
    written down, and told when the call is over.

    Args:
        model: Whose modules are named.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._kinds: dict[int, str] = {}
        self._modules: dict[int, str] = {}
        self._serials: dict[int, int] = {}  # of a storage's key, of the one that lives
        self._events: list[tuple[int, int, Any]] = []  # serial (0: a section begins), bytes, section
        self._inside: list[str] = []
        self._born_count = 0

    def begin(self, section: Any) -> None:
        """See `LiveBytes.begin`."""
        self._events.append((0, 0, section))
        super().begin(section)

    def hold(self, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that existed before, as of this kind; weights under their modules."""
        names = {id(p): name for name, p in (*self._model.named_parameters(), *self._model.named_buffers())}
        for tensor in tensors:
            self._inside = [names.get(id(tensor), "").rpartition(".")[0]]
            self.watch(tensor)
            self._mark(tensor, kind)
        self._inside = []

    def _born(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive or not size:
            return
        self._born_count += 1
        serial = self._serials[key] = self._born_count
        self._modules[serial] = self._inside[-1] if self._inside else ""
        self._events.append((serial, size, None))

        def died(_: Any) -> None:
            del self._alive[key], self._serials[key]
            self.current -= size
            self._events.append((serial, -size, None))

        self._alive[key] = weakref.ref(storage, died)
        self.current += size
        self._note()

    def _mark(self, tensor: torch.Tensor, kind: str) -> None:
        """Say what a storage is; what it was found to be first, it stays."""
        if (serial := self._serials.get(tensor.untyped_storage()._cdata)) is not None:
            self._kinds.setdefault(serial, kind)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it the model's modules are followed, and what they save and the gradients that they get are marked."""

        def entered(name: str) -> Any:
            return lambda *_: self._inside.append(name)

        def left(*_: Any) -> None:
            self._inside.pop()

        def saved(tensor: torch.Tensor) -> torch.Tensor:
            self._mark(tensor, SAVED)
            return tensor.detach() if tensor.requires_grad else tensor  # an output that holds itself would never die

        with contextlib.ExitStack() as hooks:
            for name, module in self._model.named_modules():
                hooks.callback(module.register_forward_pre_hook(entered(name)).remove)
                hooks.callback(module.register_forward_hook(left, always_call=True).remove)
            for weight in self._model.parameters():
                if weight.requires_grad:
                    hook = weight.register_post_accumulate_grad_hook(lambda p: self._mark(p.grad, GRADIENTS))
                    hooks.callback(hook.remove)
            hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor))
            yield

    def holdings(self) -> dict[Any, Holding]:
        """Section → what was alive at its peak; the whole call's is the largest of them."""
        found: dict[Any, Holding] = {}
        at = self._peaks()
        alive: Counter[Part] = Counter()
        for index, (serial, size, _) in enumerate(self._events):
            if serial:
                alive[self._part(serial)] += size
            for section in at.get(index, ()):
                found[section] = Holding({part: held for part, held in alive.items() if held})
        return found

    def _peaks(self) -> dict[int, list[Any]]:
        """After which event each section had its peak."""
        current, section, most = 0, None, {}
        for index, (serial, size, begun) in enumerate(self._events):
            current += size
            if not serial:
                section = begun
            if (not serial or size > 0) and current > most.get(section, (-1, 0))[0]:
                most[section] = current, index
        places: dict[int, list[Any]] = {}
        for section, (_, index) in most.items():
            places.setdefault(index, []).append(section)
        return places

    def _part(self, serial: int) -> Part:
        return self._kinds.get(serial, TEMPORARIES), _NUMBER.sub("*", self._modules[serial])
