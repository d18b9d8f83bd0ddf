"""Run a user's code in a process of its own, which a time limit really ends."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from nanolib.measurement import BadInput
from nanolib.models.functions import cause
from nanolib.run.process import Died, Late, call_in_process


def answers_of(
    function: Callable[..., Iterable[Any]], *arguments: Any, limit_s: float
) -> tuple[list[Any], str]:
    """Run a function in a fresh process; what it prints is dropped.

    Args:
        function: Of a module; yields its answers one by one, which pickle can send.
        arguments: Its arguments.
        limit_s: Time limit of each answer, s.

    Returns:
        The answers, and why there are no more; empty if the function came to its end.

    Raises:
        BadInput: The function did.
    """
    answers: list[Any] = []
    try:
        for answer, refused, reason in call_in_process(
            _answer, function, arguments, limit_s=limit_s
        ):
            if refused:
                raise BadInput(*refused)
            if reason:
                return answers, reason
            answers.append(answer)
    except Late:
        return answers, f"it takes over {limit_s:g} s"
    except Died as error:
        return answers, str(error)
    return answers, ""


def _answer(
    send: Callable[[Any], None],
    function: Callable[..., Iterable[Any]],
    arguments: tuple[Any, ...],
) -> None:
    """In that process: send each answer, and then the lines of `BadInput` or why it ended."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    try:
        for answer in function(*arguments):
            send((answer, (), ""))
    except BadInput as error:
        send((None, error.lines, ""))
    except BaseException as error:  # the user's code may call sys.exit
        send((None, (), cause(error)))
