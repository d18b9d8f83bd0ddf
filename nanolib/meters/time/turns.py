"""Several things timed in turns: one block of each per round, so that what the machine does hits all of them alike."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from nanolib.measurement import Flag, Measurement
from nanolib.meters.cpu_load import cpu_times, load_between
from nanolib.meters.time.clock import Call
from nanolib.meters.time.sampler import FLOOR_BLOCKS, MIN_BLOCKS, BlockSampler, Collect
from nanolib.stats.intervals import Interval, TooFewSamples
from nanolib.stats.signed_ranks import hodges_lehmann

Outliers = Literal["keep", "remove"]
ROUNDS = "rounds"  # the method of a speed-up
_LABEL_S = 0.3  # so often the CPUs are looked at: it takes milliseconds
_FEW_BUSY = 0.25  # of the rounds: left out they leave enough


@dataclass(frozen=True)
class Timing:
    """What is to be timed, phases in turn.

    Attributes:
        phases: Scope of each and its call, in order.
        rel_ci, budget_s, device, outliers, cold, collect: As in `measure`.
        total: What the row of their sum says was measured, where there are several.
    """

    phases: Mapping[str, Call]
    rel_ci: float = 0.01
    budget_s: float = 10.0
    device: str = "cpu"
    total: str = "total"
    outliers: Outliers = "keep"
    cold: bool = False
    collect: Collect | None = None


@dataclass
class Round:
    """One block of each that still takes some.

    Attributes:
        ms: Name → block medians, ms, a value per phase.
        is_busy: Whether other processes took so much of the CPUs meanwhile that a timing suffers.
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
    """Take blocks in rounds, in a random order in each, until every sampler has enough.

    A sampler that has enough takes no more.

    Args:
        samplers: By name; each has begun. One whose block failed is taken out.
        seed: Of the order.
        within: As in `measure_in_turns`.
        enough: Told how many rounds there are, says whether they are enough for all, where samplers do not end by themselves.

    Returns:
        The rounds, in order, those labeled in which others were at work.
    """
    order, rounds = random.Random(seed), []
    watch = _Watch() if len(samplers) > 1 else None
    while waiting := [name for name, sampler in samplers.items() if not sampler.stop]:
        one = Round()
        for name in order.sample(waiting, len(waiting)):
            with within(name):
                one.ms[name] = samplers[name].take()
                continue
            del samplers[name]
        rounds.append(one)
        if watch is not None:
            watch.label(rounds)
        if enough is not None and enough(len(rounds)):
            break
    if watch is not None:
        watch.label(rounds, last=True)
    return rounds


class _Watch:
    """Labels rounds by what the CPUs did meanwhile, over as many rounds as their counters need."""

    def __init__(self) -> None:
        self._labeled, self._before, self._since = 0, cpu_times(), time.monotonic()

    def label(self, rounds: Sequence[Round], last: bool = False) -> None:
        """Label the rounds since the last label, if that is long ago."""
        if not last and time.monotonic() - self._since < _LABEL_S:
            return
        after = cpu_times()
        load = load_between(self._before, after)
        if load.taken is not None:
            is_busy = load.is_busy
        elif last and self._labeled:  # too short to be told by themselves
            is_busy = rounds[self._labeled - 1].is_busy
        else:
            return
        for one in rounds[self._labeled :]:
            one.is_busy = is_busy
        self._labeled, self._before, self._since = len(rounds), after, time.monotonic()


def speed_up(baseline_ms: Sequence[float], own_ms: Sequence[float]) -> Interval:
    """How many times as fast as a baseline something is, from blocks of the same rounds.

    Args:
        baseline_ms: Of the baseline, shape [n], n >= 6.
        own_ms: Of the other, in the same rounds.

    Returns:
        The ratio with its 95 % interval: Hodges and Lehmann's centre of the logarithms of the rounds' ratios.

    Raises:
        TooFewSamples: Fewer than six rounds.
    """
    low, centre, high = np.exp(hodges_lehmann(np.log(np.asarray(baseline_ms) / np.asarray(own_ms))))
    return Interval(float(low), float(centre), float(high))


def speed_up_row(
    rounds: Sequence[Round], name: str, baseline: str, *, phase: int | None = None, scope: str = ""
) -> Measurement | None:
    """The `speed_up` of one over another, from the rounds that both took a block in.

    Rounds in which others were at work are left out where 20 clean ones remain, or six that are three quarters of all; otherwise
    all count, and the row says so.

    Args:
        rounds: As `take_turns` gives them.
        name: Whose speed-up.
        baseline: Over which.
        phase: Of the phases, which; None for their sum.
        scope: What the row says was measured, and over what.

    Returns:
        The row; None where fewer than six rounds have both.
    """
    both = [one for one in rounds if name in one.ms and baseline in one.ms]
    clean = [one for one in both if not one.is_busy]
    few_busy = len(clean) >= max(FLOOR_BLOCKS, (1 - _FEW_BUSY) * len(both))
    used = clean if few_busy or len(clean) >= MIN_BLOCKS else both

    def series(of: str) -> list[float]:
        return [float(one.ms[of].sum() if phase is None else one.ms[of][phase]) for one in used]

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
        samples=tuple(a / b for a, b in zip(base, own, strict=True)),
        method=ROUNDS,
        scope=scope,
        flags=(Flag.BUSY_MACHINE,) if used is both and len(clean) < len(both) else (),
        details={"rounds": len(both), "clean_rounds": len(clean)},
    )
