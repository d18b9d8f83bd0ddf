"""One case in a fresh process: `python -m nanolib.run.worker`, a request in, a file of JSON lines out.

Each row is written as it is made, so that a worker which is killed leaves what it had.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from nanolib.measurement import BadInput, Measurement, Status
from nanolib.meters.limits import fitting_threads
from nanolib.run.case import Case
from nanolib.run.ceilings import Ceiling
from nanolib.run.launch import command
from nanolib.run.outcome import Keep, Outcome, attempt
from nanolib.run.params import Params
from nanolib.run.process import KILLED, end_group, ending, import_path, start
from nanolib.run.workload import measure_case
from nanolib.scratch import Scratch
from nanolib.store import Store
from nanolib.store.traces import recording

_POLL_S = 0.2
_START_S = 60.0  # what importing torch may take on a busy machine, on top of the case's own limit


class Cancelled(BaseException):
    """Someone asked for the case to end; no `except Exception` on the way may swallow it."""


def run_here(
    params: Params, case: Case, ceilings: dict[str, float], store: Store, run_id: str, keep: Keep | None = None
) -> Outcome:
    """Measure one case in this process; its traces go to the store. Arguments are as in `run_in_process` and `attempt`."""
    with recording(lambda: store.new_trace(run_id, case.case_id)):
        return attempt(lambda: measure_case(case, params, ceilings), params.case_timeout_s, keep)


def run_in_process(
    experiment: Any,
    params: Params,
    case: Case,
    ceilings: dict[str, float],
    database: Path,
    run_id: str,
    stop: threading.Event | None = None,
) -> Outcome:
    """Measure one case in a fresh process, within its time limit; its traces go straight to the database.

    Args:
        experiment: The module.
        params: Its parameters.
        case: Which case.
        ceilings: What the run has measured of them.
        database: Where its traces go.
        run_id: Of which run.
        stop: When it is set the process is ended.

    Raises:
        Cancelled: `stop` was set.

    Returns:
        Its outcome; `error` with the signal's name when the process was killed.
    """
    request = {
        "module": experiment.__name__,
        "params": params.model_dump(mode="json"),
        "case_id": case.case_id,
        "ceilings": {name: Ceiling.of(value).ends for name, value in ceilings.items()},
        "database": str(database.absolute()),
        "run_id": run_id,
    }
    began = time.perf_counter()
    with Scratch("case") as scratch:
        request["answer"] = str(scratch.path / "rows.jsonl")
        Path(request["answer"]).touch()
        process = start(
            command(__name__),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": import_path()},
        )
        try:
            late, errors = _talk(process, json.dumps(request), params.case_timeout_s + _START_S, stop)
        finally:  # after an interrupt too: nothing may stay behind
            if process.poll() is None:
                end_group(process)
        outcome = _read(Path(request["answer"]))
    outcome.seconds = time.perf_counter() - began
    if late:
        outcome.was_late(params.case_timeout_s)
    elif process.returncode:
        outcome.status, outcome.message = Status.ERROR, ending(process.returncode, errors)
    return outcome


def _talk(
    process: subprocess.Popen[str], request: str, timeout_s: float, stop: threading.Event | None
) -> tuple[bool, str]:
    """Whether the process took too long, and what it complained of."""
    end, sent = time.monotonic() + timeout_s, request
    while True:
        try:
            return False, process.communicate(sent, timeout=min(_POLL_S, max(0.0, end - time.monotonic())))[1]
        except subprocess.TimeoutExpired:
            sent = None  # it has been sent
        if stop is not None and stop.is_set():
            raise Cancelled
        if time.monotonic() >= end:
            return True, ""


def was_killed(outcome: Outcome) -> bool:
    """Whether the outcome is that of a process killed by a signal."""
    return outcome.status is Status.ERROR and outcome.message.startswith(KILLED)


def _read(path: Path) -> Outcome:
    outcome = Outcome()
    for line in path.read_text().splitlines():
        answer = json.loads(line)
        if "metric" in answer:
            outcome.rows.append(Measurement.from_dict(answer))
        else:
            outcome.status, outcome.message = Status(answer["status"]), answer["message"]
            outcome.details = answer["details"]
    return outcome


def main() -> None:
    """Read the request from standard input, measure, write the answer."""
    request = json.load(sys.stdin)
    experiment = importlib.import_module(request["module"])
    params = experiment.Params(**request["params"])
    case = next((case for case in experiment.cases(params) if case.case_id == request["case_id"]), None)
    if case is None:
        raise BadInput(f"case_id: {request['case_id']} is not among the cases of these parameters")
    with open(request["answer"], "a", encoding="utf-8") as answer:

        def write(value: dict[str, Any]) -> None:
            answer.write(json.dumps(value) + "\n")
            answer.flush()

        with Store(request["database"], create=False) as store, fitting_threads():
            ceilings = {name: Ceiling.of(ends) for name, ends in request["ceilings"].items()}
            run_id = request["run_id"]
            outcome = run_here(params, case, ceilings, store, run_id, keep=lambda row: write(row.to_dict()))
        write({"status": outcome.status, "message": outcome.message, "details": outcome.details})
