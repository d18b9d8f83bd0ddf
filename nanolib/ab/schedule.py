"""Time blocks of A and B in turns, each version in its own process.

A block of A and a block of B form a pair, in random order, so drift of the machine affects both
equally. `nano ab` measures in many pairs of processes, because a process's position in memory and
on the cores changes the speed of its code. With at least six pairs of processes, each of these
pairs counts as one sample. With fewer pairs of processes, each pair of blocks counts as one sample,
and a change is `suspect` unless each pair of processes shows it.
A measurement ends when the ratio is precise enough or the time limit is reached, and never because
the result is significant. `nano ab` then judges all samples once.
"""

import contextlib
import itertools
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nanolib.ab.children import VersionDied, VersionProcess
from nanolib.ab.pairs import CALL, Pairs, Request, Settings, Task, TaskResult
from nanolib.ab.processes import Processes
from nanolib.ab.versions import Version
from nanolib.measurement import Status
from nanolib.stats.compare import Kind, Verdict, compare_paired, compare_processes, judge_together
from nanolib.stats.intervals import TooFewSamples, median_interval

FEWEST_PAIRS = 6  # Smallest number of block pairs in a pair of processes.
PROCESS_PAIRS = 36  # The time for blocks is enough for this number of process pairs.
SURE_PROCESS_PAIRS = 20  # With fewer pairs, an interval may be narrow by chance.
REL_CI = 0.01  # A case ends when the interval of each ratio has at most this half-width.
TIMED = 0.55  # Fraction of the budget for timing. The start of processes takes the rest.
# A block takes much longer than a message between processes. The load of a shared machine stays
# constant for about 0.3 s, so both blocks of a pair have the same load. A call that takes longer
# than this time is a block of its own.
_BLOCK_MS = 20.0
_LONGEST_COMPILE_S = 120.0  # The first call may compile.
WARM_UP_S = 0.1

Log = Callable[[str], None]


def compare_versions(
    versions: Sequence[Version],
    tasks: Sequence[Task],
    settings: Settings,
    log: Log = lambda _: None,
) -> list[TaskResult]:
    """Measure all tasks in both versions, and judge the results.

    Args:
        versions: The two versions, A and B.
        tasks: Cases or functions to compare.
        settings: How to compare the versions.
        log: Function that receives one line of progress at a time.

    Raises:
        BadInput: A version cannot run a task.
    """
    task, is_linux = tasks[0], sys.platform == "linux"
    # One server cannot fork processes of two interpreters. With two servers, the positions of the
    # servers in memory would count as an effect of the packages, so nanolib does not fork.
    one_interpreter = all(version.is_here for version in versions)
    if not one_interpreter:
        log("with two interpreters, each process imports all modules again")
    # Only its first processes show whether a function uses a GPU. `Processes` then does not fork.
    may_fork = is_linux and one_interpreter and (task.experiment == CALL or task.device == "cpu")
    results = [TaskResult(task) for task in tasks]
    bound = is_linux and task.device == "cpu"
    with Processes(versions, fork=may_fork, bound=bound, log=log) as sides:
        _run_tasks(sides, results, settings)
    _judge(results, settings)
    return results


def _judge(results: Sequence[TaskResult], settings: Settings):
    """Judge all scopes together, except scopes with too few pairs."""
    places, verdicts = [], []
    for result in results:
        for scope, pairs in result.blocks.items():
            with contextlib.suppress(TooFewSamples):
                verdicts.append(compare_pairs(pairs, settings.threshold))
                places.append((result, scope))
    for (result, scope), verdict in zip(places, judge_together(verdicts), strict=True):
        is_change = verdict.kind in (Kind.REGRESSED, Kind.IMPROVED)
        if is_change and not result.blocks[scope].agree(settings.threshold):
            verdict = replace(verdict, kind=Kind.SUSPECT)
        result.verdicts[scope] = verdict


def compare_pairs(pairs: Pairs, threshold: float) -> Verdict:
    """Judge the pairs of one scope, before the adjustment for the number of scopes.

    Args:
        pairs: Block times of A and B.
        threshold: Smallest change that counts, as a fraction.

    Raises:
        TooFewSamples: There are fewer than six pairs.
    """
    if pairs.counts_processes:
        return compare_processes(pairs.ratios, threshold=threshold)
    return compare_paired(pairs.a, pairs.b, threshold=threshold)


def _run_tasks(sides: Processes, results: Sequence[TaskResult], settings: Settings):
    """Run the tasks in one pair of processes after another.

    The loop ends when each ratio is precise enough or the time limit is reached.
    """
    window_s = settings.budget_s * TIMED / PROCESS_PAIRS
    spent_s, unfinished = 0.0, list(results)
    for number in itertools.count(1):
        begun = time.monotonic()
        sides.renew()
        for result in unfinished:
            in_step = _run_task(
                sides.processes or sides.renew(), result, window_s, settings.budget_s
            )
            if not in_step:
                sides.end()
        # The tasks share this time, so a task that ended does not leave its budget to the others.
        spent_s += (time.monotonic() - begun) / len(unfinished)
        unfinished = [
            result
            for result in unfinished
            if not result.failures and not is_precise_enough(result.blocks, REL_CI)
        ]
        if not unfinished or ends_after(number, spent_s, settings.budget_s):
            return


def ends_after(number: int, spent_s: float, budget_s: float) -> bool:
    """Return whether another pair of processes would exceed the budget.

    Args:
        number: Number of pairs of processes so far. `nano ab` runs at least two pairs.
        spent_s: Time spent on a case in the pairs so far, s.
        budget_s: Time limit for a case, s.
    """
    return number >= 2 and spent_s * (1 + 1 / number) > budget_s


