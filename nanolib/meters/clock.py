"""Time blocks of calls with the host's clock or with the events of a device."""

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pynvml
import torch

from nanolib.meters.interference import GpuState

Call = Callable[[], object]
Device = str | torch.device


class HostClock:
    """Read `perf_counter_ns` around each phase, and synchronize the device before each reading.

    Args:
        synchronize: Function that waits for the device, or None if no call returns early.

    Attributes:
        method: Method of the rows, `perf_counter`.
        gpu: Clock of a GPU, if this clock uses one.
        now: Function that waits for the device and returns the present moment, for `ms`.
        resolution_ms: Smallest step of the clock on any system, ms.
    """

    method = "perf_counter"
    gpu = None
    resolution_ms = 1e-4

    def __init__(self, synchronize: Call | None = None):
        self.synchronize = synchronize
        self.now = self._synchronized_ns if synchronize else time.perf_counter_ns

    def _synchronized_ns(self) -> int:
        self.synchronize()
        return time.perf_counter_ns()

    def ms(self, start: int, end: int) -> float:
        """Return the time between two moments, ms."""
        return (end - start) / 1e6

    def time_block(self, phases: Sequence[Call], calls: int, inner: int) -> list[list[float]]:
        """Run the sequence of phases `calls` times, with each phase `inner` times in a row.

        Returns:
            Milliseconds per single call, shape [calls][phases].
        """
        rows = []
        for _ in range(calls):
            marks = [self.now()]
            for phase in phases:
                for _ in range(inner):
                    phase()
                marks.append(self.now())
            rows.append([self.ms(a, b) / inner for a, b in itertools.pairwise(marks)])
        return rows

    def warm_up(self, phases: Sequence[Call]) -> None:
        """Do nothing, because nanolib finds the end of the warm-up in the samples."""


# If the size of the third level is not known, nanolib assumes a cache of 64 MiB.
_UNKNOWN = 64 * 2**20
_WARM_UP_S = 0.5  # A GPU's clock ramps up in less than half a second.
# A GPU sleeps for about 0.15 s, in which the host can launch most calls three times.
_SLEEP_CYCLES, _LAUNCH_ROUNDS = 2**28, 3


class CudaClock:
    """Record CUDA events around each phase, and synchronize only before and after each block.

    In each block, the clock reads the GPU's sensors while the GPU computes.

    Args:
        device: GPU that computes.
        nvml: NVML module of `GpuState`.
    """

    method = "cuda_event"
    resolution_ms = 0.5e-3  # CUDA documents half a microsecond.

    def __init__(self, device: Device, nvml=pynvml):
        self.device, self.gpu = torch.device(device), self
        self.state = GpuState(str(self.device), nvml)

    def now(self) -> torch.cuda.Event:
        """Record the present moment of the device, for `ms`, without waiting for the device."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Return the time between two moments that the device has reached, ms."""
        return start.elapsed_time(end)

    def time_block(self, phases: Sequence[Call], calls: int, inner: int) -> list[list[float]]:
        """Run the phases as `HostClock.time_block` does, and return ms, shape [calls][phases]."""
        with torch.cuda.device(self.device):
            rows = [_events(phases) for _ in range(calls)]
            torch.cuda.synchronize()
            for marks in rows:
                _launch(phases, marks, inner)
            self.state.read()  # The GPU still computes, so the readings are under load.
            torch.cuda.synchronize()
            return [[ms / inner for ms in _elapsed_ms(marks)] for marks in rows]

    def warm_up(self, phases: Sequence[Call]) -> None:
        """Run the phases for half a second, so that the GPU's clock ramps up."""
        until = time.perf_counter() + _WARM_UP_S
        with torch.cuda.device(self.device):
            while time.perf_counter() < until:
                for phase in phases:
                    phase()
                torch.cuda.synchronize()

    def host_and_device(self, phases: Sequence[Call]) -> list[dict[str, float]]:
        """Measure the host's time to launch each phase and the device's time to compute it, ms.

        The device sleeps until all calls are queued, so the device never waits for the host.

        Returns:
            `host_ms` and `device_ms` of each phase. Both are missing if a phase waits for the
            device, fills the device's queue, or takes the host too long.
        """
        with torch.cuda.device(self.device):
            rows = [_events(phases) for _ in range(_LAUNCH_ROUNDS)]
            torch.cuda.synchronize()
            torch.cuda._sleep(_SLEEP_CYCLES)
            host = [_launch(phases, marks) for marks in rows]
            is_awake = rows[0][0].query()
            torch.cuda.synchronize()
        if is_awake:
            return [{} for _ in phases]
        medians = np.median([host, [_elapsed_ms(marks) for marks in rows]], axis=1).T.tolist()
        return [{"host_ms": a, "device_ms": b} for a, b in medians]


