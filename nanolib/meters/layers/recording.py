"""Settings and data of a profiler: calls, times of modules, statistics of their outputs."""

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
_SAMPLE = 2048  # Number of elements of an output.

# A large output has three tensors: a sample, its smallest and its largest element. A small output
# has only a copy. The tensors stay on the device.
OutputSample = tuple[torch.Tensor, ...]

# A mark has a module, its caller, its start and end, and the number of pauses before each of them.
Mark = tuple[str, str | None, Any, Any, int, int]


class DeepPass(NamedTuple):
    """A module that the model calls directly, in one call that torch's profiler records.

    Attributes:
        ms: Time of the module, ms, with the overhead of the profiler.
        operations: Operation -> total time of its calls, ms.
    """

    ms: float
    operations: dict[str, float]


@dataclass
class ModuleTime:
    """Recorded data of one module.

    Attributes:
        name: Name in `named_modules`, which is empty for the model itself.
        kind: `model`, `block`, or the class of the module.
        inside: Name of the timed module that called this module first, or "" for the model. The
            times of the modules that the model calls add up to the model's time.
        calls_ms: Time of each call that torch's profiler did not record, ms.
        passes: Calls that torch's profiler recorded.
        values: Name -> a value per detailed call, for `STATISTICS` of the output. A block also has
            `attention_entropy` (nats), `attention_max_weight`, `attention_sparsity`,
            `mlp_kill_ratio` and `norm_variance_ratio`.
    """

    name: str
    kind: str
    inside: str | None = None
    calls_ms: list[float] = field(default_factory=list)
    passes: list[DeepPass] = field(default_factory=list)
    values: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


@dataclass(slots=True)
class Call:
    """One call of the model, with numbers that stay on the device until they are read.

    Attributes:
        number: Number of the call, from 0.
        profile: The profiler of torch, if this call is recorded.
        marks: Times of the modules.
        pauses: Moments between which statistics were computed, which no module's time includes.
        outputs: Module -> a sample of its output.
        values: Module, statistic and value.
    """

    number: int
    profile: Any = None
    marks: list[Mark] = field(default_factory=list)
    pauses: list[tuple[Any, Any]] = field(default_factory=list)
    outputs: dict[str, OutputSample] = field(default_factory=dict)
    values: list[tuple[str, str, torch.Tensor]] = field(default_factory=list)


class Stopwatch:
    """Read a device's own clock.

    Attributes:
        is_cuda: Whether moments are CUDA events.
        synchronize: Function that waits for the device.
        now: Function that returns the present moment, which `nanoseconds` compares with another.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_cuda, self.synchronize = device.type == "cuda", synchronizer(device)
        clocks = {"cuda": self._event, "cpu": time.perf_counter_ns}
        self.now = clocks.get(device.type, self._read)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _read(self) -> int:
        self.synchronize()
        return time.perf_counter_ns()

    def nanoseconds(self, begin: Any, end: Any) -> int:
        """Return the time in ns between two moments that the device has reached."""
        return round(1e6 * begin.elapsed_time(end)) if self.is_cuda else end - begin


def sample_of(out: torch.Tensor) -> OutputSample:
    """Sample an output for `summarize`, without waiting for the device."""
    out = out.detach()
    if out.numel() <= _SAMPLE:
        return (out.to(torch.float32, copy=True),)
    flat = out.reshape(-1)
    sample = flat[:: -(-len(flat) // _SAMPLE)].to(torch.float32, copy=True)
    return sample, *torch.aminmax(flat)


def summarize(
    outputs: Mapping[Any, OutputSample], near_zero: float
) -> Iterator[tuple[Any, str, float]]:
    """Compute the statistics of outputs. Samples of equal size are stacked, which is much faster.

    Args:
        outputs: Key of an output -> result of `sample_of`.
        near_zero: Upper limit of the magnitude of an element near zero.

    Yields:
        Key of the output, name in `STATISTICS`, and value.
    """
    by_size = {}  # size of a sample and number of tensors → keys of the outputs
    for key, parts in outputs.items():
        by_size.setdefault((parts[0].numel(), len(parts)), []).append(key)
    for (size, _), keys in by_size.items():
        samples, *ends = zip(*(outputs[key] for key in keys), strict=True)
        x = torch.stack([sample.flatten() for sample in samples])
        magnitude = x.abs()
        largest = magnitude.amax(dim=1)
        for end in ends:
            largest = torch.maximum(largest, torch.stack(end).abs().float())
        spread = x.std(dim=1, correction=min(1, size - 1))
        near = (magnitude < near_zero).float().mean(dim=1)
        table = torch.stack([magnitude.mean(dim=1), spread, largest, near])
        for statistic, row in zip(STATISTICS, table.tolist(), strict=True):
            for key, value in zip(keys, row, strict=True):
                yield key, statistic, value


class ProfilingConfig(StrictModel):
    """Settings of a profiler: which data it records, and how often.

    Assignment is validated. A profiler copies its settings when it is made.

    Attributes:
        modules: Time all modules in each k-th call. Every call times the blocks, and the leaves
            outside them.
        capture_activations: Summarize the outputs of the timed modules in each k-th call.
        deep_profiling: Profile either the operations or the attention weights in each k-th call.
        every_nth_layer: Time the modules of each n-th block only.
        every_kth_token: Number k of model calls from one detailed call to the next.
        near_zero: Magnitude below which activations and attention weights count as near zero.
        power_sample_interval_ms: Time between power samples.
        batch_db_commits: Commit the rows of a trace in batches, and not after each call.
        preallocate_metrics: Largest number of detailed calls whose statistics stay on the device
            before the host copies the statistics.

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
        """Return settings that time the blocks only."""
        return cls(**changes)

    @classmethod
    def standard(cls, **changes: Any) -> Self:
        """Return settings that time every module and summarize its output, in each k-th call."""
        return cls(**{"modules": True, "capture_activations": True} | changes)

    custom = standard

    @classmethod
    def deep(cls, **changes: Any) -> Self:
        """Return the settings of `standard` that also profile operations, in each k-th call."""
        return cls.standard(**{"deep_profiling": True} | changes)


MODES = {name: getattr(ProfilingConfig, name) for name in ("minimal", "standard", "deep")}
