"""Measure one case, or the cases of a group in turns, in this process or in a fresh one."""

import contextlib
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from nanolib.measurement import OVER, Flag, Measurement, Status
from nanolib.meters.latency import measure, measure_in_turns
from nanolib.meters.machine import limit_threads
from nanolib.meters.recording import Trace
from nanolib.meters.sampler import Timing
from nanolib.meters.turns import speed_up_row
from nanolib.run.case import Case, Ceilings, Params
from nanolib.run.memory_plan import check_case, shortage
from nanolib.run.outcome import Outcome
from nanolib.run.process import Died, Late, call_in_process

_GRACE_S = 5.0  # Extra time in which an interrupted case reports its own timeout, s.
# nanolib multiplies matrices of this size for this time, to see the machine's current speed.
_PACE_SIZE, _PACE_S = 512, 0.3


# A function that receives the id of a case and one of its rows, or its trace.
Add = Callable[[str, Measurement | Trace], None]


class Canceled(KeyboardInterrupt):
    """The user has canceled the case."""


def fit_together(cases: Sequence[Case]) -> bool:
    """Return whether all cases that can run fit into the free memory together."""
    device, largest = cases[0].device, {}
    try:
        for case in cases:
            most, inputs = case.plan().most, case.inputs_id
            if not case.unsupported_reason() and not shortage(most, device):
                largest[inputs] = max(most or 0, largest.get(inputs, 0))
        return not shortage(sum(largest.values()), device)
    except torch.AcceleratorError:  # This process has lost the device.
        return True


def measure_group(
    cases: Sequence[Case],
    params: Params,
    ceilings: Ceilings,
    report: Callable[..., object] = lambda case_id, *rows: None,
) -> dict[str, Outcome]:
    """Measure one case, or the cases of a group in turns.

    Args:
        cases: Cases to measure.
        params: Parameters of the notebook. The time limit applies to each case.
        ceilings: Peak rates, as for `roofline_ms`.
        report: Function that receives the id of a case before code of the case runs, and the id
            with each row. If the process dies, the last id shows the case at fault.

    Returns:
        Case id → outcome of the case, with a `speed_up` over each baseline that nanolib timed in
        turns with the case. If the device was lost during a case, the result contains only the
        outcome of that case.
    """
    outcomes, ready = {case.case_id: Outcome() for case in cases}, []

    def within(case_id: str):
        report(case_id)
        return outcomes[case_id].within(params.case_timeout_s)

    def add(case_id: str, row: Measurement | Trace):
        if isinstance(row, Trace):
            outcomes[case_id].traces = row.rows
        else:
            outcomes[case_id].rows.append(row)
            report(case_id, row)

    try:
        for case in cases:
            with within(case.case_id):
                check_case(case)
                ready.append(case)
        if cases[0].shares_launch:
            _launch(ready, params, outcomes, add)
        else:
            _take_turns(ready, params, ceilings, within, add)
    except torch.AcceleratorError:
        lost = {case_id: own for case_id, own in outcomes.items() if "device_lost" in own.details}
        if not lost:  # No case is at fault.
            raise
        return lost
    return outcomes


def _take_turns(cases: Sequence[Case], params: Params, ceilings: Ceilings, within, add: Add):
    """Measure cases in this process. Time the cases that wait for equal scopes in turns."""
    by_id = {case.case_id: case for case in cases}
    steps = {case_id: case.measure(params, ceilings) for case_id, case in by_id.items()}
    waiting = {}

    def advance(case_id: str, answer: dict[str, Measurement] | None = None):
        """Measure the case until its next timing or its end."""
        with within(case_id), contextlib.suppress(StopIteration):
            made = steps[case_id].send(answer)
            while not isinstance(made, Timing):
                add(case_id, made)
                made = next(steps[case_id])
            waiting[case_id] = made
            return
        steps[case_id].close()  # Closing the generator releases the memory of the case.

    for case_id in steps:
        advance(case_id)
    while waiting:
        scopes = [*next(iter(waiting.values())).phases]
        same = [case_id for case_id, timing in waiting.items() if [*timing.phases] == scopes]
        timings = {case_id: waiting.pop(case_id) for case_id in same}
        rows, rounds = measure_in_turns(timings, seed=params.seed, within=within)
        for case, other in _pairs([by_id[case_id] for case_id in rows]):
            # A row of several phases has the number None.
            for scope in rows[case.case_id]:
                phase = scopes.index(scope) if scope in scopes else None
                name = f"{scope}{OVER}{other.title}"
                row = speed_up_row(rounds, case.case_id, other.case_id, phase=phase, scope=name)
                if row is not None:
                    add(case.case_id, row)
        for case_id in timings:
            if case_id in rows:
                advance(case_id, rows[case_id])
            else:  # The case has failed in one of its blocks.
                steps[case_id].close()


