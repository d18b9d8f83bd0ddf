"""When what is timed: blocks of A and B back to back in random order, each version in a process of its own.

Blocks are compared in pairs, so that drift of the machine hits both alike, and in many pairs of processes, since how
a process happens to lie in memory and on the cores is an effect of its own: each pair of processes is one datum, and all of them
together are judged once, when they are precise enough or the time is up, and never because it looks significant.
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from nanolib.ab.pairs import Compared, Pairs, Settings, Task, TaskResult, device_of
from nanolib.ab.processes import Processes, VersionDied, VersionProcess
from nanolib.ab.worktree import Version
from nanolib.measurement import Direction, Status
from nanolib.stats.compare import (
    Verdict,
    compare_paired,
    compare_processes,
    judge_together,
)
from nanolib.stats.intervals import TooFewSamples
from nanolib.stats.signed_ranks import capped_centre, hodges_lehmann

MIN_PAIRS, MAX_PAIRS, FEWEST_PAIRS = 10, 1000, 6  # of blocks, in one pair of processes
PROCESS_PAIRS = 36  # that the budget is divided by; of short ones there are more
FEWEST_PROCESS_PAIRS = 2
SURE_PROCESS_PAIRS = 20  # before that many, chance makes an interval narrow
TIMED = 0.55  # of the budget; starting processes takes the rest
# Long compared with the answer's way between the processes. Short, since a shared machine changes its pace every few tenths of a
# second, and a pair should be over before; so a long call is a block by itself.
_BLOCK_MS = 20.0
WARM_UP_S = 0.1

Log = Callable[[str], None]


def compare_versions(
    versions: Sequence[Version],
    tasks: Sequence[Task],
    settings: Settings,
    log: Log = lambda _: None,
) -> list[Compared]:
    """Compare two versions over some tasks.

    Args:
        versions: A and B.
        tasks: What to compare.
        settings: How.
        log: Told, in one line each, what is known as it becomes known.

    Raises:
        BadInput: A version cannot serve a task at all.
    """
    on_cores = settings.pairs and device_of(tasks[0]) == "cpu" and sys.platform == "linux"
    # how what two interpreters import lies in memory would be taken for their packages
    two_interpreters = any(version.environment for version in versions)
    if two_interpreters:
        log("two interpreters: each process imports everything anew")
    fork = on_cores and not two_interpreters
    with Processes(versions, settings.timeout_s, fork=fork, bound=on_cores, log=log) as sides:
        results = _run_tasks(sides, tasks, settings, log)
    judged = _judge(results, settings)
    return [Compared(*one) for one in zip(tasks, results, judged, strict=True)]


def _compare(pairs: Pairs, settings: Settings) -> Verdict:
    how = {"threshold": settings.threshold, "direction": settings.direction}
    a, b = pairs.data()
    if settings.direction is Direction.HIGHER:  # a rate: the same work over the time
        a, b = 1 / a, 1 / b
    return compare_processes(b / a, **how) if pairs.by_process else compare_paired(a, b, **how)


def _judge(results: Sequence[TaskResult], settings: Settings) -> list[dict[str, Verdict]]:
    """Verdicts by task and scope, p adjusted over all of them."""
    places, verdicts = [], []
    for i, one in enumerate(results):
        for scope, blocks in one.blocks.items():
            with contextlib.suppress(TooFewSamples):  # it has no verdict, and its line says so
                verdicts.append(_compare(blocks, settings))
                places.append((i, scope))
    result: list[dict[str, Verdict]] = [{} for _ in results]
    for (i, scope), verdict in zip(places, judge_together(verdicts), strict=True):
        result[i][scope] = verdict
    return result


def _run_tasks(
    sides: Processes, tasks: Sequence[Task], settings: Settings, log: Log
) -> list[TaskResult]:
    """All tasks in one pair of processes after the other, until each is known well enough or the time is up."""
    begun, budget_s = time.monotonic(), len(tasks) * settings.budget_s
    window_s = least_s = settings.budget_s * TIMED / PROCESS_PAIRS
    results = [TaskResult() for _ in tasks]
    number, open_, starting_s = 0, list(range(len(tasks))), math.inf
    while open_:
        number += 1
        pair_begun = time.monotonic()
        parts = _run_process_pair(sides, [tasks[at] for at in open_], settings, window_s)
        for at, part in zip(open_, parts, strict=True):
            results[at] = _merged(results[at], part)
        now = time.monotonic()
        if not settings.pairs or ends_after(number, now - begun, budget_s):
            break
        # processes that take long to start are timed for longer
        starting_s = min(starting_s, (now - pair_begun) / len(open_) - window_s)
        window_s = max(least_s, starting_s / 2)
        # what failed is not tried again
        open_ = [
            at for at in open_ if results[at].fine and not known_well(results[at], settings.rel_ci)
        ]
    for task, result in zip(tasks, results, strict=True):
        told = [
            result.failures,
            *(f"{scope or 'call'} {pairs}" for scope, pairs in result.blocks.items()),
        ]
        log(f"{task.experiment} {task.case}: {'; '.join(filter(None, told)) or 'nothing to time'}")
    return results


def ends_after(number: int, spent_s: float, budget_s: float) -> bool:
    """Whether the n-th pair of processes is the last: another like them would take more than the budget."""
    return number >= FEWEST_PROCESS_PAIRS and spent_s * (1 + 1 / number) > budget_s


def known_well(result: TaskResult, rel_ci: float) -> bool:
    """Whether the interval of every ratio is narrow enough, of enough pairs of processes."""
    return bool(result.blocks) and all(
        len(pairs.generations) >= SURE_PROCESS_PAIRS and half_width(pairs) <= rel_ci
        for pairs in result.blocks.values()
    )


def half_width(pairs: Pairs) -> float:
    """Of the interval of the ratio, as a share."""
    low, _, high = capped_centre(np.log(pairs.data()[1]))
    return (high - low) / 2


def _merged(earlier: TaskResult, later: TaskResult) -> TaskResult:
    """The same task in more pairs of processes."""
    scopes = {**earlier.blocks, **later.blocks}
    blocks = {
        scope: earlier.blocks.get(scope, Pairs()) + later.blocks.get(scope, Pairs())
        for scope in scopes
    }
    return TaskResult(blocks, later.rows, later.endings)


def _run_process_pair(
    sides: Processes, tasks: Sequence[Task], settings: Settings, window_s: float
) -> list[TaskResult]:
    """All tasks once, in one pair of processes as long as both keep in step."""
    results: list[TaskResult] = []
    in_step = False
    for task in tasks:
        processes = sides.processes if in_step else sides.renew()
        result, in_step = _run_task(processes, task, settings, window_s)
        if not in_step:
            sides.end()
        results.append(result)
    return results


def _run_task(
    sides: Sequence[VersionProcess], task: Task, settings: Settings, window_s: float
) -> tuple[TaskResult, bool]:
    """Run a task on both sides to its end, its timings interleaved for so long in all.

    Returns:
        What it gave, and whether both processes can take another task.
    """
    result, timing = TaskResult(), False
    try:
        rest = {"timeout_s": settings.timeout_s, "rows": not settings.pairs}
        answers = _asked(sides, [{**request, **rest} for request in task.requests])
        while "timing" in answers[0] and answers[0]["timing"] == answers[1].get("timing"):
            if not answers[0]["last"]:
                window_s /= 2
            timing = True
            result.blocks.update(_interleave(sides, answers[0]["timing"], settings, window_s))
            timing = False
            answers = _asked(sides, [{"do": "next"}] * 2)
    except VersionDied as death:
        deaths = {death.process: death}
        if timing:  # what A cannot do B may not be able to do either
            (other,) = (side for side in sides if side is not death.process)
            try:
                other.time_block(1, keep=False)
            except VersionDied as second:
                deaths[other] = second
        one, two = (
            (deaths[side].status, str(deaths[side])) if side in deaths else (Status.OK, "")
            for side in sides
        )
        result.endings = one, two
        return result, False
    ended = [(a.get("ended", Status.OK), a.get("message", "")) for a in answers]
    if all(status == Status.OK for status, _ in ended) and answers[0].get("timing") != answers[
        1
    ].get("timing"):
        ended[1] = (Status.ERROR, "it times other phases than A does")
    rows = [a.get("rows", []) for a in answers]
    result.endings, result.rows = (ended[0], ended[1]), (rows[0], rows[1])
    return result, all("ended" in answer for answer in answers)


def _asked(
    sides: Sequence[VersionProcess], requests: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The answers of both, one after the other, since what they compute would fight for the cores; but imports go side by side."""
    if all(side.is_forked for side in sides):
        return [side.ask(**request) for side, request in zip(sides, requests, strict=True)]
    for side, request in zip(sides, requests, strict=True):
        side.send(**request)
    return [side.receive() for side in sides]


