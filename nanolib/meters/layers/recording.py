"""Settings and data of a profiler: calls, times of modules, statistics of their outputs."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

import pydantic
import torch

from nanolib.meters.time.clock import synchronizer
from nanolib.params import StrictModel

STATISTICS = ("mean_abs", "sd", "max_abs", "near_zero")
_SAMPLE = 2048  # elements of an output

# A sample of an output, and its smallest and largest element; they stay on the device.
OutputSample = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class DeepPass(NamedTuple):
    """A block, or a module next to the blocks, in one call under torch's profiler.

    Attributes:
        ms: Its time, including the profiler's overhead.
        operations: Operation -> total time of its calls, ms.
    """

    ms: float
    operations: dict[str, float]


@dataclass
class ModuleTime:
    """Recorded data of one module.

    Attributes:
        name: As `named_modules` has it; empty for the model itself.
        kind: `model`, `block`, or the class of the module.
        inside: Name of the timed module that called it first. Modules inside "" add up to the
            model.
        calls_ms: Time of each call, ms, without deep passes.
        passes: Deep passes.
        values: Name -> a value per sampled call: `STATISTICS` of the output. For a block also
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
        number: Its number, from 0.
        is_detailed: Whether all modules are timed.
        profile: torch's profiler, if it records this call.
        marks: Module, its caller, and the marks of its start and end.
        outputs: Module -> a sample of its output.
        values: Module, statistic, value.
        passes: Module that the model calls directly -> its deep pass.
    """

    number: int
    is_detailed: bool
    profile: Any = None
    marks: list[tuple[str, str | None, Any, Any]] = field(default_factory=list)
    outputs: dict[str, OutputSample] = field(default_factory=dict)
    values: list[tuple[str, str, torch.Tensor]] = field(default_factory=list)
    passes: dict[str, DeepPass] = field(default_factory=dict)


class Stopwatch:
    """Marks moments on a device's own clock. The time between two marks excludes pauses."""

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
        """Mark this moment."""
        return self._now(), len(self._pauses)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the block's time."""
        begin = self._now()
        yield
        self._pauses.append((begin, self._now()))

    def forget(self) -> None:
        """Drop the pauses, if no earlier mark is read again."""
        self._pauses.clear()

    def nanoseconds(self, begin: tuple[Any, int], end: tuple[Any, int]) -> int:
        """Return the time between two marks; the device must have reached them."""
        pauses = self._pauses[begin[1] : end[1]]
        return self._between(begin[0], end[0]) - sum(self._between(*pause) for pause in pauses)

    def _between(self, begin: Any, end: Any) -> int:
        return round(1e6 * begin.elapsed_time(end)) if self.is_cuda else end - begin


def sample_of(out: torch.Tensor) -> OutputSample:
    """Sample an output for `summarize`, without waiting for the device."""
    flat = out.detach().reshape(-1)
    sample = flat[:: -(-len(flat) // _SAMPLE)].to(torch.float32, copy=True)
    return sample, *torch.aminmax(flat)


def summarize(
    outputs: Mapping[str, OutputSample], near_zero: float
) -> Iterator[tuple[str, str, float]]:
    """Compute the statistics of outputs. Samples of equal size are stacked, which is much faster.

    Args:
        outputs: Module -> result of `sample_of`.
        near_zero: Upper limit of the magnitude of an element near zero.

    Yields:
        Module, name in `STATISTICS`, value.
    """
    by_size: dict[int, list[str]] = {}
    for module, (sample, _, _) in outputs.items():
        by_size.setdefault(len(sample), []).append(module)
    for size, modules in by_size.items():
        samples = [outputs[module] for module in modules]
        x, low, high = (torch.stack(parts) for parts in zip(*samples, strict=True))
        spread = x.std(dim=1, correction=min(1, size - 1))
        near = (x.abs() < near_zero).float().mean(dim=1)
        largest = torch.maximum(-low, high).float()
        table = torch.stack([x.abs().mean(dim=1), spread, largest, near])
        for statistic, row in zip(STATISTICS, table.tolist(), strict=True):
            for module, value in zip(modules, row, strict=True):
                yield module, statistic, value


class ProfilingConfig(StrictModel):
    """What a profiler records, and how often.

    Assignment is validated. A profiler keeps the settings with which it was made.

    Attributes:
        modules: Time all modules in each k-th call. Blocks, and the modules next to them, are timed
            in every call.
        capture_activations: Summarize the outputs of the timed modules in each k-th call.
        deep_profiling: Profile the operations and the attention weights of each k-th call.
        every_nth_layer: Time the modules of each n-th block only.
        every_kth_token: k, in calls of the model.
        near_zero: Activations and attention weights below this count as near zero.
        power_sample_interval_ms: Time between power samples.
        batch_db_commits: Commit rows of a trace in batches; if false, after each call.
        preallocate_metrics: Summaries that stay on the device before they are copied to the host.

    Example:
        >>> ProfilingConfig(every_kth_token=0)
        Traceback (most recent call last):
        nanolib.measurement.BadInput: profiling.every_kth_token: ...
    """

    NAME: ClassVar[str] = "profiling"

    modules: bool = False
    capture_activations: bool = False
    deep_profiling: bool = False
    every_nth_layer: int = pydantic.Field(1, gt=0)
    every_kth_token: int = pydantic.Field(16, gt=0)
    near_zero: float = pydantic.Field(1e-2, gt=0)
    power_sample_interval_ms: float = pydantic.Field(50.0, gt=0)
    batch_db_commits: bool = True
    preallocate_metrics: int = pydantic.Field(64, gt=0)

    @property
    def has_details(self) -> bool:
        """Whether each k-th call is profiled in detail."""
        return self.modules or self.capture_activations or self.deep_profiling

    @classmethod
    def minimal(cls, **changes: Any) -> Self:
        """Time the blocks only."""
        return cls(**changes)

    @classmethod
    def standard(cls, **changes: Any) -> Self:
        """Time every module, and summarize its output, in each k-th call."""
        return cls(**{"modules": True, "capture_activations": True} | changes)

    custom = standard

    @classmethod
    def deep(cls, **changes: Any) -> Self:
        """Like `standard`, and profile the operations of each k-th call."""
        return cls.standard(**{"deep_profiling": True} | changes)


MODES = {name: getattr(ProfilingConfig, name) for name in ("minimal", "standard", "deep")}
