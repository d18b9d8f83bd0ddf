"""Define a profiler's settings and data: calls, times of modules, and statistics of outputs."""

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
_SAMPLE = 2048  # Largest number of elements in the sample of an output.

# The sample of a large output has three tensors: some elements, the smallest element and the
# largest element. The sample of a small output is a copy. The tensors stay on the device.
OutputSample = tuple[torch.Tensor, ...]

# A mark has the names of a module and its caller, the start and the end of the call, and the number
# of pauses before each of the two moments.
Mark = tuple[str, str | None, Any, Any, int, int]


class DeepPass(NamedTuple):
    """Times of a module that the model calls directly, in one call that torch's profiler records.

    Attributes:
        ms: Time of the module, ms, with the overhead of the profiler.
        operations: Name of an operation → total time of its calls, ms.
    """

    ms: float
    operations: dict[str, float]


@dataclass
class ModuleTime:
    """Recorded data of one module.

    Attributes:
        name: Name of the module in `named_modules`, or "" for the model itself.
        kind: Label of the module: `model`, `block`, or the name of its class.
        inside: Name of the timed module that first called this module, or "" for the model. The
            times of modules that the model calls directly do not overlap.
        calls_ms: Time of each call that torch's profiler did not record, ms.
        passes: Calls that torch's profiler recorded.
        values: Name of a statistic → a value per detailed call. An output has all `STATISTICS`. A
            block also has `attention_entropy` (nats), `attention_max_weight`, `attention_sparsity`,
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
    """One call of the model, with numbers that stay on the device until the profiler reads them.

    Attributes:
        number: Number of the call, from 0.
        profile: torch's profiler, if it records this call.
        marks: Times of the modules.
        pauses: Start and end of each computation of statistics. No module's time includes a pause.
        outputs: Name of a module → a sample of its output.
        values: Statistics of the call, each as name of a module, name of the statistic, and value.
    """

    number: int
    profile: Any = None
    marks: list[Mark] = field(default_factory=list)
    pauses: list[tuple[Any, Any]] = field(default_factory=list)
    outputs: dict[str, OutputSample] = field(default_factory=dict)
    values: list[tuple[str, str, torch.Tensor]] = field(default_factory=list)


class Stopwatch:
    """Measure time on a device, with CUDA events or the host's clock.

    Attributes:
        is_cuda: Whether moments are CUDA events.
        synchronize: Function that waits for the device.
        now: Function that returns the present moment, for `nanoseconds`.
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
    """Compute the statistics of outputs. To save time, nanolib stacks samples of equal size.

    Args:
        outputs: Key of an output → result of `sample_of`.
        near_zero: Magnitude below which an element counts as near zero.

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

    nanolib validates each assignment. A profiler copies the settings when you create the profiler,
    so later assignments do not affect it.

    Attributes:
        modules: Whether to time all modules in each k-th call. In every call, the profiler times
            the blocks and the leaf modules outside blocks.
        capture_activations: Whether to summarize the outputs of timed modules in each k-th call.
        deep_profiling: Whether to profile operations or attention weights, alternately, in each
            k-th call.
        every_nth_layer: Number n. The profiler times the modules inside each n-th block only.
        every_kth_token: Number k of model calls from one detailed call to the next.
        near_zero: Magnitude below which activations and attention weights count as near zero.
        power_sample_interval_ms: Time between power samples, ms.
        batch_db_commits: Whether to read the data of calls in batches, and not after each call.
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
        """Return settings that time only the blocks, and the leaf modules outside blocks."""
        return cls(**changes)

    @classmethod
    def standard(cls, **changes: Any) -> Self:
        """Return settings that time every module and summarize its output, in each k-th call."""
        return cls(**{"modules": True, "capture_activations": True} | changes)

    custom = standard

    @classmethod
    def deep(cls, **changes: Any) -> Self:
        """Return the settings of `standard`, and also profile operations in each k-th call."""
        return cls.standard(**{"deep_profiling": True} | changes)


MODES = {name: getattr(ProfilingConfig, name) for name in ("minimal", "standard", "deep")}
