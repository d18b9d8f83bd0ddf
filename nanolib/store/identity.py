"""Which process a run or a lock belongs to: told apart from a later one of the same number, and from one out of sight."""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path

import psutil


def process_name(pid: int | None = None) -> str:
    """`HOST:PID:BEGAN` of a process, by default of this one; the host is a hash."""
    pid = pid or os.getpid()
    return f"{host()}:{pid}:{_began(pid)}"


@functools.cache
def host() -> str:
    """This machine, without naming it."""
    return hashlib.sha256(os.uname().nodename.encode()).hexdigest()[:8]


def pid_of(process: str) -> int:
    """The number in a process's name; -1, which is none, where there is no number."""
    _, _, rest = process.partition(":")
    number = rest.partition(":")[0]
    return int(number) if number.isascii() and number.isdigit() and len(number) < 10 else -1


def alive(process: str) -> bool:
    """Whether the process of that name is still there, on this machine."""
    if process.partition(":")[0] != host() or (pid := pid_of(process)) <= 0:
        return False
    began = process.partition(":")[2].partition(":")[2]
    try:
        if "@" in began:
            return _began(pid) == began
        # where there is no /proc: the wall clock as it began, which a step of the clock moves
        found = psutil.Process(pid)
        return abs(found.create_time() - float(began)) < 1 and found.status() != psutil.STATUS_ZOMBIE
    except FileNotFoundError:
        return _hidden(pid)
    except (psutil.NoSuchProcess, ProcessLookupError, ValueError):
        return False


def gone(process: str, file: Path) -> bool:
    """Whether the process of that name has ended for certain; one on another machine or in another container cannot be seen.

    Args:
        process: Its name.
        file: What it wrote: on a disk of this machine alone whoever did so before this boot has ended.
    """
    place, _, rest = process.partition(":")
    began = rest.partition(":")[2]
    if place != host():
        return False
    if "@" not in began:
        return not alive(process)
    boot, _, space = began.partition("@")[2].partition(".")
    if boot != _boot():
        return "" not in (boot, _boot()) and _on_own_disk(file)
    return space == _space() and _sees_processes() and not alive(process)


def _on_own_disk(file: Path) -> bool:
    mount = next(folder for folder in file.resolve().parents if folder.is_mount())
    return str(mount) in {disk.mountpoint for disk in psutil.disk_partitions()}  # without network file systems


def _sees_processes() -> bool:
    """Whether /proc is there, and numbers processes as they number themselves."""
    try:
        return str(Path("/proc/self").readlink()) == str(os.getpid())
    except OSError:
        return False


def _hidden(pid: int) -> bool:
    """Whether /proc keeps it from us, as some systems do with what other users run."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except ProcessLookupError:
        return False
    return True


def _began(pid: int) -> str:
    """When a process began: by /proc in ticks since the boot, which boot, and which container; no wall clock moves it."""
    stat = Path(f"/proc/{'self' if pid == os.getpid() else pid}/stat")
    if not Path("/proc/self/stat").exists():
        return f"{psutil.Process(pid).create_time():.2f}"
    state, *fields = stat.read_text(errors="replace").rpartition(")")[2].split()  # its name may hold anything
    return "" if state in "ZX" else f"{fields[18]}@{_boot()}.{_space()}"


@functools.cache
def _boot() -> str:
    file = Path("/proc/sys/kernel/random/boot_id")
    return hashlib.sha256(file.read_bytes()).hexdigest()[:8] if file.exists() else ""


def _space() -> str:
    """Among which processes a number is counted; containers count their own."""
    try:
        return "".join(c for c in str(Path("/proc/self/ns/pid").readlink()) if c.isdigit())
    except OSError:
        return ""
