"""One case in a fresh process: `python -m nanolib.run.worker`, a request in, a file of JSON lines out.

Each row is written as it is made, so that a worker which is killed leaves what it had.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
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
from nanolib.run.turns import measure_group
from nanolib.run.workload import measure_case
from nanolib.scratch import Scratch
from nanolib.store import Store
from nanolib.store.traces import recording

_POLL_S = 0.2
_START_S = 60.0  # what importing torch may take on a busy machine, on top of the case's own limit
_GRACE_S = 5.0  # in which a case that can still be interrupted says that it was late


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
    cases: Sequence[Case],
    ceilings: dict[str, float],
    database: Path,
    run_id: str,
    stop: threading.Event | None = None,
) -> dict[str, Outcome]:
    """Measure one case, or those of a group, in a fresh process, within their time limit; traces go straight to the database.

    Args:
        experiment: The module.
        params: Its parameters.
        cases: Which.
        ceilings: What the run has measured of them.
        database: Where its traces go.
        run_id: Of which run.
        stop: When it is set the process is ended.

    Raises:
        Cancelled: `stop` was set.

    Returns:
        Case id → its outcome. Where the process was killed or late, that is the outcome of the case whose code ran, and the others
        that had not ended have none.
    """
    request = {
        "module": experiment.__name__,
        "params": params.model_dump(mode="json"),
        "case_ids": [case.case_id for case in cases],
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
            answer = Path(request["answer"])
            late, errors = _talk(process, json.dumps(request), answer, params.case_timeout_s, stop)
        finally:  # after an interrupt too: nothing may stay behind
            if process.poll() is None:
                end_group(process)
        outcomes, at = _read(Path(request["answer"]), cases[0].case_id)
    if late:
        outcomes.setdefault(at, Outcome()).was_late(params.case_timeout_s)
    elif process.returncode:
        died = outcomes.setdefault(at, Outcome())
        died.status, died.message = Status.ERROR, ending(process.returncode, errors)
    if len(cases) == 1 or late or process.returncode:
        outcomes[at].seconds = time.perf_counter() - began
    return outcomes


def _talk(
    process: subprocess.Popen[str], request: str, answer: Path, limit_s: float, stop: threading.Event | None
) -> tuple[bool, str]:
    """Whether the process said nothing for longer than a case may take, and what it complained of."""
    sent, said, since, more_s = request, 0, time.monotonic(), _START_S
    while True:
        try:
            return False, process.communicate(sent, timeout=_POLL_S)[1]
        except subprocess.TimeoutExpired:
            sent = None  # it has been sent
        if stop is not None and stop.is_set():
            raise Cancelled
        if (length := answer.stat().st_size) != said:
            said, since, more_s = length, time.monotonic(), _GRACE_S
        if time.monotonic() - since >= limit_s + more_s:
            return True, ""


def was_killed(outcome: Outcome) -> bool:
    """Whether the outcome is that of a process killed by a signal."""
    return outcome.status is Status.ERROR and outcome.message.startswith(KILLED)


def _read(path: Path, first: str) -> tuple[dict[str, Outcome], str]:
    """The outcomes of the cases that ended, with the rows of the one whose code ran last, and that one's id."""
    made: dict[str, Outcome] = {}
    ended, at = set(), first
    for line in path.read_text().splitlines():
        answer = json.loads(line)
        at = answer.pop("case_id")
        outcome = made.setdefault(at, Outcome())
        if "metric" in answer:
            outcome.rows.append(Measurement.from_dict(answer))
        elif answer:
            ended.add(at)
            outcome.status, outcome.message = Status(answer["status"]), answer["message"]
            outcome.details, outcome.seconds = answer["details"], answer["seconds"]
    return {case_id: outcome for case_id, outcome in made.items() if case_id in {*ended, at}}, at


def main() -> None:
    """Read the request from standard input, measure, write the answer: a line per row, and per case that begins or ends."""
    request = json.load(sys.stdin)
    experiment = importlib.import_module(request["module"])
    params = experiment.Params(**request["params"])
    known = {case.case_id: case for case in experiment.cases(params)}
    if missing := [case_id for case_id in request["case_ids"] if case_id not in known]:
        raise BadInput(f"case_id: {missing[0]} is not among the cases of these parameters")
    cases = [known[case_id] for case_id in request["case_ids"]]
    params.look(cases)
    with open(request["answer"], "a", encoding="utf-8") as answer:

        def write(case_id: str, **told: Any) -> None:
            answer.write(json.dumps({"case_id": case_id} | told) + "\n")
            answer.flush()

        def keep(case_id: str, row: Measurement) -> None:
            write(case_id, **row.to_dict())

        with Store(request["database"], create=False) as store, fitting_threads():
            ceilings = {name: Ceiling.of(ends) for name, ends in request["ceilings"].items()}
            write(cases[0].case_id)
            if len(cases) == 1:
                (case,) = cases
                own = functools.partial(keep, case.case_id)
                outcomes = {case.case_id: run_here(params, case, ceilings, store, request["run_id"], keep=own)}
            else:
                outcomes = measure_group(cases, params, ceilings, keep=keep, announce=write)
        for case_id, outcome in outcomes.items():
            told = {"status": outcome.status, "message": outcome.message, "details": outcome.details}
            write(case_id, **told, seconds=outcome.seconds)
