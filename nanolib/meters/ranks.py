"""Time sections of code and calls that all ranks make together, and count the bytes on the wire."""

import ctypes
import fcntl
import itertools
import math
import os
import socket
import statistics
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import psutil
import torch
import torch.distributed as dist

from nanolib.meters.clock import Call, Device, HostClock, synchronizer
from nanolib.meters.sampler import (
    BLOCK_MS,
    FLOOR_BLOCKS,
    MAX_BLOCKS,
    BlockSampler,
    Timing,
    pause_collector,
)
from nanolib.meters.turns import take_turns

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
_SET_FLAGS, _UP_RUNNING = 0x8914, 0x41
# Each payload is a number of bytes per rank.
PAYLOADS = (1 << 10, 1 << 16, 1 << 20, 1 << 22)
_COUNTED_CALLS = 2
KINDS = {"comp": "compute", "wait": "wait", "comm": "communication"}


class Timer:
    """Time named sections of code and print a table of their times.

    A section's time excludes inner sections, so the times of nested sections add up. Do not open
    sections of one timer in several threads. With several ranks, a barrier precedes each section
    whose name starts with `comm_`. The barrier's time counts as `wait`, because waiting for a slow
    rank is not communication.

    Args:
        device: Device to synchronize before each reading.
        use_cuda: Whether to use CUDA. Code from other benchmark suites may give `use_cuda`
            instead of `device`.

    Attributes:
        seconds: Name of a section → time of each of its runs, s.
    """

    def __init__(self, device: Device = "cpu", *, use_cuda: bool | None = None):
        if use_cuda is not None:
            device = "cuda" if use_cuda else "cpu"
        self.seconds = {}  # name of a section → its times, s
        self._synchronize = synchronizer(device)
        self._inner = []  # for each open section, the time of its inner sections, s

    @contextmanager
    def time_block(self, name: str) -> Iterator[None]:
        """Time the context as a run of the section `name`, without the time of inner sections."""
        if name.startswith("comm_") and _ranks() > 1:
            with self._timed("wait"):
                dist.barrier()
        with self._timed(name):
            yield

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        self._synchronize()
        self._inner.append(0.0)
        start = time.perf_counter()
        try:
            yield
        finally:
            self._synchronize()
            took = time.perf_counter() - start
            self.seconds.setdefault(name, []).append(took - self._inner.pop())
            if self._inner:
                self._inner[-1] += took

    def print_stats(self, write: Callable[[str], object] = print) -> None:
        """Print a table of the sections, with the number, the sum, the mean and the spread."""
        width = max([12, *map(len, self.seconds)])
        rank = f"rank {dist.get_rank()} of {_ranks()}" if _ranks() > 1 else "name"
        lines = [f"{rank:<{width}}  calls   total s   mean ms     sd ms"]
        for name, times in self.seconds.items():
            mean_ms = 1e3 * statistics.fmean(times)
            sd_ms = 1e3 * statistics.stdev(times) if len(times) > 1 else 0.0
            lines.append(
                f"{name:<{width}}  {len(times):5d}  {sum(times):8.3f}  {mean_ms:8.3f}  {sd_ms:8.3f}"
            )
        write("\n".join(lines))  # One call of `write` keeps a rank's lines together.


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


class _RankSampler(BlockSampler):
    """Take blocks of equal size, which start at the same time on all ranks."""

    def __init__(self, call: Call, device: Device):
        super().__init__(_BarrierClock(synchronizer(device)), Timing({"": call}))
        self._device = device

    def _size(self, call_ms: float) -> tuple[int, int]:
        return 1, math.ceil(BLOCK_MS / _largest(call_ms, self._device))


class _BarrierClock(HostClock):
    def time_block(self, phases: Sequence[Call], calls: int, inner: int) -> list[list[float]]:
        dist.barrier()
        return super().time_block(phases, calls, inner)


def time_across_ranks(
    calls: Mapping[str, Call],
    budget_s: float,
    *,
    seed: int,
    device: Device = "cpu",
) -> tuple[dict[str, list[float]], list[bool]]:
    """Measure how long each call takes on this rank.

    A block lasts at least 5 ms and starts at the same time on all ranks. In each round, each call
    has one block, in a random order that is the same on all ranks.

    Args:
        calls: Name → call. All ranks must pass the same calls.
        budget_s: Time after which measuring stops, s. There are 6 to 100 rounds.
        seed: Seed of the random order.
        device: Device on which this rank computes.

    Returns:
        Name → time of a call in each round, ms, and whether other processes disturbed each round.
    """
    samplers = {name: _RankSampler(call, device) for name, call in calls.items()}
    for sampler in samplers.values():
        sampler.begin()
    with pause_collector():
        rounds = take_turns(samplers, seed, enough=_budget(budget_s, device))
    ms = {name: [float(round_.ms[name][0]) for round_ in rounds] for name in calls}
    return ms, [round_.is_busy for round_ in rounds]


