"""Calls that all ranks make together, timed on each of them: in one order, block by block, and once more part by part."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from nanolib.meters.time.clock import Call, HostClock, synchronizer
from nanolib.meters.time.collector import quiet_collector
from nanolib.meters.time.sampler import BLOCK_MS, FLOOR_BLOCKS, MAX_BLOCKS, BlockSampler
from nanolib.meters.time.timer import Timer
from nanolib.meters.time.turns import take_turns


class Together(NamedTuple):
    """Blocks of calls that all ranks make together, as one rank saw them.

    Attributes:
        ms: By name, milliseconds per call, a value per round: the largest over ranks is what the call takes.
        is_busy: Of each round, whether other processes took so much of the CPUs that a timing suffers.
    """

    ms: dict[str, list[float]]
    is_busy: list[bool]


class _RankSampler(BlockSampler):
    """Blocks that all ranks begin at once, and of one size on all of them."""

    def __init__(self, call: Callable[[], object], device: str | torch.device) -> None:
        super().__init__(
            _BegunAtOnce(synchronizer(device)),
            {"": call},
            rel_ci=1.0,
            budget_s=math.inf,
            in_rounds=True,
        )
        self._device = device

    def _size(self, call_ms: float) -> tuple[int, int]:
        return 1, math.ceil(BLOCK_MS / _largest(call_ms, self._device))

    def _why_enough(self) -> str:
        return ""  # all ranks must end after the same round


class _BegunAtOnce(HostClock):
    def time_block(self, phases: Sequence[Call], calls: int, inner: int) -> list[list[float]]:
        dist.barrier()
        return super().time_block(phases, calls, inner)


def time_across_ranks(
    calls: Mapping[str, Callable[[], object]],
    budget_s: float,
    *,
    seed: int,
    device: str | torch.device = "cpu",
) -> Together:
    """How long each call takes on this rank.

    A block is as many calls in a row as last 5 ms, begun by all ranks at once; in each round every call has one, in an order drawn
    anew, the same on every rank.

    Args:
        calls: By name; every rank gives the same ones.
        budget_s: Stop after so many seconds, or 100 rounds; six are made all the same.
        device: Where this rank computes.
        seed: Of the order.
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

    with quiet_collector():
        rounds = take_turns(samplers, seed, enough=enough)
    ms = {name: [float(one.ms[name][0]) for one in rounds] for name in calls}
    return Together(ms, [one.is_busy for one in rounds])


def parts_together(
    calls: Mapping[str, Callable[[Timer], object]],
    budget_s: float,
    *,
    device: str | torch.device = "cpu",
) -> dict[str, list[dict[str, float]]]:
    """How long each part of a call takes on this rank; ranks wait for each other before they communicate.

    Args:
        calls: By name; each takes the timer.
        budget_s: As in `time_together`.
        device: Where this rank computes.

    Returns:
        For each call and each of its runs: milliseconds in each block, those of one name added up.
    """
    found: dict[str, list[dict[str, float]]] = {name: [] for name in calls}
    start = time.perf_counter()
    with quiet_collector():
        for count in range(MAX_BLOCKS + 1):
            for name, call in calls.items():
                timer = Timer(device)
                dist.barrier()
                call(timer)
                if count:  # the first run is cold
                    found[name].append(
                        {block: 1e3 * seconds for block, seconds in timer.totals().items()}
                    )
            if count >= FLOOR_BLOCKS and _largest(time.perf_counter() - start, device) >= budget_s:
                break
    return found


def _largest(value: float, device: str | torch.device) -> float:
    """The largest over ranks, so that all of them decide alike."""
    shared = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return float(shared)
