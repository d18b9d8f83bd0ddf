"""Define what nanolib records during a case: traces, and a profiler's settings and data."""

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, Self

import pydantic
import torch

from nanolib.params import StrictModel


@dataclass
class Trace:
    """The readings of a case, in lists, so that collecting costs a window no disk access.

    A case yields its trace, and nanolib stores the rows together with the measurements of the case.

    Attributes:
        start_s: Time of `time.monotonic` at which the trace began, s.
        rows: Name of a table of `nanolib.store.schema.TRACE_TABLES` → rows, with the columns in the
            order of the table.

    Example:
        >>> trace = Trace(start_s=1.0)
        >>> trace.rows["tokens"].append((trace.at_us(1.5), 2000))
        >>> dict(trace.rows)
        {'tokens': [(500000, 2000)]}
    """

    start_s: float = field(default_factory=time.monotonic)
    rows: defaultdict[str, list[tuple[Any, ...]]] = field(default_factory=lambda: defaultdict(list))

    def at_us(self, t_s: float) -> int:
        """Convert a time of `time.monotonic`, in s, to microseconds since the trace began."""
        return round(1e6 * (t_s - self.start_s))


@dataclass
class ModuleTime:
    """Recorded data of one module.

    Attributes:
        name: Name of the module in `named_modules`, or "" for the model itself.
        inside: Name of the timed module that first called this module, or "" for the model. The
            times of modules that the model calls directly do not overlap.
        calls_ms: Time of each call in which nanolib records only times, ms.
        passes: Number of calls by the model that torch's profiler recorded.
        operations: Name of an operation → total time in these passes, ms.
    """

    name: str
    inside: str | None = None
    calls_ms: list[float] = field(default_factory=list)
    passes: int = 0
    operations: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Call:
    """One call of the model, with numbers that stay on the device until the profiler reads them.

    Attributes:
        number: Number of the call, from 0.
        turn: What the call records in detail, one of `ProfilingConfig.turns`, or an empty string.
        profile: torch's profiler, if it records this call.
        marks: Name of a module, name of its caller, and start and end of the module's call.
        values: Name of a module, name of a statistic, and its value, a tensor of shape [].
    """

    number: int
    turn: str = ""
    profile: Any = None
    marks: list[tuple[str, str | None, Any, Any]] = field(default_factory=list)
    values: list[tuple[str, str, torch.Tensor]] = field(default_factory=list)


class ProfilingConfig(StrictModel):
    """Settings of a profiler: which data it records, and how often.

    nanolib validates each assignment. A profiler copies the settings when you create the profiler,
    so later assignments do not affect it.

    Attributes:
        modules: Whether to time all modules in each k-th call. In every call, the profiler times
            the blocks and the leaf modules outside blocks.
        capture_activations: Whether to summarize the outputs of timed modules in each k-th call.
        deep_profiling: Whether to profile operations, and to summarize attention weights, in each
            k-th call.
        every_kth_token: Number k of model calls from one detailed call to the next.
        power_sample_interval_ms: Time between power samples, ms.
        batch_db_commits: Whether to read the data of calls in batches, and not after each call.
        preallocate_metrics: Largest number of calls whose data stays on the device before the host
            copies the data.

    Example:
        >>> ProfilingConfig(every_kth_token=0)
        Traceback (most recent call last):
        nanolib.measurement.BadInput: profiling.every_kth_token: ...
    """

    NAME = "profiling"

    modules: bool = False
    capture_activations: bool = False
    deep_profiling: bool = False
    every_kth_token: int = pydantic.Field(16, gt=0)
    power_sample_interval_ms: float = pydantic.Field(50.0, gt=0)
    batch_db_commits: bool = True
    preallocate_metrics: int = pydantic.Field(64, gt=0)

    @property
    def turns(self) -> list[str]:
        """What detailed calls record, one after the other. The list is empty without details.

        `values` stands for statistics, `operations` for torch's profiler, and `times` for the times
        of all modules. Computing statistics would lengthen the times of the same call.
        """
        wanted = {
            "values": self.capture_activations or self.deep_profiling,
            "operations": self.deep_profiling,
            "times": self.modules,
        }
        return [turn for turn, is_wanted in wanted.items() if is_wanted]

    @classmethod
    def minimal(cls, **changes) -> Self:
        """Return settings that time only the blocks, and the leaf modules outside blocks."""
        return cls(**changes)

    @classmethod
    def standard(cls, **changes) -> Self:
        """Return settings that time every module and summarize its output, in each k-th call."""
        return cls(**{"modules": True, "capture_activations": True} | changes)

    custom = standard

    @classmethod
    def deep(cls, **changes) -> Self:
        """Return the settings of `standard`, and also profile operations in each k-th call."""
        return cls.standard(**{"deep_profiling": True} | changes)


MODES = {name: getattr(ProfilingConfig, name) for name in ("minimal", "standard", "deep")}
