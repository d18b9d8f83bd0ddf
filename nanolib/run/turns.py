"""Cases of one group, measured together: each is prepared by itself, and what they time is timed in turns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from nanolib.measurement import OVER, Flag, Measurement
from nanolib.meters.memory import free_bytes
from nanolib.meters.time.latency import measure, measure_in_turns
from nanolib.meters.time.turns import Round, Timing, speed_up_row
from nanolib.run.case import Case, Measuring, Plan
from nanolib.run.ceilings import CeilingCase
from nanolib.run.outcome import Attempt, Outcome
from nanolib.run.params import Params
from nanolib.run.workload import fits, start_case

Announce = Callable[[str], object]
_PACE_SIZE, _PACE_S = 512, 0.3  # of the product that tells how fast the machine is just now


def grouped(cases: Sequence[Case]) -> list[list[Case]]:
    """Cases that are timed in turns together, each group where its first case stands."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(f"group {case.group}" if case.group else case.case_id, []).append(case)
    return list(groups.values())


def part_of(cases: Sequence[Case], part: str) -> list[Case]:
    """The share of one of several runs, `2/4`; the machine's ceilings belong to each of them.

    Cases of one shape stay together, a group's among them: what is compared with one another must come from one run.
    """
    if not part:
        return list(cases)
    number, of = map(int, part.split("/"))
    shapes: dict[tuple[Any, ...], list[str]] = {}
    for case in cases:
        if not isinstance(case, CeilingCase):
            shape = tuple(str(case.factors.get(name)) for name in ("seq_len", "batch_size"))
            shapes.setdefault(shape, []).append(case.case_id)
    mine = {case_id for shape in list(shapes.values())[number - 1 :: of] for case_id in shape}
    return (
        [case for case in cases if isinstance(case, CeilingCase) or case.case_id in mine]
        if mine
        else []
    )


def fit_together(cases: Sequence[Case]) -> bool:
    """Whether all of a group that will run fit into the memory that is free, as far as their plans know."""
    try:
        free = free_bytes(cases[0].device)
    except torch.AcceleratorError:  # this process has lost it
        return True
    plans = [case.plan() for case in cases if not case.unsupported()]
    together = sum(plan.most or 0 for plan in plans if free is not None and fits(plan, free))
    return free is None or fits(Plan({"all": together}), free)


class _Lane:
    """One case as far as it has come.

    Attributes:
        timing: What it asks to be timed next; None where it is over.
    """

    def __init__(self, case: Case, measuring: Measuring, attempt: Attempt) -> None:
        self.case, self.attempt = case, attempt
        self.timing: Timing | None = None
        self._measuring = measuring

    def advance(self, answer: dict[str, Measurement] | None = None) -> None:
        """Go on to the next timing that it asks for, or to its end."""
        self.timing = None
        with self.attempt.within():
            self.timing = self._next_timing(answer)
            return
        self.end()

    def end(self) -> None:
        """Let go what it holds."""
        self.timing = None
        self._measuring.close()

    def _next_timing(self, answer: dict[str, Measurement] | None) -> Timing | None:
        with contextlib.suppress(StopIteration):
            made = self._measuring.send(answer)
            while not isinstance(made, Timing):
                self.attempt.add(made)
                made = next(self._measuring)
            return made
        return None

    @property
    def scopes(self) -> tuple[str, ...]:
        """Of what it asks for."""
        return tuple(self.timing.phases) if self.timing else ()


def measure_group(
    cases: Sequence[Case],
    params: Params,
    ceilings: dict[str, float],
    *,
    keep: Callable[[str, Measurement], object] = lambda case_id, row: None,
    announce: Announce = lambda case_id: None,
) -> dict[str, Outcome]:
    """Measure cases of one group.

    Args:
        cases: Of one group.
        params: Those of their notebook; the time limit is each case's own.
        ceilings: As `roofline_ms` takes them.
        keep: Told each row as it comes, with its case's id.
        announce: Told the id of a case before its code runs, so that who dies of it is known.

    Returns:
        Case id → its outcome, with a `speed_up` over each baseline that was timed in the same rounds. Where one has lost this
        process's device, that one's alone.
    """
    lanes = {case.case_id: _lane(case, params, ceilings, keep) for case in cases}
    try:
        _go_on(lanes, params.seed, announce)
    except _DeviceLost as lost:  # to this process: the others need another one
        return {lost.case_id: lanes[lost.case_id].attempt.outcome}
    return {case_id: lane.attempt.outcome for case_id, lane in lanes.items()}


