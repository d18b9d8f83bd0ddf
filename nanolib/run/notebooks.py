"""Run jobs one after another, each with papermill in its own process, and report the results.

If a kernel was killed, papermill still saves the notebook with its completed cells. A job is
therefore done only if its run has the status `done`. The last cell of the notebook sets this
status.
"""

import contextlib
import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd
import psutil
import yaml
from tqdm import tqdm

from nanolib.measurement import RunStatus, printable
from nanolib.meters.interference import find_interference
from nanolib.meters.machine import resolve_device
from nanolib.paths import DATABASE, LAUNCH_VARIABLE, OUTPUT_VARIABLE, checkout, make_folder
from nanolib.run.jobs import Job
from nanolib.run.lock import lock_owner
from nanolib.run.process import describe_exit, kill_tree, python, start
from nanolib.store import Store

_POLL_S = 0.3
_RESUME = "--resume continues after the last finished case"
_BAR = "{desc} · case {n_fmt} of {total_fmt} {bar} {elapsed} · about {remaining} left"
_LEAST_FREE = 2**16  # Disk space without which papermill cannot save a notebook, in bytes.
_KERNEL_DIED = 138  # papermill's exit code after the death of a kernel.


@dataclass
class NotebookResult:
    """The result of one job.

    Attributes:
        name: Name of the executed notebook.
        cases: Number of cases.
        status: Status of the job: `done`, `failed`, `interrupted` or `not started`.
        message: Reason for a failure or an interruption, in one line.
        seconds: Wall time of the job, s.
        measured_s: Wall time inside the cases that this command measured, s.
        resumed: Number of cases that an earlier command has measured.
        finished: Number of cases that have ended.
        statuses: Number of cases by status.
        run_id: ID of the run, or an empty string if the notebook has not created a run.
        interference: Lines about the interference on the machine during the run.
    """

    name: str
    cases: int = 0
    status: str = "not started"
    message: str = ""
    seconds: float = 0.0
    measured_s: float = 0.0
    resumed: int = 0
    finished: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
    run_id: str = ""
    interference: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return lines about the result for a terminal."""
        resumed = f"{self.resumed} of {self.cases} cases were finished before"
        return [
            *([f"{self.name}: {resumed}"] if self.resumed else []),
            *(f"{self.name}: not a quiet machine: {line}" for line in self.interference),
            f"{self.name}: {self.status} in {self.seconds:.0f} s {self.message}".rstrip(),
        ]


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
        """The folder with one log per job. The first use creates the folder."""
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

    waits = set()

    def show(result: NotebookResult, text: str) -> None:
        # Before a job has a run, the only text is a line about a wait.
        if bar.disable and text and not result.run_id and result.name not in waits:
            waits.add(result.name)
            log(f"{result.name}: {text}")
        bar.set_description_str(printable(f"{result.name}: {text}" if text else result.name))
        bar.update(sum(each.finished for each in results) - bar.n)

    with bar, contextlib.suppress(KeyboardInterrupt):
        for job, result in zip(jobs, results, strict=True):
            if bar.disable:
                cases = f"{result.cases} cases" if result.cases else "reads the database"
                log(f"{result.name}: {cases}")
            run_job(job, result, command, show)
            with bar.external_write_mode(sys.stderr):
                for line in (*result.lines(), *conclude(result)):
                    log(line)
            if result.status == RunStatus.INTERRUPTED:
                break
    return results


def run_job(
    job: Job,
    result: NotebookResult,
    command: Command,
    show: Callable[[NotebookResult, str], None],
) -> None:
    """Run one job, and store the job's status in `result` and in the database.

    Args:
        job: Job to run.
        result: Result of the job. The function updates this result while the job runs.
        command: Command of the job.
        show: Function that shows `result` and the name of the current case.
    """
    began = time.perf_counter()
    names = {case.case_id: str(case) for case in job.cases()}
    device = resolve_device(getattr(job.params, "device", "cpu"))
    with Store(command.output / DATABASE) as store:

        def watch() -> None:
            """Find the run of the job in the database, and show the run's progress."""
            if not result.run_id:
                runs = store.runs("launch = ?", (command.launch(job.title),)).run_id
                result.run_id = str(next(iter(runs), ""))
                if job.params.resume:
                    result.resumed = len(store.finished_cases(result.run_id))
                    endings = store.case_endings(result.run_id)
                    result.measured_s = -sum(seconds for *_, seconds in endings)
            result.finished = len(store.finished_cases(result.run_id) & names.keys())
            current = next(map(names.get, store.started_attempts(result.run_id)), "")
            if names and not result.run_id:
                # The job locks the device before it has a run.
                ours = {child.pid for child in psutil.Process().children(recursive=True)}
                if owner := lock_owner(device, ours):
                    current = f"waiting for {device}: in use by {owner}"
            show(result, current)

        try:
            code = _run_papermill(job, command, watch)
            _judge(result, code, store, command.logs / f"{job.title}.log")
        except KeyboardInterrupt:
            result.status = RunStatus.INTERRUPTED
            result.message = f"stopped by Ctrl-C or SIGTERM; {_RESUME}"
            store.forget_started(result.run_id)
        result.seconds = time.perf_counter() - began
        if result.run_id and result.status != RunStatus.DONE:
            store.update_run(result.run_id, status=result.status, message=result.message)
        for status, count, seconds in store.case_endings(result.run_id):
            result.statuses[status] = count
            result.measured_s += seconds
        result.interference = list(itertools.chain(*store.runs_of([result.run_id]).interference))


