"""One sweep per device at a time: a lock that waits, says for whom, and that a crash releases.

Its file lies where all users may write, so it is never followed, made anew or written to unless it is plainly a lock of ours.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from nanolib.measurement import BadInput, printable
from nanolib.store.identity import alive, pid_of, process_name

_POLL_S = 0.2
_LONGEST = 4096  # bytes of what a holder says
# a pipe in its place must not keep us waiting
_OPEN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def lock_path(device: str) -> Path:
    """The lock file of a device, one for all users of the machine."""
    name = device.replace(":", "-")
    if device.startswith("cuda"):
        from nanolib.meters.machine import gpu_uuid  # imports torch, for which a command that is mistaken need not wait

        name = gpu_uuid(device)
    return Path(tempfile.gettempdir()) / f"nanolib-{name}.lock"


def say(line: str) -> None:
    """A line beside what a command answers, at once."""
    print(printable(line), file=sys.stderr, flush=True)


@contextmanager
def device_lock(
    device: str, what: str, log: Callable[[str], object] = say, pause: Callable[[float], object] = time.sleep
) -> Iterator[None]:
    """Hold the device for the block; wait while another process does.

    Args:
        device: As `resolve_device` names it.
        what: Who holds it, for those who wait.
        log: Told once, in one line, when there is a wait and when it ends.
        pause: Called between two tries with how long to wait, s; what it raises ends the wait.

    Raises:
        BadInput: Something else lies where its file should.
    """
    path, waiting = lock_path(device), False
    while True:
        handle = _open(path)
        try:
            held = _try(handle)
            if held and _is_at(path, handle):
                break
            if not held and not waiting:
                log(f"waiting for {device}: in use by {_holder_text(handle)}; this run starts when that ends")
                waiting = True
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # somebody may have removed the file meanwhile, and others made a new one
        if not held:
            pause(_POLL_S)
    try:
        if waiting:
            log(f"{device} is free; starting")
        _write(path, handle, json.dumps({"process": process_name(), "what": what[:300]}))
        yield
        _write(path, handle, "")
    finally:
        os.close(handle)  # releases the lock, as the end of the process does


def holder(device: str) -> str:
    """Who holds the device now, in words; empty when it is free."""
    try:
        handle = os.open(lock_path(device), os.O_RDONLY | _OPEN)
    except OSError:  # whoever wants to hold it is told
        return ""
    try:
        return "" if _try(handle) else _holder_text(handle)
    finally:
        os.close(handle)


def _open(path: Path) -> int:
    """The file, made if it is missing.

    Raises:
        BadInput: It is no lock file.
    """
    while True:
        try:
            handle = os.open(path, os.O_RDONLY | _OPEN)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):  # another made it just now
                made = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN, 0o644)
                os.fchmod(made, 0o644)  # whatever the umask: others wait for it too
                os.close(made)
            continue
        except OSError as error:  # a link, or a file that its owner keeps to himself
            raise _wrong(path, error.strerror) from None
        found = os.fstat(handle)
        if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:
            return handle
        os.close(handle)
        raise _wrong(path, "it is a folder, a pipe or a file with two names")


def _wrong(path: Path, why: str) -> BadInput:
    return BadInput(f"lock: {path} is no lock file of nanolib's ({why}); move it away, or set TMPDIR to another folder")


def _write(path: Path, handle: int, text: str) -> None:
    """Say who holds it; in another user's file nobody does.

    Raises:
        BadInput: What is in the file is not ours to overwrite.
    """
    if os.fstat(handle).st_uid != os.geteuid():
        return
    if os.fstat(handle).st_size and "what" not in _said(handle):
        raise _wrong(path, "something else is in it")
    with contextlib.suppress(FileNotFoundError):  # somebody removed it: there is nobody to tell
        file = os.open(path, os.O_WRONLY | _OPEN)
        if os.path.samestat(os.fstat(file), os.fstat(handle)):
            os.ftruncate(file, 0)
            os.pwrite(file, text.encode(), 0)
        os.close(file)


def _is_at(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _try(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _said(handle: int) -> dict[str, str]:
    """What its holder has written; nothing while it has not."""
    text = os.pread(handle, _LONGEST, 0).decode(errors="replace")
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def _holder_text(handle: int) -> str:
    said = _said(handle)
    process = str(said.get("process", ""))
    # the file may be another user's than the holder's, and speak of one before
    return f"process {pid_of(process)} ({said.get('what')})" if alive(process) else "another process"
