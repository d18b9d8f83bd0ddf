"""Measure one case, or the cases of a group in turns, in this process or in a fresh one."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from nanolib.measurement import OVER, Flag, Measurement, Status, Unsupported
from nanolib.meters.machine import limit_threads
from nanolib.meters.time.latency import measure, measure_alone, measure_in_turns
from nanolib.meters.time.sampler import Timing
from nanolib.meters.time.turns import Round, speed_up_row
from nanolib.run.case import Case, Measuring, Plan
from nanolib.run.memory_plan import shortage
from nanolib.run.params import Params
from nanolib.run.peaks_case import ceilings_of
from nanolib.run.process import Died, Late, call_in_process
from nanolib.run.timeout import DeviceLost, Outcome, PredictedOutOfMemory
from nanolib.store import Store
from nanolib.store.traces import recording

_GRACE_S = 5.0  # in which a case that can still be interrupted reports that it was late
_PACE_SIZE, _PACE_S = 512, 0.3  # of the product that shows how fast the machine is at the moment


class Canceled(BaseException):
    """The user canceled the case; no `except Exception` on the way may swallow it."""


def grouped(cases: Sequence[Case]) -> list[list[Case]]:
    """Collect the cases of each group, at the place of its first case."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(f"group {case.group}" if case.group else case.case_id, []).append(case)
    return list(groups.values())


def fit_together(cases: Sequence[Case]) -> bool:
    """Return whether all cases that can run fit into the free memory, as far as is planned."""
    device, plans = cases[0].device, [case.plan() for case in cases if not case.unsupported()]
    try:
        needed = sum(plan.most or 0 for plan in plans if not shortage(plan, device))
        return not shortage(Plan({"all": needed}), device)
    except torch.AcceleratorError:  # this process has lost it
        return True


def start_case(case: Case, params: Params, ceilings: dict[str, float]) -> Measuring:
    """Yield the rows of one case and the timings that it requests, unless it cannot run here.

    Args:
        case: Any.
        params: Those of its notebook.
        ceilings: As `roofline_ms` takes them.

    Raises:
        Unsupported: This machine cannot run it.
        PredictedOutOfMemory: Its plan exceeds the memory that is free.
    """
    if reason := case.unsupported() or case.plan().unsupported:
        raise Unsupported(reason)
    if reason := shortage(case.plan(), case.device):
        raise PredictedOutOfMemory(reason)
    yield from case.measure(params, ceilings)


def measure_group(
    cases: Sequence[Case],
    params: Params,
    ceilings: dict[str, float],
    report: Callable[..., object] = lambda *_: None,
) -> dict[str, Outcome]:
    """Measure one case, or the cases of a group.

    Args:
        cases: Which.
        params: Of their notebook; the time limit is each case's own.
        ceilings: As `roofline_ms` takes them.
        report: Called with the id of a case before its code runs, so that the case that ends the
            process is known, and with the id and each row.

    Returns:
        Case id → its outcome, with a `speed_up` over each baseline that was timed in the same
        rounds. If a case has lost the device for this process, only the outcome of that case.
    """
    by_id = {case.case_id: case for case in cases}
    steps = {case_id: start_case(case, params, ceilings) for case_id, case in by_id.items()}
    outcomes = {case_id: Outcome() for case_id in by_id}
    waiting: dict[str, Timing] = {}  # for its next timing

    def within(case_id: str) -> AbstractContextManager[None]:
        report(case_id)
        return outcomes[case_id].within(params.case_timeout_s)

    def add(case_id: str, row: Measurement) -> None:
        outcomes[case_id].rows.append(row)
        report(case_id, row)

    def advance(case_id: str, answer: dict[str, Measurement] | None = None) -> None:
        """Go on to the case's next timing, or to its end."""
        with within(case_id), contextlib.suppress(StopIteration):
            made = steps[case_id].send(answer)
            while not isinstance(made, Timing):
                add(case_id, made)
                made = next(steps[case_id])
            waiting[case_id] = made
            return
        steps[case_id].close()  # releases what the case has allocated

    try:
        for case_id in by_id:
            advance(case_id)
        while waiting:
            scopes = [*next(iter(waiting.values())).phases]
            chosen = [name for name, timing in waiting.items() if [*timing.phases] == scopes]
            timings = {case_id: waiting.pop(case_id) for case_id in chosen}
            rows, rounds = {}, []
            if len(chosen) > 1:
                rows, rounds = measure_in_turns(timings, seed=params.seed, within=within)
            else:
                with within(chosen[0]):
                    rows[chosen[0]] = measure_alone(timings[chosen[0]])
            for case_id, timing in timings.items():
                if case_id not in rows:  # it failed within its own block
                    steps[case_id].close()
                    continue
                others = [by_id[other] for other in rows]
                for row in _speed_ups(by_id[case_id], others, rounds, timing):
                    add(case_id, row)
                advance(case_id, rows[case_id])
    except DeviceLost:
        return {at: outcome for at, outcome in outcomes.items() if "device_lost" in outcome.details}
    return outcomes


