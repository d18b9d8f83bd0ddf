"""Measure the cases of a group: prepare each by itself, and time in turns what they ask for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from nanolib.measurement import OVER, Flag, Measurement
from nanolib.meters.memory import free_bytes
from nanolib.meters.time.latency import measure, measure_alone, measure_in_turns
from nanolib.meters.time.turns import Round, Timing, speed_up_row
from nanolib.run.case import Case, Measuring, Plan
from nanolib.run.outcome import DeviceLost, Outcome
from nanolib.run.params import Params
from nanolib.run.workload import fits, start_case

_PACE_SIZE, _PACE_S = 512, 0.3  # of the product that shows how fast the machine is at the moment


def grouped(cases: Sequence[Case]) -> list[list[Case]]:
    """Collect the cases of each group, at the place of its first case."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(f"group {case.group}" if case.group else case.case_id, []).append(case)
    return list(groups.values())


def fit_together(cases: Sequence[Case]) -> bool:
    """Whether all cases of a group that can run fit into the free memory, as far as is planned."""
    try:
        free = free_bytes(cases[0].device)
    except torch.AcceleratorError:  # this process has lost it
        return True
    if free is None:
        return True
    plans = [case.plan() for case in cases if not case.unsupported()]
    return fits(Plan({"all": sum(plan.most or 0 for plan in plans if fits(plan, free))}), free)


class _Lane:
    """One case of a group.

    Attributes:
        case: Which.
        outcome: What it has given so far.
        timing: What it asks to be timed next; None if it is over.
    """

    def __init__(self, case: Case, measuring: Measuring, keep: Callable[..., object]) -> None:
        self.case, self.outcome = case, Outcome()
        self.timing: Timing | None = None
        self._measuring, self._keep = measuring, keep

    def add(self, row: Measurement) -> None:
        """A row was made."""
        self.outcome.rows.append(row)
        self._keep(self.case.case_id, row)

    def advance(self, answer: dict[str, Measurement] | None, timeout_s: float) -> None:
        """Go on to the next timing that the case asks for, or to its end."""
        self.timing = None
        with self.outcome.within(timeout_s), contextlib.suppress(StopIteration):
            made = self._measuring.send(answer)
            while not isinstance(made, Timing):
                self.add(made)
                made = next(self._measuring)
            self.timing = made
        if self.timing is None:
            self.end()

    def end(self) -> None:
        """Release what the case has allocated."""
        self.timing = None
        self._measuring.close()


def measure_group(
    cases: Sequence[Case],
    params: Params,
    ceilings: dict[str, float],
    *,
    keep: Callable[[str, Measurement], object] = lambda case_id, row: None,
    announce: Callable[[str], object] = lambda case_id: None,
) -> dict[str, Outcome]:
    """Measure one case, or the cases of a group.

    Args:
        cases: Which.
        params: Of their notebook; the time limit is each case's own.
        ceilings: As `roofline_ms` takes them.
        keep: Receives the case id and each row as it is made.
        announce: Receives the id of a case before its code runs, so that it is known which case
            ended the process.

    Returns:
        Case id → its outcome, with a `speed_up` over each baseline that was timed in the same
        rounds. If a case has lost the device for this process, only that case's.
    """
    lanes = {case.case_id: _Lane(case, start_case(case, params, ceilings), keep) for case in cases}

    def within(case_id: str) -> AbstractContextManager[None]:
        announce(case_id)
        return lanes[case_id].outcome.within(params.case_timeout_s)

    def advance(case_id: str, answer: dict[str, Measurement] | None = None) -> None:
        announce(case_id)
        lanes[case_id].advance(answer, params.case_timeout_s)

    try:
        for case_id in lanes:
            advance(case_id)
        while waiting := [lane for lane in lanes.values() if lane.timing]:
            scopes = list(waiting[0].timing.phases)
            timed = [lane for lane in waiting if list(lane.timing.phases) == scopes]
            timings = {lane.case.case_id: lane.timing for lane in timed}
            rows, rounds = _time(timings, params.seed, within)
            for case_id, timing in timings.items():
                if case_id not in rows:  # it failed within its own block
                    lanes[case_id].end()
                    continue
                others = [lanes[other].case for other in rows]
                for row in _speed_ups(lanes[case_id].case, others, rounds, timing):
                    lanes[case_id].add(row)
                advance(case_id, rows[case_id])
    except DeviceLost:
        lost = [lane for lane in lanes.values() if "device_lost" in lane.outcome.details]
        return {lane.case.case_id: lane.outcome for lane in lost}
    return {case_id: lane.outcome for case_id, lane in lanes.items()}


def _time(
    timings: dict[str, Timing], seed: int, within: Callable[[str], AbstractContextManager[None]]
) -> tuple[dict[str, dict[str, Measurement]], Sequence[Round]]:
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
) -> list[Measurement]:
    """Over each baseline among the others, phase by phase and of all phases together."""
    scopes: list[tuple[int | None, str]] = list(enumerate(timing.phases))
    if len(scopes) > 1:
        scopes.append((None, timing.total))
    rows = [
        speed_up_row(
            rounds, case.case_id, other.case_id, phase=phase, scope=f"{scope}{OVER}{other.title}"
        )
        for other in others
        if other.is_baseline and other.case_id != case.case_id
        for phase, scope in scopes
    ]
    return [row for row in rows if row is not None]


def measure_apart(cases: Sequence[Case], measure: Callable[[Case], Outcome]) -> dict[str, Outcome]:
    """Measure one after the other the cases of a group that do not fit into memory together.

    Their latencies are flagged. A speed-up is then subject to what the machine did in between. So
    its interval is the widest that both times allow, and wider by the drift of a matrix product that
    is timed between the cases.

    Args:
        cases: Of one group.
        measure: Measures one of them.

    Returns:
        As `measure_group`.
    """
    outcomes, paces = {}, [_pace_ms(cases[0].device)]
    for case in cases:
        outcomes[case.case_id] = measure(case)
        if not any("device_lost" in outcome.details for outcome in outcomes.values()):
            paces.append(_pace_ms(case.device))
    drift = max(paces) / min(paces)
    times = {}
    for case_id, outcome in outcomes.items():
        for at, row in enumerate(outcome.rows):
            if row.metric == "latency":
                outcome.rows[at] = replace(row, flags=(*row.flags, Flag.SEQUENTIAL))
        times[case_id] = [row for row in outcome.rows if row.metric == "latency"]
    for case in cases:
        outcomes[case.case_id].rows += [
            _speed_up_apart(base, own, drift, f"{own.scope}{OVER}{other.title}")
            for other in cases
            if other.is_baseline and other is not case
            for own in times[case.case_id]
            for base in times[other.case_id]
            if own.scope == base.scope and None not in (own.low, base.low)
        ]
    return outcomes


def _pace_ms(device: str) -> float:
    """How long a fixed product takes at the moment."""
    a = torch.rand(_PACE_SIZE, _PACE_SIZE, device=device)
    return measure(lambda: a @ a, rel_ci=0.05, budget_s=_PACE_S, device=device).estimate


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
