"""A function run in a process of its own, which a time limit ends for certain: for a user's code that is only looked at.

What is pickled passes between processes of one user, of which each may run that code anyway.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import IO, Any

from nanolib.measurement import BadInput
from nanolib.models.user import cause
from nanolib.run.launch import command
from nanolib.run.process import end_group, end_tree, ending, import_path, start

_START_S = 60.0  # what importing torch may take on a busy machine
_POLL_S = 0.05


def answers_of(function: Callable[..., Iterable[Any]], *arguments: Any, limit_s: float) -> tuple[list[Any], str]:
    """Run a function in a fresh process; what it prints is dropped, and nothing of it stays behind.

    Args:
        function: Of a module; yields its answers one by one. These and the arguments can be pickled.
        arguments: What it takes.
        limit_s: How long each answer may take, s.

    Returns:
        The answers, and why there are no more; empty where the function came to its end.

    Raises:
        BadInput: The function did.
    """
    with tempfile.TemporaryFile() as file:  # without a name: nothing is left behind, however this ends
        environment = os.environ | {"PYTHONPATH": import_path()}
        process = start(
            command(__name__, str(file.fileno())),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            pass_fds=[file.fileno()],
        )
        try:
            process.stdin.write(pickle.dumps((function, arguments)))
            process.stdin.close()
            late = _wait(process, file.fileno(), limit_s)
        finally:
            end_tree(process)
            end_group(process)
        answers, last = _read(file)
    if isinstance(last, list):
        raise BadInput(*last)
    if last is None:
        last = f"it takes over {limit_s:g} s" if late else ending(process.returncode, "")
    return answers, last


def _wait(process: subprocess.Popen[bytes], file: int, limit_s: float) -> bool:
    """Whether the process gave no answer for longer than it may."""
    size, since, more_s = 0, time.monotonic(), _START_S
    while process.poll() is None:
        if (now := os.fstat(file).st_size) != size:
            size, since, more_s = now, time.monotonic(), 0.0
        if time.monotonic() - since > limit_s + more_s:
            return True
        time.sleep(_POLL_S)
    return False


def _read(file: IO[bytes]) -> tuple[list[Any], str | list[str] | None]:
    """The answers, and how they ended: in a reason, in lines of bad input, or not at all."""
    answers: list[Any] = []
    file.seek(0)
    while True:
        try:
            kind, value = pickle.load(file)  # noqa: S301
        except (EOFError, pickle.UnpicklingError):  # the process was ended while it wrote
            return answers, None
        if kind == "end":
            return answers, value
        if kind == "answer":
            answers.append(value)


def main() -> None:
    """Read a function and its arguments from standard input; write each answer, and how it ended."""
    function, arguments = pickle.load(sys.stdin.buffer)  # noqa: S301
    with open(int(sys.argv[1]), "wb", buffering=0) as file:

        def write(kind: str, value: Any) -> None:
            file.write(pickle.dumps((kind, value)))

        write("begin", None)  # what took long until now was importing torch
        try:
            for answer in function(*arguments):
                write("answer", answer)
            write("end", "")
        except BadInput as error:
            write("end", list(error.lines))
        except BaseException as error:  # code of the user's may end itself
            write("end", cause(error))
