"""Run blocks of A and B alternately, in random order, each version in its own process.

Blocks are compared in pairs, so that drift of the machine affects both equally. They are measured in many pairs of processes,
because the position of a process in memory and on the cores is an effect of its own. Each pair of processes is one datum. All of
them are judged once, when they are precise enough or the time is up, and never because the result looks significant.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from nanolib.ab.children import VersionDied, VersionProcess
from nanolib.ab.pairs import Pairs, Settings, Task, TaskResult
from nanolib.ab.processes import Processes
from nanolib.ab.versions import Version
from nanolib.measurement import Direction, Status
from nanolib.stats.compare import Verdict, compare_paired, compare_processes, judge_together
from nanolib.stats.intervals import TooFewSamples
from nanolib.stats.signed_ranks import capped_centre, hodges_lehmann

MIN_PAIRS, MAX_PAIRS, FEWEST_PAIRS = 10, 1000, 6  # of blocks, in one pair of processes
PROCESS_PAIRS = 36  # that the budget is divided by; of short ones there are more
FEWEST_PROCESS_PAIRS = 2
SURE_PROCESS_PAIRS = 20  # with fewer, an interval may be narrow by chance
TIMED = 0.55  # of the budget; starting processes takes the rest
# Long compared with a message between processes. Short compared with the load changes of a shared machine (about 0.3 s). A call
# that takes longer is a block of its own.
_BLOCK_MS = 20.0
WARM_UP_S = 0.1

Log = Callable[[str], None]


def compare_versions(
    versions: Sequence[Version],
    tasks: Sequence[Task],
    settings: Settings,
    log: Log = lambda _: None,
) -> list[TaskResult]:
    """Compare two versions.

    Args:
        versions: A and B.
        tasks: What to compare.
        settings: How to compare it.
        log: Receives a line when something is known.

    Raises:
        BadInput: A version cannot run a task at all.
    """
    on_cores = settings.timed and tasks[0].device == "cpu" and sys.platform == "linux"
    # Two interpreters import different files. Their position in memory would count as an effect of the packages.
    two_interpreters = any(version.environment for version in versions)
    if two_interpreters:
        log("two interpreters: each process imports everything again")
    fork = on_cores and not two_interpreters
    results = [TaskResult(task) for task in tasks]
    with Processes(versions, settings.timeout_s, fork=fork, bound=on_cores, log=log) as sides:
        _run_tasks(sides, results, settings)
    _judge(results, settings)
    return results


def _judge(results: Sequence[TaskResult], settings: Settings) -> None:
    """Give each scope its verdict, p adjusted over all of them; a scope with too few pairs gets none."""
    places, verdicts = [], []
    for result in results:
        for scope, pairs in result.blocks.items():
            with contextlib.suppress(TooFewSamples):
                verdicts.append(_compare(pairs, settings))
                places.append((result, scope))
    for (result, scope), verdict in zip(places, judge_together(verdicts), strict=True):
        result.verdicts[scope] = verdict


def _compare(pairs: Pairs, settings: Settings) -> Verdict:
    how = {"threshold": settings.threshold, "direction": settings.direction}
    a, b = pairs.data()
    if settings.direction is Direction.HIGHER:  # a rate: the same work over the time
        a, b = 1 / a, 1 / b
    return compare_processes(b / a, **how) if pairs.by_process else compare_paired(a, b, **how)


def _run_tasks(sides: Processes, results: Sequence[TaskResult], settings: Settings) -> None:
    """Run all tasks in one pair of processes after the other, until all ratios are precise enough or the time is up."""
    begun, budget_s = time.monotonic(), len(results) * settings.budget_s
    window_s = least_s = settings.budget_s * TIMED / PROCESS_PAIRS
    starting_s, unfinished = math.inf, list(results)
    for number in itertools.count(1):
        pair_begun = time.monotonic()
        sides.renew()
        for result in unfinished:
            in_step = _run_task(sides.processes or sides.renew(), result, settings, window_s)
            if not in_step:
                sides.end()
        now = time.monotonic()
        if not settings.timed or ends_after(number, now - begun, budget_s):
            return
        # Processes that take long to start are timed for longer.
        starting_s = min(starting_s, (now - pair_begun) / len(unfinished) - window_s)
        window_s = max(least_s, starting_s / 2)
        unfinished = [
            result
            for result in unfinished
            if not result.failures and not is_precise_enough(result.blocks, settings.rel_ci)
        ]
        if not unfinished:
            return


def ends_after(number: int, spent_s: float, budget_s: float) -> bool:
    """Whether the n-th pair of processes is the last: another one would exceed the budget."""
    return number >= FEWEST_PROCESS_PAIRS and spent_s * (1 + 1 / number) > budget_s


def is_precise_enough(blocks: Mapping[str, Pairs], rel_ci: float) -> bool:
    """Whether the interval of every ratio is narrow enough, over enough pairs of processes."""
    return bool(blocks) and all(
        len(pairs.generations) >= SURE_PROCESS_PAIRS
        and _half_width(capped_centre(np.log(pairs.data()[1]))) <= rel_ci
        for pairs in blocks.values()
    )


def _half_width(logs: tuple[float, float, float]) -> float:
    """Return half the width of a ratio's interval as a share."""
    low, _, high = logs
    return (high - low) / 2


