"""Processes of our own: one way to start them, so that they end with this one, and one way to end all that they started.

`-m nanolib.run.process PARENT MODULE ARGUMENT...` runs `-m MODULE ARGUMENT...` in a process that ends when its parent does.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

_PARENT_DEATH = 1  # PR_SET_PDEATHSIG
_WATCH_S = 0.5
_POLL_S = 0.2
_START_S = 60.0  # what importing torch may take on a busy machine
_GRACE_S = 5.0  # for a process that closes its pipe, to end


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a process in a session of its own: Ctrl-C reaches this one only.

    Args:
        command: What to run; see `python`.
        options: As `subprocess.Popen` takes them.
    """
    return subprocess.Popen(list(command), start_new_session=True, **options)


def python(module: str, *arguments: str) -> list[str]:
    """What runs a module in a process that ends when this one does."""
    return [sys.executable, "-m", __name__, str(os.getpid()), module, *arguments]


def spawn(
    function: str, *arguments: Any, environment: Mapping[str, str] | None = None
) -> tuple[BaseProcess, Connection]:
    """Call a function in a fresh interpreter that ends when this process does.

    Args:
        function: `module:name`; it is called with its end of a pipe, and then the arguments.
        arguments: What pickle can send.
        environment: Variables that are set before the module is imported.

    Returns:
        The process, and this end of the pipe. What the function prints goes to standard error.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    variables = dict(environment or {})
    process = context.Process(target=_serve, args=(os.getpid(), variables, function, theirs))
    with theirs:
        process.start()
    ours.send(arguments)  # not with the process: to read them is to import what they need
    return process, ours


def _serve(parent: int, environment: dict[str, str], function: str, connection: Connection) -> None:
    exit_with_parent(parent)
    os.setsid()
    os.dup2(2, 1)
    os.environ.update(environment)
    module, _, name = function.partition(":")
    gc.disable()  # what is imported stays: collecting meanwhile takes a fifth of torch's import
    called = getattr(importlib.import_module(module), name)
    arguments = connection.recv()
    gc.enable()
    called(connection, *arguments)


class Late(Exception):
    """A process sent nothing for longer than it may take."""


class Died(Exception):
    """A process ended with an error.

    Attributes:
        by_signal: Whether a signal killed it.
    """

    def __init__(self, code: int) -> None:
        self.by_signal = code < 0
        super().__init__(describe_exit(code))


def received(
    function: str,
    *arguments: Any,
    limit_s: float,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[Any]:
    """Yield what a function sends from a fresh process, and end all that it started.

    Args:
        function: As in `spawn`.
        arguments: As in `spawn`.
        limit_s: It may send nothing for so long, s; for the first time the import of torch is added.
        stopped: Asked now and then; where it returns true, the process is ended.

    Raises:
        Died: The process ended with an error.
        Late: It sent nothing for longer than it may take.
    """
    process, connection = spawn(function, *arguments)
    deadline = time.monotonic() + _START_S + limit_s
    try:
        while not stopped():
            if connection.poll(_POLL_S):
                yield connection.recv()
                deadline = time.monotonic() + limit_s
            elif not process.is_alive():  # something that it forked may hold the pipe open
                break
            elif time.monotonic() > deadline:
                raise Late
    except (EOFError, OSError):  # it has ended
        process.join(_GRACE_S)
    finally:  # after an interrupt too: nothing may stay behind
        kill_tree(process.pid)
        process.join()
        connection.close()
    if process.exitcode and not stopped():
        raise Died(process.exitcode)


def kill_tree(pid: int) -> None:
    """Kill a process that `start` or `spawn` started, and all that descend from it; who started it waits for it then."""
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
    """Where the system reports no parent's end: look for it."""
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    os.kill(os.getpid(), signal.SIGKILL)


def signal_name(number: int) -> str:
    """The name of a signal, such as SIGKILL; not all of them have one."""
    known = number in {one.value for one in signal.Signals}
    return signal.Signals(number).name if known else f"signal {number}"


def describe_exit(code: int, errors: str = "") -> str:
    """How a process ended that should not have, and its last words.

    Args:
        code: As `subprocess` gives it: below zero for a signal.
        errors: What it wrote.
    """
    if code < 0:
        return f"its process was killed by {signal_name(-code)}"
    return ": ".join([f"its process ended with {code}", *errors.strip().splitlines()[-1:]])


if __name__ == "__main__":
    exit_with_parent(int(sys.argv[1]))
    gc.set_threshold(50_000)  # imports leave nothing to collect
    name, sys.argv = sys.argv[2], sys.argv[2:]
    runpy.run_module(name, run_name="__main__", alter_sys=True)
