"""Who used the CPUs meanwhile: this command and all that it started, or others; and whether a quota held it back.

with watched_cpus() as load:
...
load.others  # share of the CPUs, 0.5
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil

from nanolib.measurement import Flag
from nanolib.meters.limits import cpu_quota, throttled_periods, usable_cpus
from nanolib.paths import LAUNCH_VARIABLE

BUSY_SHARE = 0.10  # of the CPUs, above which a timing suffers
# What is in the commands of processes that nanolib starts.
_STARTED = {"nanolib.run.process", "nanolib.run.torchrun", "--multiprocessing-fork"}
_KERNEL = "ipykernel_launcher"  # under `nano run`
_COUNTED = (
    "user",
    "system",
    "idle",
    "nice",
    "iowait",
    "irq",
    "softirq",
    "steal",
)  # a guest's time is within the user's
LEAST_S = 0.5  # CPUs are counted in ticks of 10 ms: over less the difference says nothing


@dataclass(frozen=True)
class CpuTimes:
    """CPU time until a moment, s.

    Attributes:
        everyone: By kind, of all CPUs that this process may run on.
        ours: Of this command: the process that began it and all that descend from it.
        periods: As `throttled_periods` gives them.
    """

    everyone: dict[str, float]
    ours: float
    periods: dict[str, tuple[int, int]]


@dataclass
class CpuLoad:
    """What the CPUs did over a span; shares are None where the span was too short, or the system does not count.

    Attributes:
        others: Share of the CPUs that other processes used.
        stolen: Share that a hypervisor took.
        others_s: CPU time of other processes, s.
        held_back: Share of its quota's periods in which this process was held back; 0 without a quota.
        quota: Cores' worth of time that it is allowed.
    """

    others: float | None = None
    stolen: float | None = None
    others_s: float = 0.0
    held_back: float = 0.0
    quota: float = 0.0

    @property
    def taken(self) -> float | None:
        """Share of the CPUs that others took, a hypervisor among them."""
        return (
            None
            if self.others is None or self.stolen is None
            else min(1.0, self.others + self.stolen)
        )

    @property
    def is_busy(self) -> bool:
        """Whether others took so much that a timing suffers."""
        return (self.taken or 0.0) > BUSY_SHARE

    @property
    def limited_by(self) -> str:
        """The quota, where it held this process back so often that a timing suffers."""
        return f"a CPU quota of {self.quota:g} cores" if self.held_back > BUSY_SHARE else ""

    @property
    def flags(self) -> tuple[Flag, ...]:
        """What a timing of this span carries."""
        return tuple(
            flag
            for flag, holds in (
                (Flag.BUSY_MACHINE, self.is_busy),
                (Flag.THROTTLED, self.limited_by),
            )
            if holds
        )

    def details(self) -> dict[str, Any]:
        """For a row: `others_share`, and `throttled_by` where it was."""
        return {"others_share": self.taken} | (
            {"throttled_by": self.limited_by} if self.limited_by else {}
        )


@contextlib.contextmanager
def watched_cpus() -> Iterator[CpuLoad]:
    """What the CPUs do while the block runs; filled when it ends."""
    load, before = CpuLoad(), cpu_times()
    try:
        yield load
    finally:
        vars(load).update(vars(load_between(before, cpu_times())))


def cpu_times() -> CpuTimes:
    """The CPU time until now."""
    ours = _of_this_command()
    every, mine = psutil.cpu_times(percpu=True), usable_cpus()
    # numbers of CPUs that are off have no place in the list: then it is not known which are ours
    chosen = [every[number] for number in mine] if mine and max(mine) < len(every) else every
    everyone = {name: sum(getattr(one, name, 0.0) for one in chosen) for name in _COUNTED}
    return CpuTimes(everyone, ours, throttled_periods())


def load_between(before: CpuTimes, after: CpuTimes) -> CpuLoad:
    """Who used the CPUs from one moment to another."""
    spent = {name: after.everyone[name] - before.everyone[name] for name in after.everyone}
    load, total = CpuLoad(quota=cpu_quota()), sum(spent.values())
    if total > LEAST_S:
        stolen = spent.get("steal", 0.0)
        idle = spent.get("idle", 0.0) + spent.get("iowait", 0.0)
        load.others_s = max(0.0, total - idle - stolen - (after.ours - before.ours))
        load.others, load.stolen = min(1.0, load.others_s / total), stolen / total
    for group, (periods, throttled) in after.periods.items():
        first, held = before.periods.get(group, (periods, throttled))
        if periods > first:
            load.held_back = max(load.held_back, (throttled - held) / (periods - first))
    return load


_REST_S, _LOOK_S, _TICKS_S = 10.0, 0.1, 0.02
_last_look = -math.inf, -math.inf  # when, and what they had used by then, s


def wait_for_compilers() -> None:
    """Wait, at most 10 s, until the processes that torch compiles with are at rest.

    It starts one per core at the first thing to compile, compiles that by itself meanwhile, and comes back while they still begin.
    """
    global _last_look
    if "torch._inductor.async_compile" not in sys.modules:
        return
    end = time.monotonic() + _REST_S
    while time.monotonic() < end:
        used_s = _seconds_of(psutil.Process().children(recursive=True))
        (moment, before), _last_look = _last_look, (time.monotonic(), used_s)
        if _last_look[0] - moment >= _LOOK_S and _last_look[1] - before <= _TICKS_S:
            return
        time.sleep(_LOOK_S)


def _of_this_command() -> float:
    """CPU seconds of the process that began this command and of all that descend from it, those that have ended included."""
    children = os.times()
    seconds = time.process_time() + children.children_user + children.children_system
    return seconds + _seconds_of(process for process in _family() if process.pid != os.getpid())


def _seconds_of(processes: Iterable[psutil.Process]) -> float:
    """CPU seconds of processes and of their children that have ended."""
    seconds = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it has ended just now: its parent has its time
            times = process.cpu_times()
            seconds += times.user + times.system
            seconds += getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
    return seconds


def _family() -> list[psutil.Process]:
    """Processes of this command: `nano`, papermill, kernel, worker and ranks know who started them, others are their own."""
    first = psutil.Process()
    with contextlib.suppress(psutil.Error):
        started = _STARTED | ({_KERNEL} if LAUNCH_VARIABLE in os.environ else set())
        while started & {*first.cmdline()} and (parent := first.parent()) is not None:
            first = parent
    return [first, *first.children(recursive=True)]
