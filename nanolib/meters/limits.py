"""What this process may use of its machine: cores by affinity and a container's quota, memory by its control groups.

What limits a control group (cgroup v2, or v1's `cpu` and `memory`) limits all groups below it: the own group and its parents are
asked, as far as they are shown here.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch

_PROC = Path("/proc/self")
_MOUNTED = Path("/sys/fs/cgroup")
# Of version 2 and of version 1: limit, use, and what the cache of files holds, which is given back when asked for.
_MEMORY = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def usable_cores() -> int:
    """Cores that this process may keep busy: those that it may run on, and no more than its CPU quota pays for; at least one."""
    return max(1, min(len(usable_cpus()) or os.cpu_count() or 1, math.floor(min(cpu_quota(), 1e6))))


def usable_cpus() -> set[int]:
    """Numbers of the CPUs that this process may run on; empty where the system does not tell."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def cpu_quota() -> float:
    """Cores' worth of time that this process's control groups allow it, such as 0.5; infinite without a quota."""
    return min((quota for _, quota in _quotas()), default=math.inf)


def throttled_periods() -> dict[str, tuple[int, int]]:
    """Per control group with a quota: periods in which it ran, and those in which it was held back for having used its quota."""
    found = {}
    for group, _ in _quotas():
        counts = _fields(group / "cpu.stat")
        found[str(group)] = counts.get("nr_periods", 0), counts.get("nr_throttled", 0)
    return found


def memory_limits() -> list[tuple[int, int]]:
    """Limit and use of each control group that has a limit, bytes; what the cache of files holds is not counted as used."""
    found = []
    for group in _groups("memory"):
        for limit, used, cached in _MEMORY:
            with contextlib.suppress(
                OSError, ValueError
            ):  # of the other version, or no limit ("max")
                numbers = [int((group / name).read_text()) for name in (limit, used)]
                found.append(
                    (numbers[0], numbers[1] - _fields(group / "memory.stat").get(cached, 0))
                )
    return found


@contextlib.contextmanager
def fitting_threads() -> Iterator[None]:
    """Within it torch uses no more threads than there are usable cores, unless OMP_NUM_THREADS says how many.

    torch knows of affinity and nothing of a quota: two threads on half a core stand still together most of the time.
    """
    before = torch.get_num_threads()
    if before > usable_cores() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(usable_cores())
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


def _quotas() -> Iterator[tuple[Path, float]]:
    for group in _groups("cpu"):
        with contextlib.suppress(OSError, ValueError):  # version 2; "max" is no quota
            quota, period = map(int, (group / "cpu.max").read_text().split())
            yield group, quota / period
        with contextlib.suppress(OSError):  # version 1; -1 is no quota
            quota, period = (
                int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period")
            )
            if quota > 0:
                yield group, quota / period


def _groups(controller: str) -> list[Path]:
    """Folders of the own control group and its parents, the own one first; empty where there are none."""
    try:
        lines = [line.split(":", 2) for line in (_PROC / "cgroup").read_text().splitlines()]
    except OSError:  # not Linux
        return []
    paths = {name: path for _, names, path in lines for name in names.split(",")}
    is_first = controller in paths  # version 1 has a folder for each controller
    top = _MOUNTED / controller if is_first else _MOUNTED
    own = top / paths.get(controller, paths.get("", "/")).lstrip("/")
    if ".." in own.parts or not own.is_dir():  # a container is shown its own group as the root
        own = top
    return [own, *(parent for parent in own.parents if parent.is_relative_to(top))]


def _fields(file: Path) -> dict[str, int]:
    """The lines `name number` of a file; empty where it cannot be read."""
    with contextlib.suppress(OSError):
        lines = (line.split() for line in file.read_text().splitlines())
        return {words[0]: int(words[1]) for words in lines if len(words) == 2}
    return {}
