"""Time calls that all ranks make together, on each rank: in blocks, and part by part."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from nanolib.meters.time.clock import Call, HostClock, synchronizer
from nanolib.meters.time.collector import pause_collector
from nanolib.meters.time.sampler import BLOCK_MS, FLOOR_BLOCKS, MAX_BLOCKS, BlockSampler
from nanolib.meters.time.timer import Timer
from nanolib.meters.time.turns import take_turns


class RankTimes(NamedTuple):
    """Times of one rank. The largest over ranks is the time of the call.

    Attributes:
        ms: Name → milliseconds per call, a value per round.
        is_busy: Per round, whether other processes disturbed it.
    """

    ms: dict[str, list[float]]
    is_busy: list[bool]


class _RankSampler(BlockSampler):
    """Takes blocks that start at once on all ranks and have one size."""

    def __init__(self, call: Callable[[], object], device: str | torch.device) -> None:
        super().__init__(_BarrierClock(synchronizer(device)), {"": call}, 1.0, math.inf)
        self._device = device

    def _size(self, call_ms: float) -> tuple[int, int]:
        return 1, math.ceil(BLOCK_MS / _largest(call_ms, self._device))

    def _why_enough(self) -> str:
        return ""  # all ranks must stop after the same round


class _BarrierClock(HostClock):
    def time_block(self, phases: Sequence[Call], calls: int, inner: int) -> list[list[float]]:
        dist.barrier()
        return super().time_block(phases, calls, inner)


def time_across_ranks(
    calls: Mapping[str, Callable[[], object]],
    budget_s: float,
    *,
    seed: int,
    device: str | torch.device = "cpu",
) -> RankTimes:
    """Measure how long each call takes on this rank.

    A block lasts at least 5 ms and starts at once on all ranks. In each round, each call has one
    block, in a random order that is the same on all ranks.

    Args:
        calls: Name → call, the same on all ranks.
        budget_s: Stop after this time or 100 rounds, but not before six rounds.
        seed: Seed of the order.
        device: Where this rank computes.
    """
    samplers: dict[str, BlockSampler] = {
        name: _RankSampler(call, device) for name, call in calls.items()
    }
    for sampler in samplers.values():
        sampler.begin()
    start = time.perf_counter()

    def enough(rounds: int) -> bool:
        late = rounds >= FLOOR_BLOCKS and _largest(time.perf_counter() - start, device) >= budget_s
        return late or rounds >= MAX_BLOCKS

    with pause_collector():
        rounds = take_turns(samplers, seed, enough=enough)
    ms = {name: [float(one.ms[name][0]) for one in rounds] for name in calls}
    return RankTimes(ms, [one.is_busy for one in rounds])


def time_parts_across_ranks(
    calls: Mapping[str, Callable[[Timer], object]],
    budget_s: float,
    *,
    device: str | torch.device = "cpu",
) -> dict[str, list[dict[str, float]]]:
    """Measure how long each part of a call takes on this rank, with a barrier before communication.

    Args:
        calls: Name → call; it takes a `Timer`.
        budget_s: As in `time_across_ranks`.
        device: Where this rank computes.

    Returns:
        Name → for each run of the call, the part's name → milliseconds.
    """
    found: dict[str, list[dict[str, float]]] = {name: [] for name in calls}
    start = time.perf_counter()
    with pause_collector():
        for count in range(MAX_BLOCKS + 1):
            for name, call in calls.items():
                timer = Timer(device)
                dist.barrier()
                call(timer)
                if count:  # the first run is cold
                    ms = {part: 1e3 * seconds for part, seconds in timer.totals().items()}
                    found[name].append(ms)
            if count >= FLOOR_BLOCKS and _largest(time.perf_counter() - start, device) >= budget_s:
                break
    return found


def _largest(value: float, device: str | torch.device) -> float:
    """Return the largest value over ranks, so that all ranks make the same decision."""
    shared = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return float(shared)
