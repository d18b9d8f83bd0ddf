"""Measure the cases of a group: prepare each by itself, and time them in turns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from nanolib.measurement import OVER, Flag, Measurement, Unsupported
from nanolib.meters.time.latency import measure, measure_alone, measure_in_turns
from nanolib.meters.time.sampler import Timing
from nanolib.meters.time.turns import Round, speed_up_row
from nanolib.run.case import Case, Measuring, Plan
from nanolib.run.memory_plan import shortage
from nanolib.run.params import Params
from nanolib.run.timeout import DeviceLost, Outcome, PredictedOutOfMemory

_PACE_SIZE, _PACE_S = 512, 0.3  # of the product that shows how fast the machine is at the moment


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


@dataclass
class _Lane:
    """One case of a group.

    Attributes:
        case: Which.
        measuring: Its measurement, between two steps.
        outcome: Its rows so far.
        timing: Its next timing; None if it is over.
    """

    case: Case
    measuring: Measuring
    outcome: Outcome = field(default_factory=Outcome)
    timing: Timing | None = None

    def end(self) -> None:
        """Release what the case has allocated."""
        self.timing = None
        self.measuring.close()


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
    lanes = {case.case_id: _Lane(case, start_case(case, params, ceilings)) for case in cases}

    def within(case_id: str) -> AbstractContextManager[None]:
        report(case_id)
        return lanes[case_id].outcome.within(params.case_timeout_s)

    def add(case_id: str, row: Measurement) -> None:
        lanes[case_id].outcome.rows.append(row)
        report(case_id, row)

    def advance(case_id: str, answer: dict[str, Measurement] | None = None) -> None:
        """Go on to the case's next timing, or to its end."""
        lane = lanes[case_id]
        with within(case_id), contextlib.suppress(StopIteration):
            made = lane.measuring.send(answer)
            while not isinstance(made, Timing):
                add(case_id, made)
                made = next(lane.measuring)
            lane.timing = made
            return
        lane.end()

    try:
        for case_id in lanes:
            advance(case_id)
        while waiting := {case_id: lane.timing for case_id, lane in lanes.items() if lane.timing}:
            scopes = [*next(iter(waiting.values())).phases]
            timings = {
                name: timing for name, timing in waiting.items() if [*timing.phases] == scopes
            }
            rows, rounds = _time(timings, params.seed, within)
            for case_id, timing in timings.items():
                if case_id not in rows:  # it failed within its own block
                    lanes[case_id].end()
                    continue
                others = [lanes[other].case for other in rows]
                for row in _speed_ups(lanes[case_id].case, others, rounds, timing):
                    add(case_id, row)
                advance(case_id, rows[case_id])
    except DeviceLost:
        lost = [lane for lane in lanes.values() if "device_lost" in lane.outcome.details]
        return {lane.case.case_id: lane.outcome for lane in lost}
    return {case_id: lane.outcome for case_id, lane in lanes.items()}


def _time(
    timings: dict[str, Timing], seed: int, within: Callable[[str], AbstractContextManager[None]]
) -> tuple[dict[str, Any], Sequence[Round]]:
    """Time several in rounds, and one by itself."""
    if len(timings) > 1:
        return measure_in_turns(timings, seed=seed, within=within)
    rows = {}
    for case_id, timing in timings.items():
        with within(case_id):
            rows[case_id] = measure_alone(timing)
    return rows, []


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
