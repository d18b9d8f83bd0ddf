"""Measure the overhead of a profiling mode, in turns with calls that have no profiler."""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
from torch import nn

from nanolib.measurement import Flag, Measurement
from nanolib.meters.energy.meter import EnergyMeter
from nanolib.meters.layers.profiler import LayerProfiler
from nanolib.meters.layers.recording import ProfilingConfig
from nanolib.meters.time.clock import Call, clock_for
from nanolib.meters.time.latency import measure_in_turns
from nanolib.meters.time.sampler import FLOOR_BLOCKS, Timing
from nanolib.meters.time.turns import ROUNDS, undisturbed
from nanolib.stats.intervals import hodges_lehmann

_BLOCK_S, _MAX_CALLS = 0.05, 16
# In a short block, too few calls share the time to read and collect rows, unlike in a real run.
_LEAST_BLOCK_S = 0.01
_READINGS = 20
_BARE, _AGAIN, _PLAIN = "bare", "again", "plain"
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
    seed: int = 0,
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
        seed: Seed of the order of modes.

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
    kinds = {_BARE: None, _AGAIN: None, _PLAIN: ProfilingConfig.minimal()} | detailed
    device, each_s = str(next(model.parameters()).device), budget_s / len(kinds)
    block_ms = 1e3 * min(_BLOCK_S, max(_LEAST_BLOCK_S, each_s / FLOOR_BLOCKS))
    _, (bare_ms,) = clock_for(device).time_block([call], 2, 1)
    calls = min(_MAX_CALLS, max(1, round(block_ms / bare_ms)))
    counts = dict.fromkeys(kinds, calls)
    for name, config in detailed.items():  # In a block, each turn comes equally often.
        counts[name] += -calls % len(config.turns)
    cpu_s = {kind: [] for kind in kinds}  # times of the blocks of each round
    profiler = None

    def block(kind: str) -> None:
        start = time.thread_time()
        for _ in range(counts[kind]):
            call()
        if profiler is not None:
            profiler.flush()
        cpu_s[kind][-1].append((time.thread_time() - start) / counts[kind])

    @contextlib.contextmanager
    def within(kind: str) -> Iterator[None]:
        nonlocal profiler
        config = kinds[kind]
        with LayerProfiler(model, config) if config else contextlib.nullcontext() as profiler:
            call()  # The first call after the profiler's start takes longer, so it is not timed.
            cpu_s[kind].append([])
            yield

    timings = {kind: Timing({kind: partial(block, kind)}, rel_ci, each_s, device) for kind in kinds}
    _, rounds = measure_in_turns(timings, seed=seed, within=within)
    rounds = [one for one in rounds if len(one.ms) == len(kinds)]
    # The sampler enters each kind once before the rounds.
    cpu_s = {kind: [*map(np.mean, times[1 : 1 + len(rounds)])] for kind, times in cpu_s.items()}
    rounds, is_busy = undisturbed(rounds)
    wall_ms = {kind: [one.ms[kind][0] / counts[kind] for one in rounds] for kind in kinds}
    plain_ms, reading_ms = float(np.median(wall_ms[_BARE])), _reading_ms()
    for name in (_AGAIN, *modes):
        threads = reading_ms / modes[name].power_sample_interval_ms if name in modes else 0.0
        details, every = {"threads": threads, "plain_ms": plain_ms}, math.inf
        if name in detailed:
            detailed_ms = float(np.median(wall_ms[name]))
            share = (detailed_ms - np.median(wall_ms[_PLAIN])) / plain_ms
            every = int(np.clip(np.ceil(share / _DETAIL_SHARES[name]), _OFTENEST, _RAREST))
            details |= {"detailed_ms": detailed_ms, "detailed_every": every}
        low, estimate, high = _overhead(name, wall_ms, every) + threads
        details["cpu"] = (_overhead(name, cpu_s, every) + threads).tolist()
        yield Measurement(
            "overhead",
            float(estimate),
            float(low),
            float(high),
            0.95,
            n=len(rounds),
            method=ROUNDS,
            scope=f"{scope} {name}",
            flags=(Flag.BUSY_MACHINE,) if is_busy else (),
            details=details,
        )


def _overhead(name: str, times: Mapping[str, list[float]], every: float) -> np.ndarray:
    """Compute the overhead of a mode with its interval: low end, estimate and high end.

    Args:
        name: Name of the mode.
        times: Kind of calls → time of a call in each block.
        every: Number of calls from one detailed call to the next, or infinity without details.
    """
    bare, plain = times[_BARE], times[_AGAIN if name == _AGAIN else _PLAIN]
    bare, plain, own = map(np.array, (bare, plain, times.get(name, plain)))
    return np.expm1(hodges_lehmann(np.log((plain + (own - plain) / every) / bare)))


def _reading_ms() -> float:
    """Measure the CPU time of reading all power sources once, ms."""
    meter = EnergyMeter()
    meter.read()
    start = time.thread_time()
    for _ in range(_READINGS):
        meter.read()
    return 1e3 * (time.thread_time() - start) / _READINGS
