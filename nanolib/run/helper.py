"""A function run in a process of its own, which a time limit really ends: for a user's code that is only looked at."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

from nanolib.measurement import BadInput
from nanolib.models.functions import cause
from nanolib.run.process import Died, Late, describe_exit, received


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
    answers: list[Any] = []
    try:
        sent = received(f"{__name__}:serve", function, arguments, limit_s=limit_s)
        for kind, value in sent:
            if kind == "answer":
                answers.append(value)
            elif kind == "bad input":
                raise BadInput(*value)
            elif kind == "end":
                sent.close()
                return answers, value
    except Late:
        return answers, f"it takes over {limit_s:g} s"
    except Died as error:
        return answers, str(error)
    return answers, describe_exit(0)  # it ended without a word


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
        connection.send(("end", ""))
    except BadInput as error:
        connection.send(("bad input", error.lines))
    except BaseException as error:  # code of the user's may end itself
        connection.send(("end", cause(error)))