def is_precise_enough(blocks: Mapping[str, Pairs], rel_ci: float) -> bool:
    """Return whether every ratio has a narrow interval, from enough pairs of processes.

    Args:
        blocks: Pairs of blocks of each scope.
        rel_ci: Largest half-width of a narrow interval, as a fraction.
    """
    for pairs in blocks.values():
        if len(pairs.generations) < SURE_PROCESS_PAIRS:
            return False
        # The half-width of the log's interval is a fraction of the ratio.
        low, _, high = median_interval(np.log(pairs.ratios))
        if (high - low) / 2 > rel_ci:
            return False
    return bool(blocks)


def _run_task(
    sides: Sequence[VersionProcess], result: TaskResult, window_s: float, budget_s: float
) -> bool:
    """Run a whole task in both processes, with interleaved timings.

    Args:
        sides: The processes of A and B.
        result: Results of the task. This function adds blocks, rows and endings to the results.
        window_s: Time limit for all timings of the task, s.
        budget_s: Time limit for the task in all processes, s.

    Returns:
        Whether both processes can run another task.
    """
    timing = False
    # Only the first pair of processes checks the budget. Later, one slow call is chance.
    limit_s = np.inf if result.blocks else budget_s
    for side in sides:
        side.block_s = _LONGEST_COMPILE_S + budget_s
    try:
        answers = ask_both(sides, result.task.request)
        while _same_phases(answers) and "timing" in answers[0]:
            if not answers[0]["last"]:
                window_s /= 2
            timing = True
            result.add(_interleave(sides, answers[0]["timing"], window_s, limit_s))
            timing = False
            answers = ask_both(sides, {"do": "next"})
    except TimeoutError as error:
        result.endings = [(Status.TIMEOUT, "too slow"), (Status.TIMEOUT, str(error))]
        return False
    except VersionDied as death:
        deaths = {death.process: death}
        if timing:  # The other version may fail in the same way.
            (other,) = (side for side in sides if side is not death.process)
            try:
                other.time_block(death.process.calls, keep=False)
            except VersionDied as second:
                deaths[other] = second
        result.endings = [
            (deaths[side].status, str(deaths[side])) if side in deaths else (Status.OK, "")
            for side in sides
        ]
        return False
    result.endings = [
        (answer.get("ended", Status.OK), answer.get("message", "")) for answer in answers
    ]
    if not result.failures and not _same_phases(answers):
        result.endings[1] = (Status.ERROR, "the phases of B differ from the phases of A")
    result.rows = [answer.get("rows", []) for answer in answers]
    return all("ended" in answer for answer in answers)


def _same_phases(answers: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether both versions time the same phases, or no phases."""
    return answers[0].get("timing") == answers[1].get("timing")


def ask_both(sides: Sequence[VersionProcess], request: Request) -> list[dict[str, Any]]:
    """Return the answers of both versions.

    Two new interpreters answer in parallel, so that their imports finish sooner. Forked processes
    answer one after the other, because otherwise the processes would compete for the cores.
    """
    if all(side.is_forked for side in sides):
        return [side.ask(**request) for side in sides]
    for side in sides:
        side.send(**request)
    return [side.receive() for side in sides]


def _interleave(
    sides: Sequence[VersionProcess], scopes: Sequence[str], window_s: float, limit_s: float
) -> dict[str, Pairs]:
    """Time pairs of blocks until the time limit is reached.

    Args:
        sides: The processes of A and B.
        scopes: Names of the phases.
        window_s: Time limit, s.
        limit_s: Time limit for the fewest calls of a comparison, s.

    Returns:
        Block medians of A and B for each scope, ms. If there are several phases, the scope `total`
        contains the medians of their sum.

    Raises:
        TimeoutError: The fewest calls of a comparison take longer than their time limit.
    """
    warm = time.monotonic() + WARM_UP_S
    # The first call of a process is slow, so the second call decides the size of a block.
    call_ms = [sum(side.time_block(2, keep=False)[-1]) for side in sides]
    calls = block_calls(max(*call_ms, 1e-6))
    # A comparison needs two pairs of processes. The time of a call varies by a few percent.
    needed_s = 2 * (2 + FEWEST_PAIRS * calls) * sum(call_ms) / 1e3
    if needed_s > limit_s:
        raise TimeoutError(
            f"one call takes {max(call_ms) / 1e3:.3g} s, so a comparison needs {needed_s:.0f} s; "
            f"use --budget {1.1 * needed_s + 1:.0f}s (--total: as long per case) or a smaller case"
        )
    while time.monotonic() < warm:
        for side in sides:
            side.time_block(calls, keep=False)
    names = [*scopes, "total"] if len(scopes) > 1 else scopes
    medians = [[], []]
    count, end = 0, time.monotonic() + window_s
    while time.monotonic() < end or count < FEWEST_PAIRS:
        for i in random.sample((0, 1), 2):
            block = np.asarray(sides[i].time_block(calls, keep=True))
            total = np.median(block.sum(axis=1))
            medians[i].append(np.append(np.median(block, axis=0), total)[: len(names)])
        count += 1
    a, b = (np.asarray(side) for side in medians)
    return {
        name: Pairs(a[:, i].tolist(), b[:, i].tolist(), [count]) for i, name in enumerate(names)
    }


def block_calls(call_ms: float) -> int:
    """Return the number of calls in a block, from the time of one call in ms."""
    return min(10_000, max(1, round(_BLOCK_MS / call_ms)))
