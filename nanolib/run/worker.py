"""Measure cases here, or in a fresh process that sends each row as it is made."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from nanolib.measurement import Measurement, Status
from nanolib.meters.limits import limit_threads
from nanolib.run.case import Case
from nanolib.run.group import ignore, measure_group
from nanolib.run.params import Params
from nanolib.run.process import Died, Late, received
from nanolib.run.timeout import Outcome
from nanolib.store import Store
from nanolib.store.traces import recording

_GRACE_S = 5.0  # in which a case that can still be interrupted says that it was late


class Canceled(BaseException):
    """Someone asked for the case to end; no `except Exception` on the way may swallow it."""


def run_here(
    params: Params,
    cases: Sequence[Case],
    ceilings: dict[str, float],
    store: Store,
    run_id: str,
    tell: Callable[..., object] = ignore,
) -> dict[str, Outcome]:
    """Measure one case, whose traces go to the store, or those of a group; see `measure_group`."""
    (first, *others) = cases
    traced = nullcontext() if others else recording(lambda: store.new_trace(run_id, first.case_id))
    with traced:
        return measure_group(cases, params, ceilings, tell)


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
        Case id → its outcome. If the process was killed or late, that is the outcome of the case
        whose code ran, and the others that had not ended have none.
    """
    began, at, failed = time.perf_counter(), cases[0].case_id, Outcome()
    rows: defaultdict[str, list[Measurement]] = defaultdict(list)
    outcomes: dict[str, Outcome] = {}
    asked = (params, list(cases), ceilings, str(store.path.absolute()), run_id)
    limit_s = params.case_timeout_s + _GRACE_S
    try:
        for at, sent in received(_serve, *asked, limit_s=limit_s, stopped=stop.is_set):
            if isinstance(sent, Outcome):
                outcomes[at] = sent
            elif sent is not None:
                rows[at].append(sent)
    except Late:
        failed.mark_timed_out(params.case_timeout_s)
    except Died as error:
        failed.status, failed.message, failed.killed = Status.ERROR, str(error), error.by_signal
    if stop.is_set():
        raise Canceled
    if failed.message:
        failed.rows, failed.seconds = rows[at], time.perf_counter() - began
        outcomes[at] = failed
    return outcomes


def _serve(
    send: Callable[[Any], None],
    params: Params,
    cases: Sequence[Case],
    ceilings: dict[str, float],
    database: str,
    run_id: str,
) -> None:
    """In that process: send `(case_id, what)`, a row, None before its code runs, and its outcome."""

    def tell(case_id: str, what: Any = None) -> None:
        send((case_id, what))

    params.look(cases)
    with Store(database, create=False) as store, limit_threads():
        outcomes = run_here(params, cases, ceilings, store, run_id, tell)
    for case_id, outcome in outcomes.items():
        tell(case_id, outcome)
