"""Cases in a fresh process: each row comes through a pipe as it is made, so that a worker which is killed leaves what it had."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from nanolib.measurement import Measurement, Status
from nanolib.meters.limits import fitting_threads
from nanolib.run.case import Case
from nanolib.run.outcome import Keep, Outcome, attempt
from nanolib.run.params import Params
from nanolib.run.process import KILLED, describe_exit, kill_tree, spawn
from nanolib.run.turns import measure_group
from nanolib.run.workload import measure_case
from nanolib.store import Store
from nanolib.store.traces import recording

_POLL_S = 0.2
_START_S = 60.0  # what importing torch may take on a busy machine, on top of the case's own limit
_GRACE_S = 5.0  # in which a case that can still be interrupted says that it was late


class Cancelled(BaseException):
    """Someone asked for the case to end; no `except Exception` on the way may swallow it."""


def run_here(
    params: Params,
    case: Case,
    ceilings: dict[str, float],
    store: Store,
    run_id: str,
    keep: Keep | None = None,
) -> Outcome:
    """Measure one case in this process; its traces go to the store. Arguments are as in `run_in_process` and `attempt`."""
    with recording(lambda: store.new_trace(run_id, case.case_id)):
        return attempt(lambda: measure_case(case, params, ceilings), params.case_timeout_s, keep)


def run_in_process(
    params: Params,
    cases: Sequence[Case],
    ceilings: dict[str, float],
    database: Path,
    run_id: str,
    stop: threading.Event | None = None,
) -> dict[str, Outcome]:
    """Measure one case, or those of a group, in a fresh process, within their time limit.

    Args:
        params: Of the experiment.
        cases: Which.
        ceilings: What the run has measured of them.
        database: Where traces go.
        run_id: Of which run.
        stop: When it is set the process is ended.

    Raises:
        Cancelled: `stop` was set.

    Returns:
        Case id → its outcome. Where the process was killed or late, that is the outcome of the case whose code ran, and the others
        that had not ended have none.
    """
    began = time.perf_counter()
    process, connection = spawn(f"{__name__}:serve", str(database.absolute()), run_id)
    outcomes: dict[str, Outcome] = {}
    ended, at, is_late = set(), cases[0].case_id, False
    since, limit_s = time.monotonic(), params.case_timeout_s + _START_S
    try:
        connection.send((params, list(cases), ceilings))
        while not is_late:
            if stop is not None and stop.is_set():
                raise Cancelled
            if connection.poll(_POLL_S):
                at, said = connection.recv()
                since, limit_s = time.monotonic(), params.case_timeout_s + _GRACE_S
                outcome = outcomes.setdefault(at, Outcome())
                if isinstance(said, Measurement):
                    outcome.rows.append(said)
                elif said is not None:
                    ended.add(at)
                    outcomes[at] = said
            elif not process.is_alive():  # something that it forked may hold the pipe open
                break
            else:
                is_late = time.monotonic() - since >= limit_s
    except (EOFError, OSError):  # it has ended
        process.join(_GRACE_S)
    finally:  # after an interrupt too: nothing may stay behind
        kill_tree(process.pid)
        process.join()
        connection.close()
    outcomes = {
        case_id: outcome for case_id, outcome in outcomes.items() if case_id in {*ended, at}
    }
    failed = outcomes.setdefault(at, Outcome())
    if is_late:
        failed.was_late(params.case_timeout_s)
    elif process.exitcode:
        failed.status, failed.message = Status.ERROR, describe_exit(process.exitcode)
    if len(cases) == 1 or is_late or process.exitcode:
        failed.seconds = time.perf_counter() - began
    return outcomes


def was_killed(outcome: Outcome) -> bool:
    """Whether the outcome is that of a process killed by a signal."""
    return outcome.status is Status.ERROR and outcome.message.startswith(KILLED)


def serve(connection: Connection, database: str, run_id: str) -> None:
    """In that process: measure, and send `(case_id, what)`: a row, None where a case begins, an outcome where it has ended."""
    params, cases, ceilings = connection.recv()
    params.look(cases)
    with Store(database, create=False) as store, fitting_threads():
        first = cases[0].case_id
        connection.send((first, None))
        if len(cases) == 1:
            keep = run_here(
                params,
                cases[0],
                ceilings,
                store,
                run_id,
                keep=lambda row: connection.send((first, row)),
            )
            outcomes = {first: keep}
        else:
            outcomes = measure_group(
                cases,
                params,
                ceilings,
                keep=lambda case_id, row: connection.send((case_id, row)),
                announce=lambda case_id: connection.send((case_id, None)),
            )
    for ended in outcomes.items():
        connection.send(ended)
