"""Calls that all ranks make together, timed on each of them: in one order, block by block, and once more part by part."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from nanolib.meters.time.clock import HostClock, synchronizer
from nanolib.meters.time.collector import quiet_collector
from nanolib.meters.time.timer import Timer

MAX_BLOCKS, FLOOR_BLOCKS = 100, 6  # six are the fewest that give a 95 % interval
_BLOCK_MS = 5.0


def time_together(
    calls: Mapping[str, Callable[[], object]], budget_s: float, *, seed: int, device: str | torch.device = "cpu"
) -> dict[str, list[float]]:
    """How long each call takes on this rank.

    A block is as many calls in a row as last 5 ms, begun by all ranks at once; blocks of the calls are interleaved, in an order
    drawn anew each time, the same on every rank.

    Args:
        calls: By name; every rank gives the same ones.
        budget_s: Stop after so many seconds, or 100 blocks; six blocks are taken all the same.
        device: Where this rank computes.
        seed: Of the order.

    Returns:
        Milliseconds per call, a value per block: the largest over ranks is what the call takes.
    """
    clock, order = HostClock(synchronizer(device)), random.Random(seed)
    inner = {}
    for name, call in calls.items():
        (_, (second_ms,)) = clock.time_block([call], 2, 1)
        inner[name] = math.ceil(_BLOCK_MS / _largest(second_ms, device))
    blocks: dict[str, list[float]] = {name: [] for name in calls}
    start = time.perf_counter()
    with quiet_collector():
        for count in range(1, MAX_BLOCKS + 1):
            for name in order.sample(list(calls), len(calls)):
                dist.barrier()
                blocks[name] += clock.time_block([calls[name]], 1, inner[name])[0]
            if count >= FLOOR_BLOCKS and _largest(time.perf_counter() - start, device) >= budget_s:
                break
    return blocks


def parts_together(
    calls: Mapping[str, Callable[[Timer], object]], budget_s: float, *, device: str | torch.device = "cpu"
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
                    found[name].append({block: 1e3 * seconds for block, seconds in timer.totals().items()})
            if count >= FLOOR_BLOCKS and _largest(time.perf_counter() - start, device) >= budget_s:
                break
    return found


def _largest(value: float, device: str | torch.device) -> float:
    """The largest over ranks, so that all of them decide alike."""
    shared = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return float(shared)
