"""Take blocks of timed calls, one block at a time, until a stopping rule is met."""

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from nanolib.measurement import BadInput
from nanolib.meters.call_check import CallCheck
from nanolib.meters.clock import Call, Clock
from nanolib.stats.changes import GROUP, steady_state
from nanolib.stats.intervals import median_interval

MIN_BLOCKS, MAX_BLOCKS, FLOOR_BLOCKS = 20, 100, 6  # Fewer than six blocks give no 95 % interval.
CONFIDENCE = 0.95
BLOCK_MS = 5.0  # A block must be long compared with the clock's resolution.
_BLOCK_RESOLUTIONS = 1000
_SLOW_S = 0.002  # A collection is slow if it takes a large part of a block's time.

# A function that takes blocks with a clock. It returns times in ms, shape [blocks, calls per block,
# phases], and details.
Collect = Callable[[Clock, Mapping[str, Call]], tuple[np.ndarray, dict[str, Any]]]


@dataclass(frozen=True)
class Timing:
    """Phases to time, and how to time them.

    Attributes:
        phases: Scope of each phase → its call, in order.
        rel_ci: Sampling stops when the half-width of the interval is at most this share of the
            estimate.
        budget_s: Time after which sampling stops, s, but not before six blocks.
        device: Device on which the phases compute.
        total: Scope of the row for the sum of the phases, if there are several phases.
        cold: Whether to overwrite the last-level cache before each call.
        collect: Function that takes all blocks, or None to use nanolib's stopping rule. `nano ab`
            sets a function that interleaves the blocks of two versions.

    Example:
        >>> from nanolib.meters import measure_phases
        >>> timing = Timing({"sum": lambda: sum(range(1000))}, budget_s=0.2)
        >>> list(measure_phases(timing))
        ['sum']
    """

    phases: Mapping[str, Call]
    rel_ci: float = 0.01
    budget_s: float = 10.0
    device: str = "cpu"
    total: str = "total"
    cold: bool = False
    collect: Collect | None = None


class BlockSampler:
    """Take blocks of one sequence of phases until the stopping rule is met.

    The budget does not include the time between blocks, so several samplers can take turns.

    Args:
        clock: Clock that times a block.
        timing: Phases and stopping rule.

    Attributes:
        checks: Scope of each phase → check of its first two calls.
        stop: Reason why sampling stopped: `precision`, `budget`, `max_blocks` or `collected`.
            While sampling continues, the reason is an empty string.
    """

    def __init__(self, clock: Clock, timing: Timing):
        self.clock, self._timing = clock, timing
        self.checks = {
            scope: CallCheck(call, scope or "fn", BadInput) for scope, call in timing.phases.items()
        }
        self._calls = [*timing.phases.values()]
        self._blocks = []  # ms, shape [blocks][calls][phases]
        self._spent_s = 0.0
        self.stop = ""

    def begin(self) -> None:
        """Call the phases twice and choose the size of a block. With `collect`, take all blocks.

        The first call is cold and may compile. Then, a GPU warms up. The second call sets the size
        of a block, and the time of this call is part of the budget.
        """
        timing = self._timing
        if timing.collect is not None:
            self._collected = timing.collect(self.clock, timing.phases)
            self.stop = "collected"
            return
        checks = list(self.checks.values())
        self.clock.time_block(checks, 1, 1)
        self.clock.warm_up(self._calls)
        start = time.perf_counter()
        second = self.clock.time_block(checks, 1, 1)
        self._shape = self._size(max(sum(second[0]), 1e-6))
        self._spent_s += time.perf_counter() - start

    def take(self) -> np.ndarray:
        """Take one block and return the median time of each phase, ms."""
        start = time.perf_counter()
        block = self.clock.time_block(self._calls, *self._shape)
        self._blocks.append(block)
        gc.collect()  # This collection is fast, because older objects are frozen.
        self._spent_s += time.perf_counter() - start
        self.stop = self._stop_reason()
        return np.median(block, axis=0)

    def _size(self, call_ms: float) -> tuple[int, int]:
        """Return the number of readings per block, and the number of calls per reading."""
        several, readable = len(self._calls) > 1, _BLOCK_RESOLUTIONS * self.clock.resolution_ms
        inner = 1 if several else math.ceil(readable / call_ms)
        return math.ceil(BLOCK_MS / (call_ms * inner)), inner

    def _stop_reason(self) -> str:
        count = len(self._blocks)
        if count >= MAX_BLOCKS:
            return "max_blocks"
        if self._spent_s >= self._timing.budget_s and count >= FLOOR_BLOCKS:
            return "budget"
        totals = np.asarray(self._blocks).sum(axis=2)
        enough = count >= MIN_BLOCKS and _precise(totals, self._timing.rel_ci)
        return "precision" if enough else ""

    def result(self) -> tuple[np.ndarray, dict[str, Any]]:
        """Return times in ms, shape [blocks, calls per block, phases], and details."""
        if self.stop == "collected":
            return self._collected
        per_block, inner = self._shape
        return np.asarray(self._blocks), {
            "calls_per_block": per_block,
            "inner": inner,
            "stop": self.stop,
            "precision": self._timing.rel_ci,
            "budget_s": self._timing.budget_s,
        }


def _precise(totals: np.ndarray, rel_ci: float) -> bool:
    """Return whether the interval of the steady state is narrow enough to stop sampling."""
    medians = np.median(totals, axis=1)
    low, estimate, high = median_interval(medians)
    if high - low > 3 * rel_ci * estimate:
        return False  # This test avoids the slow search for a steady state.
    steady = steady_state(totals.reshape(-1), max(GROUP, totals.shape[1]))
    medians = medians[math.ceil(steady.cut / totals.shape[1]) :] if steady.steady else medians
    low, estimate, high, _ = interval_of(medians)
    return len(medians) >= MIN_BLOCKS and high - low <= 2 * rel_ci * estimate


def interval_of(medians: np.ndarray) -> tuple[float | None, float, float | None, float | None]:
    """Return the median with its 95 % interval and confidence, which need at least six blocks."""
    if len(medians) < FLOOR_BLOCKS:
        return None, float(np.median(medians)), None, None
    return *median_interval(medians, CONFIDENCE), CONFIDENCE


@contextmanager
def pause_collector() -> Iterator[None]:
    """Switch the garbage collector off. If a collection is slow, freeze all objects first.

    Each block ends with a collection, which must be fast. In a sweep, the collection is fast
    already, and the objects that the sweep has frozen stay frozen. Otherwise, later collections can
    free the objects again at the end.
    """
    was_enabled, start = gc.isenabled(), time.perf_counter()
    gc.collect()
    freezes = time.perf_counter() - start > _SLOW_S
    if freezes:
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()
        if was_enabled:
            gc.enable()
