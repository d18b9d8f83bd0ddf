"""What looking costs: calls with and without a profiler, interleaved, and its threads by the processor time they take."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn

from nanolib.measurement import Measurement
from nanolib.meters.energy.meter import EnergyMeter
from nanolib.meters.layers.profiler import READ_S, LayerProfiler
from nanolib.meters.layers.profiling import ProfilingConfig
from nanolib.meters.sink import Sink
from nanolib.meters.time.clock import synchronizer
from nanolib.stats.intervals import Interval
from nanolib.stats.signed_ranks import hodges_lehmann

PLAIN, AGAIN = "plain", "again"
_Kind = str | ProfilingConfig  # of a call: bare, or with a profiler
# Calls in a row. Longer ones are no quieter: what a shared machine does to a call it does to the next one as well, so two
# neighbours differ by as much as two rows of ten.
_BLOCK_S, _MAX_CALLS = 0.02, 16
_MIN_ROUNDS, _MAX_ROUNDS = 6, 1000  # six is the least from which a median has a 95 % interval
_SAMPLES, _HANDINGS = 20, 5


@dataclass(frozen=True)
class Overhead:
    """What one mode costs, as a share of the bare call.

    Attributes:
        mode: Its name; `again` is the bare call once more, which can cost nothing.
        wall: Wall time of the calling thread, with its 95 % interval, and the threads beside it counted in full.
        cpu: Processor time of the calling thread likewise.
        rounds: Pairs that it rests on.
        threads: Of `wall` and `cpu`, what the threads that sample power and write rows take.
        pass_ms: What one call takes in which the profiler looks closest, and the bare call, ms.
        rows: Rows of a trace per call, on average.
    """

    mode: str
    wall: Interval
    cpu: Interval
    rounds: int
    threads: float
    pass_ms: tuple[float, float]
    rows: float

    def to_measurement(self, scope: str) -> Measurement:
        """The row of metric `overhead`."""
        details = {
            "cpu": list(self.cpu),
            "threads": self.threads,
            "pass_ms": self.pass_ms[0],
            "plain_ms": self.pass_ms[1],
            "rows_per_call": self.rows,
        }
        low, estimate, high = self.wall
        return Measurement(
            "overhead",
            estimate,
            low,
            high,
            0.95,
            n=self.rounds,
            method="interleaved_pairs",
            scope=f"{scope} {self.mode}",
            details=details,
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
    """The cost of each mode of profiling, in single calls that alternate with bare ones.

    A mode is taken apart into the calls that it consists of: most are watched alone, each k-th is looked at closely. Every round
    runs all kinds of calls in random order and then in the reverse (ABBA), each between two bare calls to which it is compared, so
    that drift hits all alike; a mode's datum is the mean of its calls' ratios, k − 1 watched and one looked at. Handing rows over
    is part of a call that is looked at; for the others it is timed by itself, over as many calls as are handed over together in
    use. What the threads beside it take (one reading of every power source per interval, and the rows written) is measured by
    itself too and added in full, as if no core were free for them.

    Args:
        model: What is profiled.
        call: Calls it once.
        modes: Name → how closely to look.
        sink: Where rows go.
        budget_s: Stop after this long; six rounds are made all the same.
        rel_ci: Stop when every interval's half-width is at most this.
        seed: Of the order.

    Returns:
        One per mode, and first the bare call against itself.
    """
    kinds = _kinds(modes)
    order, random_order = list(kinds), random.Random(seed)
    ratios: dict[_Kind, list[np.ndarray]] = {
        kind: [] for kind in kinds
    }  # wall and processor time over the bare call's
    rows = dict.fromkeys(kinds, 0.0)
    synchronize = synchronizer(next(model.parameters()).device)

    def timed(kind: _Kind, calls: int) -> np.ndarray:
        spent, rows[kind] = _timed(model, call, kind, calls, sink, synchronize)
        return spent

    for kind in [PLAIN, *kinds]:  # what a first call compiles or allocates is not part of the cost
        timed(kind, 1)
    block_s = min(_BLOCK_S, budget_s / (2 * len(kinds) * _MIN_ROUNDS))
    plain_s = float(timed(PLAIN, 1)[0])
    calls = min(_MAX_CALLS, max(1, round(block_s / plain_s)))
    together = min(_MAX_CALLS, max(1, round(READ_S / plain_s)))
    handing = {kind: _handing_s(model, call, kind, together, sink) for kind in kinds}
    end, reading_s, rounds, plain = time.monotonic() + budget_s, _reading_s(), 0, []
    while rounds < _MIN_ROUNDS or (time.monotonic() < end and rounds < _MAX_ROUNDS):
        random_order.shuffle(order)
        both = {kind: np.zeros(2) for kind in kinds}
        plain.append(timed(PLAIN, calls))
        for kind in [*order, *reversed(order)]:
            spent = timed(kind, calls)
            call()  # the bare calls that are timed follow a bare call, whatever went before
            plain.append(timed(PLAIN, calls))
            both[kind] += (spent + handing[kind]) / (plain[-2] + plain[-1])
        for kind, ratio in both.items():
            ratios[kind].append(ratio)
        rounds += 1
        if rounds % _MIN_ROUNDS == 0 and _settled(ratios, modes, rel_ci):
            break
    plain_s = float(np.median(plain, axis=0)[0])
    row_s = _writing_s(sink)
    found = [Overhead("again", *_shares(ratios[AGAIN]), rounds, 0.0, (0.0, 1e3 * plain_s), 0.0)]
    for name, config in modes.items():
        per_call = float(_amortised(rows, config))
        threads = reading_s / (config.power_sample_interval_ms / 1e3) + per_call * row_s / plain_s
        shares = (
            Interval(*(end + threads for end in share))
            for share in _shares(_amortised(ratios, config))
        )
        closest = plain_s * float(np.median(ratios[_looking(config)], axis=0)[0])
        found.append(
            Overhead(name, *shares, rounds, threads, (1e3 * closest, 1e3 * plain_s), per_call)
        )
    return found


def _kinds(modes: Mapping[str, ProfilingConfig]) -> list[_Kind]:
    """The kinds of calls that modes consist of, each once, and the bare one again."""
    configs = [config for mode in modes.values() for config in (_watching(mode), _looking(mode))]
    return list(dict.fromkeys([AGAIN, *configs]))


def _watching(config: ProfilingConfig) -> ProfilingConfig:
    """A call that is not looked at closely."""
    return replace(config, modules=False, capture_activations=False, deep_profiling=False)


def _looking(config: ProfilingConfig) -> ProfilingConfig:
    """A call that is; the same where the mode has none."""
    return replace(config, every_kth_token=1) if config.looks else _watching(config)


def _amortised(series: Mapping[_Kind, Any], config: ProfilingConfig) -> Any:
    """Per call of a mode: k − 1 watched ones and one looked at."""
    k = config.every_kth_token
    watched, looked = (
        np.asarray(series[kind(config)], dtype=float) for kind in (_watching, _looking)
    )
    return ((k - 1) * watched + looked) / k


def _timed(
    model: nn.Module,
    call: Callable[[], object],
    kind: _Kind,
    calls: int,
    sink: Sink | None,
    synchronize: Callable[[], object],
) -> tuple[np.ndarray, float]:
    """Wall and processor seconds of one call, and the rows it made."""
    if isinstance(kind, str):
        return _seconds(call, calls, synchronize), 0.0
    with LayerProfiler(model, kind, sink=sink) as profiler:
        if kind.looks:
            return _seconds(call, 1, synchronize, profiler.flush), float(profiler.rows)
        call()  # in use a watched call follows a watched one, and not the making of a profiler
        seconds = _seconds(call, calls, synchronize)
    return seconds, profiler.rows / (1 + calls)


def _handing_s(
    model: nn.Module, call: Callable[[], object], kind: _Kind, calls: int, sink: Sink | None
) -> np.ndarray:
    """Wall and processor seconds per call that handing rows over takes, where it is not timed with the call."""
    if isinstance(kind, str) or kind.looks:
        return np.zeros(2)
    found = []
    for _ in range(_HANDINGS):
        with LayerProfiler(model, kind, sink=sink) as profiler:
            for _ in range(calls):
                call()
            found.append(_seconds(profiler.flush, 1, lambda: None) / calls)
    return np.median(found, axis=0)


def _seconds(
    call: Callable[[], object],
    calls: int,
    synchronize: Callable[[], object],
    last: Callable[[], object] = lambda: None,
) -> np.ndarray:
    synchronize()
    start, busy = time.perf_counter(), time.thread_time()
    for _ in range(calls):
        call()
    last()
    synchronize()
    return np.array([time.perf_counter() - start, time.thread_time() - busy]) / calls


def _shares(ratios: Any) -> list[Interval]:
    """The cost as a share of wall and of processor time, from ratios to the bare call."""
    intervals = (hodges_lehmann(series, 0.95) for series in np.log(ratios).T)
    return [Interval(*(math.expm1(end) for end in interval)) for interval in intervals]


def _settled(
    ratios: Mapping[_Kind, list[np.ndarray]], modes: Mapping[str, ProfilingConfig], rel_ci: float
) -> bool:
    shares = [_shares(_amortised(ratios, config))[0] for config in modes.values()]
    return all((share.high - share.low) / 2 <= rel_ci for share in shares)


def _reading_s() -> float:
    """Processor seconds that one reading of all power sources takes."""
    meter = EnergyMeter()
    meter.read()
    start = time.thread_time()
    for _ in range(_SAMPLES):
        meter.read()
    return (time.thread_time() - start) / _SAMPLES


def _writing_s(sink: Sink | None) -> float:
    """Processor seconds that one row takes in the thread that writes it."""
    if sink is None:
        return 0.0
    sink.flush()
    return sink.seconds_per_row()
