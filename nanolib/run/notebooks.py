"""Run jobs, each by papermill in its own process, and say how each ended.

A papermill run whose kernel was killed leaves a notebook that looks completed. So a job succeeded
if its run in the database has the status `done`, which the notebook's last cell writes. Jobs run in
threads, also if there is one at a time: Ctrl-C reaches the main thread, which sets `stop`.
"""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd
import yaml
from tqdm import tqdm

from nanolib.measurement import RunStatus, printable
from nanolib.meters.interference import find_interference
from nanolib.meters.machine import resolve_device
from nanolib.paths import DATABASE, LAUNCH_VARIABLE, OUTPUT_VARIABLE, make_folder
from nanolib.run.jobs import Job, gpu_places, on_any_gpu
from nanolib.run.lock import lock_owner
from nanolib.run.process import kill_tree, python, signal_name, start
from nanolib.store import Store

_POLL_S = 0.3
_BAR = "{desc} · case {n_fmt} of {total_fmt} {bar} {elapsed} · about {remaining} left"
_KERNEL_DIED = 138  # papermill's own exit code for it


@dataclass
class Ended:
    """How one job ended.

    Attributes:
        name: The notebook.
        cases: How many cases it has.
        status: `done`, `failed`, `interrupted` or `not started`.
        message: Why it did not end well, in one line.
        seconds: Wall time.
        measured_s: Part of the wall time inside cases.
        finished: How many cases have ended.
        statuses: Status → number of cases.
        run_id: Its run; empty if it made none.
        interference: What else the machine did during the run, in lines.
    """

    name: str
    cases: int = 0
    status: str = "not started"
    message: str = ""
    seconds: float = 0.0
    measured_s: float = 0.0
    finished: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
    run_id: str = ""
    interference: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """How it ended, for a terminal."""
        return [
            *(f"{self.name}: not a quiet machine: {line}" for line in self.interference),
            f"{self.name}: {self.status} in {self.seconds:.0f} s {self.message}".rstrip(),
        ]


@dataclass
class Command:
    """What the jobs of one command share.

    Attributes:
        output: The output folder.
        token: Names the command: its runs have it in common.
    """

    output: Path
    token: str = field(default_factory=lambda: uuid.uuid4().hex[:12])

    @functools.cached_property
    def logs(self) -> Path:
        """A folder with a log per job, made when it is first needed: a command that is refused writes nothing."""
        moment = time.strftime("%Y%m%d-%H%M%S")
        return make_folder(self.output / "logs" / f"{moment}-{self.token}")

    def launch(self, title: str) -> str:
        """By which the run of a job is found."""
        return f"{self.token}/{title}"


def run_jobs(
    jobs: Sequence[Job],
    command: Command,
    log: Callable[[str], None] = print,
    *,
    answered: Callable[[Ended], Sequence[str]] = lambda _: (),
    measured: Callable[[list[str]], None] = lambda _: None,
) -> list[Ended]:
    """Run the jobs: those that any one GPU can do on all GPUs at once, and the others in turn.

    Args:
        jobs: From `plan`.
        command: To which they belong.
        log: Takes lines for the terminal.
        answered: Returns lines for the terminal about a job that has ended.
        measured: Called with the runs so far before a job that reads them.

    Returns:
        How each ended.
    """
    make_folder(command.output)
    ended = [Ended(job.title, len(job.cases())) for job in jobs]
    total = sum(end.cases for end in ended)
    for line in find_interference("cpu") if total else ():
        log(f"not a quiet machine: {line}")
    stop, places, thread = threading.Event(), gpu_places(), threading.local()
    bar = tqdm(total=total, bar_format=_BAR, disable=None, file=sys.stderr, dynamic_ncols=True)
    together = [len(places) > 1 and on_any_gpu(job) for job in jobs]

    def settle() -> None:
        """Give a thread the GPU that its jobs use."""
        thread.place = places.pop() if places else {}

    def show(end: Ended, text: str) -> None:
        bar.set_description_str(printable(f"{end.name}: {text}" if text else end.name))
        bar.update(sum(end.finished for end in ended) - bar.n)

    def run(job: Job, end: Ended, on_a_gpu: bool) -> None:
        if stop.is_set():
            return
        if bar.disable:
            log(f"{end.name}: {f'{end.cases} cases' if end.cases else 'reads the database'}")
        run_job(job, end, command, thread.place if on_a_gpu else {}, stop, show)
        with bar.external_write_mode(sys.stderr):
            for line in (*end.lines(), *answered(end)):
                log(line)

    every = list(zip(jobs, ended, together, strict=True))
    batches = [[one for one in every if one[-1]], *([one] for one in every if not one[-1])]
    with bar, ThreadPoolExecutor(max(len(places), 1), initializer=settle) as pool:
        try:
            for batch in batches:
                if not any(end.cases for _, end, _ in batch):
                    measured([end.run_id for end in ended if end.run_id])
                list(pool.map(lambda one: run(*one), batch))
        except KeyboardInterrupt:
            stop.set()
    return ended


