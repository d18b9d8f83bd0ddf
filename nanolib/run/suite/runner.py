"""Run jobs one after the other, each by papermill in its own process, and tell how each ended.

A papermill run whose kernel was killed leaves a notebook that looks completed, so success is the run's row in the database with
status `done`, written last by the notebook itself, and never the notebook's own metadata.
"""

from __future__ import annotations

import contextlib
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
from typing import IO

import pandas as pd
import yaml
from tqdm import tqdm

from nanolib.measurement import RunStatus, printable
from nanolib.meters.machine import resolve_device
from nanolib.meters.quiet import disturbances
from nanolib.paths import DATABASE, LAUNCH_VARIABLE, OUTPUT_VARIABLE, PART_VARIABLE, make_folder
from nanolib.run.lock import holder
from nanolib.run.process import kill_tree, python, signal_name, start
from nanolib.run.suite.devices import gpu_places, on_any_gpu
from nanolib.run.suite.jobs import Job
from nanolib.store import Store
from nanolib.store.schema import DURING

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
        measured_s: Of that, inside cases.
        cases: How many cases it has.
        statuses: Status → how many cases ended so.
        run_id: Its run; empty when it made none.
        interference: What else the machine did, as far as the terminal has shown it.
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


@dataclass
class _Command:
    """What the jobs of one command share.

    Attributes:
        output: The output folder.
        token: Of the command.
        bar: Moves with the cases of all of them.
        log: Takes lines for the terminal.
        answered: Says in lines what a job that has ended answers.
        finished: Cases that have ended, by the job's title.
        stop: Set when they are to end.
    """

    output: Path
    token: str
    bar: tqdm
    log: Callable[[str], None]
    answered: Callable[[Ended], Sequence[str]]
    finished: dict[str, int] = field(default_factory=dict)
    stop: threading.Event = field(default_factory=threading.Event)


def run_jobs(
    jobs: Sequence[Job],
    output: Path,
    log: Callable[[str], None] = print,
    *,
    token: str = "",
    answered: Callable[[Ended], Sequence[str]] = lambda _: (),
    measured: Callable[[list[str]], None] = lambda _: None,
) -> tuple[list[Ended], Path]:
    """Run the jobs: those that any one GPU can do on all GPUs at once, and the others in turn.

    Args:
        jobs: From `plan`.
        output: The output folder.
        log: Takes lines for the terminal.
        token: Of the command, where it has one already.
        answered: What is to be said of a job that has ended, in lines for the terminal.
        measured: Called with the runs before the last job, where that measures nothing.

    Returns:
        How each ended, and the log file.
    """
    token = token or new_token()
    log_path = new_log(output, token)
    ended = [Ended(job.title, cases=len(job.cases())) for job in jobs]
    for line in disturbances("cpu") if any(end.cases for end in ended) else ():
        log(f"not a quiet machine: {line}")
    total = sum(end.cases for end in ended)
    places = gpu_places()
    together = [at for at, job in enumerate(jobs) if on_any_gpu(job)] if len(places) > 1 else []
    with tqdm(
        total=total, bar_format=_BAR, disable=None, file=sys.stderr, dynamic_ncols=True
    ) as bar:
        command = _Command(output, token, bar, log, answered)
        _run_together(command, [(jobs[at], ended[at]) for at in together], places, log_path)
        for at, (job, end) in enumerate(zip(jobs, ended, strict=True)):
            if command.stop.is_set():
                break
            if at in together:
                continue
            if job is jobs[-1] and not end.cases:  # it reads what the others have stored
                measured([done.run_id for done in ended if done.run_id])
            _run_one(job, end, command, {}, log_path)
    return ended, log_path


def new_token() -> str:
    """A token for the runs of one command."""
    return uuid.uuid4().hex[:12]


