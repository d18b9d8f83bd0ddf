"""Find interference: load of the CPUs by other processes, steal time, and other work on a GPU.

with watch_cpus() as load:
    ...
load.others  # share of the CPUs that other processes used, such as 0.5
"""

import contextlib
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import psutil

from nanolib.measurement import Flag
from nanolib.meters.gpu import gpu_interference
from nanolib.meters.machine import Quota, cpu_quotas, gpu_uuid, usable_cores, usable_cpus
from nanolib.paths import FIRST_VARIABLE

# Other processes disturb a timing if they use more than 10 % of the CPUs.
BUSY_SHARE = 0.10
# Linux includes the time of guest systems in `user`.
_COUNTED = ("user", "system", "idle", "nice", "iowait", "irq", "softirq", "steal")
_WATCHED_S = 0.3
# A hypervisor disturbs a timing if it takes more than 2 % of the CPU time.
_STOLEN = 0.02
# CPU time advances in steps of 10 ms, so a share of less than half a second is inaccurate.
_LEAST_S = 0.5


class CpuTimes(NamedTuple):
    """CPU time until a moment, summed over the CPUs that this process may use, s.

    Attributes:
        total: Time in all categories.
        idle: Time without work.
        stolen: Time that a hypervisor took.
        ours: CPU time of the process that began this command and of its descendants.
        quotas: CPU quotas of this process.
    """

    total: float
    idle: float
    stolen: float
    ours: float
    quotas: Sequence[Quota]


@dataclass
class CpuLoad:
    """Load of the CPUs during a span of time.

    Attributes:
        others: Share of the CPUs that other processes used, or None if the share is not known.
        stolen: Share of the CPUs that a hypervisor took, or None if the share is not known.
        throttled: Share of a CPU quota's periods in which the kernel paused this process, or 0
            without a quota. If there are several quotas, the largest share counts.
        quota: CPU quota with this share, cores.
    """

    others: float | None = None
    stolen: float | None = None
    throttled: float = 0.0
    quota: float = math.inf

    @property
    def taken(self) -> float | None:
        """Share of the CPUs that other processes and a hypervisor took, or None if not known."""
        return None if self.others is None else min(1.0, self.others + self.stolen)

    @property
    def is_busy(self) -> bool | None:
        """Whether others took enough CPU time to disturb a timing, or None if not known."""
        return None if self.taken is None else self.taken > BUSY_SHARE

    @property
    def flags(self) -> tuple[Flag, ...]:
        """Flags of a timing that nanolib took under this load."""
        flags = {Flag.BUSY_MACHINE: self.is_busy, Flag.THROTTLED: self.throttled > BUSY_SHARE}
        return tuple(flag for flag, is_set in flags.items() if is_set)

    def details(self) -> dict[str, Any]:
        """Return the row details `others_share`, and `throttled_by` if a quota disturbs timings."""
        found = {"others_share": self.taken}
        if Flag.THROTTLED in self.flags:
            found["throttled_by"] = f"a CPU quota of {self.quota:g} cores"
        return found


def shortest_watch_s() -> float:
    """Return the shortest time in which the load of the CPUs can be measured, s."""
    return max(_WATCHED_S, 1.1 * _LEAST_S / usable_cores())


@contextlib.contextmanager
def watch_cpus() -> Iterator[CpuLoad]:
    """Measure the load of the CPUs within the context. The load is set when the context ends."""
    load, before = CpuLoad(), cpu_times()
    try:
        yield load
    finally:
        vars(load).update(vars(load_between(before, cpu_times())))


def cpu_times() -> CpuTimes:
    """Read the CPU time that processes have used until now."""
    children = os.times()
    ours = time.process_time() + children.children_user + children.children_system
    ours += _seconds_of(process for process in _family() if process.pid != os.getpid())
    every, mine = psutil.cpu_times(percpu=True), usable_cpus()
    # psutil's list leaves out offline CPUs, so a CPU's index may differ from its number.
    is_complete = mine and os.sysconf("SC_NPROCESSORS_CONF") == len(every)
    chosen = [every[number] for number in mine] if is_complete else every
    total, idle, stolen = (
        sum(getattr(cpu, name, 0.0) for cpu in chosen for name in names)
        for names in (_COUNTED, ("idle", "iowait"), ("steal",))
    )
    return CpuTimes(total, idle, stolen, ours, cpu_quotas())


def load_between(before: CpuTimes, after: CpuTimes) -> CpuLoad:
    """Compute the load of the CPUs between two moments."""
    *pairs, (old_quotas, new_quotas) = zip(before, after, strict=True)
    total, idle, stolen, ours = (new - old for old, new in pairs)
    load = CpuLoad()
    if total > _LEAST_S:
        load.others = min(1.0, max(0.0, (total - idle - stolen - ours) / total))
        load.stolen = stolen / total
    for old, new in zip(old_quotas, new_quotas, strict=False):
        share = (new.throttled - old.throttled) / max(1, new.periods - old.periods)
        if share > load.throttled:
            load.throttled, load.quota = share, new.cores
    return load


_REST_S, _LOOK_S, _TICKS_S = 10.0, 0.1, 0.02


def wait_for_compilers() -> None:
    """Wait, at most 10 s, until torch's compile processes are idle.

    torch starts one process per core for the first compilation. A compile process may still be
    starting when the compilation is over, and would disturb a timing.
    """
    if "torch._inductor.async_compile" not in sys.modules:
        return
    end, before = time.monotonic() + _REST_S, -math.inf
    while time.monotonic() < end:
        used_s = _seconds_of(psutil.Process().children(recursive=True))
        if used_s - before <= _TICKS_S:
            return
        before = used_s
        time.sleep(_LOOK_S)


def _seconds_of(processes: Iterable[psutil.Process]) -> float:
    """Return the CPU time of processes and of their ended children, s."""
    seconds = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):  # A parent's time includes that of ended children.
            # The first four times are user and system, and the same of ended children.
            seconds += sum(process.cpu_times()[:4])
    return seconds


def _family() -> list[psutil.Process]:
    """List the processes of this command, such as `nano`, papermill, kernel, worker and ranks."""
    first = own = psutil.Process()
    number = int(os.environ.setdefault(FIRST_VARIABLE, str(own.pid)))
    with contextlib.suppress(psutil.Error):
        first = next((each for each in own.parents() if each.pid == number), own)
    return [first, *first.children(recursive=True)]


def find_interference(device: str) -> list[str]:
    """Describe what would disturb a measurement now, in one line per cause.

    Args:
        device: Name of the device, from `resolve_device`.
    """
    with watch_cpus() as load:
        time.sleep(shortest_watch_s())
    lines = cpu_interference(load)
    if device.startswith("cuda"):
        lines += gpu_interference(gpu_uuid(device))
    return lines


def cpu_interference(load: CpuLoad) -> list[str]:
    """Describe the load of other processes and of a hypervisor, in one line each."""
    if load.others is None:
        return ["the load of other processes was not measured: this system does not count CPU time"]
    lines = []
    if load.others > BUSY_SHARE:
        lines.append(f"other processes use {load.others:.0%} of the CPUs")
    if load.stolen > _STOLEN:
        lines.append(f"a hypervisor takes {load.stolen:.0%} of the CPU time (steal)")
    return lines