def run_job(
    job: Job,
    end: Ended,
    command: Command,
    place: dict[str, str],
    stop: threading.Event,
    show: Callable[[Ended, str], None],
) -> None:
    """Run one job, and write how it ended into `end` and into its run.

    Args:
        job: Which.
        end: Of this job.
        command: To which it belongs.
        place: Variables of its process.
        stop: Ends it when it is set.
        show: Receives `end`, and what the job is doing.
    """
    began, log = time.perf_counter(), command.logs / f"{job.title}.log"
    names = {case.case_id: str(case) for case in job.cases()}
    device = getattr(job.params, "device", "cpu")
    with Store(command.output / DATABASE) as store:

        def watch() -> None:
            """Find the run of the job, and show how far it is."""
            runs = store.runs("launch = ?", (command.launch(job.title),)).run_id
            end.run_id = str(next(iter(runs), ""))
            end.finished = len(store.finished_cases(end.run_id) & names.keys())
            at = [names[case_id] for case_id in store.started_attempts(end.run_id)]
            if names and not end.run_id and (owner := lock_owner(resolve_device(device))):
                at = [f"waiting for {device}: in use by {owner}"]
            show(end, next(iter(at), ""))

        code = _run_papermill(job, command, place, stop, watch)
        end.seconds = time.perf_counter() - began
        if code and stop.is_set():
            end.status = RunStatus.INTERRUPTED
            end.message = "stopped by Ctrl-C; finished cases are saved (--resume)"
        else:
            _judge(end, code, store, log)
        if end.run_id and end.status != RunStatus.DONE:
            store.update_run(end.run_id, status=end.status, message=end.message)
        for status, count, seconds in store.case_endings(end.run_id):
            end.statuses[status] = count
            end.measured_s += seconds
        end.interference = list(itertools.chain(*store.runs_of([end.run_id]).interference))


def _run_papermill(
    job: Job,
    command: Command,
    place: dict[str, str],
    stop: threading.Event,
    watch: Callable[[], None],
) -> int:
    """Execute the notebook beside its place, move it there, and return papermill's exit code.

    Beside its place, because two suites at once must not write into one file.
    """
    with (
        TemporaryDirectory(prefix=".nanolib-run-", dir=command.output) as folder,
        (command.logs / f"{job.title}.log").open("w", encoding="utf-8") as log,
    ):
        parameters, target = Path(folder, "params.yml"), Path(folder, f"{job.title}.ipynb")
        parameters.write_text(yaml.safe_dump(job.params.nested(job.values)), encoding="utf-8")
        # papermill fills parameters into what is in braces
        paths = [str(path).replace("{", "{{").replace("}", "}}") for path in (job.notebook, target)]
        variables = {
            OUTPUT_VARIABLE: str(command.output),
            LAUNCH_VARIABLE: command.launch(job.title),
        }
        process = start(
            python("papermill", *paths, "-f", str(parameters), "--no-progress-bar"),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | variables | place,
        )
        try:
            while process.poll() is None and not stop.wait(_POLL_S):
                watch()
        finally:
            kill_tree(process.pid)
            process.wait()
            if target.exists():
                target.replace(command.output / target.name)
            watch()
    return process.returncode


def _judge(end: Ended, code: int, store: Store, log: Path) -> None:
    """Say whether the job is done, and if not, why."""
    run = store.runs("run_id = ?", (end.run_id,))
    status, message = ("", "") if run.empty else (run.status.iloc[0], run.message.iloc[0])
    if code == 0 and status == (RunStatus.DONE if end.cases else status):
        end.status = RunStatus.DONE
        return
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1].strip() if lines else "it wrote nothing"
    end.status, end.message = RunStatus.FAILED, f"{last} (exit {code})"
    if message:
        end.message = message
    elif code < 0:
        end.message = f"papermill was killed by {signal_name(-code)}"
    elif code == _KERNEL_DIED or "died" in last.lower():
        end.message = f"the kernel died (exit {code}); out of memory? see {log}"
    elif code == 0:
        end.message = "the notebook ended before its last cell, which marks the run as done"


def closing_table(ended: Sequence[Ended]) -> pd.DataFrame:
    """Tell what ran, how its cases ended, and how long it took; the last line is the sum."""
    lines = []
    for end in ended:
        others = [f"{count} {status}" for status, count in end.statuses.items() if status != "ok"]
        line = {
            "notebook": end.name,
            "status": end.status,
            "cases": str(end.cases or "—"),
            "ok": str(end.statuses.get("ok", "—")),
            "other": ", ".join(others) or "—",
            "measuring s": end.measured_s,
            "rest s": max(0.0, end.seconds - end.measured_s),
            "total s": end.seconds,
        }
        lines.append(line)
    table = pd.DataFrame(lines)
    sums = table[["measuring s", "rest s", "total s"]].sum()
    table.loc[len(table)] = {"notebook": "total", **sums}
    return table.fillna("").map(lambda cell: cell if isinstance(cell, str) else f"{cell:.1f}")
