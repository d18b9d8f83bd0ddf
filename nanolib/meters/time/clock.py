"""Clocks: how long a call took, on the host or by the device's own events."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

Call = Callable[[], object]


class Clock(Protocol):
    """Times a block of calls; `method` is what the row says."""

    method: str

    def time_block(self, phases: Sequence[Call], calls: int, inner: int) -> list[list[float]]:
        """Run the phases in turn, `calls` times; each phase `inner` times in a row.

        Returns:
            Milliseconds per single call, shape [calls][phases].
        """
        ...

    def resolution_ms(self) -> float:
        """The smallest step that the clock shows."""
        ...


class HostClock:
    """`perf_counter_ns` around each call, with a device synchronisation before each reading where there is a device."""

    def __init__(self, synchronize: Call | None = None) -> None:
        self.synchronize = synchronize
        self.method = "perf_counter"

    def time_block(self, phases: Sequence[Call], calls: int, inner: int) -> list[list[float]]:
        """See `Clock.time_block`."""
        rows = []
        now, synchronize = time.perf_counter_ns, self.synchronize
        if synchronize:
            synchronize()
        for _ in range(calls):
            row = []
            for phase in phases:
                start = now()
                for _ in range(inner):
                    phase()
                if synchronize:
                    synchronize()
                row.append((now() - start) / inner / 1e6)
            rows.append(row)
        return rows

    def resolution_ms(self) -> float:
        """The smallest step seen between successive readings."""
        return _perf_counter_step_ns() / 1e6


@functools.cache
def _perf_counter_step_ns() -> int:
    readings = [time.perf_counter_ns() for _ in range(2000)]
    return min(b - a for a, b in itertools.pairwise(readings) if b > a)


class CudaClock:
    """CUDA events around each phase and one synchronisation at the end of the block: the device's own time.

    Args:
        device: Which GPU; events belong to one, and the current one need not be it.
    """

    method = "cuda_event"

    def __init__(self, device: str | torch.device = "cuda") -> None:
        self.device = torch.device(device)

    def time_block(self, phases: Sequence[Call], calls: int, inner: int) -> list[list[float]]:
        """See `Clock.time_block`."""
        with torch.cuda.device(self.device):
            return self._time_block(phases, calls, inner)

    def _time_block(self, phases: Sequence[Call], calls: int, inner: int) -> list[list[float]]:
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(len(phases) + 1)] for _ in range(calls)]
        torch.cuda.synchronize()
        for row in marks:
            row[0].record()
            for phase, mark in zip(phases, row[1:], strict=True):
                for _ in range(inner):
                    phase()
                mark.record()
        torch.cuda.synchronize()
        return [[a.elapsed_time(b) / inner for a, b in itertools.pairwise(row)] for row in marks]

    def resolution_ms(self) -> float:
        """CUDA events resolve half a microsecond."""
        return 0.5e-3


def clock_for(device: str | torch.device) -> Clock:
    """The clock of a device."""
    device = torch.device(device)
    if device.type == "cuda":
        return CudaClock(device)
    return HostClock(None if device.type == "cpu" else synchronizer(device))


def synchronizer(device: str | torch.device) -> Call:
    """What waits until a device has done all that was queued; on a CPU it returns at once."""
    device = torch.device(device)
    if device.type in ("cuda", "xpu"):
        return functools.partial(getattr(torch, device.type).synchronize, device)
    return torch.mps.synchronize if device.type == "mps" else lambda: None
