"""Lock a device for one run: a lock that waits, names its owner, and ends with its process."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil
from filelock import FileLock, Timeout

from nanolib.measurement import BadInput, printable

_POLL_S = 0.2
_LONGEST = 400  # bytes of an owner's text


def lock_path(device: str) -> Path:
    """Return the lock file of a device, one for all users of the machine."""
    name = device.replace(":", "-")
    if device.startswith("cuda"):
        from nanolib.meters.machine import gpu_uuid  # torch, which a mistaken command need not load

        name = gpu_uuid(device)
    return Path(tempfile.gettempdir()) / f"nanolib-{name}.lock"


def say(line: str) -> None:
    """Print a line to the standard error, at once."""
    print(printable(line), file=sys.stderr, flush=True)


@contextmanager
def device_lock(
    device: str,
    what: str,
    log: Callable[[str], object] = say,
    pause: Callable[[float], object] = time.sleep,
) -> Iterator[None]:
    """Use the device alone for the block; wait while another process does.

    Args:
        device: As `resolve_device` names it.
        what: Who uses it, for the runs that wait.
        log: Receives one line when there is a wait and one when it ends.
        pause: Called between two tries with how long to wait, s; what it raises ends the wait.

    Raises:
        BadInput: The lock file is not one of nanolib's.
    """
    lock, waits = FileLock(lock_path(device), mode=0o666), False
    while not _acquire(lock):
        if not waits:
            log(f"waiting for {device}: in use by {_owner(lock)}; this run starts when that ends")
        waits = True
        pause(_POLL_S)
    try:
        if waits:
            log(f"{device} is free; starting")
        # Another user's file cannot be written: the others wait for "another process" then.
        with contextlib.suppress(OSError), _owner_file(lock, "w") as file:
            file.write(f"{os.getpid()} {printable(what)[:300]}")
        yield
    finally:
        lock.release()


def lock_owner(device: str) -> str:
    """Name who uses the device now; empty if nobody does."""
    lock = FileLock(lock_path(device), mode=0o666)
    with contextlib.suppress(BadInput):  # the run that wants it reports this
        if not _acquire(lock):
            return _owner(lock)
        lock.release()
    return ""


def _acquire(lock: FileLock) -> bool:
    """Acquire the lock if it is free, and return whether it was.

    Raises:
        BadInput: Its file cannot be opened.
    """
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return False
    except OSError as error:
        raise BadInput(
            f"lock: {lock.lock_file} is not nanolib's lock file ({error.strerror}); "
            "move it away, or set TMPDIR"
        ) from None
    return True


def _owner_file(lock: FileLock, mode: str) -> IO[str]:
    """Open the text that names the lock's owner; a link in its place is not followed."""

    def opened(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)

    path = Path(lock.lock_file).with_suffix(".owner")
    return open(path, mode, errors="replace", opener=opened)


def _owner(lock: FileLock) -> str:
    with contextlib.suppress(OSError, ValueError), _owner_file(lock, "r") as file:
        pid, _, what = file.read(_LONGEST).partition(" ")
        if psutil.pid_exists(int(pid)):  # the text may be of an earlier owner
            return f"process {int(pid)} ({what})"
    return "another process"
