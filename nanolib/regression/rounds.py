"""Two versions, interleaved: blocks of A and B back to back in random order, each version in a process of its own.

The pair is the datum, so that drift of the machine hits both alike. A change counts only when a second round, in fresh
processes, repeats it.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nanolib.measurement import Direction, Status, case_name
from nanolib.regression.client import VersionDied, VersionProcess
from nanolib.regression.worktree import Version
from nanolib.stats.compare import (
    THRESHOLD,
    Kind,
    Verdict,
    compare_paired,
    confirm,
    hodges_lehmann,
    judge_together,
)
from nanolib.stats.intervals import TooFewSamples

MIN_PAIRS, MAX_PAIRS, FEWEST_PAIRS = 20, 1000, 6
# Long beside the answer's way between the processes, short so that many pairs fit. Five calls, so that the first, whose caches
# the other version has filled, and a burst of other people's work leave the median alone; fewer where calls are long, so that a
# pair is over before the machine's load changes.
_BLOCK_MS, _CALLS, _LONG_BLOCK_MS = 20.0, 5, 40.0
_WARM_UP_S = 0.3
GENERATIONS = 2

Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """How two versions are compared.

    Attributes:
        threshold: The share from which a change counts.
        budget_s: Seconds for one case, both rounds and the starting of processes included.
        precision: A round stops when the half-width of the ratio's interval is at most this.
        direction: Which way the metric is better.
        timeout_s: How long one answer of a version may take.
        pairs: Whether timings are wanted; without them each is called once and its rows count.
    """

    threshold: float = THRESHOLD
    budget_s: float = 60.0
    precision: float = 0.01
    direction: Direction = Direction.LOWER
    timeout_s: float = 300.0
    pairs: bool = True


@dataclass(frozen=True)
class Task:
    """One thing to compare.

    Attributes:
        experiment: Which notebook; `call` for a function.
        case_id: The case.
        factors: What the case is.
        requests: What to ask A and B.
    """

    experiment: str
    case_id: str
    factors: Mapping[str, Any]
    requests: tuple[Mapping[str, Any], Mapping[str, Any]]

    @property
    def case(self) -> str:
        """The case, for people."""
        return case_name(self.factors)


@dataclass
class Round:
    """What one round of one task gave.

    Attributes:
        blocks: Scope → block times of A and of B in pairs, ms.
        rows: The rows that each version made by itself.
        endings: Status and message of each.
    """

    blocks: dict[str, tuple[list[float], list[float]]] = field(default_factory=dict)
    rows: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ((), ())
    endings: tuple[tuple[str, str], tuple[str, str]] = ((Status.OK, ""), (Status.OK, ""))


@dataclass(frozen=True)
class Compared:
    """One task's outcome.

    Attributes:
        task: What was compared.
        rounds: The first, and the second where there was one.
        verdicts: Scope → verdict; a scope with too few pairs has none.
    """

    task: Task
    rounds: tuple[Round, ...]
    verdicts: dict[str, Verdict]

    def blocks(self, scope: str) -> tuple[list[float], list[float]]:
        """All block times of A and of B, round after round."""
        return _joined(scope, self.rounds)


def compare_versions(
    versions: Sequence[Version], tasks: Sequence[Task], settings: Settings, say: Say = lambda _: None
) -> list[Compared]:
    """Compare two versions over some tasks.

    Args:
        versions: A and B.
        tasks: What to compare.
        settings: How.
        say: Told, in one line each, what is known as it becomes known.

    Raises:
        BadInput: A version cannot serve a task at all.
    """
    first = _run_round(versions, tasks, settings, say, "")
    judged = _judge(first, settings)
    again = [i for i, verdicts in enumerate(judged) if any(v.kind is not Kind.EQUIVALENT for v in verdicts.values())]
    second: dict[int, Round] = {}
    if again:
        say(f"{len(again)} of {len(tasks)} are not clear; a second round in fresh processes decides")
        repeated = _run_round(versions, [tasks[i] for i in again], settings, say, ", second round")
        second = dict(zip(again, repeated, strict=True))
    repeated_verdicts = dict(zip(again, _judge([second[i] for i in again], settings), strict=True))
    result = []
    for i, (task, round_one) in enumerate(zip(tasks, first, strict=True)):
        rounds = (round_one, second[i]) if i in second else (round_one,)
        verdicts = judged[i]
        if i in second:
            verdicts = {
                scope: confirm(verdict, repeated_verdicts[i].get(scope), _compare(_joined(scope, rounds), settings))
                for scope, verdict in verdicts.items()
            }
        result.append(Compared(task, rounds, verdicts))
    return result


def _joined(scope: str, rounds: Sequence[Round]) -> tuple[list[float], list[float]]:
    sides = [round_.blocks[scope] for round_ in rounds if scope in round_.blocks]
    return [t for a, _ in sides for t in a], [t for _, b in sides for t in b]


def _compare(blocks: tuple[list[float], list[float]], settings: Settings) -> Verdict:
    a, b = blocks
    if settings.direction is Direction.HIGHER:  # a rate: the same work over the time
        a, b = [1 / t for t in a], [1 / t for t in b]
    return compare_paired(a, b, threshold=settings.threshold, direction=settings.direction)


def _judge(rounds: Sequence[Round], settings: Settings) -> list[dict[str, Verdict]]:
    """Verdicts of one round by task and scope, p adjusted over all of them."""
    places, verdicts = [], []
    for i, round_ in enumerate(rounds):
        for scope, blocks in round_.blocks.items():
            with contextlib.suppress(TooFewSamples):  # it has no verdict, and its line says so
                verdicts.append(_compare(blocks, settings))
                places.append((i, scope))
    result: list[dict[str, Verdict]] = [{} for _ in rounds]
    for (i, scope), verdict in zip(places, judge_together(verdicts), strict=True):
        result[i][scope] = verdict
    return result


def _run_round(
    versions: Sequence[Version], tasks: Sequence[Task], settings: Settings, say: Say, what: str
) -> list[Round]:
    """All tasks, in several pairs of processes one after the other: how a process happens to lie is an effect of its own."""
    seconds = settings.budget_s / 2 / GENERATIONS
    generations = [
        _run_generation(versions, tasks, settings, seconds) for _ in range(GENERATIONS if settings.pairs else 1)
    ]
    rounds = [_merged(parts) for parts in zip(*generations, strict=True)]
    for task, round_ in zip(tasks, rounds, strict=True):
        say(f"{task.experiment} {task.case}{what}: {_progress(round_)}")
    return rounds


def _merged(parts: Sequence[Round]) -> Round:
    """The same task in several pairs of processes as one round; a bad ending stays."""
    scopes = [scope for scope in parts[0].blocks if all(scope in part.blocks for part in parts)]
    bad = [part.endings for part in parts if any(status != Status.OK for status, _ in part.endings)]
    return Round(
        {scope: _joined(scope, parts) for scope in scopes}, parts[-1].rows, bad[0] if bad else parts[-1].endings
    )


def _run_generation(
    versions: Sequence[Version], tasks: Sequence[Task], settings: Settings, seconds: float
) -> list[Round]:
    """All tasks once, in one pair of processes as long as both keep in step."""
    rounds: list[Round] = []
    with contextlib.ExitStack() as stack:
        sides: list[VersionProcess] = []
        for task in tasks:
            deadline = time.monotonic() + seconds
            if not sides:
                sides = [stack.enter_context(VersionProcess(version, settings.timeout_s)) for version in versions]
            round_, in_step = _run_task(sides, task, settings, deadline)
            if not in_step:
                stack.close()
                sides = []
            rounds.append(round_)
    return rounds


def _progress(round_: Round) -> str:
    sides = zip("AB", round_.endings, strict=True)
    bad = [f"{side} {status}: {message}" for side, (status, message) in sides if status != Status.OK]
    pairs = [f"{scope or 'call'} {len(a)} pairs" for scope, (a, _) in round_.blocks.items()]
    return "; ".join(bad + pairs) or "nothing to time"


def _run_task(sides: Sequence[VersionProcess], task: Task, settings: Settings, deadline: float) -> tuple[Round, bool]:
    """Run a task on both sides to its end, each of its timings interleaved.

    Returns:
        What it gave, and whether both processes can take another task.
    """
    round_ = Round()
    try:
        for side, request in zip(sides, task.requests, strict=True):
            side.send(**request, timeout_s=settings.timeout_s, rows=not settings.pairs)
        while True:
            answers = [side.receive() for side in sides]
            if answers[0].get("timing") is None or answers[0].get("timing") != answers[1].get("timing"):
                break
            left = deadline - time.monotonic()
            end = deadline if answers[0]["last"] else deadline - left / 2
            round_.blocks.update(_interleave(sides, answers[0]["timing"], settings, end))
            for side in sides:
                side.send(do="next")
    except VersionDied as death:
        died = sides.index(death.process)
        endings = [(Status.OK, ""), (Status.OK, "")]
        endings[died] = (death.status, str(death))
        round_.endings = (endings[0], endings[1])
        return round_, False
    ended = [(a.get("ended", Status.OK), a.get("message", "")) for a in answers]
    if all(status == Status.OK for status, _ in ended) and answers[0].get("timing") != answers[1].get("timing"):
        ended[1] = (Status.ERROR, "it times other phases than A does")
    rows = [a.get("rows", []) for a in answers]
    round_.endings, round_.rows = (ended[0], ended[1]), (rows[0], rows[1])
    return round_, all("ended" in answer for answer in answers)


def _interleave(
    sides: Sequence[VersionProcess], scopes: Sequence[str], settings: Settings, end: float
) -> dict[str, tuple[list[float], list[float]]]:
    """Pairs of blocks until the ratio is known well enough or time is up.

    Returns:
        Scope → block medians of A and of B, ms; with several phases also their sum, `total`.
    """
    order = random.Random()
    if not settings.pairs:
        for side in sides:
            side.time_block(1, keep=True)
        return {}
    for _ in range(2):  # the second says how long a call takes once warm
        call_ms = max(sum(side.time_block(1, keep=False)[0]) for side in sides)
    calls = block_calls(max(call_ms, 1e-6))
    warm = time.monotonic() + _WARM_UP_S
    while time.monotonic() < warm:
        for side in sides:
            side.time_block(calls, keep=False)
    medians: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    next_check = MIN_PAIRS
    while len(medians[0]) < MAX_PAIRS and (time.monotonic() < end or len(medians[0]) < FEWEST_PAIRS):
        for i in order.sample((0, 1), 2):
            block = np.asarray(sides[i].time_block(calls, keep=True))
            totals = [np.median(block.sum(axis=1))] if len(scopes) > 1 else []
            medians[i].append(np.concatenate([np.median(block, axis=0), totals]))
        if len(medians[0]) >= next_check:
            next_check = next_look(len(medians[0]))
            if precise_enough(*(np.asarray(side)[:, -1] for side in medians), settings.precision):  # the total, if any
                break
    names = [*scopes, "total"] if len(scopes) > 1 else scopes
    a, b = (np.asarray(side) for side in medians)
    return {name: (a[:, i].tolist(), b[:, i].tolist()) for i, name in enumerate(names)}


def precise_enough(a: np.ndarray, b: np.ndarray, precision: float) -> bool:
    """Whether one pair of processes has given what it must for a round's ratio to be known to ± `precision`."""
    low, _, high = hodges_lehmann(np.log(b / a))
    return (high - low) / 2 <= precision * math.sqrt(GENERATIONS)


def next_look(pairs: int) -> int:
    """At how many pairs the interval is looked at again: seldom, since each look costs, and never at significance."""
    return math.ceil(pairs * 1.1)


def block_calls(call_ms: float) -> int:
    """How many calls make a block."""
    return min(10_000, max(math.ceil(_BLOCK_MS / call_ms), min(_CALLS, math.ceil(_LONG_BLOCK_MS / call_ms))))
