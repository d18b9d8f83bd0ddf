"""Processes of our own: started so that they can be ended whole, ended for certain, and what their end says.

What they run begins with `launch.command`, by which they end with the process that started them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Protocol

import psutil

KILLED = "its process was killed by"


class Ending(Protocol):
    """A process that can be ended: `subprocess.Popen`, or what behaves so."""

    pid: int

    def wait(self) -> int:
        """How it ended."""
        ...


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a process in a group of its own: Ctrl-C reaches us alone, and `end_group` reaches all that it started.

    Args:
        command: What to run.
        options: As `subprocess.Popen` takes them.
    """
    return subprocess.Popen(list(command), start_new_session=True, **options)


def import_path() -> str:
    """PYTHONPATH by which another process imports what this one does."""
    return os.pathsep.join(path or "." for path in sys.path)


def end_group(process: Ending) -> int:
    """Kill a process that `start` started and all of its group; how it ended. What has ended already is waited for."""
    with contextlib.suppress(ProcessLookupError):  # it ended by itself
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def end_tree(process: subprocess.Popen[Any], grace_s: float = 0.0) -> None:
    """End a process and all its descendants, sessions of their own included: asked first, and then for certain.

    Args:
        process: The one that was started.
        grace_s: How long they have between the two, s.
    """
    if process.poll() is not None:
        return
    try:
        tree = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    except psutil.NoSuchProcess:
        return
    for member in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.terminate()
    _, alive = psutil.wait_procs(tree, timeout=grace_s)
    for member in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


def signal_name(number: int) -> str:
    """What a signal is called, such as SIGKILL; not all of them have a name."""
    known = number in {one.value for one in signal.Signals}
    return signal.Signals(number).name if known else f"signal {number}"


def ending(code: int, errors: str) -> str:
    """How a process ended that should not have, and its last words.

    Args:
        code: As `subprocess` tells it: below zero for a signal.
        errors: What it wrote.
    """
    if code < 0:
        return f"{KILLED} {signal_name(-code)}"
    lines = errors.strip().splitlines()
    return f"its process ended with {code}: {lines[-1] if lines else 'no message'}"
