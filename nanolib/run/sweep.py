"""The one path by which a number is made: cases → sweep → rows.

Lock the device, skip what is done, write a `started` row, measure, store the case in one transaction. A kill loses the case in
flight and nothing else; a failure is a row, and the sweep goes on.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

import nanolib
from nanolib.measurement import BadInput, Measurement, RunStatus, Status, printable
from nanolib.meters.cpu_load import watched_cpus
from nanolib.meters.limits import fitting_threads
from nanolib.meters.machine import resolve_device, this_machine, versions
from nanolib.meters.quiet import disturbances
from nanolib.meters.time.collector import settled_heap
from nanolib.paths import LAUNCH_VARIABLE, PART_VARIABLE
from nanolib.run.case import Case
from nanolib.run.ceilings import Ceiling, measured_before
from nanolib.run.interference import Interference
from nanolib.run.lock import device_lock, lock_path, say
from nanolib.run.outcome import Outcome, one_line
from nanolib.run.params import Params
from nanolib.run.sources import git_revision, source_digest
from nanolib.run.turns import fit_together, grouped, measure_apart, measure_group, part_of
from nanolib.run.worker import Cancelled, run_here, run_in_process, was_killed
from nanolib.store import Run, Store
from nanolib.store.identity import alive, process_name

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["SweepRun", "measure"]

MAX_ATTEMPTS = 2


class SweepRun:
    """A run whose cases have been measured.

    Shown in a notebook it says how they ended; `finish` makes it `done`.

    Attributes:
        run_id: Its UUID.
        store: Where its rows are.

    Example:
        >>> store = Store("results.sqlite")
        >>> run = SweepRun(store, store.add(Run("attention", machine=this_machine().to_dict())))
        >>> run.finish()
        'run ... is in results.sqlite'
    """

    def __init__(self, store: Store, run_id: str) -> None:
        self.store, self.run_id, self._start = store, run_id, time.perf_counter()
        before = store.runs("run_id = ?", (run_id,)).duration_s.iloc[0]
        self._before = float(before or 0)  # a run that is continued has taken time already

    def measurements(self, *, samples: bool = False) -> pd.DataFrame:
        """Read the rows of the run, of an earlier start too; see `Store.measurements`."""
        return self.store.measurements([self.run_id], samples=samples)

    def __repr__(self) -> str:
        """How many cases ended how, and how long they took."""
        rows = self.store.case_endings(self.run_id)
        ended = ", ".join(f"{count} {status}" for status, count, _ in rows)
        return f"run {self.run_id[:8]}: {ended}; {sum(seconds for *_, seconds in rows):.0f} s inside cases"

    def finish(self) -> str:
        """Mark the run as done, the last thing that a notebook does.

        Returns:
            A line that says where the results are.
        """
        self.end(RunStatus.DONE)
        return f"run {self.run_id[:8]} is in {self.store.path.name}"

    def end(self, status: RunStatus, message: str = "") -> None:
        """Write how the run ended and how long it took."""
        duration = self._before + time.perf_counter() - self._start
        self.store.update_run(self.run_id, status=status, duration_s=duration, message=message)


def measure(
    experiment: Any,
    params: Params,
    *,
    store: Store | None = None,
    progress: bool = True,
    stop: threading.Event | None = None,
    on_progress: Callable[[int, int, str], object] | None = None,
) -> SweepRun:
    """Measure all cases of an experiment on this machine.

    Args:
        experiment: A module of `nanolib.experiments`: it has `cases`.
        params: Its parameters.
        store: Where the rows go; the database in the output folder by default.
        progress: Whether to show a bar with the case in flight.
        stop: When it is set the case in flight is ended, and the run is `interrupted`; off the main thread alone.
        on_progress: Called with the cases done, how many there are, and the case that begins.

    Returns:
        The run, still `running`.

    Raises:
        Cancelled: `stop` was set.

    Example:
        >>> from nanolib.experiments.warmup import cases as experiment
        >>> params = experiment.Params(overrides={"num_layers": 1}, seq_len=16, curve_steps=20, budget_s=0.1)
        >>> run = measure(experiment, params, store=Store("results.sqlite"), progress=False)
        >>> rows, run_id = run.measurements(), run.finish()
        >>> set(rows["status"])
        {'ok'}
    """
    cases = part_of(experiment.cases(params), os.environ.get(PART_VARIABLE, ""))
    if not cases:
        raise BadInput(f"{params.NAME}: these parameters give no case; widen them")
    params.look([] if params.isolation == "process" else cases)
    device = resolve_device(params.device)
    name = params.NAME
    waiting: dict[str, Any] = {}
    if stop is not None:
        waiting["pause"] = functools.partial(_pause, stop)
    if on_progress is not None:
        waiting["log"] = functools.partial(on_progress, 0, len(cases))
    with contextlib.ExitStack() as locks, fitting_threads():
        needed = {
            lock_path(each): each
            for each in (device, *(each for case in cases for each in case.devices))
        }
        # In one order on the whole machine, or two runs would wait for each other.
        for _, each in sorted(needed.items()):
            locks.enter_context(device_lock(each, f"{name} {params.label}".strip(), **waiting))
        store = store or Store()
        run = new_run(store, name, params, device, len(cases))
        run_id = _resumed(store, run) if params.resume else ""
        if run_id:
            done = len({case.case_id for case in cases} & store.finished_cases(run_id))
            say(f"resuming run {run_id[:8]}: {done} of {len(cases)} cases are done and skipped")
            before = store.runs_of([run_id]).disturbances.iloc[0]
            store.update_run(run_id, disturbances=list(dict.fromkeys([*before, *run.disturbances])))
        sweep_run = SweepRun(store, run_id or store.add(run))
        try:
            _Sweep(params, sweep_run, stop).measure(cases, progress, on_progress)
        except BaseException as error:
            asked = isinstance(error, KeyboardInterrupt | Cancelled)
            message = (
                "stopped by the user" if asked else f"{type(error).__name__}: {one_line(error)}"
            )
            sweep_run.end(RunStatus.INTERRUPTED if asked else RunStatus.FAILED, message)
            raise
    return sweep_run


def _pause(stop: threading.Event, seconds: float) -> None:
    if stop.wait(seconds):
        raise Cancelled


class _Sweep:
    """The cases of a run, measured group by group.

    Attributes:
        attempts: Case id → how often it has begun.
        isolated: Whether cases are measured in fresh processes.
    """

    def __init__(self, params: Params, run: SweepRun, stop: threading.Event | None) -> None:
        self._params, self._run, self._stop = params, run, stop
        self.attempts = run.store.started_attempts(run.run_id)
        # a worker process is used off the main thread too, where nothing else can enforce the time limit
        main = threading.current_thread() is threading.main_thread()
        self.isolated = params.isolation == "process" or not main

    def measure(
        self,
        cases: Sequence[Case],
        progress: bool,
        on_progress: Callable[[int, int, str], object] | None,
    ) -> None:
        """Measure what is not finished, and store it."""
        store, run_id = self._run.store, self._run.run_id
        finished, begun_before = store.finished_cases(run_id), set(self.attempts)
        begun = {case.group for case in cases if case.group and case.case_id not in finished}
        todo = [
            case for case in cases if case.case_id not in finished or case.group in begun
        ]  # a group is measured whole
        interference = Interference(store, run_id, len(todo))
        done = len(cases) - len(todo)
        bar = _progress_bar(progress, total=len(cases), initial=done, unit="case")
        with bar, settled_heap() as settle:
            for group in grouped(todo):
                settle()
                bar.set_description_str(printable(str(group[0])))
                if on_progress is not None:
                    on_progress(done, len(cases), str(group[0]))
                if self._stop is not None and self._stop.is_set():
                    raise Cancelled
                # a group in which one killed this process: in its own process it is told by which
                again = len(group) > 1 and any(case.case_id in begun_before for case in group)
                with watched_cpus() as load:
                    outcomes = self._outcomes(group, again)
                for outcome in outcomes.values():
                    if not was_killed(outcome):
                        interference.met(load, outcome)
                store_outcomes(store, run_id, group, outcomes, self.attempts)
                done += len(group)
                bar.update(len(group))
        for line in interference.lines:
            say(f"not a quiet machine: {line}")

    def _outcomes(self, group: Sequence[Case], isolated: bool) -> dict[str, Outcome]:
        """What each case of a group gave. One whose process dies is tried again, and then the others go on without it.

        Where one has lost this process's device, the others go on in a process of their own.
        """
        ended: dict[str, Outcome] = {}
        while left := [case for case in group if case.case_id not in ended]:
            for case in left:
                if (tried := self.attempts.get(case.case_id, 0)) >= MAX_ATTEMPTS:
                    message = f"its process died {tried} times while it ran; it is not tried again"
                    ended[case.case_id] = Outcome(status=Status.ERROR, message=message)
            left = [case for case in left if case.case_id not in ended]
            for case in left:
                tried = self.attempts[case.case_id] = self.attempts.get(case.case_id, 0) + 1
                # if all of this dies, nobody knows by which case of several: none is blamed
                details = {"attempts": tried if len(left) == 1 else tried - 1}
                started = Measurement("case_time", status=Status.STARTED, details=details)
                self._run.store.write_case(self._run.run_id, case.case_id, case.factors, [started])
            found = self._attempt(left, isolated) if left else {}
            died = {case_id for case_id, outcome in found.items() if was_killed(outcome)}
            ended |= {} if died else found
            for case in left:  # what others begin again is their first attempt
                if case.case_id not in {*died, *ended}:
                    self.attempts[case.case_id] -= 1
        return ended

    def _attempt(self, cases: Sequence[Case], isolated: bool) -> dict[str, Outcome]:
        first, store, run_id = cases[0], self._run.store, self._run.run_id
        if rows := measured_before(first, store, run_id):
            return {first.case_id: Outcome(rows)}

        def alone(case: Case) -> Outcome:
            return self._attempt([case], isolated)[case.case_id]

        if len(cases) > 1 and not fit_together(cases):
            return measure_apart(cases, alone)
        ceilings = ceilings_of(store, run_id)
        if isolated or self.isolated:
            found = run_in_process(self._params, cases, ceilings, store.path, run_id, self._stop)
        elif len(cases) == 1:
            found = {first.case_id: run_here(self._params, first, ceilings, store, run_id)}
        else:
            found = measure_group(cases, self._params, ceilings)
        # a fresh process still has a device that this one has lost
        self.isolated |= any(outcome.details.get("device_lost") for outcome in found.values())
        short = [case for case in cases if case.case_id in found and found[case.case_id].ran_short]
        return found | measure_apart(short, alone) if short and len(cases) > 1 else found


def live_front_end() -> bool:
    """Whether a person sits in front: a Jupyter server names its session to the kernel, papermill and nbval do not."""
    return bool(os.environ.get("JPY_SESSION_NAME")) and LAUNCH_VARIABLE not in os.environ


def _progress_bar(wanted: bool, **settings: Any) -> tqdm:
    """A widget where someone looks, a line in a terminal, nothing in a batch notebook (there it would be frozen litter)."""
    if wanted and live_front_end():
        from tqdm.auto import tqdm as widget_bar

        return widget_bar(**settings)
    return tqdm(**settings, disable=None if wanted else True, file=sys.stderr, dynamic_ncols=True)


def store_outcomes(
    store: Store,
    run_id: str,
    cases: Sequence[Case],
    outcomes: Mapping[str, Outcome],
    attempts: Mapping[str, int],
) -> None:
    """All rows of cases that belong together, each's `case_time` first, in one transaction; what cannot be stored is an error."""
    rows = {}
    for case in cases:
        outcome = outcomes[case.case_id]
        ending = Measurement(
            "case_time",
            outcome.seconds,
            n=1,
            samples=(outcome.seconds,),
            method="perf_counter",
            status=outcome.status,
            message=outcome.message,
            flags=outcome.flags,
            details={"attempts": attempts.get(case.case_id, 0)} | outcome.details,
        )
        rows[case.case_id] = (case.factors, [ending, *outcome.rows])
    try:
        store.write_cases(run_id, rows)
    except (TypeError, ValueError, sqlite3.IntegrityError) as error:
        if len(cases) > 1:  # the others have rows that can be
            for case in cases:
                store_outcomes(store, run_id, [case], outcomes, attempts)
            return
        ((case_id, (factors, (ending, *_))),) = rows.items()
        broken = replace(
            ending, status=Status.ERROR, message=f"its rows cannot be stored: {one_line(error)}"
        )
        store.write_case(run_id, case_id, factors, [broken])


