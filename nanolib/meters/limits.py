"""Find what this process may use: cores by affinity and CPU quota, memory by control groups.

A limit of a control group (cgroup v2, or v1's `cpu` and `memory`) holds for all groups below it. So
the process's own group and its visible parents are read.
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
# Of version 2 and of version 1: limit, use, and file cache, which the kernel frees when needed.
_MEMORY = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def usable_cores() -> int:
    """Return how many cores this process may keep busy, by affinity and CPU quota; at least one."""
    return max(1, min(len(usable_cpus()) or os.cpu_count() or 1, math.floor(min(cpu_quota(), 1e6))))


def usable_cpus() -> set[int]:
    """Return the numbers of the CPUs that this process may run on; empty if they are not known."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def cpu_quota() -> float:
    """Return the CPU time that control groups allow, in cores; infinite without a quota."""
    return min((quota for _, quota in _quotas()), default=math.inf)


def throttled_periods() -> dict[str, tuple[int, int]]:
    """Return, per control group with a quota, its periods and those in which it was stopped."""
    found = {}
    for group, _ in _quotas():
        counts = _fields(group / "cpu.stat")
        found[str(group)] = counts.get("nr_periods", 0), counts.get("nr_throttled", 0)
    return found


def memory_limits() -> list[tuple[int, int]]:
    """Return limit and use of each control group with a limit, bytes; file cache is not use."""
    found = []
    for group in _groups("memory"):
        for limit, used, cached in _MEMORY:
            # a file of the other version does not exist, and "max" is not a limit
            with contextlib.suppress(OSError, ValueError):
                most, taken = (int((group / name).read_text()) for name in (limit, used))
                found.append((most, taken - _fields(group / "memory.stat").get(cached, 0)))
    return found


@contextlib.contextmanager
def limit_threads() -> Iterator[None]:
    """Limit torch's threads in the block to the usable cores, unless OMP_NUM_THREADS sets them.

    torch respects affinity but not a quota: two threads on half a core are stopped most of the
    time.
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
        with contextlib.suppress(OSError, ValueError):  # version 2; "max" is not a quota
            quota, period = map(int, (group / "cpu.max").read_text().split())
            yield group, quota / period
        with contextlib.suppress(OSError):  # version 1; -1 is not a quota
            quota, period = (
                int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period")
            )
            if quota > 0:
                yield group, quota / period


def _groups(controller: str) -> list[Path]:
    """List the folders of the process's control group and its parents, its own first."""
    try:
        lines = [line.split(":", 2) for line in (_PROC / "cgroup").read_text().splitlines()]
    except OSError:  # not Linux
        return []
    paths = {name: path for _, names, path in lines for name in names.split(",")}
    is_first = controller in paths  # version 1 has a folder for each controller
    top = _MOUNTED / controller if is_first else _MOUNTED
    own = top / paths.get(controller, paths.get("", "/")).lstrip("/")
    if ".." in own.parts or not own.is_dir():  # a container sees its own group as the root
        own = top
    return [own, *(parent for parent in own.parents if parent.is_relative_to(top))]


def _fields(file: Path) -> dict[str, int]:
    """Read the lines `name number` of a file; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        lines = (line.split() for line in file.read_text().splitlines())
        return {words[0]: int(words[1]) for words in lines if len(words) == 2}
    return {}
