"""Where the time of a model goes, block by block and module by module, and what its activations look like.

The forward of chosen modules is wrapped while a profiler is entered and put back when it is left, however that happens. Wrapping
looks on: the model's output is the same to the last bit.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import nn

from nanolib.measurement import BadInput

STATISTICS = ("mean_abs", "sd", "max_abs", "near_zero")


@dataclass(frozen=True)
class ProfilingConfig:
    """How closely a profiler looks.

    Attributes:
        modules: Whether every module is timed, or the blocks and what stands beside them alone.
        capture_activations: Whether the outputs of timed modules are summarised.
        every_nth_layer: Of the blocks, only each n-th is looked into.
        every_kth_token: Activations are summarised in each k-th call of the model only.
        near_zero: Activations smaller than this count as near zero.
        power_sample_interval_ms: How often power is read beside it.
    """

    modules: bool = False
    capture_activations: bool = False
    every_nth_layer: int = 1
    every_kth_token: int = 16
    near_zero: float = 1e-2
    power_sample_interval_ms: float = 20.0

    def __post_init__(self) -> None:
        for name in ("every_nth_layer", "every_kth_token"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise BadInput(f"{name}: {value!r} will not do; give a whole number above 0")
        if not self.power_sample_interval_ms > 0:
            raise BadInput(f"power_sample_interval_ms: {self.power_sample_interval_ms!r} will not do; give more than 0")

    @classmethod
    def minimal(cls) -> Self:
        """Blocks alone."""
        return cls()

    @classmethod
    def standard(cls) -> Self:
        """Every module, and activations now and then."""
        return cls(modules=True, capture_activations=True)

    @classmethod
    def custom(cls, **fields: Any) -> Self:
        """The standard one, changed.

        Raises:
            BadInput: An unknown field, or a value that will not do.
        """
        try:
            return replace(cls.standard(), **fields)
        except TypeError:
            unknown = sorted(set(fields) - set(cls.__dataclass_fields__))
            raise BadInput(f"{unknown[0]}: there is no such field; use {', '.join(cls.__dataclass_fields__)}") from None


@dataclass
class ModuleTime:
    """What one module took.

    Attributes:
        name: As `named_modules` has it; empty for the model itself.
        kind: `model`, `block`, or the class of the module.
        inside: The timed module that called it, by name; of several the first. Those inside the model itself add up to it.
        calls_ms: Each call, ms.
        statistics: Calls → `STATISTICS` of the output, shape [calls, 4]; empty where none were taken.
    """

    name: str
    kind: str
    inside: str | None = None
    calls_ms: list[float] = field(default_factory=list)
    statistics: torch.Tensor = field(default_factory=lambda: torch.empty(0, len(STATISTICS)))

    @property
    def total_ms(self) -> float:
        """Of all calls."""
        return sum(self.calls_ms)


class LayerProfiler:
    """Times a model's modules while it is entered.

    Args:
        model: Any module; repeated blocks are found as the members of its `ModuleList`s.
        config: How closely to look.
    """

    def __init__(self, model: nn.Module, config: ProfilingConfig | None = None) -> None:
        self.model, self.config = model, config or ProfilingConfig.minimal()
        self._chosen = list(_chosen(model, self.config))
        self._cuda = any(p.device.type == "cuda" for p in model.parameters())
        self._marks: list[tuple[int, int, Any, Any]] = []  # which, inside which, begin and end: nanoseconds, or events
        self._open = [-1]
        self._pool: list[Any] = []
        self._rows: list[tuple[int, torch.Tensor]] = []
        self._calls = 0
        self._wrapped: list[nn.Module] = []

    def __enter__(self) -> Self:
        try:
            for at, (_, _, module) in enumerate(self._chosen):
                if "forward" in vars(module):
                    raise BadInput(
                        f"model: {type(module).__name__}.forward is wrapped already; leave the other profiler first"
                    )
                module.forward = self._watched(at, module.forward, module is self.model)
                self._wrapped.append(module)
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()

    def _restore(self) -> None:
        for module in self._wrapped:
            del module.forward  # the class's own is seen again
        self._wrapped.clear()

    def _watched(self, at: int, forward: Callable[..., Any], is_model: bool) -> Callable[..., Any]:
        mark, marks, opened = (self._event if self._cuda else time.perf_counter_ns), self._marks, self._open
        statistics = self.config.capture_activations and not is_model

        @functools.wraps(forward)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if is_model:
                self._calls += 1
            opened.append(at)
            begin = mark()
            try:
                out = forward(*args, **kwargs)
            finally:
                end = mark()
                opened.pop()
            marks.append((at, opened[-1], begin, end))
            if statistics and (self._calls - 1) % self.config.every_kth_token == 0:
                self._summarise(at, out)
            return out

        return watched

    def _event(self) -> Any:
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @torch.no_grad()
    def _summarise(self, at: int, out: Any) -> None:
        """Four numbers of an output, left where they are: nothing waits for the device."""
        if not isinstance(out, torch.Tensor) or not out.is_floating_point():
            return
        x = out.detach().abs()
        near = (x < self.config.near_zero).to(x.dtype).mean()
        self._rows.append((at, torch.stack([x.mean(), out.detach().std(), x.amax(), near]).float()))

    def results(self) -> list[ModuleTime]:
        """What every module took so far, in the order of the model; waits for the device once."""
        if self._cuda:
            torch.cuda.synchronize()
        found = [ModuleTime(name, kind) for name, kind, _ in self._chosen]
        for at, outer, begin, end in self._marks:
            if found[at].inside is None and outer >= 0:
                found[at].inside = self._chosen[outer][0]
            found[at].calls_ms.append(begin.elapsed_time(end) if self._cuda else (end - begin) / 1e6)
        for at, row in self._rows:
            found[at].statistics = torch.cat([found[at].statistics, row.cpu()[None]])
        return found

    def reset(self) -> None:
        """Forget what was seen."""
        if self._cuda:
            self._pool += [event for _, _, begin, end in self._marks for event in (begin, end)]
        self._marks.clear()
        self._rows.clear()
        self._calls = 0


def _chosen(model: nn.Module, config: ProfilingConfig) -> Iterator[tuple[str, str, nn.Module]]:
    """The model, its blocks, and the leaves beside them; with `modules` every module within each n-th block too."""
    yield "", "model", model
    blocks = {
        f"{name}.{key}".lstrip("."): part
        for name, parts in model.named_modules()
        if isinstance(parts, nn.ModuleList)
        for key, part in parts.named_children()
    }
    looked_into = [name for at, name in enumerate(blocks) if at % config.every_nth_layer == 0]
    for name, module in model.named_modules():
        if not name or isinstance(module, nn.ModuleList):
            continue
        if name in blocks:
            yield name, "block", module
        elif any(name.startswith(block + ".") for block in blocks):
            if config.modules and any(name.startswith(block + ".") for block in looked_into):
                yield name, type(module).__name__, module
        elif not any(module.children()):
            yield name, type(module).__name__, module


def create_profiler(model: nn.Module, config: ProfilingConfig | None = None) -> LayerProfiler:
    """A profiler of a model; see `LayerProfiler`."""
    return LayerProfiler(model, config)
