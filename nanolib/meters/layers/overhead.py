"""Measure the overhead of a profiling mode, in turns with calls that have no profiler."""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from nanolib.measurement import Flag, Measurement
from nanolib.meters.energy.meter import EnergyMeter
from nanolib.meters.layers.profiler import LayerProfiler
from nanolib.meters.layers.recording import ProfilingConfig
from nanolib.meters.time.clock import Call, HostClock, synchronizer
from nanolib.meters.time.sampler import FLOOR_BLOCKS, BlockSampler, Timing, pause_collector
from nanolib.meters.time.turns import ROUNDS, Round, take_turns, undisturbed
from nanolib.stats.signed_ranks import hodges_lehmann

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
    detailed = {
        name: config.replace(every_kth_token=1) for name, config in modes.items() if config.turns
    }
    kinds = {_BARE: None, _AGAIN: None, _PLAIN: ProfilingConfig.minimal()} | detailed
    block_s = budget_s / (len(kinds) * FLOOR_BLOCKS)
    calls = _calls_within(min(_BLOCK_S, max(_LEAST_BLOCK_S, block_s)), call)
    counts = dict.fromkeys(kinds, calls)
    for name, config in detailed.items():  # In a block, each turn comes equally often.
        counts[name] += -calls % len(config.turns)
    profiler = None

    def block(kind: str) -> None:
        for _ in range(counts[kind]):
            call()
        if profiler is not None:
            profiler.flush()

    @contextlib.contextmanager
    def within(kind: str) -> Iterator[None]:
        nonlocal profiler
        config = kinds[kind]
        with LayerProfiler(model, config) if config else contextlib.nullcontext() as profiler:
            call()  # The first call after the profiler's start takes longer, so it is not timed.
            yield

    def times(rounds: Sequence[Round]) -> dict[str, np.ndarray]:
        """Return the wall time and the CPU time of a call in each round, ms, shape [rounds, 2]."""
        return {kind: np.array([one.ms[kind] for one in rounds]) / counts[kind] for kind in kinds}

    def is_enough(rounds: Sequence[Round]) -> bool:
        if len(rounds) < FLOOR_BLOCKS:
            return False
        widths = [np.ptp(_overhead(name, times(rounds))[0][0]) for name in modes]
        return max(widths) <= 2 * rel_ci or time.monotonic() > end

    clock, samplers = _WallAndCpuClock(synchronizer(next(model.parameters()).device)), {}
    with pause_collector():
        for kind in kinds:
            samplers[kind] = _OneReading(clock, Timing({kind: partial(block, kind)}))
            with within(kind):
                samplers[kind].begin()
        end = time.monotonic() + budget_s
        rounds, is_busy = undisturbed(take_turns(samplers, seed, within, enough=is_enough))
    reading_ms = _reading_ms()
    for name in (_AGAIN, *modes):
        intervals, details = _overhead(name, times(rounds))
        threads = reading_ms / modes[name].power_sample_interval_ms if name in modes else 0.0
        (low, estimate, high), cpu = (intervals + threads).tolist()
        yield Measurement(
            "overhead",
            estimate,
            low,
            high,
            0.95,
            n=len(rounds),
            method=ROUNDS,
            scope=f"{scope} {name}",
            flags=(Flag.BUSY_MACHINE,) if is_busy else (),
            details={"cpu": cpu, "threads": threads} | details,
        )


def _overhead(name: str, ms: Mapping[str, np.ndarray]) -> tuple[np.ndarray, dict[str, Any]]:
    """Compute the overhead of a mode.

    Args:
        name: Name of the mode.
        ms: Kind of calls → wall time and CPU time of a call in each round, shape [rounds, 2].

    Returns:
        Intervals of the overhead in wall time and in CPU time, shape [2, 3], and details.
    """
    bare = ms[_BARE]
    ratio = ms[_AGAIN if name == _AGAIN else _PLAIN] / bare
    details = {"plain_ms": float(np.median(bare[:, 0]))}
    if name in ms and name != _AGAIN:
        more = ms[name] / bare - ratio
        wanted = np.ceil(np.median(more[:, 0]) / _DETAIL_SHARES[name])
        every = int(np.clip(wanted, _OFTENEST, _RAREST))
        ratio = ratio + more / every
        details |= {"detailed_ms": float(np.median(ms[name][:, 0])), "detailed_every": every}
    return np.expm1([hodges_lehmann(series) for series in np.log(ratio).T]), details


class _WallAndCpuClock(HostClock):
    """Measure the wall time and the CPU time of a block, as if they were two phases."""

    def time_block(self, phases: Sequence[Call], calls: int, inner: int) -> list[list[float]]:
        (block,) = phases
        wall, cpu = self.now(), time.thread_time_ns()
        block()
        return [[self.ms(wall, self.now()), self.ms(cpu, time.thread_time_ns())]]


class _OneReading(BlockSampler):
    def _size(self, call_ms: float) -> tuple[int, int]:
        return 1, 1


def _calls_within(block_s: float, call: Call) -> int:
    """Return the number of calls in a block of about `block_s`, at most 16."""
    call()
    start = time.monotonic()
    call()
    return min(_MAX_CALLS, max(1, round(block_s / (time.monotonic() - start))))


def _reading_ms() -> float:
    """Measure the CPU time of reading all power sources once, ms."""
    meter = EnergyMeter()
    meter.read()
    start = time.thread_time()
    for _ in range(_READINGS):
        meter.read()
    return 1e3 * (time.thread_time() - start) / _READINGS
