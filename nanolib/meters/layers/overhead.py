"""What a profiling mode costs: calls with and without a profiler, in turns."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from torch import nn

from nanolib.measurement import Measurement
from nanolib.meters.energy.meter import EnergyMeter
from nanolib.meters.layers.profiler import LayerProfiler
from nanolib.meters.layers.profiling import ProfilingConfig
from nanolib.meters.sink import Sink
from nanolib.meters.time.clock import synchronizer
from nanolib.stats.intervals import Interval
from nanolib.stats.signed_ranks import hodges_lehmann

_BLOCK_S, _MAX_CALLS = 0.05, 16
_MIN_ROUNDS, _MAX_ROUNDS = 6, 1000  # a median of six has a 95 % interval
_READINGS = 20


@dataclass(frozen=True)
class Overhead:
    """The cost of one mode, as a share of the bare call.

    Attributes:
        mode: Its name; `again` is the bare call compared with itself.
        wall: Wall time, with its 95 % interval.
        cpu: Processor time of the calling thread, likewise.
        rounds: Pairs that it rests on.
        threads: The part of both that reading the power sources takes, in a thread of its own.
        pass_ms: Time of a call that is looked at closely, ms.
        plain_ms: Time of the bare call, ms.
    """

    mode: str
    wall: Interval
    cpu: Interval
    rounds: int
    threads: float
    pass_ms: float
    plain_ms: float

    def to_measurement(self, scope: str) -> Measurement:
        """Give the row of metric `overhead`."""
        low, estimate, high = self.wall
        details = {"cpu": list(self.cpu), "threads": self.threads}
        details |= {"pass_ms": self.pass_ms, "plain_ms": self.plain_ms}
        common = {"method": "interleaved_pairs", "scope": f"{scope} {self.mode}"}
        return Measurement(
            "overhead", estimate, low, high, 0.95, n=self.rounds, details=details, **common
        )


def measure_overhead(
    model: nn.Module,
    call: Callable[[], object],
    modes: Mapping[str, ProfilingConfig],
    *,
    sink: Sink | None = None,
    budget_s: float = 10.0,
    rel_ci: float = 0.002,
    seed: int = 0,
) -> list[Overhead]:
    """Measure the cost of each mode, in turns with the bare call.

    A round takes a block of each mode in random order and then in the reverse order, each between
    two bare blocks to which it is compared. A block is two close calls and some watched calls, with
    the handing over of their rows. Their times are weighted as in use: k - 1 watched, one close.

    Args:
        model: The model that `call` calls once.
        call: The work.
        modes: Name -> what it records.
        sink: Where rows go.
        budget_s: Stop after this long, but not before six rounds.
        rel_ci: Stop when the half-width of every interval is at most this.
        seed: Of the order.

    Returns:
        One per mode, and first the bare call compared with itself.
    """
    kinds: dict[str, ProfilingConfig | None] = {"again": None, **modes}
    order, random_order = list(kinds), random.Random(seed)
    ratios: dict[str, list[np.ndarray]] = {name: [] for name in kinds}
    passes: dict[str, list[float]] = {name: [] for name in kinds}
    synchronize = synchronizer(next(model.parameters()).device)

    def bare(calls: int) -> np.ndarray:
        call()  # whatever went before, a bare call follows a bare call
        return _seconds(call, calls, synchronize)

    def block(name: str, calls: int) -> np.ndarray:
        config = kinds[name]
        if config is None:
            return bare(calls)
        closest = config.replace(every_kth_token=1)  # in deep mode one of either kind
        with LayerProfiler(model, closest, sink=sink) as profiler:
            close = _seconds(call, 2, synchronize, profiler.flush)
        with LayerProfiler(model, ProfilingConfig.minimal(), sink=sink) as profiler:
            watched = _seconds(call, calls, synchronize, profiler.flush)
        passes[name].append(1e3 * close[0])
        k = config.every_kth_token
        return ((k - 1) * watched + close) / k

    for name in kinds:  # what a first call compiles or allocates is no part of the cost
        block(name, 1)
    block_s = min(_BLOCK_S, budget_s / (4 * len(kinds) * _MIN_ROUNDS))
    calls = min(_MAX_CALLS, max(1, round(block_s / bare(1)[0])))
    end, plain = time.monotonic() + budget_s, [bare(calls)]
    while len(plain) < 2 * len(kinds) * _MAX_ROUNDS:
        random_order.shuffle(order)
        round_ratios = {name: np.zeros(2) for name in kinds}
        for name in [*order, *reversed(order)]:
            spent = block(name, calls)
            plain.append(bare(calls))
            round_ratios[name] += spent / (plain[-2] + plain[-1])
        for name, ratio in round_ratios.items():
            ratios[name].append(ratio)
        if len(ratios["again"]) < _MIN_ROUNDS:
            continue
        is_settled = all(_half_width(ratios[name]) <= rel_ci for name in modes)
        if is_settled or time.monotonic() > end:
            break
    plain_ms, reading_s = 1e3 * float(np.median(plain, axis=0)[0]), _reading_s()
    found = []
    for name, config in kinds.items():
        threads = 0.0 if config is None else 1e3 * reading_s / config.power_sample_interval_ms
        wall, cpu = (Interval(*(end + threads for end in share)) for share in _shares(ratios[name]))
        pass_ms = float(np.median(passes[name])) if passes[name] else 0.0
        found.append(Overhead(name, wall, cpu, len(ratios[name]), threads, pass_ms, plain_ms))
    return found


def _seconds(
    call: Callable[[], object],
    calls: int,
    synchronize: Callable[[], object],
    last: Callable[[], object] = lambda: None,
) -> np.ndarray:
    """Wall and processor seconds of one of `calls` calls, shape [2]."""
    synchronize()
    start, busy = time.perf_counter(), time.thread_time()
    for _ in range(calls):
        call()
    last()
    synchronize()
    return np.array([time.perf_counter() - start, time.thread_time() - busy]) / calls


def _shares(ratios: list[np.ndarray]) -> list[Interval]:
    """Cost as a share of the wall time and of the processor time."""
    intervals = (hodges_lehmann(series, 0.95) for series in np.log(ratios).T)
    return [Interval(*(math.expm1(end) for end in interval)) for interval in intervals]


def _half_width(ratios: list[np.ndarray]) -> float:
    wall = _shares(ratios)[0]
    return (wall.high - wall.low) / 2


def _reading_s() -> float:
    """Processor seconds that one reading of all power sources takes."""
    meter = EnergyMeter()
    meter.read()
    start = time.thread_time()
    for _ in range(_READINGS):
        meter.read()
    return (time.thread_time() - start) / _READINGS
