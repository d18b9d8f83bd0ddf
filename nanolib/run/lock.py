"""One sweep per device at a time: a lock that waits, says for whom, and that the end of its process releases."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from nanolib.measurement import BadInput, printable

_POLL_S = 0.2
_LONGEST = 400  # bytes of an owner's text


def lock_path(device: str) -> Path:
    """The lock file of a device, one for all users of the machine."""
    name = device.replace(":", "-")
    if device.startswith("cuda"):
        from nanolib.meters.machine import (
            gpu_uuid,
        )  # imports torch, for which a command that is mistaken need not wait

        name = gpu_uuid(device)
    return Path(tempfile.gettempdir()) / f"nanolib-{name}.lock"


def say(line: str) -> None:
    """A line beside what a command answers, at once."""
    print(printable(line), file=sys.stderr, flush=True)


@contextmanager
def device_lock(
    device: str,
    what: str,
    log: Callable[[str], object] = say,
    pause: Callable[[float], object] = time.sleep,
) -> Iterator[None]:
    """Hold the device for the block; wait while another process does.

    Args:
        device: As `resolve_device` names it.
        what: Who holds it, for those who wait.
        log: Receives one line when there is a wait and one when it ends.
        pause: Called between two tries with how long to wait, s; what it raises ends the wait.

    Raises:
        BadInput: Something else is where its file should be.
    """
    lock, waiting = FileLock(lock_path(device), mode=0o666), False
    while not _taken(lock):
        if not waiting:
            log(f"waiting for {device}: in use by {_owner(device)}; this run starts when that ends")
            waiting = True
        pause(_POLL_S)
    try:
        if waiting:
            log(f"{device} is free; starting")
        _write_owner(device, f"{os.getpid()} {printable(what)[:300]}")
        yield
    finally:
        lock.release()


def holder(device: str) -> str:
    """Who holds the device now, in words; empty when it is free."""
    lock = FileLock(lock_path(device), mode=0o666)
    with contextlib.suppress(BadInput):  # whoever wants to hold it is told
        if not _taken(lock):
            return _owner(device)
        lock.release()
    return ""


def _taken(lock: FileLock) -> bool:
    """Whether the lock was free, and is ours now.

    Raises:
        BadInput: Its file cannot be opened.
    """
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return False
    except OSError as error:
        raise BadInput(
            f"lock: {lock.lock_file} is no lock file of nanolib's ({error.strerror}); move it away, or set TMPDIR"
        ) from None
    return True


def _write_owner(device: str, text: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
    with contextlib.suppress(
        OSError
    ):  # it is another user's: others are told of "another process" then
        file = os.open(lock_path(device).with_suffix(".owner"), flags, 0o644)
        os.write(file, text.encode())
        os.close(file)


def _owner(device: str) -> str:
    with contextlib.suppress(OSError, ValueError):
        file = os.open(
            lock_path(device).with_suffix(".owner"), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        )
        pid, _, what = os.read(file, _LONGEST).decode(errors="replace").partition(" ")
        os.close(file)
        if psutil.pid_exists(int(pid)):  # the text may be of one before
            return f"process {int(pid)} ({what})"
    return "another process"