def _speed_ups(
    case: Case, others: Sequence[Case], rounds: Sequence[Round], timing: Timing
) -> Iterator[Measurement]:
    """Yield those over each baseline among the others, by phase and of all phases together."""
    scopes: list[tuple[int | None, str]] = list(enumerate(timing.phases))
    if len(scopes) > 1:
        scopes.append((None, timing.total))
    for other in _baselines(case, others):
        for phase, scope in scopes:
            name = f"{scope}{OVER}{other.title}"
            row = speed_up_row(rounds, case.case_id, other.case_id, phase=phase, scope=name)
            if row is not None:
                yield row


def _baselines(case: Case, others: Sequence[Case]) -> list[Case]:
    return [other for other in others if other.is_baseline and other.case_id != case.case_id]


def measure_apart(cases: Sequence[Case], measure: Callable[[Case], Outcome]) -> dict[str, Outcome]:
    """Measure one after another the cases of a group that do not fit into memory together.

    Their latencies are flagged. A speed-up then contains what the machine did in between. So its
    interval is the widest that both times allow, and wider by the drift of a matrix product that is
    timed between the cases.

    Args:
        cases: Of one group.
        measure: Measures one of them.

    Returns:
        As `measure_group`.
    """
    outcomes, times, paces = {}, {}, _pace_ms(cases[0].device)
    for case in cases:
        outcome = outcomes[case.case_id] = measure(case)
        for at, row in enumerate(outcome.rows):
            if row.metric == "latency":
                outcome.rows[at] = replace(row, flags=(*row.flags, Flag.SEQUENTIAL))
        times[case.case_id] = [row for row in outcome.rows if row.metric == "latency" and row.low]
        paces += _pace_ms(case.device)
    drift = max(paces, default=1.0) / min(paces, default=1.0)
    for case in cases:
        for other in _baselines(case, cases):
            outcomes[case.case_id].rows += [
                _speed_up_apart(base, own, drift, f"{own.scope}{OVER}{other.title}")
                for own in times[case.case_id]
                for base in times[other.case_id]
                if own.scope == base.scope
            ]
    return outcomes


def _pace_ms(device: str) -> list[float]:
    """Return how long a fixed product takes now; empty if this process has lost the device."""
    try:
        a = torch.rand(_PACE_SIZE, _PACE_SIZE, device=device)
        return [measure(lambda: a @ a, rel_ci=0.05, budget_s=_PACE_S, device=device).estimate]
    except torch.AcceleratorError:
        return []


def _speed_up_apart(base: Measurement, own: Measurement, drift: float, scope: str) -> Measurement:
    return Measurement(
        "speed_up",
        base.estimate / own.estimate,
        base.low / own.high / drift,
        base.high / own.low * drift,
        0.95,
        n=min(base.n, own.n),
        method="one after the other",
        scope=scope,
        flags=tuple({*base.flags, *own.flags} & {Flag.SEQUENTIAL, Flag.BUSY_MACHINE}),
        details={"drift": drift},
    )


def run_here(
    params: Params,
    cases: Sequence[Case],
    store: Store,
    run_id: str,
    report: Callable[..., object] = lambda *_: None,
) -> dict[str, Outcome]:
    """Measure one case, whose traces go to the store, or those of a group; see `measure_group`."""
    (first, *others), ceilings = cases, ceilings_of(store, run_id)
    traced = nullcontext() if others else recording(lambda: store.new_trace(run_id, first.case_id))
    with traced:
        return measure_group(cases, params, ceilings, report)


def run_in_process(
    params: Params, cases: Sequence[Case], store: Store, run_id: str, stop: threading.Event
) -> dict[str, Outcome]:
    """Measure one case, or those of a group, in a fresh process, within their time limit.

    Args:
        params: Of the experiment.
        cases: Which.
        store: Where traces go, and the peak rates are.
        run_id: The run that they belong to.
        stop: Ends the process when it is set.

    Raises:
        Canceled: `stop` was set.

    Returns:
        Case id → its outcome. If the process died or was late, the case whose code ran has failed,
        and the cases that had not ended have no outcome.
    """
    began, at = time.perf_counter(), cases[0].case_id
    partial: defaultdict[str, Outcome] = defaultdict(Outcome)
    outcomes: dict[str, Outcome] = {}
    given = (params, list(cases), str(store.path.absolute()), run_id)
    limit_s = params.case_timeout_s + _GRACE_S
    try:
        for at, sent in call_in_process(_serve, *given, limit_s=limit_s, stopped=stop.is_set):
            if isinstance(sent, Outcome):
                outcomes[at] = sent
            elif sent is not None:
                partial[at].rows.append(sent)
    except Late:
        partial[at].mark_timed_out(params.case_timeout_s)
    except Died as error:
        partial[at].status, partial[at].message = Status.ERROR, str(error)
    if stop.is_set():
        raise Canceled
    if partial[at].message:
        partial[at].seconds = time.perf_counter() - began
        outcomes[at] = partial[at]
    return outcomes


def _serve(
    send: Callable[[Any], None], params: Params, cases: Sequence[Case], database: str, run_id: str
) -> None:
    """In that process: send `(case_id, what)`: None before its code runs, each row, its outcome."""

    def report(case_id: str, what: Any = None) -> None:
        send((case_id, what))

    params.look(cases)
    with Store(database, create=False) as store, limit_threads():
        outcomes = run_here(params, cases, store, run_id, report)
    for case_id, outcome in outcomes.items():
        report(case_id, outcome)
