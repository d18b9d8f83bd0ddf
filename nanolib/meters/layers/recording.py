"""What a profiler records: the calls of a model, the time of its modules, numbers of their outputs."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from nanolib.meters.time.clock import synchronizer

STATISTICS = ("mean_abs", "sd", "max_abs", "near_zero")
_SAMPLE = 2048  # elements of an output

# A sample of an output, and the least and largest element of all; they stay on the device.
OutputSample = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


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
        passes: Deep passes.
        values: Name -> a value per sampled call: `STATISTICS` of the output. Of a block also
            `attention_entropy` (nats), `attention_max_weight`, `attention_sparsity`,
            `mlp_kill_ratio` and `norm_variance_ratio`.
    """

    name: str
    kind: str
    inside: str | None = None
    calls_ms: list[float] = field(default_factory=list)
    passes: list[DeepPass] = field(default_factory=list)
    values: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


@dataclass
class Call:
    """One call of the model, with numbers that stay on the device until they are read.

    Attributes:
        number: Of the call.
        is_close: Whether it is looked at closely.
        profile: Torch's profiler, if that records it.
        marks: Module, its caller, and the marks when it began and ended.
        outputs: Module -> a sample of its output.
        values: Module, statistic, value.
    """

    number: int
    is_close: bool
    profile: Any = None
    marks: list[tuple[str, str | None, Any, Any]] = field(default_factory=list)
    outputs: dict[str, OutputSample] = field(default_factory=dict)
    values: list[tuple[str, str, torch.Tensor]] = field(default_factory=list)


class Stopwatch:
    """Marks on a device's own time; the time between two marks leaves pauses out."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda, self.synchronize = device.type == "cuda", synchronizer(device)
        self._pauses: list[tuple[Any, Any]] = []

    def _now(self) -> Any:
        if self.is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        self.synchronize()
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

    def forget(self) -> None:
        """Drop the pauses: no mark so far is read again."""
        self._pauses.clear()

    def nanoseconds(self, begin: tuple[Any, int], end: tuple[Any, int]) -> int:
        """Give the time between two marks; the device must have passed them."""
        pauses = self._pauses[begin[1] : end[1]]
        return self._between(begin[0], end[0]) - sum(self._between(*pause) for pause in pauses)

    def _between(self, begin: Any, end: Any) -> int:
        return round(1e6 * begin.elapsed_time(end)) if self.is_cuda else end - begin


def sample_of(out: torch.Tensor) -> OutputSample:
    """Take what `summarize` needs of an output; nothing waits for the device."""
    flat = out.detach().reshape(-1)
    sample = flat[:: -(-len(flat) // _SAMPLE)].to(torch.float32, copy=True)
    return sample, *torch.aminmax(flat)


def summarize(
    outputs: Mapping[str, OutputSample], near_zero: float
) -> Iterator[tuple[str, str, float]]:
    """Summarize samples of equal size together: one by one would take longer than the model.

    Args:
        outputs: Module -> what `sample_of` took of its output.
        near_zero: An element below this counts as near zero.

    Yields:
        Module, name in `STATISTICS`, value.
    """
    by_size: dict[int, list[str]] = {}
    for module, (sample, _, _) in outputs.items():
        by_size.setdefault(len(sample), []).append(module)
    for size, modules in by_size.items():
        taken = [outputs[module] for module in modules]
        x, low, high = (torch.stack(parts) for parts in zip(*taken, strict=True))
        spread = x.std(dim=1, correction=min(1, size - 1))
        near = (x.abs() < near_zero).float().mean(dim=1)
        largest = torch.maximum(-low, high).float()
        table = torch.stack([x.abs().mean(dim=1), spread, largest, near])
        for statistic, row in zip(STATISTICS, table.tolist(), strict=True):
            for module, value in zip(modules, row, strict=True):
                yield module, statistic, value