def _events(phases: Sequence[Call]) -> list[Any]:
    return [torch.cuda.Event(enable_timing=True) for _ in range(len(phases) + 1)]


def _launch(phases: Sequence[Call], marks: Sequence[Any], inner: int = 1) -> list[float]:
    """Launch each phase `inner` times between events and return the host's time for each, ms."""
    host_ms = []
    marks[0].record()
    for phase, mark in zip(phases, marks[1:], strict=True):
        start = time.perf_counter_ns()
        for _ in range(inner):
            phase()
        host_ms.append((time.perf_counter_ns() - start) / 1e6)
        mark.record()
    return host_ms


def _elapsed_ms(marks: Sequence[Any]) -> list[float]:
    return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]


class ColdClock:
    """Overwrite the last-level cache before each call, outside the measured time.

    Args:
        clock: Clock that times the calls.
        device: Device on which the calls compute.
    """

    def __init__(self, clock: HostClock | CudaClock, device: Device):
        self._clock, self.gpu = clock, clock.gpu
        self.method = f"{clock.method}, cold cache"
        self.warm_up, self.resolution_ms = clock.warm_up, clock.resolution_ms
        other = torch.empty(2 * last_level_bytes(device), dtype=torch.uint8, device=device)
        self._overwrite = functools.partial(other.fill_, 1)

    def time_block(self, phases: Sequence[Call], calls: int, inner: int) -> list[list[float]]:
        """Time calls with a cold cache and return ms, shape [calls][phases].

        On a GPU, the host launches a call while the GPU overwrites the cache.
        """
        between = [call for phase in phases for call in (self._overwrite, phase)]
        rows = np.asarray(self._clock.time_block(between, calls * inner, 1))[:, 1::2]
        return rows.reshape(calls, inner, -1).mean(axis=1).tolist()


Clock = HostClock | CudaClock | ColdClock


def last_level_bytes(device: Device, cpus: Path = Path("/sys/devices/system/cpu")) -> int:
    """Return the size of a GPU's L2 or of all L3 caches of the CPUs in bytes, or 64 MiB if unknown.

    Args:
        device: Device whose caches count.
        cpus: Folder in which Linux describes the CPUs.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    if device.type != "cpu":
        return _UNKNOWN
    sizes = {}  # CPUs that share a cache → bytes
    for cache in cpus.glob("cpu[0-9]*/cache/index3"):
        with contextlib.suppress(FileNotFoundError):  # Some machines do not report the size.
            shared, size = (cache / "shared_cpu_list").read_text(), (cache / "size").read_text()
            sizes[shared] = int(size.strip().removesuffix("K")) * 1024
    return sum(sizes.values()) or _UNKNOWN


def clock_for(device: Device) -> Clock:
    """Return the clock that times calls on a device."""
    device = torch.device(device)
    if device.type == "cuda":
        return CudaClock(device)
    return HostClock(None if device.type == "cpu" else synchronizer(device))


def synchronizer(device: Device) -> Call:
    """Return a function that waits until a device's queue is empty. A CPU has no queue."""
    device = torch.device(device)
    if device.type in ("cuda", "xpu"):
        return functools.partial(getattr(torch, device.type).synchronize, device)
    return torch.mps.synchronize if device.type == "mps" else lambda: None
