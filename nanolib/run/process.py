"""Start processes that end with this one, and end all that they started.

`-m nanolib.run.process PARENT MODULE ARGUMENT...` runs `-m MODULE ARGUMENT...` in a process that
ends when its parent does. This file imports nothing but the standard library: `nano ab` loads it
under interpreters that have nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

_PARENT_DEATH = 1  # PR_SET_PDEATHSIG
_WATCH_S = 0.5
_POLL_S = 0.2
_START_S = 60.0  # what importing torch may take on a busy machine
_GRACE_S = 5.0  # for a process that closes its pipe, to end


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a process in a session of its own, which Ctrl-C does not reach.

    Args:
        command: What to run; see `python`.
        options: As `subprocess.Popen` takes them.
    """
    return subprocess.Popen(list(command), start_new_session=True, **options)


def python(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in a process that ends when this one does."""
    return [sys.executable, "-m", __name__, str(os.getpid()), module, *arguments]


class Late(Exception):
    """A process sent nothing for longer than it may take."""


class Died(Exception):
    """A process ended before its function returned."""


def call_in_process(
    function: Callable[..., None],
    *arguments: Any,
    limit_s: float,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[Any]:
    """Call a function in a fresh interpreter, and yield what it sends.

    The process and all that it started end with the generator, and with this process.

    Args:
        function: Of a module; its first argument is a function that sends one value here. What it
            prints goes to standard error.
        arguments: The others, which pickle can send.
        limit_s: Longest time between two values, s; a minute longer while it imports.
        stopped: Called every 0.2 s; the process is ended when it returns true.

    Raises:
        Died: The process ended before the function returned.
        Late: It sent nothing for longer than it may take.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(os.getpid(), theirs))
    process.start()
    theirs.close()
    ours.send((function, arguments))  # not with the process: to read them is to import torch
    deadline, returned = time.monotonic() + _START_S + limit_s, False
    try:
        while not stopped():
            if ours.poll(_POLL_S):
                values = ours.recv()
                returned = values is None
                yield from values or ()
                deadline = time.monotonic() + limit_s
            elif not process.is_alive():  # something that it forked may hold the pipe open
                break
            elif time.monotonic() > deadline:
                raise Late(f"it sent nothing for {limit_s:g} s")
    except (EOFError, OSError):  # it has ended
        process.join(_GRACE_S)
    finally:  # after an interrupt too: nothing may stay behind
        kill_tree(process.pid)
        process.join()
        ours.close()
    if not (returned or stopped()):
        raise Died(describe_exit(process.exitcode))


def _serve(parent: int, connection: Connection) -> None:
    """In that process: send lists, an empty one after the imports, and None after the function."""
    exit_with_parent(parent)
    os.setsid()
    os.dup2(2, 1)
    gc.disable()  # collecting takes a fifth of the time of importing torch, and frees nothing
    function, arguments = connection.recv()
    gc.enable()
    connection.send([])
    function(lambda value: connection.send([value]), *arguments)
    connection.send(None)


def kill_tree(pid: int) -> None:
    """Kill a process and all that descend from it; the caller waits for it then."""
    import psutil  # another interpreter, whose version `nano ab` measures, may not have it

    try:
        first = psutil.Process(pid)
        tree = [first, *first.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def exit_with_parent(parent: int) -> None:
    """End this process when the one that started it has ended, however that happens.

    Args:
        parent: Its number, as it knew it: it may have ended before this is called.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH, int(signal.SIGKILL))
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(parent: int) -> None:
    """Poll for the parent's end: this system does not report it."""
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    os.kill(os.getpid(), signal.SIGKILL)


def describe_exit(code: int, errors: str = "") -> str:
    """Describe the exit of a process that should not have ended, with its last line.

    Args:
        code: As `subprocess` gives it: below zero for a signal.
        errors: What it wrote.
    """
    if code < 0:
        return f"its process was killed by {signal_name(-code)}"
    return ": ".join([f"its process ended with {code}", *errors.strip().splitlines()[-1:]])


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGKILL; not all of them have one."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


if __name__ == "__main__":
    exit_with_parent(int(sys.argv[1]))
    gc.set_threshold(50_000)  # imports leave nothing to collect
    name, sys.argv = sys.argv[2], sys.argv[2:]
    runpy.run_module(name, run_name="__main__", alter_sys=True)
