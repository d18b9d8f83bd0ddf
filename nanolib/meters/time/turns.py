"""Time several calls in turns, one block of each per round, so that noise affects all of them."""

import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np

from nanolib.measurement import Flag, Measurement
from nanolib.meters.interference import cpu_times, load_between
from nanolib.meters.time.sampler import FLOOR_BLOCKS, MIN_BLOCKS, BlockSampler
from nanolib.stats.intervals import Interval, TooFewSamples
from nanolib.stats.signed_ranks import hodges_lehmann

ROUNDS = "rounds"  # Method of a `speed_up` row.
_LABEL_S = 0.3  # Reading the load takes milliseconds, so several rounds share a reading.
_FEW_BUSY = 0.25  # Largest share of rounds that nanolib leaves out, if fewer than 20 are clean.


@dataclass
class Round:
    """One block of each sampler that has not stopped.

    Attributes:
        ms: Name → median time of each phase in the block, ms.
        is_busy: Whether other processes disturbed the round.
    """

    ms: dict[str, np.ndarray] = field(default_factory=dict)
    is_busy: bool = False


def take_turns(
    samplers: dict[str, BlockSampler],
    seed: int,
    within: Callable[[str], AbstractContextManager[object]] = lambda name: nullcontext(),
    *,
    enough: Callable[[int], bool] | None = None,
) -> list[Round]:
    """Take blocks in rounds, in random order, until every sampler stops.

    Args:
        samplers: Name → sampler that has begun. If `within` suppresses the error of a block, the
            function deletes the sampler of that block.
        seed: Seed of the random order.
        within: Function from a name to the context of its block.
        enough: Function from the number of rounds to whether all samplers stop.

    Returns:
        The rounds, in order. `is_busy` marks the busy rounds.
    """
    order, rounds = random.Random(seed), []
    labels = _BusyLabels() if len(samplers) > 1 else None
    while waiting := [name for name, sampler in samplers.items() if not sampler.stop]:
        one = Round()
        for name in order.sample(waiting, len(waiting)):
            with within(name):
                one.ms[name] = samplers[name].take()
                continue
            del samplers[name]
        rounds.append(one)
        if labels is not None:
            labels.update(rounds)
        if enough is not None and enough(len(rounds)):
            break
    if labels is not None:
        labels.update(rounds, last=True)
    return rounds


class _BusyLabels:
    """Label rounds by the load of the CPUs, from one reading for several rounds."""

    def __init__(self) -> None:
        self._labeled, self._before, self._since = 0, cpu_times(), time.monotonic()

    def update(self, rounds: Sequence[Round], last: bool = False) -> None:
        """Label the rounds since the last label, if enough time has passed."""
        if not last and time.monotonic() - self._since < _LABEL_S:
            return
        after = cpu_times()
        load = load_between(self._before, after)
        if load.taken is not None:
            is_busy = load.is_busy
        elif last and self._labeled:  # The last rounds are too short for a reading.
            is_busy = rounds[self._labeled - 1].is_busy
        else:
            return
        for one in rounds[self._labeled :]:
            one.is_busy = is_busy
        self._labeled, self._before, self._since = len(rounds), after, time.monotonic()


def speed_up(baseline_ms: Sequence[float], own_ms: Sequence[float]) -> Interval:
    """Estimate the speed-up over a baseline from blocks of the same rounds.

    Args:
        baseline_ms: Times of the baseline, ms, shape [n], n >= 6.
        own_ms: Times of the other call in the same rounds, ms, shape [n].

    Returns:
        The ratio with its 95 % interval, from the Hodges–Lehmann estimate of logarithms.

    Raises:
        TooFewSamples: There are fewer than six rounds.
    """
    logs = np.log(np.asarray(baseline_ms) / np.asarray(own_ms))
    return Interval(*np.exp(hodges_lehmann(logs)).tolist())


def speed_up_row(
    rounds: Sequence[Round], name: str, baseline: str, *, phase: int | None = None, scope: str = ""
) -> Measurement | None:
    """Make the `speed_up` row of one call over another, from the rounds that have both.

    nanolib leaves out busy rounds if at least 20 rounds are clean. Six or more clean rounds are
    enough if they are at least three quarters of all rounds. Otherwise, all rounds count, and the
    row has a flag.

    Args:
        rounds: Rounds from `take_turns`.
        name: Name of the call.
        baseline: Name of the call to compare with.
        phase: Index of a phase, or None for the sum of all phases.
        scope: Scope of the row.

    Returns:
        The row, or None if fewer than six rounds have both calls.
    """
    both = [one for one in rounds if name in one.ms and baseline in one.ms]
    clean = [one for one in both if not one.is_busy]
    few_busy = len(clean) >= max(FLOOR_BLOCKS, (1 - _FEW_BUSY) * len(both))
    used = clean if few_busy or len(clean) >= MIN_BLOCKS else both

    def series(of: str) -> np.ndarray:
        return np.array([one.ms[of].sum() if phase is None else one.ms[of][phase] for one in used])

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
        flags=(Flag.BUSY_MACHINE,) if used is both and len(clean) < len(both) else (),
        details={"rounds": len(both), "clean_rounds": len(clean)},
    )
