"""Run jobs one after another, each with papermill in its own process, and report the results.

If a kernel was killed, papermill still saves the notebook with its completed cells. A job is
therefore done only if its run has the status `done`. The last cell of the notebook sets this
status.
"""

import contextlib
import functools
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
import yaml
from tqdm import tqdm

from nanolib.measurement import RunStatus, printable
from nanolib.meters.interference import find_interference
from nanolib.meters.machine import resolve_device
from nanolib.paths import (
    DATABASE,
    FIRST_VARIABLE,
    LAUNCH_VARIABLE,
    OUTPUT_VARIABLE,
    checkout,
    make_folder,
)
from nanolib.run.jobs import Job
from nanolib.run.lock import device_lock
from nanolib.run.process import describe_exit, kill_tree, python, start
from nanolib.store import Store

_POLL_S = 0.3
_RESUME = "--resume continues after the last finished case"
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
        """The folder with the log and the parameters of each job. The first use creates the folder."""
        moment = time.strftime("%Y%m%d-%H%M%S")
        return make_folder(self.output / "logs" / f"{moment}-{self.token}")

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
    """
    make_folder(command.output)
    results = [NotebookResult(job.title, len(job.cases())) for job in jobs]
    total = sum(result.cases for result in results)
    for line in find_interference("cpu") if total else ():
        log(f"not a quiet machine: {line}")
    bar = tqdm(total=total, bar_format=_BAR, disable=None, file=sys.stderr, dynamic_ncols=True)

    def say(line: str) -> None:
        with bar.external_write_mode(sys.stderr):
            log(line)

    with bar, contextlib.suppress(KeyboardInterrupt):
        for job, result in zip(jobs, results, strict=True):
            if bar.disable:
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

    Raises:
        BadInput: This process cannot open the lock file of the device.
    """
    began, before = time.perf_counter(), bar.n
    names = {case.case_id: str(case) for case in job.cases()}
    with Store(command.output / DATABASE) as store:

        def watch() -> None:
            """Find the run of the job in the database, and show the run's progress."""
            if not result.run_id:
                runs = store.runs("launch = ?", (command.launch(job.title),)).run_id
                result.run_id = str(next(iter(runs), ""))
            finished = store.finished_cases(result.run_id) & names.keys()
            current = next(map(names.get, store.started_attempts(result.run_id)), "")
            bar.set_description_str(printable(f"{result.name}: {current}"))
            bar.update(before + len(finished) - bar.n)

        try:
            if names:  # The notebook waits for its device too, but shows the wait only in its log.
                with device_lock(resolve_device(job.params.device), job.title, log):
                    pass
            code = _run_papermill(job, command, watch)
            _judge(result, code, store, command.logs / f"{job.title}.log")
        except KeyboardInterrupt:
            result.status = RunStatus.INTERRUPTED
            result.message = f"stopped by Ctrl-C or SIGTERM; {_RESUME}"
            store.forget_started(result.run_id)
        result.seconds = time.perf_counter() - began
        if result.run_id and result.status != RunStatus.DONE:
            store.update_run(result.run_id, status=result.status, message=result.message)
        endings = store.case_endings(result.run_id)
        result.statuses = {status: count for status, count, _ in endings}


def _run_papermill(job: Job, command: Command, watch: Callable[[], None]) -> int:
    """Execute a notebook, and return papermill's exit code."""
    parameters = command.logs / f"{job.title}.yml"
    parameters.write_text(yaml.safe_dump(job.params.nested(job.values)), encoding="utf-8")
    source = checkout() / "notebooks" / f"{job.name}.ipynb"
    target = command.output / f"{job.title}.ipynb"
    # Papermill replaces names in braces by parameters, even in a path.
    paths = [str(path).replace("{", "{{").replace("}", "}}") for path in (source, target)]
    variables = {
        OUTPUT_VARIABLE: str(command.output),
        LAUNCH_VARIABLE: command.launch(job.title),
        FIRST_VARIABLE: str(os.getpid()),
    }
    with (command.logs / f"{job.title}.log").open("w", encoding="utf-8") as log:
        process = start(
            python("papermill", *paths, "-f", str(parameters), "--no-progress-bar"),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | variables,
        )
        try:
            while process.poll() is None:
                time.sleep(_POLL_S)
                watch()
        finally:
            kill_tree(process.pid)
            process.wait()
            watch()
    return process.returncode


def _judge(result: NotebookResult, code: int, store: Store, log: Path) -> None:
    """Set the status of the job, and the message if the job is not done."""
    run = store.runs_of([result.run_id])
    status, message = ("", "") if run.empty else (run.status.iloc[0], run.message.iloc[0])
    if code == 0 and (status == RunStatus.DONE or not result.cases):
        result.status = RunStatus.DONE
        return
    reason = "the notebook ended before its last cell marked the run as done"
    if code:
        reason = describe_exit(code, log.read_text(errors="replace"))
    result.status, result.message = RunStatus.FAILED, message or reason


def closing_table(results: Sequence[NotebookResult]) -> pd.DataFrame:
    """Return a table of each job's status, cases and duration, with the total in the last line."""
    lines = []
    for result in results:
        counts = result.statuses
        others = [f"{counts[status]} {status}" for status in counts if status != "ok"]
        line = {
            "notebook": result.name,
            "status": result.status,
            "cases": str(result.cases or "—"),
            "ok": str(counts.get("ok", "—")),
            "other": ", ".join(others) or "—",
            "total s": f"{result.seconds:.1f}",
        }
        lines.append(line)
    seconds = sum(result.seconds for result in results)
    total = {"notebook": "total", "total s": f"{seconds:.1f}"}
    return pd.DataFrame([*lines, total]).fillna("")
