"""Measure the overhead of a profiling mode, in alternating blocks with and without a profiler."""

import math
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext

import numpy as np
from torch import nn

from nanolib.measurement import Measurement
from nanolib.meters.energy.meter import EnergyMeter
from nanolib.meters.layers.profiler import LayerProfiler
from nanolib.meters.layers.recording import ProfilingConfig
from nanolib.meters.time.clock import Call, synchronizer
from nanolib.meters.time.sampler import FLOOR_BLOCKS
from nanolib.stats.intervals import hodges_lehmann

_BLOCK_S, _MAX_CALLS, _MAX_ROUNDS = 0.05, 16, 1000
# In a short block, too few calls share the time to read and collect rows, unlike in a real run.
_LEAST_BLOCK_S = 0.01
_READINGS = 20
_AGAIN, _WATCHED = "again", "watched"
# Intended overhead of the detailed calls of each mode, as a share of a bare call's time.
DETAIL_SHARES = {"standard": 0.005, "deep": 0.04}
# If nanolib chooses the detailed calls, at least every 128th call is a detailed call.
_RAREST = 128


def measure_overhead(
    model: nn.Module,
    call: Call,
    modes: Mapping[str, ProfilingConfig],
    shares: Mapping[str, float] = DETAIL_SHARES,
    *,
    scope: str = "",
    budget_s: float = 10.0,
    rel_ci: float = 0.002,
    seed: int = 0,
) -> Iterator[Measurement]:
    """Measure the overhead of each mode compared with bare calls, which have no profiler.

    nanolib times plain and detailed calls separately, because only each k-th call of a mode is
    detailed. The overhead of a mode is a mean over k calls. The time of a call includes the time to
    read its data and to collect its rows.

    Args:
        model: Model to profile.
        call: Function that calls the model once.
        modes: Name of each mode → its settings.
        shares: Name of a mode → intended overhead of its detailed calls, as a share. For these
            modes, nanolib chooses k from 1 to 128. For other modes, k is the `every_kth_token` of
            their settings.
        scope: First words of the scope of each row. The name of the mode follows.
        budget_s: Time after which measuring stops, s, but not before six rounds.
        rel_ci: Measuring stops when the half-width of each interval is at most this share of the
            time of a bare call.
        seed: Seed of the order of modes.

    Yields:
        `overhead` of each mode as a share of the bare call's wall time. The first row, `again`,
        compares bare calls with bare calls. The detail `cpu` is the overhead in CPU time of the
        calling thread, with its interval. `threads` is the share of time in which another thread
        reads power, and is part of both overheads. `plain_ms` is the time of a bare call,
        `detailed_ms` is the time of a detailed call, and `detailed_every` is k. Modes without
        details have no `detailed_ms` and no `detailed_every`.
    """
    synchronize = synchronizer(next(model.parameters()).device)
    calls = 1

    def seconds(config: ProfilingConfig | None = None) -> np.ndarray:
        """Run a block of calls, and return wall time and CPU time per call, s, shape [2]."""
        # torch's profiler records every other detailed call in deep mode, so the count is even.
        count = calls + calls % 2 if config and config.has_details else calls
        with LayerProfiler(model, config) if config else nullcontext() as profiler:
            call()  # The first call after the profiler's start takes longer, so it is not timed.
            if profiler:
                profiler.flush()
            synchronize()
            start = np.array([time.perf_counter(), time.thread_time()])
            for _ in range(count):
                call()
            if profiler:
                profiler.flush()
            synchronize()
            end = np.array([time.perf_counter(), time.thread_time()])
        return (end - start) / count

    detailed = {
        name: config.replace(every_kth_token=1)
        for name, config in modes.items()
        if config.has_details
    }
    kinds = {_AGAIN: None, _WATCHED: ProfilingConfig.minimal()} | detailed
    # The first block of each kind allocates memory, so nanolib does not use its time.
    for config in kinds.values():
        seconds(config)
    block_s = budget_s / (3 * len(kinds) * FLOOR_BLOCKS)
    block_s = min(_BLOCK_S, max(_LEAST_BLOCK_S, block_s))
    bare_s = seconds()[0]
    calls = min(_MAX_CALLS, max(1, round(block_s / bare_s)))
    # Kind → rounds. A round has the times of a bare block, a block of the kind, and a bare block.
    times = {kind: [] for kind in kinds}

    def ratios(kind: str) -> np.ndarray:
        """Return the ratio of each block to the bare blocks around it, shape [rounds, 2]."""
        before, own, after = np.moveaxis(times[kind], 1, 0)
        return 2 * own / (before + after)

    def median_ms(kind: str) -> float:
        """Return the median wall time of a call, ms."""
        return 1e3 * float(np.median(times[kind], axis=0)[1, 0])

    def extra(name: str) -> np.ndarray:
        """Return the extra time of a detailed call relative to a bare call, shape [rounds, 2]."""
        return ratios(name) - ratios(_WATCHED)

    def every(name: str) -> int:
        """Return the number of calls from one detailed call to the next."""
        if name not in shares:
            return modes[name].every_kth_token
        more = np.median(extra(name)[:, 0])
        return min(_RAREST, max(1, math.ceil(more / shares[name])))

    def costs(name: str) -> np.ndarray:
        """Return the intervals of the overhead in wall time and in CPU time, shape [2, 3]."""
        found = ratios(_AGAIN if name == _AGAIN else _WATCHED)
        if name in detailed:
            found += extra(name) / every(name)
        return np.expm1([hodges_lehmann(series, 0.95) for series in np.log(found).T])

    def is_precise() -> bool:
        return all(np.ptp(costs(name)[0]) <= 2 * rel_ci for name in modes)

    order, end = random.Random(seed), time.monotonic() + budget_s
    for rounds in range(1, _MAX_ROUNDS + 1):
        for kind in order.sample([*kinds], len(kinds)):
            times[kind].append([seconds(), seconds(kinds[kind]), seconds()])
        is_late = time.monotonic() > end
        if rounds >= FLOOR_BLOCKS and (is_late or is_precise()):
            break
    reading_ms = _reading_ms()
    for name in (_AGAIN, *modes):
        threads = reading_ms / modes[name].power_sample_interval_ms if name in modes else 0.0
        (low, estimate, high), cpu = (costs(name) + threads).tolist()
        details = {"cpu": cpu, "threads": threads, "plain_ms": median_ms(_AGAIN)}
        if name in detailed:
            details |= {"detailed_ms": median_ms(name), "detailed_every": every(name)}
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
