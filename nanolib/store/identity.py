"""Name the process that writes a run, so that a later one of the same number is another."""

from __future__ import annotations

import functools
import hashlib
import os
import platform

import psutil


def process_name(pid: int | None = None) -> str:
    """Return `HOST:PID:BEGAN` of a process, by default of this one."""
    pid = pid or os.getpid()
    return f"{host()}:{pid}:{_began(pid):.2f}"


@functools.cache
def host() -> str:
    """Return a digest of this machine's name."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def alive(process: str) -> bool:
    """Return whether the process of that name runs on this machine."""
    place, pid, began = process.split(":") if process.count(":") == 2 else ("", "", "")
    if place != host():
        return False
    try:
        ended = psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE
        return (
            not ended and abs(_began(int(pid)) - float(began)) < 1.5
        )  # the boot's moment is rounded to a second
    except psutil.AccessDenied:
        return True
    except (psutil.NoSuchProcess, ValueError):
        return False


def gone(process: str) -> bool:
    """Return whether the process of that name has certainly ended: it is one of this machine."""
    return process.partition(":")[0] == host() and not alive(process)


def _began(pid: int) -> float:
    """Return when a process began, s since the boot: a step of the clock moves both moments."""
    boot = psutil.boot_time()  # psutil takes this reading for the moment of creation too
    return psutil.Process(pid).create_time() - boot
