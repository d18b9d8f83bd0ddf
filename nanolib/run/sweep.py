"""Measure the cases of an experiment, and store their rows.

The sweep locks the device, skips the finished cases, and stores a `started` row for each other case
before it measures the case. If the process is killed, only the cases in progress are lost. A failed
case becomes a row with its status and message, and the sweep continues.
"""

import contextlib
import gc
import os
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pandas as pd
from tqdm import tqdm

from nanolib.measurement import BadInput, Measurement, RunStatus, Status, cause, one_line, printable
from nanolib.meters.interference import watch_cpus
from nanolib.meters.machine import limit_threads, resolve_device
from nanolib.paths import LAUNCH_VARIABLE
from nanolib.run.case import Case, Params
from nanolib.run.group import (
    Canceled,
    fit_together,
    measure_apart,
    measure_group,
    run_in_process,
)
from nanolib.run.outcome import Outcome
from nanolib.run.peaks import ceilings_of, measured_before
from nanolib.run.prepare import new_run, take_over
from nanolib.run.process import device_lock, lock_path, say
from nanolib.run.ranks import under_torchrun
from nanolib.store import Store

__all__ = ["SweepRun", "measure"]

MAX_ATTEMPTS = 2


class SweepRun:
    """A run whose cases have been measured.

    A notebook shows this object as the number of cases by status.

    Attributes:
        run_id: UUID of the run.
        store: Database of the run.

    Example:
        >>> from nanolib.meters.machine import this_machine
        >>> from nanolib.store import Run
        >>> store = Store("results.sqlite")
        >>> run = SweepRun(store, store.add(Run("attention", machine=this_machine().to_dict())))
        >>> run.finish()
        'run ... is in results.sqlite'
    """

    def __init__(self, store: Store, run_id: str):
        self.store, self.run_id = store, run_id
        before = store.runs_of([run_id]).duration_s.iloc[0]  # Only a continued run has a duration.
        self._start = time.perf_counter() - float(before or 0)

    def measurements(self, *, samples: bool = False) -> pd.DataFrame:
        """Read the rows of the run, including the rows from before a `--resume`."""
        return self.store.measurements([self.run_id], samples=samples)

    def __repr__(self) -> str:
        """Return the number of cases by status, and the sum of their durations."""
        rows = self.store.case_endings(self.run_id)
        ended = ", ".join(f"{count} {status}" for status, count, _ in rows)
        seconds = sum(seconds for *_, seconds in rows)
        return f"run {self.run_id[:8]}: {ended}; {seconds:.0f} s inside cases"

    def finish(self) -> str:
        """Mark the run as done. The last cell of each notebook calls this method.

        Returns:
            One line with the run's ID and the name of the database.
        """
        self.end(RunStatus.DONE)
        return f"run {self.run_id[:8]} is in {self.store.path.name}"

    def end(self, status: RunStatus, message: str = "") -> None:
        """Store the status and the duration of the run."""
        self.store.update_run(
            self.run_id,
            status=status,
            duration_s=time.perf_counter() - self._start,
            message=message,
        )


def measure(
    experiment,
    params: Params,
    *,
    store: Store | None = None,
    stop: threading.Event | None = None,
    on_progress: Callable[[str], object] | None = None,
) -> SweepRun:
    """Measure all cases of an experiment on this machine.

    Args:
        experiment: Module of `nanolib.experiments` with a function `cases`.
        params: Parameters of the experiment.
        store: Database of the rows, by default the database in the output folder.
        stop: Event that ends the current case and interrupts the run. If the case runs in this
            process, nanolib cannot interrupt the case, so the run ends after the case.
        on_progress: Function that replaces the progress bar. Before each group of cases, the
            function receives a line with the number of finished cases and the name of the group's
            first case. While the run waits, the line is about the wait.

    Returns:
        The run. The status of the run is `running` until you call `finish`.

    Raises:
        BadInput: The parameters give no case.
        Canceled: `stop` was set.

    Example:
        >>> from nanolib.experiments.warmup import cases as experiment
        >>> small = {"overrides": {"num_layers": 1}, "seq_len": 16, "curve_steps": 20}
        >>> params = experiment.Params(**small, budget_s=0.1)
        >>> run = measure(experiment, params, store=Store("results.sqlite"))
        >>> rows, run_id = run.measurements(), run.finish()
        >>> set(rows["status"])
        {'ok'}
    """
    cases = experiment.cases(params)
    if not cases:
        raise BadInput(f"{params.NAME}: these parameters give no case; check that no list is empty")
    params.look([] if params.isolation == "process" else cases)
    device, stop = resolve_device(params.device), stop or threading.Event()

    def pause(seconds: float):
        if stop.wait(seconds):
            raise Canceled

    devices = {each for case in cases for each in case.devices}
    name, log = f"{params.NAME} {params.label}".strip(), on_progress or say
    with contextlib.ExitStack() as locks, limit_threads():
        # All runs lock devices in the same order, so that no two runs wait for each other.
        for _, each in sorted({lock_path(each): each for each in devices}.items()):
            locks.enter_context(device_lock(each, name, log, pause))
        store = store or Store()
        run = new_run(params, device, len(cases))
        run_id = take_over(store, run) if params.resume else ""
        if run_id:
            done = len({case.case_id for case in cases} & store.finished_cases(run_id))
            say(f"resuming run {run_id[:8]}: {done} of {len(cases)} cases are done and skipped")
        sweep_run = SweepRun(store, run_id or store.add(run))
        try:
            _Sweep(params, sweep_run, stop).measure(cases, on_progress)
        except KeyboardInterrupt:  # `Canceled` is one too.
            store.forget_started(sweep_run.run_id)
            sweep_run.end(RunStatus.INTERRUPTED, "stopped by the user")
            raise
        except BaseException as error:
            sweep_run.end(RunStatus.FAILED, cause(error))
            raise
    return sweep_run


