"""A clock that stands still while the instrument itself works, so that looking closely does not show in what is seen."""

from __future__ import annotations

import time
from typing import Any

import torch

from nanolib.meters.time.clock import synchronizer


class CpuStopwatch:
    """On `time.perf_counter_ns`; a mark is a number. The time between two marks leaves pauses out, which do not nest."""

    def __init__(self) -> None:
        self._paused = self._since = 0

    def mark(self) -> int:
        """Nanoseconds, pauses left out."""
        return time.perf_counter_ns() - self._paused

    def pause(self) -> None:
        """What follows is the instrument's own work."""
        self._since = time.perf_counter_ns()

    def resume(self) -> None:
        """It ends."""
        self._paused += time.perf_counter_ns() - self._since

    def skip(self, ns: int) -> None:
        """So much of what was just counted was the instrument's too."""
        self._paused += ns

    def settle(self) -> None:
        """Wait until marks can be read; here they can."""

    def nanoseconds(self, begin: int, end: int) -> int:
        """From one mark to another."""
        return end - begin

    def forget(self) -> None:
        """No mark made so far is read again; here none is kept."""


class WaitingStopwatch(CpuStopwatch):
    """A CPU's, for a device into whose queue no events are put (MPS, XPU): each mark waits until its work is done.

    Args:
        device: Which.
    """

    def __init__(self, device: torch.device | str) -> None:
        super().__init__()
        self._synchronize = synchronizer(device)

    def mark(self) -> int:
        """Nanoseconds at the end of all that was launched."""
        self._synchronize()
        return super().mark()

    def pause(self) -> None:
        """Begin when all that was launched is done."""
        self._synchronize()
        super().pause()


class CudaStopwatch:
    """On CUDA events, taken from a pool; a mark is an event and how many pauses came before it.

    Args:
        device: Which GPU, whose stream the events go into.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self._device = torch.device(device)
        self._free: list[torch.cuda.Event] = []
        self._used: list[torch.cuda.Event] = []
        self._pauses: list[tuple[Any, Any]] = []
        self._since: Any = None

    def _event(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._used.append(event)
        return event

    def mark(self) -> tuple[torch.cuda.Event, int]:
        """An event in the stream."""
        return self._event(), len(self._pauses)

    def pause(self) -> None:
        """What the stream does from here on is not counted."""
        self._since = self._event()

    def resume(self) -> None:
        """It counts again."""
        self._pauses.append((self._since, self._event()))

    def skip(self, ns: int) -> None:
        """The instrument's Python does not delay what is queued on the device."""

    def settle(self) -> None:
        """One synchronize for all marks."""
        torch.cuda.synchronize(self._device)

    def nanoseconds(self, begin: tuple[Any, int], end: tuple[Any, int]) -> int:
        """Between two events, less the pauses between them."""
        between = sum(first.elapsed_time(last) for first, last in self._pauses[begin[1] : end[1]])
        return round(1e6 * (begin[0].elapsed_time(end[0]) - between))

    def forget(self) -> None:
        """The events are used again."""
        self._free += self._used
        self._used.clear()
        self._pauses.clear()


Stopwatch = CpuStopwatch | CudaStopwatch


def stopwatch_for(device: torch.device | str) -> Stopwatch:
    """The stopwatch of a device."""
    kind = torch.device(device).type
    return (
        CudaStopwatch(device)
        if kind == "cuda"
        else CpuStopwatch()
        if kind == "cpu"
        else WaitingStopwatch(device)
    )
