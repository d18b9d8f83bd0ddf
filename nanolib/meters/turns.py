"""Time several calls in turns, one block of each call per round, so noise affects all calls."""

import itertools
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np

from nanolib.measurement import Flag, Measurement
from nanolib.meters.interference import cpu_times, load_between, shortest_watch_s
from nanolib.meters.sampler import FLOOR_BLOCKS, MIN_BLOCKS, BlockSampler
from nanolib.stats.intervals import Interval, TooFewSamples, hodges_lehmann

# This is the method of each `speed_up` row.
ROUNDS = "rounds"
# With fewer than 20 clean rounds, nanolib leaves out at most a quarter of the rounds.
_FEW_BUSY = 0.25


@dataclass
class Round:
    """A round of measurements, with one block from each sampler that has not stopped.

    Attributes:
        ms: Name of a sampler → median time of each phase in its block, ms.
        is_busy: Whether other processes disturbed the round, or None if the rounds were too short
            to measure the load.
    """

    ms: dict[str, np.ndarray] = field(default_factory=dict)
    is_busy: bool | None = None


def take_turns(
    samplers: dict[str, BlockSampler],
    seed: int,
    within: Callable[[str], AbstractContextManager[object]] = nullcontext,
    *,
    enough: Callable[[int], bool] | None = None,
) -> list[Round]:
    """Take blocks in rounds, in random order, until every sampler stops.

    Args:
        samplers: Name → sampler after a call of `begin`. If `within` suppresses an error, the
            function removes the sampler that failed from this mapping.
        seed: Seed of the random order.
        within: Function that returns the context in which a block of a name runs.
        enough: Function that takes the number of rounds and returns whether all samplers stop. By
            default, each sampler stops by its own rule.

    Returns:
        The rounds, in order. `is_busy` marks the busy rounds.
    """
    order, rounds = random.Random(seed), []

    def reading():
        return len(rounds), time.monotonic(), cpu_times()

    # A reading of the CPU load takes milliseconds, so several rounds share a reading.
    readings = [reading()]
    is_group, shortest_s = len(samplers) > 1, shortest_watch_s()
    while waiting := [name for name, sampler in samplers.items() if enough or not sampler.stop]:
        round_ = Round()
        for name in order.sample(waiting, len(waiting)):
            with within(name):
                round_.ms[name] = samplers[name].take()
                continue
            del samplers[name]
        rounds.append(round_)
        if is_group and time.monotonic() - readings[-1][1] > shortest_s:
            readings.append(reading())
        if enough is not None and enough(len(rounds)):
            break
    if is_group:
        # The last rounds may be too short for a reading of their own.
        readings[max(1, len(readings) - 1) :] = [reading()]
        for (first, _, before), (end, _, after) in itertools.pairwise(readings):
            is_busy = load_between(before, after).is_busy
            for round_ in rounds[first:end]:
                round_.is_busy = is_busy
    return rounds


def drop_busy_rounds(
    rounds: list[Round],
) -> tuple[list[Round], tuple[Flag, ...], dict[str, int | None]]:
    """Leave out the busy rounds, if enough rounds are clean.

    20 clean rounds are enough. Six or more clean rounds are enough if they are at least three
    quarters of all rounds. Otherwise, all rounds count, with the flag `busy_machine`.

    Returns:
        The rounds to use, and the flags and details of a row that rests on them. The detail
        `clean_rounds` is None if the load during the rounds is not known.
    """
    clean = [round_ for round_ in rounds if not round_.is_busy]
    is_known = all(round_.is_busy is not None for round_ in rounds)
    details = {"rounds": len(rounds), "clean_rounds": len(clean) if is_known else None}
    few_busy = len(clean) >= max(FLOOR_BLOCKS, (1 - _FEW_BUSY) * len(rounds))
    if few_busy or len(clean) >= MIN_BLOCKS:
        return clean, (), details
    return rounds, (Flag.BUSY_MACHINE,), details


def speed_up(baseline_ms: np.ndarray, own_ms: np.ndarray) -> Interval:
    """Estimate the speed-up over a baseline from blocks of the same rounds.

    Args:
        baseline_ms: Times of the baseline, ms, shape [n], n >= 6.
        own_ms: Times of the other call in the same rounds, ms, shape [n].

    Returns:
        The ratio with its 95 % interval, from the Hodges–Lehmann estimate of logarithms.

    Raises:
        TooFewSamples: There are fewer than six rounds.
    """
    return Interval(*np.exp(hodges_lehmann(np.log(baseline_ms / own_ms))).tolist())


def speed_up_row(
    rounds: Sequence[Round], name: str, baseline: str, *, phase: int | None = None, scope: str = ""
) -> Measurement | None:
    """Make the `speed_up` row of one call over another, from the rounds that contain both calls.

    nanolib leaves out busy rounds with `drop_busy_rounds`.

    Args:
        rounds: Rounds from `take_turns`.
        name: Name of the call.
        baseline: Name of the call to compare with.
        phase: Index of a phase, or None for the sum of all phases.
        scope: Scope of the row.

    Returns:
        The row, or None if fewer than six rounds have both calls.
    """
    both = [round_ for round_ in rounds if name in round_.ms and baseline in round_.ms]
    used, flags, details = drop_busy_rounds(both)

    def series(of: str) -> np.ndarray:
        return np.array(
            [round_.ms[of].sum() if phase is None else round_.ms[of][phase] for round_ in used]
        )

    base, own = series(baseline), series(name)
    try:
        low, estimate, high = speed_up(base, own)
    except TooFewSamples:
        return None
    return Measurement(
        "speed_up",
        estimate,
        low,
        high,
        0.95,
        n=len(used),
        samples=tuple((base / own).tolist()),
        method=ROUNDS,
        scope=scope,
        flags=flags,
        details=details,
    )
