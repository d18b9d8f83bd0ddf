"""Identify the process that writes a run, even if a later process gets the same process ID."""

import functools
import hashlib
import os
import platform

import psutil


def process_name(pid: int | None = None) -> str:
    """Return the name `HOST:PID:BEGAN` of a process, by default of this process."""
    pid = pid or os.getpid()
    return f"{host()}:{pid}:{_began(pid):.2f}"


@functools.cache
def host() -> str:
    """Return a hash of this machine's name."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def alive(process: str) -> bool:
    """Return whether the process with this name runs on this machine."""
    place, _, started = process.partition(":")
    if place != host():
        return False
    pid, began = started.split(":")
    try:
        ended = psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE
        # The system rounds the boot time to a second.
        return not ended and abs(_began(int(pid)) - float(began)) < 1.5
    except psutil.AccessDenied:
        return True
    except psutil.NoSuchProcess:
        return False


def gone(process: str) -> bool:
    """Return whether the process with this name was on this machine and has ended."""
    return process.partition(":")[0] == host() and not alive(process)


def _began(pid: int) -> float:
    """Return the time from the boot to the start of a process, in s.

    A change of the system clock moves both times, so the difference stays the same.
    """
    boot = psutil.boot_time()
    return psutil.Process(pid).create_time() - boot
