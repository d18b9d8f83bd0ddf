"""Run jobs, each by papermill in its own process, and say how each ended.

A papermill run whose kernel was killed leaves a notebook that looks completed. So a job succeeded if
its run in the database has the status `done`, which the notebook's last cell writes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import queue
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
from nanolib.meters.machine import resolve_device
from nanolib.meters.quiet import disturbances
from nanolib.paths import DATABASE, LAUNCH_VARIABLE, OUTPUT_VARIABLE, make_folder
from nanolib.run.jobs import Job, gpu_places, on_any_gpu
from nanolib.run.lock import holder
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
        status: `done`, `failed`, `interrupted` or `not started`.
        message: Why it did not end well, in one line.
        seconds: Wall time.
        measured_s: Part of the wall time inside cases.
        cases: How many cases it has.
        statuses: Status → number of cases.
        run_id: Its run; empty if it made none.
        interference: What else the machine did during the run, in lines.
    """

    name: str
    status: str = "not started"
    message: str = ""
    seconds: float = 0.0
    measured_s: float = 0.0
    cases: int = 0
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
        measured: Called with the runs so far before the last job, if that one measures nothing.

    Returns:
        How each ended.
    """
    make_folder(command.output)
    ended = [Ended(job.title, cases=len(job.cases())) for job in jobs]
    for line in disturbances("cpu") if any(end.cases for end in ended) else ():
        log(f"not a quiet machine: {line}")
    stop, places = threading.Event(), gpu_places()
    free: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()
    for place in places:
        free.put(place)
    total = sum(end.cases for end in ended)
    bar = tqdm(total=total, bar_format=_BAR, disable=None, file=sys.stderr, dynamic_ncols=True)
    finished: dict[str, int] = {}

    def show(title: str, count: int, text: str) -> None:
        finished[title] = count
        bar.set_description_str(printable(f"{title}: {text}" if text else title))
        bar.update(sum(finished.values()) - bar.n)

    def run(job: Job, end: Ended, place: dict[str, str]) -> None:
        if stop.is_set():
            return
        if bar.disable:
            kind = f"{end.cases} cases" if end.cases else "reads the database"
            log(f"{end.name}: {kind}")
        run_job(job, end, command, place, stop, show)
        with bar.external_write_mode(sys.stderr):
            for line in (*end.lines(), *answered(end)):
                log(line)

    def run_on_a_gpu(job: Job, end: Ended) -> None:
        place = free.get()
        try:
            run(job, end, place)
        finally:
            free.put(place)

    pairs = list(zip(jobs, ended, strict=True))
    together = [pair for pair in pairs if len(places) > 1 and on_any_gpu(pair[0])]
    with bar, ThreadPoolExecutor(max(len(places), 1)) as pool:
        try:
            list(pool.map(run_on_a_gpu, *zip(*together, strict=True)) if together else ())
        except KeyboardInterrupt:
            stop.set()
        for job, end in pairs:
            if stop.is_set():
                break
            if (job, end) in together:
                continue
            if job is jobs[-1] and not end.cases:  # it reads what the others have stored
                measured([done.run_id for done in ended if done.run_id])
            run(job, end, {})
    return ended


def run_job(
    job: Job,
    end: Ended,
    command: Command,
    place: dict[str, str],
    stop: threading.Event,
    show: Callable[[str, int, str], None],
) -> None:
    """Run one job, and write how it ended into `end` and into its run.

    Args:
        job: Which.
        end: Of this job.
        command: To which it belongs.
        place: Variables of its process.
        stop: Ends it when it is set; a Ctrl-C sets it.
        show: Receives its title, how many cases are finished, and what it is doing.
    """
    began = time.perf_counter()
    names = {case.case_id: str(case) for case in job.cases()}
    device = getattr(job.params, "device", "cpu")
    with Store(command.output / DATABASE) as store:

        def watch() -> None:
            """Find the run of the job, and show how far it is."""
            if not end.run_id:
                runs = store.runs("launch = ?", (command.launch(job.title),)).run_id
                end.run_id = str(next(iter(runs), ""))
            if end.run_id:
                done = store.finished_cases(end.run_id) & names.keys()
                begun = [names[case] for case in store.started_attempts(end.run_id)]
                show(end.name, len(done), begun[0] if begun else "")
            elif names and (owner := holder(resolve_device(device))):
                show(end.name, 0, f"waiting for {device}: in use by {owner}")

        try:
            code = _run_papermill(job, command, place, stop, watch)
            _judge(end, code, store, command.logs / f"{job.title}.log")
        except KeyboardInterrupt:
            stop.set()
            end.status = RunStatus.INTERRUPTED
            end.message = "stopped by Ctrl-C; finished cases are saved (--resume)"
        end.seconds = time.perf_counter() - began
        if not end.run_id:
            return
        if end.status != RunStatus.DONE:
            store.update_run(end.run_id, status=end.status, message=end.message)
        endings = store.case_endings(end.run_id)
        end.statuses = {status: count for status, count, _ in endings}
        end.measured_s = sum(seconds for _, _, seconds in endings)
        end.interference = list(itertools.chain(*store.runs_of([end.run_id]).disturbances))


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
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
                if stop.is_set():
                    raise KeyboardInterrupt
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
    """What ran, how its cases ended, and how long it took; the last line is the sum."""
    lines = []
    for end in ended:
        others = [f"{count} {status}" for status, count in end.statuses.items() if status != "ok"]
        line = {
            "notebook": end.name,
            "status": end.status,
            "cases": str(end.cases or "—"),
            "ok": str(end.statuses.get("ok", "—")),
            "other": ", ".join(others) or "—",
        }
        lines.append(line | _times(end.measured_s, end.seconds))
    measured_s = sum(end.measured_s for end in ended)
    seconds = sum(end.seconds for end in ended)
    return pd.DataFrame([*lines, {"notebook": "total"} | _times(measured_s, seconds)]).fillna("")


def _times(measured_s: float, seconds: float) -> dict[str, str]:
    rest_s = max(0.0, seconds - measured_s)
    columns = {"measuring s": measured_s, "rest s": rest_s, "total s": seconds}
    return {name: f"{value:.1f}" for name, value in columns.items()}
