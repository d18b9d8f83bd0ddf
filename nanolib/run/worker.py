"""Run code in a fresh process: cases, which send each row as it is made, and a user's functions."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

from nanolib.measurement import BadInput, Status
from nanolib.meters.machine import limit_threads
from nanolib.models.functions import cause
from nanolib.run.case import Case
from nanolib.run.group import measure_group
from nanolib.run.params import Params
from nanolib.run.process import Died, Late, call_in_process
from nanolib.run.timeout import Outcome
from nanolib.store import Store
from nanolib.store.traces import recording

_GRACE_S = 5.0  # in which a case that can still be interrupted reports that it was late


class Canceled(BaseException):
    """The user canceled the case; no `except Exception` on the way may swallow it."""


def run_here(
    params: Params,
    cases: Sequence[Case],
    ceilings: dict[str, float],
    store: Store,
    run_id: str,
    report: Callable[..., object] = lambda *_: None,
) -> dict[str, Outcome]:
    """Measure one case, whose traces go to the store, or those of a group; see `measure_group`."""
    (first, *others) = cases
    traced = nullcontext() if others else recording(lambda: store.new_trace(run_id, first.case_id))
    with traced:
        return measure_group(cases, params, ceilings, report)


def run_in_process(
    params: Params,
    cases: Sequence[Case],
    ceilings: dict[str, float],
    store: Store,
    run_id: str,
    stop: threading.Event,
) -> dict[str, Outcome]:
    """Measure one case, or those of a group, in a fresh process, within their time limit.

    Args:
        params: Of the experiment.
        cases: Which.
        ceilings: As `roofline_ms` takes them.
        store: Where traces go.
        run_id: The run that they belong to.
        stop: Ends the process when it is set.

    Raises:
        Canceled: `stop` was set.

    Returns:
        Case id → its outcome. If the process died or was late, the case whose code ran has failed,
        and the cases that had not ended have no outcome.
    """
    began, at = time.perf_counter(), cases[0].case_id
    partial: defaultdict[str, Outcome] = defaultdict(Outcome)
    outcomes: dict[str, Outcome] = {}
    given = (params, list(cases), ceilings, str(store.path.absolute()), run_id)
    limit_s = params.case_timeout_s + _GRACE_S
    try:
        for at, sent in call_in_process(_serve, *given, limit_s=limit_s, stopped=stop.is_set):
            if isinstance(sent, Outcome):
                outcomes[at] = sent
            elif sent is not None:
                partial[at].rows.append(sent)
    except Late:
        partial[at].mark_timed_out(params.case_timeout_s)
    except Died as error:
        partial[at].status, partial[at].message = Status.ERROR, str(error)
    if stop.is_set():
        raise Canceled
    if partial[at].message:
        partial[at].seconds = time.perf_counter() - began
        outcomes[at] = partial[at]
    return outcomes


def _serve(
    send: Callable[[Any], None],
    params: Params,
    cases: Sequence[Case],
    ceilings: dict[str, float],
    database: str,
    run_id: str,
) -> None:
    """In that process: send `(case_id, what)`: None before its code runs, each row, its outcome."""

    def report(case_id: str, what: Any = None) -> None:
        send((case_id, what))

    params.look(cases)
    with Store(database, create=False) as store, limit_threads():
        outcomes = run_here(params, cases, ceilings, store, run_id, report)
    for case_id, outcome in outcomes.items():
        report(case_id, outcome)


def answers_of(
    function: Callable[..., Iterable[Any]], *arguments: Any, limit_s: float
) -> tuple[list[Any], str]:
    """Run a user's function in a fresh process, which its time limit really ends; drop its output.

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