def group_cases(cases: Sequence[Case]) -> list[list[Case]]:
    """Divide cases into their groups. The groups are in the order of their first cases."""
    groups = {}
    for case in cases:
        groups.setdefault(case.group or case.case_id, []).append(case)
    return list(groups.values())


class _Sweep:
    """Measures the cases of a run, group by group."""

    def __init__(self, params: Params, run: SweepRun, stop: threading.Event):
        self._params, self._stop = params, stop
        self._store, self._run_id = run.store, run.run_id
        # Case id → how often the run was killed during the case.
        self._attempts = self._store.started_attempts(run.run_id)
        # A time limit can interrupt Python only on the main thread.
        is_main = threading.current_thread() is threading.main_thread()
        self._isolated = params.isolation == "process" or not is_main

    def measure(self, cases: Sequence[Case], on_progress: Callable[[str], object] | None):
        """Measure the unfinished groups, and store their rows."""
        finished = self._store.finished_cases(self._run_id)
        groups = [
            group for group in group_cases(cases) if {case.case_id for case in group} - finished
        ]
        done = len(cases) - sum(map(len, groups))
        bar = _progress_bar(bool(on_progress), total=len(cases), initial=done, unit="case")
        with bar, contextlib.ExitStack() as heap:
            heap.callback(gc.unfreeze)
            for group in groups:
                # With a notebook, a collection of all objects takes 0.1 s, and each timing has many
                # collections. A collection skips frozen objects.
                gc.collect()
                gc.freeze()
                bar.set_description_str(printable(str(group[0])))
                if on_progress is not None:
                    on_progress(f"{done} of {len(cases)}: {group[0]}")
                if self._stop.is_set():
                    raise Canceled
                with watch_cpus() as load:
                    outcomes = self._measure_group(group)
                for case in group:
                    outcomes[case.case_id].add_interference(load)
                    store_outcome(self._store, self._run_id, case, outcomes[case.case_id])
                done += len(group)
                bar.update(len(group))

    def _measure_group(self, group: Sequence[Case]) -> dict[str, Outcome]:
        """Measure a group's cases in turns, or one by one if memory is too small for all cases."""
        if rows := measured_before(group[0], self._store, self._run_id):
            return {group[0].case_id: Outcome(rows)}
        if len(group) == 1:
            return self._measure_together(group)
        outcomes, apart = {}, group
        if fit_together(group):
            outcomes = self._measure_together(group)
            # Other cases of the group may have used the memory.
            short = (Status.OOM, Status.OOM_PREDICTED)
            apart = [case for case in group if outcomes[case.case_id].status in short]
        if apart:
            outcomes |= measure_apart(
                apart, lambda case: self._measure_together([case])[case.case_id]
            )
        return outcomes

    def _measure_together(self, cases: Sequence[Case]) -> dict[str, Outcome]:
        """Measure cases until each case has an outcome, even if a case kills its process."""
        message = f"the run was killed {MAX_ATTEMPTS} times during the case; nanolib skips the case"
        outcomes = {
            case.case_id: Outcome(status=Status.ERROR, message=message)
            for case in cases
            if self._attempts.get(case.case_id, 0) >= MAX_ATTEMPTS
        }
        while left := [case for case in cases if case.case_id not in outcomes]:
            outcomes |= self._run(left)
        return outcomes

    def _run(self, cases: Sequence[Case]) -> dict[str, Outcome]:
        """Measure cases in this process or in a fresh one."""
        for case in cases:
            # nanolib counts only the attempts of single cases, because any case of a group may
            # cause the end of the process.
            attempts = self._attempts.get(case.case_id, 0) + (len(cases) == 1)
            row = Measurement(
                "case_duration", status=Status.STARTED, details={"attempts": attempts}
            )
            self._store.write_case(self._run_id, case.case_id, case.factors, [row])
        given = cases, self._params, ceilings_of(self._store, self._run_id)
        # A case during which the run was killed may kill its process again, so the case gets a
        # fresh process. Under torchrun, a fresh process would lack the ranks of other machines.
        was_killed = any(case.case_id in self._attempts for case in cases)
        if (self._isolated or was_killed) and not under_torchrun():
            return run_in_process(*given, self._stop)
        outcomes = measure_group(*given)
        # A fresh process can still use a device that this process has lost.
        self._isolated = any("device_lost" in outcome.details for outcome in outcomes.values())
        return outcomes


def is_interactive() -> bool:
    """Return whether the process is the kernel of an interactive Jupyter session."""
    return bool(os.environ.get("JPY_SESSION_NAME")) and LAUNCH_VARIABLE not in os.environ


def _progress_bar(is_hidden: bool, **settings) -> tqdm:
    """Create a progress bar in JupyterLab or a terminal, but not in a batch notebook."""
    if is_interactive() and not is_hidden:
        from tqdm.auto import tqdm as widget_bar

        return widget_bar(**settings)
    return tqdm(**settings, disable=is_hidden or None, file=sys.stderr, dynamic_ncols=True)


def store_outcome(store: Store, run_id: str, case: Case, outcome: Outcome) -> None:
    """Store the rows of a case. If a row is not valid, store only the failure of the case."""
    rows = [outcome.ending, *outcome.rows]
    try:
        store.write_case(run_id, case.case_id, case.factors, rows, outcome.traces)
    except (TypeError, ValueError, sqlite3.IntegrityError) as error:
        message = f"the case has rows that cannot be stored: {one_line(error)}"
        broken = replace(outcome.ending, status=Status.ERROR, message=message)
        store.write_case(run_id, case.case_id, case.factors, [broken])