def _run_papermill(job: Job, command: Command, watch: Callable[[], None]) -> int:
    """Execute a notebook in a temporary folder, move the result, and return papermill's exit code.

    Without a temporary folder, two commands at the same time could write to the same file.
    """
    with (
        TemporaryDirectory(prefix=".nanolib-run-", dir=command.output) as folder,
        (command.logs / f"{job.title}.log").open("w", encoding="utf-8") as log,
    ):
        parameters, target = Path(folder, "params.yml"), Path(folder, f"{job.title}.ipynb")
        parameters.write_text(yaml.safe_dump(job.params.nested(job.values)), encoding="utf-8")
        source = checkout() / "notebooks" / f"{job.name}.ipynb"
        # Papermill replaces names in braces by parameters, even in a path.
        paths = [str(path).replace("{", "{{").replace("}", "}}") for path in (source, target)]
        variables = {
            OUTPUT_VARIABLE: str(command.output),
            LAUNCH_VARIABLE: command.launch(job.title),
        }
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
            # On a full disk, papermill leaves half a notebook.
            with contextlib.suppress(OSError, ValueError):
                json.loads(target.read_bytes())
                target.replace(command.output / target.name)
            watch()
    return process.returncode


def _judge(result: NotebookResult, code: int, store: Store, log: Path) -> None:
    """Set the status of the job, and the message if the job is not done."""
    run = store.runs_of([result.run_id])
    status, message = ("", "") if run.empty else (run.status.iloc[0], run.message.iloc[0])
    if code == 0 and status == (RunStatus.DONE if result.cases else status):
        result.status = RunStatus.DONE
        return
    result.status = RunStatus.FAILED
    if message:
        result.message = message
    elif shutil.disk_usage(log.parent).free < _LEAST_FREE:
        result.message = "the disk is full; free space, and run again with --resume"
    elif code == 0:
        result.message = "the notebook ended before its last cell marked the run as done"
    elif code == _KERNEL_DIED:
        result.message = f"the kernel died, perhaps because memory ran out; see {log}; {_RESUME}"
    else:
        result.message = describe_exit(code, log.read_text(errors="replace"))


def closing_table(results: Sequence[NotebookResult]) -> pd.DataFrame:
    """Return a table of each job's status, cases and times, with total times in the last line."""
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
            "measuring s": result.measured_s,
            "rest s": max(0.0, result.seconds - result.measured_s),
            "total s": result.seconds,
        }
        lines.append(line)
    table = pd.DataFrame(lines)
    table.loc[len(table)] = {"notebook": "total", **table.sum(numeric_only=True)}
    return table.fillna("").map(lambda cell: cell if isinstance(cell, str) else f"{cell:.1f}")
