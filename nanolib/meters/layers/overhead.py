"""Measure the overhead of a profiling mode: calls with and without a profiler, in turns."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import nn

from nanolib.measurement import Measurement
from nanolib.meters.energy.meter import EnergyMeter
from nanolib.meters.energy.source import Sink
from nanolib.meters.layers.profiler import LayerProfiler
from nanolib.meters.layers.recording import ProfilingConfig
from nanolib.meters.time.clock import Call, synchronizer
from nanolib.meters.time.sampler import FLOOR_BLOCKS
from nanolib.meters.time.turns import take_turns
from nanolib.stats.signed_ranks import hodges_lehmann

_BLOCK_S, _MAX_CALLS, _MAX_ROUNDS = 0.05, 16, 1000
_READINGS = 20
_AGAIN, _WATCHED = "again", "watched"


@dataclass
class _Blocks:
    """Blocks of calls in one mode, each between two blocks without a profiler.

    Attributes:
        own: Runs a block; returns wall and CPU seconds of a call, shape [2].
        bare: The same without a profiler.
        seconds: Result of each block.
        ratios: Ratio of each block to the mean of the bare blocks around it.
    """

    own: Callable[[], np.ndarray]
    bare: Callable[[], np.ndarray]
    seconds: list[np.ndarray] = field(default_factory=list)
    ratios: list[np.ndarray] = field(default_factory=list)
    stop: str = ""  # all modes end together

    def take(self) -> np.ndarray:
        """Run one block and return its ratio."""
        before, own, after = self.bare(), self.own(), self.bare()
        self.seconds.append(own)
        self.ratios.append(2 * own / (before + after))
        return self.ratios[-1]

    def median_ms(self) -> float:
        """Return the median wall time of a call in this mode, ms."""
        return 1e3 * float(np.median(self.seconds, axis=0)[0])


def measure_overhead(
    model: nn.Module,
    call: Call,
    modes: Mapping[str, ProfilingConfig],
    *,
    scope: str = "",
    sink: Sink | None = None,
    budget_s: float = 10.0,
    rel_ci: float = 0.002,
    seed: int = 0,
) -> Iterator[Measurement]:
    """Measure the overhead of each mode, in turns with the bare call.

    Plain and detailed calls are timed separately and weighted as in use: one detailed call and k -
    1 plain ones. Writing their rows is part of their time.

    Args:
        model: The model that `call` calls once.
        call: The work.
        modes: Name -> settings.
        scope: Start of the rows' scope.
        sink: Receives rows of the profilers.
        budget_s: Stop after this time, but not before six rounds.
        rel_ci: Stop when the half-width of each interval is at most this.
        seed: Seed of the order.

    Yields:
        `overhead` of each mode as a share of the bare call's wall time, and first that of bare
        calls against themselves (`again`). The details have `cpu` (the same for the thread's CPU
        time), `threads` (the part of both for reading power, in another thread), `pass_ms` (a
        detailed call) and `plain_ms` (a bare call).
    """
    synchronize = synchronizer(next(model.parameters()).device)
    calls = 1

    def seconds(config: ProfilingConfig | None = None, count: int = 0) -> np.ndarray:
        call()  # each block follows a bare call, whatever ran before
        bare = contextlib.nullcontext()
        with LayerProfiler(model, config, sink=sink) if config else bare as profiler:
            synchronize()
            start = np.array([time.perf_counter(), time.thread_time()])
            for _ in range(count or calls):
                call()
            if profiler:
                profiler.flush()
            synchronize()
            end = np.array([time.perf_counter(), time.thread_time()])
        return (end - start) / (count or calls)

    def blocks(config: ProfilingConfig | None, count: int = 0) -> _Blocks:
        return _Blocks(lambda: seconds(config, count), seconds)

    again, watched = blocks(None), blocks(ProfilingConfig.minimal())
    detailed = {
        name: blocks(config.replace(every_kth_token=1), 2)  # deep mode has two kinds of such calls
        for name, config in modes.items()
        if config.has_details
    }
    kinds = {_AGAIN: again, _WATCHED: watched} | detailed
    for kind in kinds.values():  # a first call compiles and allocates
        kind.own()
    block_s = min(_BLOCK_S, budget_s / (3 * len(kinds) * FLOOR_BLOCKS))
    bare_s = seconds()[0]
    calls = min(_MAX_CALLS, max(1, round(block_s / bare_s)))

    def costs(name: str) -> np.ndarray:
        """Return the intervals of the overhead in wall time and in CPU time, shape [2, 3]."""
        ratios = np.array((again if name == _AGAIN else watched).ratios)
        if name in detailed:
            ratios += (np.array(detailed[name].ratios) - ratios) / modes[name].every_kth_token
        return np.expm1([hodges_lehmann(series, 0.95) for series in np.log(ratios).T])

    end = time.monotonic() + budget_s

    def is_enough(rounds: int) -> bool:
        if rounds < FLOOR_BLOCKS:
            return False
        is_over = time.monotonic() > end or rounds >= _MAX_ROUNDS
        return is_over or all(np.ptp(costs(name)[0]) <= 2 * rel_ci for name in modes)

    rounds = len(take_turns(kinds, seed, enough=is_enough))
    reading_ms = _reading_ms()
    for name in (_AGAIN, *modes):
        threads = reading_ms / modes[name].power_sample_interval_ms if name in modes else 0.0
        (low, estimate, high), cpu = (costs(name) + threads).tolist()
        details = {"cpu": cpu, "threads": threads, "plain_ms": again.median_ms()}
        details["pass_ms"] = detailed[name].median_ms() if name in detailed else 0.0
        yield Measurement(
            "overhead",
            estimate,
            low,
            high,
            0.95,
            n=rounds,
            method="interleaved_pairs",
            scope=f"{scope} {name}",
            details=details,
        )


def _reading_ms() -> float:
    """Measure the CPU time of reading all power sources once, ms."""
    meter = EnergyMeter()
    meter.read()
    start = time.thread_time()
    for _ in range(_READINGS):
        meter.read()
    return 1e3 * (time.thread_time() - start) / _READINGS