def _interleave(
    sides: Sequence[VersionProcess], scopes: Sequence[str], settings: Settings, window_s: float
) -> dict[str, Pairs]:
    """Pairs of blocks until the ratio is known well enough or time is up.

    Returns:
        Scope → block medians of A and of B, ms; with several phases also their sum, `total`.
    """
    order = random.Random()
    if not settings.pairs:
        for side in sides:
            side.time_block(1, keep=True)
        return {}
    warm = time.monotonic() + WARM_UP_S
    # the second says how long one takes once warm
    call_ms = max(sum(side.time_block(2, keep=False)[-1]) for side in sides)
    calls = block_calls(max(call_ms, 1e-6))
    while time.monotonic() < warm:
        for side in sides:
            side.time_block(calls, keep=False)
    medians: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    next_check, end = MIN_PAIRS, time.monotonic() + window_s
    while len(medians[0]) < MAX_PAIRS and (
        time.monotonic() < end or len(medians[0]) < FEWEST_PAIRS
    ):
        for i in order.sample((0, 1), 2):
            block = np.asarray(sides[i].time_block(calls, keep=True))
            totals = [np.median(block.sum(axis=1))] if len(scopes) > 1 else []
            medians[i].append(np.concatenate([np.median(block, axis=0), totals]))
        if len(medians[0]) >= next_check:
            next_check = next_look(len(medians[0]))
            if precise_enough(
                *(np.asarray(side)[:, -1] for side in medians), settings.rel_ci
            ):  # the total, if any
                break
    names = [*scopes, "total"] if len(scopes) > 1 else scopes
    a, b = (np.asarray(side) for side in medians)
    return {
        name: Pairs(a[:, i].tolist(), b[:, i].tolist(), [len(a)]) for i, name in enumerate(names)
    }


def precise_enough(a: np.ndarray, b: np.ndarray, rel_ci: float) -> bool:
    """Whether one pair of processes has given what it must for the ratio of all of them to be known to ± `rel_ci`."""
    low, _, high = hodges_lehmann(np.log(b / a))
    return (high - low) / 2 <= rel_ci * math.sqrt(SURE_PROCESS_PAIRS)


def next_look(pairs: int) -> int:
    """At how many pairs the interval is looked at again: seldom, since each look costs, and never at significance."""
    return math.ceil(pairs * 1.1)


def block_calls(call_ms: float) -> int:
    """How many calls make a block."""
    return min(10_000, max(1, round(_BLOCK_MS / call_ms)))
