"""Start processes that end with this process, execute notebooks, and lock devices for a process.

This file imports only the standard library at its top, because `nano ab` also loads this file in
interpreters without other packages.
"""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_WATCH_S = 0.5
_POLL_S = 0.2
_START_S = 60.0  # Longest time to import torch on a busy machine, s.
_GRACE_S = 5.0  # Longest wait for the end of a process that has closed its pipe, s.


class Died(Exception):
    """A process ended before its function returned, or the function raised an exception."""


class Late(Died):
    """A process sent no value within the time limit, and was killed."""


def call_in_process(
    function: Callable[..., None],
    *arguments,
    limit_s: float,
    stopped: Callable[[], bool] = lambda: False,
    log: Path | None = None,
) -> Iterator[Any]:
    """Call a function in a fresh interpreter, and yield the values that the function sends.

    When the generator or this process ends, the new process ends too, with all of its children.

    Args:
        function: Function at the top level of a module. Its first argument is a callback that
            sends a value to this process.
        arguments: Other arguments of the function, which must be picklable.
        limit_s: Longest time between two values, s. Imports may take 60 s more.
        stopped: Function to call every 0.2 s. The process ends when the function returns true.
        log: File for the output of the function, by default standard error.

    Raises:
        BadInput: The function raised `BadInput`.
        Died: The function raised another exception, or the process ended before it returned.
        Late: No value came for `limit_s` seconds.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(os.getpid(), theirs, log))
    process.start()
    theirs.close()
    deadline, returned = time.monotonic() + _START_S + limit_s, False
    try:
        # Unpickling imports torch, which takes seconds. `exit_with_parent` must run before.
        ours.send((function, arguments))
        while not stopped():
            if ours.poll(_POLL_S):
                values = ours.recv()
                if isinstance(values, Exception):
                    raise values
                returned = values is None
                yield from values or ()
                deadline = time.monotonic() + limit_s
            elif not process.is_alive():  # A grandchild may keep the pipe open.
                if not ours.poll():  # The process may have sent values just before its end.
                    break
            elif time.monotonic() > deadline:
                raise Late(f"the call takes more than {limit_s:g} s")
    except (EOFError, OSError):  # The process has ended.
        process.join(_GRACE_S)
    finally:  # The process must not survive an interrupt either.
        kill_tree(process.pid)
        process.join()
        ours.close()
    if not (returned or stopped()):
        raise Died(describe_exit(process.exitcode))


def _serve(parent: int, connection: Connection, log: Path | None):
    """Call the function in the new process.

    The process sends an empty list after the imports, a list with each value, and at the end None
    or an exception.
    """
    from nanolib.measurement import BadInput, cause  # Some interpreters of `nano ab` lack nanolib.

    exit_with_parent(parent)
    os.setsid()
    if log:
        with log.open("w") as file:
            os.dup2(file.fileno(), 2)
    os.dup2(2, 1)
    gc.disable()  # Garbage collection takes a fifth of torch's import time, and frees nothing.
    function, arguments = connection.recv()
    gc.enable()
    connection.send([])
    try:
        function(lambda value: connection.send([value]), *arguments)
        connection.send(None)
    except (BadInput, Died) as error:
        connection.send(error)
    except BaseException as error:  # A user's code may call sys.exit.
        connection.send(Died(cause(error)))


def execute(
    send: Callable[[Any], None],
    source: Path,
    target: Path,
    parameters: Mapping[str, Any],
    variables: Mapping[str, str],
) -> None:
    """Execute a notebook with papermill, for `call_in_process`.

    Args:
        send: Not used.
        source: The notebook.
        target: File of the executed notebook.
        parameters: Parameters to inject into the notebook.
        variables: Environment variables of the kernel.

    Raises:
        Died: A cell raised an exception, or the kernel ended.
    """
    import papermill

    from nanolib.measurement import one_line

    os.environ |= variables
    try:
        # Papermill replaces names in braces by parameters, even in a path.
        paths = (str(path).replace("{", "{{").replace("}", "}}") for path in (source, target))
        papermill.execute_notebook(*paths, parameters, progress_bar=False)
    except Exception as error:
        traceback.print_exc()
        # The text of papermill's own exception contains the traceback of the cell.
        name, text = getattr(error, "ename", type(error).__name__), getattr(error, "evalue", error)
        raise Died(f"{name}: {one_line(text)}") from None


def kill_tree(pid: int) -> None:
    """Kill a process and all of its descendants. The caller must then wait for the process."""
    import psutil  # The interpreters of `nano ab` may not have psutil.

    try:
        first = psutil.Process(pid)
        tree = [first, *first.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def exit_with_parent(parent: int) -> None:
    """Make this process end when its parent ends for any reason.

    Args:
        parent: Process ID of the parent, which may have ended before this call.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # 1 is PR_SET_PDEATHSIG.
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(parent: int):
    """Wait until the parent process ends, and then kill this process.

    Only Linux can send a signal when a parent ends.
    """
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    os.kill(os.getpid(), signal.SIGKILL)


def describe_exit(code: int, errors: str = "") -> str:
    """Describe the unexpected end of a process in one line.

    Args:
        code: Exit code, or the negative number of a signal.
        errors: Text that the process wrote to standard error. The last line of this text ends the
            description.
    """
    if code < 0:
        return f"the process was killed by {signal_name(-code)}"
    return ": ".join([f"the process exited with code {code}", *errors.strip().splitlines()[-1:]])


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGKILL, or its number if it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def say(line: str) -> None:
    """Print a line to standard error without a delay."""
    from nanolib.measurement import printable

    print(printable(line), file=sys.stderr, flush=True)


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


@contextlib.contextmanager
def device_lock(
    device: str,
    what: str,
    log: Callable[[str], object] = say,
    pause: Callable[[float], object] = time.sleep,
) -> Iterator[None]:
    """Lock a device within the context. First wait until no other process uses the device.

    The end of a process frees its lock.

    Args:
        device: Device, such as `cpu` or `cuda:0`.
        what: Name of this run, which other runs show while they wait.
        log: Function that receives a line when a wait begins and a line when the wait ends.
        pause: Function that waits for a time in s between two attempts to lock the device. An
            exception in `pause` ends the wait.

    Raises:
        BadInput: This process cannot open the lock file.
    """
    from filelock import FileLock, Timeout

    from nanolib.measurement import BadInput

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
        # If the file belongs to another user, it keeps its text.
        with contextlib.suppress(OSError), open(owner, "w", opener=_open_file) as file:
            file.write(f"{os.getpid()} {what}")
        yield
    finally:
        lock.release()


def _open_file(path: str, flags: int) -> int:
    """Open a file, but never follow a link or wait for a pipe that another user has left there."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)


def _read(owner: Path) -> str:
    """Return the process and the run that the owner file names."""
    import psutil

    with contextlib.suppress(OSError, ValueError):
        with open(owner, errors="replace", opener=_open_file) as file:
            pid, _, what = file.read().partition(" ")
        if psutil.pid_exists(int(pid)):  # The text may be from an earlier owner.
            return f"process {int(pid)} ({what})"
    return "another process"
