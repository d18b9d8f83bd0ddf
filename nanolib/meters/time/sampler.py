"""Blocks of calls of one thing that is timed, one block at a time, until a rule says that they are enough."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nanolib.measurement import BadInput
from nanolib.meters.time.call_check import CallCheck
from nanolib.meters.time.clock import Call, Clock
from nanolib.stats.intervals import TooFewSamples, median_interval, range_confidence
from nanolib.stats.steady import GROUP, SteadyState, leading_slow_samples, steady_state

MIN_BLOCKS, MAX_BLOCKS, FLOOR_BLOCKS = 20, 100, 6  # six are the fewest that give a 95 % interval
CONFIDENCE = 0.95
BLOCK_MS = 5.0  # a block lasts at least this: long beside the clock and the scheduler's slices
_BLOCK_RESOLUTIONS = 1000

# Clock, phases, rel_ci, budget → ms, shape [blocks, calls per block, phases], and what is told of how they were taken.
Collect = Callable[[Clock, Mapping[str, Call], float, float], tuple[np.ndarray, dict[str, Any]]]


class BlockSampler:
    """Takes blocks of one sequence of phases, and knows when they are enough.

    Whoever has several of them decides whose block comes next: time that passes between blocks is not counted.

    Args:
        clock: Times a block.
        phases: Scope and call of each, in order.
        rel_ci: Enough when the half-width of the interval of their sum is at most this share of the estimate.
        budget_s: Enough when the blocks have taken so long, if there are six.
        collect: Takes all the blocks at once, in the place of the rules above.
        in_rounds: Whether all of its blocks are to be of rounds; otherwise the call that sizes them counts where it is slow.

    Attributes:
        stop: Why the blocks are enough, `precision`, `budget`, `max_blocks` or `collected`; empty as long as they are not.
    """

    def __init__(
        self,
        clock: Clock,
        phases: Mapping[str, Call],
        rel_ci: float,
        budget_s: float,
        *,
        collect: Collect | None = None,
        in_rounds: bool = False,
    ) -> None:
        self.clock, self._phases, self._rel_ci, self._budget_s = clock, phases, rel_ci, budget_s
        self._collect, self._in_rounds = collect, in_rounds
        self._checks = {
            scope: call if isinstance(call, CallCheck) else CallCheck(call, scope or "fn", BadInput)
            for scope, call in phases.items()
        }
        self._calls = [check.call for check in self._checks.values()]
        self._blocks: list[list[list[float]]] = []
        self._spent_s = 0.0
        self.stop = ""

    def begin(self) -> None:
        """Call it twice and size the blocks.

        The first call is cold, and may compile: the second one sizes the block, and the budget is for what follows the first.
        """
        if self._collect is not None:
            asked = self.clock, self._phases, self._rel_ci, self._budget_s
            self._collected = self._collect(*asked)
            self.stop = "collected"
            return
        checks = list(self._checks.values())
        first = self.clock.time_block(checks, 1, 1)
        self.clock.warm_up(self._calls)
        start = time.perf_counter()
        second = self.clock.time_block(checks, 1, 1)
        self._probes = [sum(first[0]), sum(second[0])]
        self._shape = self._size(max(self._probes[1], 1e-6))
        if (
            not self._in_rounds and self._probes[1] >= BLOCK_MS * 4
        ):  # so slow a call is a block by itself
            self._blocks.append(second)
        self._spent_s += time.perf_counter() - start

    def take(self) -> np.ndarray:
        """Take one block more.

        Returns:
            The median of its calls, ms, a value per phase.
        """
        start = time.perf_counter()
        block = self.clock.time_block(self._calls, *self._shape)
        self._blocks.append(block)
        gc.collect()  # cheap: what lived before is frozen
        self._spent_s += time.perf_counter() - start
        self.stop = self._why_enough()
        return np.median(block, axis=0)

    def _size(self, call_ms: float) -> tuple[int, int]:
        """Calls per block, and how many back-to-back calls one reading spans."""
        several, readable = len(self._calls) > 1, _BLOCK_RESOLUTIONS * self.clock.resolution_ms()
        inner = 1 if several else math.ceil(readable / call_ms)
        return math.ceil(BLOCK_MS / (call_ms * inner)), inner

    def _why_enough(self) -> str:
        count = len(self._blocks)
        if count >= MAX_BLOCKS:
            return "max_blocks"
        if self._spent_s >= self._budget_s and count >= FLOOR_BLOCKS:
            return "budget"
        enough = count >= MIN_BLOCKS and _precise(
            np.asarray(self._blocks).sum(axis=2), self._rel_ci
        )
        return "precision" if enough else ""

    def result(self) -> tuple[np.ndarray, dict[str, Any]]:
        """Ms, shape [blocks, calls per block, phases], and what is told of how they were taken."""
        if self._collect is not None:
            return self._collected
        per_block, inner = self._shape
        return np.asarray(self._blocks), {
            "calls_per_block": per_block,
            "inner": inner,
            "first_calls": self._probes,
            "stop": self.stop,
            "cached": [scope for scope, check in self._checks.items() if check.is_cached],
            "precision": self._rel_ci,
            "budget_s": self._budget_s,
            "elapsed_s": self._spent_s,
        }


def _precise(totals: np.ndarray, rel_ci: float) -> bool:
    """Whether the steady part is long enough and its interval narrow enough; totals [blocks, calls], of enough blocks."""
    medians = np.median(totals, axis=1)
    low, estimate, high = median_interval(medians)
    if high - low > 3 * rel_ci * estimate:
        return False  # far off even with the warm-up in it: skip the costlier search
    steady = settled(totals.reshape(-1), totals.shape[1])
    medians = medians[math.ceil(steady.cut / totals.shape[1]) :] if steady.steady else medians
    low, estimate, high, _ = interval_of(medians)
    return len(medians) >= MIN_BLOCKS and high - low <= 2 * rel_ci * estimate


def settled(series: np.ndarray, calls_per_block: int) -> SteadyState:
    """Where a series settles: change points, and the cold calls at the very start, which medians of 5 cannot see."""
    found = steady_state(series, group=max(GROUP, calls_per_block))
    cold = leading_slow_samples(series) if len(series) >= 8 else 0
    if cold <= found.cut or cold >= len(series) / 2:
        return found
    return SteadyState(cold, found.changes, found.steady, found.got_slower)


def interval_of(medians: np.ndarray) -> tuple[float | None, float, float | None, float | None]:
    """The 95 % interval of the median; with too few blocks their range and the coverage that it has."""
    try:
        low, estimate, high = median_interval(medians, CONFIDENCE)
    except TooFewSamples:
        estimate = float(np.median(medians))
        if len(medians) < 2:
            return None, estimate, None, None
        return float(medians.min()), estimate, float(medians.max()), range_confidence(len(medians))
    return low, estimate, high, CONFIDENCE