def new_log(output: Path, token: str) -> Path:
    """Where a command's log will be; its folder exists then."""
    return make_folder(output / "logs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{token}.log"


def _run_together(
    command: _Command,
    jobs: Sequence[tuple[Job, Ended]],
    places: Sequence[dict[str, str]],
    log_path: Path,
) -> None:
    """As many at once as there are places, each with a log of its own."""
    free: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()
    for place in places:
        free.put(place)

    def run(job: Job, end: Ended) -> None:
        place = free.get()
        try:
            if not command.stop.is_set():
                _run_one(
                    job, end, command, place, log_path.with_stem(f"{log_path.stem}-{job.title}")
                )
        finally:
            free.put(place)

    with ThreadPoolExecutor(max(len(places), 1)) as pool:
        running = [pool.submit(run, job, end) for job, end in jobs]
        try:
            for one in running:
                one.result()
        except KeyboardInterrupt:
            command.stop.set()


def _run_one(
    job: Job, end: Ended, command: _Command, place: dict[str, str], log_path: Path
) -> None:
    """One job to its end, whichever that is."""
    if command.bar.disable:
        command.log(
            f"{end.name}: {end.cases} cases" if end.cases else f"{end.name}: reads the database"
        )
    with (
        Store(command.output / DATABASE) as store,
        log_path.open("a", encoding="utf-8") as log_file,
    ):
        try:
            _run(job, end, command, place, store, log_file)
        except KeyboardInterrupt:
            command.stop.set()
            end.status = RunStatus.INTERRUPTED
            end.message = "stopped by Ctrl-C; finished cases are saved (--resume)"
        _settle(store, end)
        if end.run_id:
            _show_interference(end, command, store, ended=True)
    with command.bar.external_write_mode(sys.stderr):
        if command.bar.disable:
            command.log(f"{end.name}: {end.status} in {end.seconds:.0f} s {end.message}".rstrip())
        for line in command.answered(end):
            command.log(line)


def _run(
    job: Job, end: Ended, command: _Command, place: dict[str, str], store: Store, log_file: IO[str]
) -> None:
    began = time.perf_counter()
    names = {case.case_id: str(case) for case in job.cases()}
    launch = f"{command.token}/{job.title}"
    log_file.seek(0, os.SEEK_END)
    said = log_file.tell()
    # beside its place until it ends: two suites at once must not write into one file
    with TemporaryDirectory(prefix=".nanolib-run-", dir=command.output) as made:
        parameters, target = Path(made, "params.yml"), Path(made, f"{job.title}.ipynb")
        parameters.write_text(yaml.safe_dump(dict(job.values)), encoding="utf-8")
        arguments = [
            _as_is(job.notebook),
            _as_is(target),
            "-f",
            str(parameters),
            "--no-progress-bar",
        ]
        told = {
            OUTPUT_VARIABLE: str(command.output),
            LAUNCH_VARIABLE: launch,
            PART_VARIABLE: job.part,
        }
        process = start(
            python("papermill", *arguments),
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=log_file,
            env=os.environ | told | place,
        )
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
                if command.stop.is_set():
                    raise KeyboardInterrupt
                _watch(job, end, command, store, names, launch)
        finally:
            kill_tree(process.pid)
            process.wait()
            if target.exists():
                target.replace(command.output / target.name)
            end.seconds = time.perf_counter() - began
            _watch(job, end, command, store, names, launch)
    row = store.runs("run_id = ?", (end.run_id,))
    if process.returncode == 0 and (
        (row.empty and not names) or (not row.empty and row.status.iloc[0] == RunStatus.DONE)
    ):
        end.status = RunStatus.DONE
        return
    end.status = RunStatus.FAILED
    if not row.empty and row.message.iloc[0]:
        end.message = row.message.iloc[0]
    else:
        end.message = _reason(process.returncode, Path(log_file.name), said)


def _as_is(path: Path) -> str:
    """A path for papermill, which fills parameters into what stands in braces."""
    return str(path).replace("{", "{{").replace("}", "}}")


def _watch(
    job: Job, end: Ended, command: _Command, store: Store, names: dict[str, str], launch: str
) -> None:
    """Move the bar to where the rows say that the job is."""
    if not names:
        return
    if not end.run_id:
        end.run_id = str(next(iter(store.runs("launch = ?", (launch,)).run_id), ""))
    if not end.run_id:
        if busy := holder(resolve_device(getattr(job.params, "device", "cpu"))):
            command.bar.set_description_str(
                printable(f"{end.name} waits: the device is in use by {busy}")
            )
        return
    _show_interference(end, command, store, ended=False)
    command.finished[end.name] = len(store.finished_cases(end.run_id) & names.keys())
    in_flight = [
        names[case_id] for case_id in store.started_attempts(end.run_id) if case_id in names
    ]
    command.bar.set_description_str(printable(": ".join([end.name, *in_flight[:1]])))
    command.bar.update(sum(command.finished.values()) - command.bar.n)


def _show_interference(end: Ended, command: _Command, store: Store, ended: bool) -> None:
    """What the run found when it began, at once; what its cases met, when it has ended: until then that line changes."""
    for line in itertools.chain(*store.runs_of([end.run_id]).disturbances):
        if line not in end.interference and (ended or not line.startswith(DURING)):
            end.interference.append(line)
            with command.bar.external_write_mode(sys.stderr):
                command.log(f"{end.name}: not a quiet machine: {line}")


def _settle(store: Store, end: Ended) -> None:
    """Write into the run's row that it did not end well, and read from its rows how the cases did."""
    if not end.run_id:
        return
    if end.status != RunStatus.DONE:
        store.update_run(end.run_id, status=end.status, message=end.message)
    rows = store.case_endings(end.run_id)
    end.statuses = {status: count for status, count, _ in rows}
    end.measured_s = sum(seconds for _, _, seconds in rows)


def _reason(returncode: int, log_file: Path, said: int) -> str:
    """Why papermill ended so: the last line it wrote, and the signal where there was one."""
    with log_file.open("rb") as file:
        file.seek(said)
        lines = [
            line.strip()
            for line in file.read().decode(errors="replace").splitlines()
            if line.strip()
        ]
    last = lines[-1] if lines else "it wrote nothing"
    if returncode < 0:
        return f"papermill was killed by {signal_name(-returncode)}"
    if returncode == _KERNEL_DIED or "died" in last.lower():
        return f"its kernel died before the run was done (exit {returncode}); out of memory? see the log"
    if returncode == 0:
        return "the notebook ended but its run is not marked done: its last cell did not run"
    return f"{last} (exit {returncode})"


def closing_table(ended: Sequence[Ended]) -> pd.DataFrame:
    """What ran, how long and where the time went; the sum of it in the last line."""
    lines = []
    for end in ended:
        other = (
            ", ".join(
                f"{count} {status}" for status, count in end.statuses.items() if status != "ok"
            )
            or "—"
        )
        counts = {
            "cases": str(end.cases or "—"),
            "ok": str(end.statuses.get("ok", "—")),
            "other": other,
        }
        lines.append(
            {"notebook": end.name, "status": end.status}
            | counts
            | _times(end.measured_s, end.seconds)
        )
    measured_s, seconds = (
        sum(getattr(end, name) for end in ended) for name in ("measured_s", "seconds")
    )
    return pd.DataFrame([*lines, {"notebook": "total"} | _times(measured_s, seconds)]).fillna("")


def _times(measured_s: float, seconds: float) -> dict[str, str]:
    parts = {
        "measuring s": measured_s,
        "rest s": max(0.0, seconds - measured_s),
        "total s": seconds,
    }
    return {name: f"{value:.1f}" for name, value in parts.items()}
