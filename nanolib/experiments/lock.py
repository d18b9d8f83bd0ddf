"""One sweep per device at a time: a lock that waits, says for whom, and that a crash releases."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from nanolib.meters.machine import gpu_uuid

_POLL_S = 0.2


def lock_path(device: str) -> Path:
    """The lock file of a device, one for all users of the machine."""
    name = gpu_uuid(device) if device.startswith("cuda") else device.replace(":", "-")
    return Path(tempfile.gettempdir()) / f"nanolib-{name}.lock"


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


@contextmanager
def device_lock(device: str, what: str, say: Callable[[str], None] = _say) -> Iterator[None]:
    """Hold the device for the block; wait while another process does.

    Args:
        device: As `resolve_device` names it.
        what: Who holds it, for those who wait.
        say: Told once, in one line, when there is a wait and when it ends.
    """
    handle = _open(lock_path(device))
    try:
        waiting = False
        while not _try(handle):
            if not waiting:
                say(f"waiting for {device}: in use by {_holder_text(handle)}; this run starts when that ends")
                waiting = True
            time.sleep(_POLL_S)
        if waiting:
            say(f"{device} is free; starting")
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps({"pid": os.getpid(), "what": what}).encode(), 0)
        yield
        os.ftruncate(handle, 0)
    finally:
        os.close(handle)  # releases the lock, as the end of the process does


def holder(device: str) -> str:
    """Who holds the device now, in words; empty when it is free."""
    if not lock_path(device).exists():
        return ""
    handle = _open(lock_path(device))
    try:
        return "" if _try(handle) else _holder_text(handle)
    finally:
        os.close(handle)


def _open(path: Path) -> int:
    # An existing file is opened without O_CREAT: Linux refuses that for other people's files in a sticky folder.
    try:
        handle = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        os.fchmod(handle, 0o666)
    os.set_inheritable(handle, False)
    return handle


def _try(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder_text(handle: int) -> str:
    text = os.pread(handle, 4096, 0).decode(errors="replace")
    try:
        said = json.loads(text)
        return f"process {said['pid']} ({said['what']})"
    except (ValueError, KeyError, TypeError):  # the holder is between taking the lock and writing its name
        return "another process"
