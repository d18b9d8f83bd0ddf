"""A function run in a process of its own, which a time limit really ends: for a user's code that is only looked at."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

from nanolib.measurement import BadInput
from nanolib.models.user import cause
from nanolib.run.process import describe_exit, kill_tree, spawn

_START_S = 60.0  # what importing torch may take on a busy machine


def answers_of(
    function: Callable[..., Iterable[Any]], *arguments: Any, limit_s: float
) -> tuple[list[Any], str]:
    """Run a function in a fresh process; what it prints is dropped.

    Args:
        function: Of a module; yields its answers one by one. These and the arguments can be pickled.
        arguments: What it takes.
        limit_s: How long each answer may take, s.

    Returns:
        The answers, and why there are no more; empty if the function came to its end.

    Raises:
        BadInput: The function did.
    """
    process, connection = spawn(f"{__name__}:serve", function, arguments)
    answers: list[Any] = []
    kind, value, more_s = "", None, _START_S
    try:
        while kind != "end":
            if not connection.poll(limit_s + more_s):
                return answers, f"it takes over {limit_s:g} s"
            kind, value = connection.recv()
            more_s = 0.0
            if kind == "answer":
                answers.append(value)
    except EOFError:  # the process ended without a word
        process.join()
        return answers, describe_exit(process.exitcode or 0)
    finally:
        kill_tree(process.pid)
        process.join()
        connection.close()
    if isinstance(value, list):
        raise BadInput(*value)
    return answers, value


def serve(
    connection: Connection, function: Callable[..., Iterable[Any]], arguments: tuple[Any, ...]
) -> None:
    """In that process: send each answer, and how it ended."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    connection.send(("begin", None))  # what took long until now was importing torch
    try:
        for answer in function(*arguments):
            connection.send(("answer", answer))
        end: Any = ""
    except BadInput as error:
        end = list(error.lines)
    except BaseException as error:  # code of the user's may end itself
        end = cause(error)
    connection.send(("end", end))