def _run_task(
    sides: Sequence[VersionProcess], result: TaskResult, settings: Settings, window_s: float
) -> bool:
    """Run a task on both sides to its end, with its timings interleaved for `window_s` in all.

    Returns:
        Whether both processes can take another task.
    """
    rest = {"timeout_s": settings.timeout_s, "rows": not settings.timed}
    timing = False
    try:
        answers = _ask_both(sides, [{**request, **rest} for request in result.task.requests])
        while _same_phases(answers) and "timing" in answers[0]:
            if not answers[0]["last"]:
                window_s /= 2
            timing = True
            result.add(_interleave(sides, answers[0]["timing"], settings, window_s))
            timing = False
            answers = _ask_both(sides, [{"do": "next"}] * 2)
    except VersionDied as death:
        deaths = {death.process: death}
        if timing:  # the other version may fail in the same way
            (other,) = (side for side in sides if side is not death.process)
            try:
                other.time_block(1, keep=False)
            except VersionDied as second:
                deaths[other] = second
        result.endings = [
            (deaths[side].status, str(deaths[side])) if side in deaths else (Status.OK, "")
            for side in sides
        ]
        return False
    result.endings = [(one.get("ended", Status.OK), one.get("message", "")) for one in answers]
    if not result.failures and not _same_phases(answers):
        result.endings[1] = (Status.ERROR, "it times other phases than A does")
    result.rows = [one.get("rows", []) for one in answers]
    return all("ended" in one for one in answers)


def _same_phases(answers: Sequence[Mapping[str, Any]]) -> bool:
    """Whether both versions are about to time the same, or nothing."""
    return answers[0].get("timing") == answers[1].get("timing")


def _ask_both(
    sides: Sequence[VersionProcess], requests: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Ask both versions one after the other, because they would compete for the cores; only imports run at the same time."""
    if all(side.is_forked for side in sides):
        return [side.ask(**request) for side, request in zip(sides, requests, strict=True)]
    for side, request in zip(sides, requests, strict=True):
        side.send(**request)
    return [side.receive() for side in sides]


def _interleave(
    sides: Sequence[VersionProcess], scopes: Sequence[str], settings: Settings, window_s: float
) -> dict[str, Pairs]:
    """Time pairs of blocks until the ratio is precise enough or the time is up.

    Returns:
        Scope → block medians of A and of B, ms; with several phases also their sum, `total`.
    """
    if not settings.timed:
        for side in sides:
            side.time_block(1, keep=True)
        return {}
    warm, order = time.monotonic() + WARM_UP_S, random.Random()
    # The second of two calls shows how long a warm one takes.
    call_ms = max(sum(side.time_block(2, keep=False)[-1]) for side in sides)
    calls = block_calls(max(call_ms, 1e-6))
    while time.monotonic() < warm:
        for side in sides:
            side.time_block(calls, keep=False)
    names = [*scopes, "total"] if len(scopes) > 1 else scopes
    medians: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    count, next_check, end = 0, MIN_PAIRS, time.monotonic() + window_s
    while count < MAX_PAIRS and (time.monotonic() < end or count < FEWEST_PAIRS):
        for i in order.sample((0, 1), 2):
            block = np.asarray(sides[i].time_block(calls, keep=True))
            total = np.median(block.sum(axis=1))
            medians[i].append(np.append(np.median(block, axis=0), total)[: len(names)])
        count += 1
        if count >= next_check:
            next_check = next_look(count)
            last = (np.asarray(side)[:, -1] for side in medians)  # the total, if there is one
            if precise_enough(*last, settings.rel_ci):
                break
    a, b = (np.asarray(side) for side in medians)
    return {
        name: Pairs(a[:, i].tolist(), b[:, i].tolist(), [count]) for i, name in enumerate(names)
    }


def precise_enough(a: np.ndarray, b: np.ndarray, rel_ci: float) -> bool:
    """Whether one pair of processes has contributed enough for the ratio of all of them to be known to ± `rel_ci`."""
    return _half_width(hodges_lehmann(np.log(b / a))) <= rel_ci * math.sqrt(SURE_PROCESS_PAIRS)


def next_look(pairs: int) -> int:
    """Return at how many pairs the interval is computed again: rarely, because it takes time, and never at significance."""
    return math.ceil(pairs * 1.1)


def block_calls(call_ms: float) -> int:
    """Return how many calls make a block."""
    return min(10_000, max(1, round(_BLOCK_MS / call_ms)))