class _DeviceLost(BaseException):
    """A case has lost the device for all of this process."""

    def __init__(self, case_id: str) -> None:
        self.case_id = case_id
        super().__init__(case_id)


def _go_on(lanes: dict[str, _Lane], seed: int, announce: Announce) -> None:
    """Prepare each case, and time what they ask for in turns, until all are over."""

    def begin(case_id: str) -> None:
        for other, lane in lanes.items():
            if lane.attempt.outcome.details.get("device_lost"):
                raise _DeviceLost(other)
        announce(case_id)

    def within(case_id: str) -> Any:
        begin(case_id)
        return lanes[case_id].attempt.within()

    for case_id, lane in lanes.items():
        begin(case_id)
        lane.advance()
    while waiting := {case_id: lane for case_id, lane in lanes.items() if lane.timing}:
        scopes = next(iter(waiting.values())).scopes
        timings = {
            case_id: lane.timing for case_id, lane in waiting.items() if lane.scopes == scopes
        }
        rows, rounds = measure_in_turns(timings, seed=seed, within=within)
        for case_id in timings:
            lane = lanes[case_id]
            if case_id not in rows:  # it failed within its own block
                lane.end()
                continue
            for row in _speed_ups(
                lane.case, [lanes[other].case for other in rows], rounds, timings[case_id]
            ):
                lane.attempt.add(row)
            begin(case_id)
            lane.advance(rows[case_id])


def measure_apart(cases: Sequence[Case], measure: Callable[[Case], Outcome]) -> dict[str, Outcome]:
    """Measure cases of a group that do not fit into memory together, one after the other.

    Their latencies are flagged. A speed-up then holds what the machine did in between, so its interval is the widest that both
    times allow, and wider by the drift of a product that is timed between the cases.

    Args:
        cases: Of one group.
        measure: Measures one of them.

    Returns:
        As `measure_group`.
    """
    paces, outcomes = [_pace_ms(cases[0].device)], {}
    for case in cases:
        outcome = outcomes[case.case_id] = measure(case)
        if outcome.details.get("device_lost"):
            break
        paces.append(_pace_ms(case.device))
    outcomes |= {case.case_id: measure(case) for case in cases if case.case_id not in outcomes}
    drift = max(paces) / min(paces)
    times = {
        case_id: [row for row in found.rows if row.metric == "latency"]
        for case_id, found in outcomes.items()
    }
    for case in cases:
        outcome = outcomes[case.case_id]
        outcome.rows = [
            _sequential(row) if row.metric == "latency" else row for row in outcome.rows
        ]
        outcome.rows += [
            _speed_up_apart(base, own, drift, f"{own.scope}{OVER}{other.title}")
            for other in cases
            if other.is_baseline and other is not case
            for own in times[case.case_id]
            for base in times[other.case_id]
            if own.scope == base.scope and None not in (own.low, base.low)
        ]
    return outcomes


def _pace_ms(device: str) -> float:
    """How long a fixed product takes now."""
    a = torch.rand(_PACE_SIZE, _PACE_SIZE, device=device)
    return measure(lambda: a @ a, rel_ci=0.05, budget_s=_PACE_S, device=device).estimate


def _sequential(row: Measurement) -> Measurement:
    return replace(row, flags=(*row.flags, Flag.SEQUENTIAL))


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
        flags=tuple(
            {Flag.SEQUENTIAL, *base.flags, *own.flags} & {Flag.SEQUENTIAL, Flag.BUSY_MACHINE}
        ),
        details={"drift": drift},
    )


def _lane(
    case: Case,
    params: Params,
    ceilings: dict[str, float],
    keep: Callable[[str, Measurement], object],
) -> _Lane:
    attempt = Attempt(params.case_timeout_s, lambda row: keep(case.case_id, row))
    return _Lane(case, start_case(case, params, ceilings), attempt)


def _speed_ups(
    case: Case, others: Sequence[Case], rounds: Sequence[Round], timing: Timing
) -> list[Measurement]:
    """Over each baseline among the others, phase by phase and of all phases together."""
    rows = []
    for other in others:
        if not other.is_baseline or other.case_id == case.case_id:
            continue
        asked: list[tuple[str, int | None]] = [
            (scope, at) for at, scope in enumerate(timing.phases)
        ]
        asked += [(timing.total, None)] if len(asked) > 1 else []
        for scope, phase in asked:
            row = speed_up_row(
                rounds,
                case.case_id,
                other.case_id,
                phase=phase,
                scope=f"{scope}{OVER}{other.title}",
            )
            rows += [row] if row is not None else []
    return rows