def _pairs(cases: Sequence[Case]) -> Iterator[tuple[Case, Case]]:
    """Yield each case with each other case of its group that is a baseline."""
    return ((a, b) for a, b in itertools.permutations(cases, 2) if b.is_baseline)


def _launch(cases: Sequence[Case], params: Params, outcomes: dict[str, Outcome], add: Add):
    """Measure the cases of a group in one launch. If the launch fails, all its cases fail."""
    launch = Outcome()
    with launch.within(params.case_timeout_s):
        for case, row in cases[0].launch(cases, params) if cases else ():
            add(case.case_id, row)
    for case in cases:
        outcomes[case.case_id] = replace(
            launch, rows=outcomes[case.case_id].rows, seconds=launch.seconds / len(cases)
        )


def measure_apart(cases: Sequence[Case], measure: Callable[[Case], Outcome]) -> dict[str, Outcome]:
    """Measure the cases of a group one after another, because memory is too small for all of them.

    The latencies get the flag `sequential`. The machine may change its speed between two cases, so
    the interval of a speed-up is the widest that both latencies allow. nanolib also times a matrix
    product between the cases, and the drift of that time widens the interval further.

    Args:
        cases: Cases of one group.
        measure: Function that measures a single case.

    Returns:
        Case id → outcome of the case, with its speed-ups.
    """
    outcomes, times, paces = {}, defaultdict(dict), _pace_ms(cases[0].device)
    for case in cases:
        outcome = outcomes[case.case_id] = measure(case)
        for index, row in enumerate(outcome.rows):
            if row.metric == "latency":
                row = outcome.rows[index] = replace(row, flags=(*row.flags, Flag.SEQUENTIAL))
                if row.low:
                    times[case.case_id][row.scope] = row
        paces += _pace_ms(case.device)
    drift = max(paces, default=1.0) / min(paces, default=1.0)
    for case, other in _pairs(cases):
        base = times[other.case_id]
        outcomes[case.case_id].rows += [
            _speed_up_apart(base[scope], own, drift, f"{scope}{OVER}{other.title}")
            for scope, own in times[case.case_id].items()
            if scope in base
        ]
    return outcomes


def _pace_ms(device: str) -> list[float]:
    """Return a list with the time of a matrix product, ms, or no time if the device is lost."""
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


def run_in_process(
    cases: Sequence[Case], params: Params, ceilings: Ceilings, stop: threading.Event
) -> dict[str, Outcome]:
    """Measure one case or a group in a fresh process, under the time limit of each case.

    Args:
        cases: Cases to measure.
        params: Parameters of the notebook.
        ceilings: Peak rates, as for `roofline_ms`.
        stop: Event that ends the process.

    Returns:
        Case id → outcome of the case. If the process dies or exceeds the limit, the current case
        fails, and the other unfinished cases have no outcome.

    Raises:
        Canceled: `stop` was set.
    """
    began, case_id, outcomes = time.perf_counter(), cases[0].case_id, defaultdict(Outcome)
    try:
        for sent in call_in_process(
            _serve,
            list(cases),
            params,
            ceilings,
            limit_s=params.case_timeout_s + _GRACE_S,
            stopped=stop.is_set,
        ):
            if isinstance(sent, dict):
                return sent
            case_id, *rows = sent
            outcomes[case_id].rows += rows
    except Late:
        outcomes[case_id].mark_timed_out(params.case_timeout_s)
    except Died as error:
        outcomes[case_id].status, outcomes[case_id].message = Status.ERROR, str(error)
    if stop.is_set():
        raise Canceled
    outcomes[case_id].seconds = time.perf_counter() - began
    return {case_id: outcomes[case_id]}


def _serve(send: Callable[[Any], None], cases: Sequence[Case], params: Params, ceilings: Ceilings):
    """Measure cases in a new process. Send what `measure_group` reports, and then all outcomes."""
    with limit_threads():
        send(measure_group(cases, params, ceilings, lambda *reported: send(reported)))
