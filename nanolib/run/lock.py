"""Lock a device for one run, so that a second run waits. The end of a process frees its lock."""

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


def lock_path(device: str) -> Path:
    """Return the path of a device's lock file. Runs with one temporary folder share this file.

    Runs with different temporary folders, such as jobs with a `TMPDIR` of their own, do not wait
    for each other.
    """
    name = device.replace(":", "-")
    if device.startswith("cuda"):
        from nanolib.meters.machine import gpu_uuid  # Only the lock of a GPU needs torch.

        name = gpu_uuid(device)
    return Path(tempfile.gettempdir()) / f"nanolib-{name}.lock"


def say(line: str) -> None:
    """Print a line to standard error without a delay."""
    print(printable(line), file=sys.stderr, flush=True)


@contextmanager
def device_lock(
    device: str,
    what: str,
    log: Callable[[str], object] = say,
    pause: Callable[[float], object] = time.sleep,
) -> Iterator[None]:
    """Lock a device within the context. First wait until no other process uses the device.

    Args:
        device: Device, such as `cpu` or `cuda:0`.
        what: Name of this run, which other runs show while they wait.
        log: Function that receives a line when a wait begins and a line when the wait ends.
        pause: Function that waits for a time in s between two attempts to lock the device. An
            exception in `pause` ends the wait.

    Raises:
        BadInput: This process cannot open the lock file.
    """
    path, waits = lock_path(device), False
    lock, owner = FileLock(path, mode=0o666), path.with_suffix(".owner")
    while not lock.is_locked:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if not waits:
                log(f"waiting for {device}: in use by {_read(owner)}; this run starts afterwards")
            waits = True
            pause(_POLL_S)
        except OSError as error:
            raise BadInput(
                f"lock: {path} is not nanolib's lock file ({error.strerror}); "
                "move it away, or set TMPDIR"
            ) from None
    try:
        if waits:
            log(f"{device} is free; starting")
        # If the owner file belongs to another user, this process cannot write its name there. Other
        # runs then show "another process".
        with contextlib.suppress(OSError), open(owner, "w", opener=_open_file) as file:
            file.write(f"{os.getpid()} {printable(what)}")
        yield
    finally:
        lock.release()


def _open_file(path: str, flags: int) -> int:
    """Open a file, but never follow a link or wait for a pipe that another user has left there."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)


def _read(owner: Path) -> str:
    """Return the process and the run that the owner file names."""
    with contextlib.suppress(OSError, ValueError):
        with open(owner, errors="replace", opener=_open_file) as file:
            pid, _, what = file.read().partition(" ")
        if psutil.pid_exists(int(pid)):  # The text may be from an earlier owner.
            return f"process {int(pid)} ({what})"
    return "another process"
