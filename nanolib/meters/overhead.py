"""Measure the overhead of a profiling mode, in turns with calls that have no profiler."""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from torch import nn

from nanolib.measurement import Measurement
from nanolib.meters.clock import Call, HostClock, clock_for, synchronizer
from nanolib.meters.energy import EnergyMeter
from nanolib.meters.layers import LayerProfiler
from nanolib.meters.recording import ProfilingConfig
from nanolib.meters.sampler import FLOOR_BLOCKS, BlockSampler, Timing, pause_collector
from nanolib.meters.turns import ROUNDS, drop_busy_rounds, take_turns
from nanolib.stats.intervals import hodges_lehmann

_BLOCK_S, _MAX_CALLS = 0.05, 16
# In a short block, too few calls share the time to read and collect rows, unlike in a real run.
_LEAST_BLOCK_S = 0.01
_READINGS = 20
# Intended overhead of the detailed calls of each mode, as a share of a bare call's time.
_DETAIL_SHARES = {"standard": 0.005, "deep": 0.04}
# nanolib makes each second to each 128th call a detailed call. Other calls have undisturbed times.
_OFTENEST, _RAREST = 2, 128


def measure_overhead(
    model: nn.Module,
    call: Call,
    modes: Mapping[str, ProfilingConfig],
    *,
    scope: str = "",
    budget_s: float = 10.0,
    rel_ci: float = 0.002,
) -> Iterator[Measurement]:
    """Measure the overhead of each mode compared with bare calls, which have no profiler.

    nanolib times plain and detailed calls separately, because only each k-th call of a mode is
    detailed. The overhead of a mode is a mean over k calls. The time of a call includes the time to
    read its data and to collect its rows.

    Args:
        model: Model to profile.
        call: Function that calls the model once.
        modes: Name of each mode in `MODES` → its settings. For modes with details, nanolib chooses
            k from 2 to 128.
        scope: First words of the scope of each row. The name of the mode follows.
        budget_s: Time after which measuring stops, s, but not before six rounds.
        rel_ci: Measuring stops when the half-width of each latency's interval is at most this share
            of the latency.

    Yields:
        `overhead` of each mode as a share of the bare call's wall time. The first row, `again`,
        compares bare calls with bare calls. The detail `cpu` is the overhead in CPU time of the
        calling thread, with its interval. `threads` is the share of time in which another thread
        reads power, and is part of both overheads. `plain_ms` is the time of a bare call,
        `detailed_ms` is the time of a detailed call, and `detailed_every` is k. Modes without
        details have no `detailed_ms` and no `detailed_every`.
    """
    detailed = {
        name: config.replace(every_kth_token=1) for name, config in modes.items() if config.turns
    }
    kinds = {"bare": None, "again": None, "plain": ProfilingConfig.minimal()} | detailed
    device, each_s = next(model.parameters()).device, budget_s / len(kinds)
    block_ms = 1e3 * min(_BLOCK_S, max(_LEAST_BLOCK_S, each_s / FLOOR_BLOCKS))
    _, (bare_ms,) = clock_for(device).time_block([call], 2, 1)
    calls = min(_MAX_CALLS, max(1, round(block_ms / bare_ms)))
    samplers = {}
    for kind, config in kinds.items():
        turns = config.turns if config else []  # In a block, each turn comes equally often.
        clock = _ProfiledClock(model, config, calls + -calls % max(1, len(turns)))
        samplers[kind] = BlockSampler(clock, Timing({kind: call}, rel_ci, each_s))
    with pause_collector():
        for sampler in samplers.values():
            sampler.begin()
        rounds = take_turns(samplers, seed=0)
    rounds, flags, counted = drop_busy_rounds(
        [round_ for round_ in rounds if len(round_.ms) == len(kinds)]
    )
    # Wall time and CPU time of a call in each round, ms.
    times = {kind: np.array([round_.ms[kind] for round_ in rounds]).T for kind in kinds}
    plain_ms, reading_ms = float(np.median(times["bare"][0])), _reading_ms()
    for name in ("again", *modes):
        threads = reading_ms / modes[name].power_sample_interval_ms if name in modes else 0.0
        details, every = counted | {"threads": threads, "plain_ms": plain_ms}, math.inf
        own = times.get(name, times["plain"])
        plain = times["plain"] if name in modes else own
        if name in detailed:
            detailed_ms = float(np.median(own[0]))
            share = (detailed_ms - np.median(plain[0])) / plain_ms
            every = int(np.clip(np.ceil(share / _DETAIL_SHARES[name]), _OFTENEST, _RAREST))
            details |= {"detailed_ms": detailed_ms, "detailed_every": every}
        ratios = np.log((plain + (own - plain) / every) / times["bare"])
        wall, cpu = (np.expm1(hodges_lehmann(ratio)) + threads for ratio in ratios)
        low, estimate, high = wall.tolist()
        yield Measurement(
            "overhead",
            estimate,
            low,
            high,
            0.95,
            n=len(rounds),
            method=ROUNDS,
            scope=f"{scope} {name}",
            flags=flags,
            details=details | {"cpu": cpu.tolist()},
        )


class _ProfiledClock(HostClock):
    """Time a block of calls with a profiler, in wall time and in CPU time of the calling thread.

    Args:
        model: Model to profile.
        config: Settings of the profiler, or None for no profiler.
        calls: Number of calls in a block.
    """

    def __init__(self, model: nn.Module, config: ProfilingConfig | None, calls: int):
        super().__init__(synchronizer(next(model.parameters()).device))
        self._model, self._config, self._calls = model, config, calls

    def time_block(self, phases: Sequence[Call], calls: int, inner: int) -> list[list[float]]:
        """Run a block, and return the wall time and the CPU time of a call, ms, shape [1][2]."""
        (call,) = phases
        profiler = LayerProfiler(self._model, self._config) if self._config else None
        with profiler or contextlib.nullcontext():
            call()  # The first call after the profiler's start takes longer, so it is not timed.
            before = self.now(), time.thread_time_ns()
            for _ in range(self._calls):
                call()
            if profiler is not None:
                profiler.flush()
            after = self.now(), time.thread_time_ns()
        return [[self.ms(a, b) / self._calls for a, b in zip(before, after, strict=True)]]


def _reading_ms() -> float:
    """Measure the CPU time of reading all power sources once, ms."""
    meter = EnergyMeter()
    meter.read()
    start = time.thread_time()
    for _ in range(_READINGS):
        meter.read()
    return 1e3 * (time.thread_time() - start) / _READINGS
