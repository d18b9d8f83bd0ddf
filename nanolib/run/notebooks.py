"""Run jobs one after another, each with papermill in its own process, and report the results.

If a kernel was killed, papermill still saves the notebook with its completed cells. A job is
therefore done only if its run has the status `done`. The last cell of the notebook sets this
status.
"""

import contextlib
import functools
import math
import os
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from nanolib.measurement import RunStatus, printable
from nanolib.meters.interference import find_interference
from nanolib.meters.machine import resolve_device
from nanolib.params import Job
from nanolib.paths import (
    DATABASE,
    FIRST_VARIABLE,
    LAUNCH_VARIABLE,
    OUTPUT_VARIABLE,
    checkout,
    make_folder,
)
from nanolib.run.process import Died, call_in_process, device_lock, execute
from nanolib.store import Store

_BAR = "{desc} · case {n_fmt} of {total_fmt} {bar} {elapsed} · about {remaining} left"


@dataclass
class NotebookResult:
    """The result of one job.

    Attributes:
        name: Name of the executed notebook.
        cases: Number of cases.
        status: Status of the job: `done`, `failed`, `interrupted` or `not started`.
        message: Reason for a failure or an interruption, in one line.
        seconds: Wall time of the job, s.
        statuses: Number of cases by status.
        run_id: ID of the run, or an empty string if the notebook has not created a run.
    """

    name: str
    cases: int = 0
    status: str = "not started"
    message: str = ""
    seconds: float = 0.0
    statuses: dict[str, int] = field(default_factory=dict)
    run_id: str = ""

    def __str__(self) -> str:
        """Return a line about the result for a terminal."""
        return f"{self.name}: {self.status} in {self.seconds:.0f} s {self.message}".rstrip()


@dataclass
class Command:
    """A command whose jobs share an output folder.

    Attributes:
        output: Output folder of all jobs.
        token: Identifier that all runs of the command share.
    """

    output: Path
    token: str = field(default_factory=lambda: uuid.uuid4().hex[:12])

    @functools.cached_property
    def logs(self) -> Path:
        """The folder with the log of each job. The first use creates the folder."""
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{self.token}"
        return make_folder(self.output / "logs" / name)

    def launch(self, title: str) -> str:
        """Return the value of the column `launch` for the run of a job."""
        return f"{self.token}/{title}"


def run_jobs(
    jobs: Sequence[Job],
    command: Command,
    log: Callable[[str], None],
    conclude: Callable[[NotebookResult], Sequence[str]] = lambda _: (),
) -> list[NotebookResult]:
    """Run jobs one after another. Ctrl-C ends the current job, and no other job starts.

    Args:
        jobs: Jobs to run.
        command: Command of the jobs.
        log: Function that prints a line on the terminal.
        conclude: Function that returns lines about a job that has ended, for the terminal.

    Returns:
        The result of each job, in the same order.

    Raises:
        BadInput: A model, function or run that a job names does not exist. No job has started.
    """
    results = []
    for job in jobs:
        results.append(NotebookResult(job.title, len(job.cases())))
        # The summary may name runs of the jobs before it, which do not exist yet.
        if results[-1].cases or len(jobs) == 1:
            job.params.look([])
    total = sum(result.cases for result in results)
    for line in find_interference("cpu") if total else ():
        log(f"not a quiet machine: {line}")
    bar = tqdm(total=total, bar_format=_BAR, disable=None, file=sys.stderr, dynamic_ncols=True)

    def say(line: str):
        with bar.external_write_mode(sys.stderr):
            log(line)

    with bar, contextlib.suppress(KeyboardInterrupt):
        for job, result in zip(jobs, results, strict=True):
            cases = f"{result.cases} cases" if result.cases else "reads the database"
            say(f"{result.name}: {cases}")
            run_job(job, result, command, bar, say)
            for line in (str(result), *conclude(result)):
                say(line)
            if result.status == RunStatus.INTERRUPTED:
                break
    return results


def run_job(
    job: Job, result: NotebookResult, command: Command, bar: tqdm, log: Callable[[str], None]
) -> None:
    """Run one job, and store the job's status in `result` and in the database.

    Args:
        job: Job to run.
        result: Result of the job. The function updates this result.
        command: Command of the job.
        bar: Bar that shows the current case and counts the finished cases of all jobs.
        log: Function that receives a line when a wait for the device begins or ends.
    """
    began, before = time.perf_counter(), bar.n
    names = {case.case_id: str(case) for case in job.cases()}
    with Store(command.output / DATABASE) as store:

        def watch():
            """Find the run of the job in the database, and show the run's progress."""
            if not result.run_id:
                runs = store.runs("launch = ?", (command.launch(job.title),))
                result.run_id = "".join(runs.run_id)
            finished = store.finished_cases(result.run_id) & names.keys()
            current = next(map(names.get, store.started_attempts(result.run_id)), "")
            bar.set_description_str(printable(f"{result.name}: {current}"))
            bar.update(before + len(finished) - bar.n)

        try:
            if names:  # The notebook waits for its device too, but shows the wait only in its log.
                with device_lock(resolve_device(job.params.device), job.title, log):
                    pass
            _judge(result, _run_papermill(job, command, watch), store)
        except KeyboardInterrupt:
            result.status = RunStatus.INTERRUPTED
            result.message = (
                "stopped by Ctrl-C or SIGTERM; --resume continues after the last finished case"
            )
            store.forget_started(result.run_id)
        result.seconds = time.perf_counter() - began
        if result.run_id and result.status != RunStatus.DONE:
            store.update_run(result.run_id, status=result.status, message=result.message)
        result.statuses = {status: count for status, count, _ in store.case_endings(result.run_id)}


def _run_papermill(job: Job, command: Command, watch: Callable[[], None]) -> str:
    """Execute a notebook, and return why it ended early, or an empty string."""
    source = checkout() / "notebooks" / f"{job.name}.ipynb"
    variables = {
        OUTPUT_VARIABLE: str(command.output),
        LAUNCH_VARIABLE: command.launch(job.title),
        FIRST_VARIABLE: str(os.getpid()),
    }
    try:
        for _ in call_in_process(
            execute,
            source,
            command.output / f"{job.title}.ipynb",
            job.params.nest_settings(job.values),
            variables,
            limit_s=math.inf,
            stopped=watch,
            log=command.logs / f"{job.title}.log",
        ):
            pass
    except Died as error:
        return str(error)
    finally:
        watch()
    return ""


def _judge(result: NotebookResult, reason: str, store: Store):
    """Set the status of the job, and the message if the job is not done."""
    run = store.runs_of([result.run_id])
    if not reason and (RunStatus.DONE in {*run.status} or not result.cases):
        result.status = RunStatus.DONE
        return
    early = "the notebook ended before its last cell marked the run as done"
    result.status, result.message = RunStatus.FAILED, "".join(run.message) or reason or early


def closing_table(results: Sequence[NotebookResult]) -> pd.DataFrame:
    """Return a table of each job's status, cases and duration, with the total in the last line."""
    lines = []
    for result in results:
        counts = dict(result.statuses)
        ok = counts.pop("ok", "—")
        other = ", ".join(f"{count} {status}" for status, count in counts.items()) or "—"
        seconds = f"{result.seconds:.1f}"
        lines.append([result.name, result.status, result.cases or "—", ok, other, seconds])
    total_s = sum(result.seconds for result in results)
    lines.append(["total", "", "", "", "", f"{total_s:.1f}"])
    return pd.DataFrame(lines, columns=["notebook", "status", "cases", "ok", "other", "total s"])
