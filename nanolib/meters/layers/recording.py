"""What a profiler recorded: calls, the time of modules over them, deep passes, and numbers of outputs."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from nanolib.meters.time.clock import synchronizer

STATISTICS = ("mean_abs", "sd", "max_abs", "near_zero")


@dataclass(frozen=True)
class DeepPass:
    """A block, or a module next to the blocks, in one call that torch's profiler recorded.

    Attributes:
        ms: Its time, with the cost of torch's profiler.
        operations: Operation -> its time, ms, all its calls together.
    """

    ms: float
    operations: dict[str, float]


@dataclass
class ModuleTime:
    """What was recorded of one module.

    Attributes:
        name: As `named_modules` has it; empty for the model itself.
        kind: `model`, `block`, or the class of the module.
        inside: Name of the timed module that called it first. Modules inside "" add up to the model.
        calls_ms: Time of each call, ms, without deep passes.
        statistics: `STATISTICS` of the output in each sampled call, shape [calls, 4].
        passes: Deep passes.
        deep: `attention_entropy` (nats), `attention_max_weight`, `attention_sparsity`,
            `mlp_kill_ratio`, `norm_variance_ratio` -> values, as many as were seen.
    """

    name: str
    kind: str
    inside: str | None = None
    calls_ms: list[float] = field(default_factory=list)
    statistics: torch.Tensor = field(default_factory=lambda: torch.empty(0, len(STATISTICS)))
    passes: list[DeepPass] = field(default_factory=list)
    deep: dict[str, list[float]] = field(default_factory=dict)


@dataclass
class Call:
    """One call of the model: its marks on the clock, and numbers that stay on the device until they are read."""

    number: int
    close: bool
    profile: Any = None
    marks: list[tuple[int, int, Any, Any]] = field(default_factory=list)  # module, caller, from, to
    times: list[tuple[int, int, int]] = field(default_factory=list)  # module, caller, ns
    outputs: dict[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    looked: list[tuple[int, str, Any]] = field(default_factory=list)  # layer, name, value
    statistics: dict[int, list[float]] = field(default_factory=dict)  # module -> `STATISTICS`
    operations: list[tuple[int, str, int]] | None = None  # layer, operation, ns


class Stopwatch:
    """Marks on a device's own time; the time between two marks leaves pauses out."""

    def __init__(self, device: torch.device) -> None:
        self._cuda, self._synchronize = device.type == "cuda", synchronizer(device)
        self._pauses: list[tuple[Any, Any]] = []

    def _now(self) -> Any:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        self._synchronize()
        return time.perf_counter_ns()

    def mark(self) -> tuple[Any, int]:
        """Note this moment."""
        return self._now(), len(self._pauses)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stand still."""
        begin = self._now()
        yield
        self._pauses.append((begin, self._now()))

    def settle(self) -> None:
        """Wait until marks can be read."""
        self._synchronize()

    def forget(self) -> None:
        """Drop the pauses: no mark so far is read again."""
        self._pauses.clear()

    def nanoseconds(self, begin: tuple[Any, int], end: tuple[Any, int]) -> int:
        """Give the time between two marks."""
        pauses = self._pauses[begin[1] : end[1]]
        return self._between(begin[0], end[0]) - sum(self._between(*pause) for pause in pauses)

    def _between(self, begin: Any, end: Any) -> int:
        return round(1e6 * begin.elapsed_time(end)) if self._cuda else end - begin


def pass_of(call: Call, at: int, ms: float) -> DeepPass:
    """Give the deep pass of one layer, which took `ms`."""
    operations: Counter[str] = Counter()
    for layer, operation, ns in call.operations or ():
        if layer == at:
            operations[operation] += ns / 1e6
    return DeepPass(ms, dict(operations))


def summarize_outputs(outputs: list[tuple[torch.Tensor, ...]], near_zero: float) -> torch.Tensor:
    """Summarize samples of all modules at once: one by one would take longer than the model.

    Args:
        outputs: Of each module, a sample of its output, and the least and largest element of all.
        near_zero: An element below this counts as near zero.

    Returns:
        `STATISTICS`, shape [modules, 4].
    """
    samples, low, high = zip(*outputs, strict=True)
    x = pad_sequence([*samples], batch_first=True)
    lengths = torch.tensor([len(sample) for sample in samples], device=x.device)[:, None]
    inside = torch.arange(x.shape[1], device=x.device) < lengths
    mean = x.sum(dim=1, keepdim=True) / lengths
    variance = ((x - mean) * inside).square().sum(dim=1, keepdim=True) / (lengths - 1)
    near = ((x.abs() < near_zero) & inside).sum(dim=1, keepdim=True) / lengths
    largest = torch.maximum(-torch.stack(low), torch.stack(high)).float()[:, None]
    size = x.abs().sum(dim=1, keepdim=True) / lengths
    return torch.cat([size, variance.sqrt(), largest, near], dim=1)