def time_parts_across_ranks(
    calls: Mapping[str, Callable[[Timer], object]],
    budget_s: float,
    *,
    device: Device = "cpu",
) -> dict[str, list[dict[str, float]]]:
    """Measure how long each part of a call takes on this rank, with a barrier before communication.

    Args:
        calls: Name → function that times its own parts with a `Timer`.
        budget_s: Time after which measuring stops, s. There are 6 to 100 runs.
        device: Device on which this rank computes.

    Returns:
        Name of a call → a list with a mapping for each run: name of a part → its time, ms.
    """
    found = {name: [] for name in calls}
    is_enough = _budget(budget_s, device)
    with pause_collector():
        for count in itertools.count():
            for name, call in calls.items():
                timer = Timer(device)
                dist.barrier()
                call(timer)
                if count:  # The first run is cold.
                    ms = {part: 1e3 * sum(times) for part, times in timer.seconds.items()}
                    found[name].append(ms)
            if is_enough(count):
                break
    return found


def _budget(budget_s: float, device: Device) -> Callable[[int], bool]:
    """Return a function that decides from the number of rounds whether all ranks stop."""
    start = time.perf_counter()

    def is_enough(rounds: int) -> bool:
        late = rounds >= FLOOR_BLOCKS and _largest(time.perf_counter() - start, device) >= budget_s
        return late or rounds >= MAX_BLOCKS

    return is_enough


def _largest(value: float, device: Device) -> float:
    """Return the largest value over ranks, so that all ranks make the same decision."""
    shared = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return float(shared)


def time_collectives(budget_s: float, *, seed: int, device: Device = "cpu") -> list[dict[str, Any]]:
    """Measure the time of collectives of several sizes on this rank, in interleaved blocks.

    Returns:
        A mapping per collective and size. `collective` is the name, and `payload` is the number of
        bytes per rank. `messages` is the number of consecutive messages, and `sent` is the number
        of bytes that each rank sends. `blocks` contains the time of one call in each block, ms.
    """
    world = dist.get_world_size()
    rows, calls = {}, {}
    for payload in PAYLOADS:
        x = torch.zeros(payload // 4, device=device)
        gathered = torch.empty(world * len(x), device=device)
        whole = torch.zeros(payload // 4 // world * world, device=device)
        received = torch.empty_like(whole)
        part = (world - 1) / world
        reduce = partial(dist.all_reduce, x)
        gather = partial(dist.all_gather_into_tensor, gathered, x)
        to_all = partial(dist.all_to_all_single, received, whole)
        for name, call, messages, sent in (
            ("all_reduce", reduce, 2 * (world - 1), 2 * part * payload),
            ("all_gather", gather, world - 1, (world - 1) * payload),
            ("all_to_all", to_all, world - 1, part * payload),
        ):
            key = f"{name} {payload}"
            calls[key] = call
            rows[key] = {"collective": name, "payload": payload, "messages": messages, "sent": sent}
    blocks, _ = time_across_ranks(calls, budget_s, device=device, seed=seed)
    return [row | {"blocks": blocks[key]} for key, row in rows.items()]


def count_bytes(call: Callable[[], object]) -> float | None:
    """Count the bytes that all ranks send in one call, including the bytes of the protocol.

    All ranks must call this function at the same time.

    Returns:
        Number of bytes, or None if other processes share the network. The result is also None with
        backends other than gloo. For example, NCCL does not use the network on one machine.
    """
    if dist.get_backend() != "gloo" or not has_private_network():
        return None
    call()  # The first call opens connections.
    return (_count_operations(call, _COUNTED_CALLS) - _count_operations(call, 0)) / _COUNTED_CALLS


def _count_operations(call: Callable[[], object], calls: int) -> int:
    dist.barrier()
    before = loopback_bytes()
    dist.barrier()
    for _ in range(calls):
        call()
    dist.barrier()
    after = loopback_bytes()
    dist.barrier()
    return after - before


def loopback_bytes() -> int:
    """Return the bytes that the loopback interface has sent, with headers, for all processes.

    Raises:
        KeyError: The system has no counter of the loopback interface.
    """
    return psutil.net_io_counters(pernic=True, nowrap=False)["lo"].bytes_sent


def has_private_network() -> bool:
    """Return whether the network of this process has only the loopback interface."""
    return [*psutil.net_io_counters(pernic=True)] == ["lo"]


def enter_private_network() -> None:
    """Move this process and its future children to a network with only the loopback interface.

    Raises:
        OSError: The system does not allow a private network, and the process keeps its network.
    """
    if sys.platform != "linux":
        raise OSError("this system has no network namespaces")
    libc = ctypes.CDLL(None, use_errno=True)
    # Root needs no user namespace. In a user namespace, root would lose access to files.
    if libc.unshare(_NEW_NETWORK if os.geteuid() == 0 else _NEW_NETWORK | _NEW_USER):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with socket.socket() as control:
        fcntl.ioctl(control, _SET_FLAGS, struct.pack("16sh", b"lo", _UP_RUNNING))