def ceilings_of(store: Store, run_id: str) -> dict[str, float]:
    """The machine's ceilings that this run has measured: dtype → FLOP/s, and `copy` → B/s, each a `Ceiling`."""
    query = (
        "SELECT scope, low, estimate, high FROM measurements WHERE run_id = ? AND estimate IS NOT NULL"
        " AND metric IN ('ceiling_flops', 'ceiling_bytes')"
    )
    return {scope: Ceiling.of(ends) for scope, *ends in store.connection.execute(query, (run_id,))}


# runs


def new_run(store: Store, name: str, params: Params, device: str, cases: int) -> Run:
    """A run that begins now; what makes the machine less than quiet is told.

    Args:
        store: Where runs that have died are marked first.
        name: Of its experiment.
        params: Its parameters.
        device: Where it runs; held.
        cases: How many cases it has.
    """
    store.mark_dead_runs()
    machine, disturbed = this_machine(), disturbances(device)
    for line in disturbed:
        say(f"not a quiet machine: {line}")
    made_by = versions() | {"nanolib": nanolib.__version__, "sources": source_digest()}
    identity = [name, params.defining(), made_by, machine.machine_id, device]
    identity += filter(None, [os.environ.get(PART_VARIABLE)])
    return Run(
        experiment=name,
        machine=machine.to_dict(),
        params=params.model_dump(mode="json"),
        suite=params.suite,
        label=params.label,
        device=device,
        versions=made_by,
        git_revision=git_revision(),
        fingerprint=hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16],
        cases=cases,
        process=process_name(),
        launch=os.environ.get(LAUNCH_VARIABLE, ""),
        disturbances=disturbed,
    )


def _resumed(store: Store, run: Run) -> str:
    """The last run with the same parameters, version and machine, taken over by this process; empty without one."""
    runs = store.runs("fingerprint = ?", (run.fingerprint,))
    in_use = [
        status == RunStatus.RUNNING and process != run.process and alive(process)
        for status, process in zip(runs.status, runs.process, strict=True)
    ]
    runs = runs[[not used for used in in_use]]
    if runs.empty:
        return ""
    run_id = str(runs.run_id.iloc[-1])
    store.update_run(
        run_id,
        status=RunStatus.RUNNING,
        process=run.process,
        launch=run.launch or str(runs.launch.iloc[-1]),
        label=run.label or str(runs.label.iloc[-1]),
    )
    return run_id
