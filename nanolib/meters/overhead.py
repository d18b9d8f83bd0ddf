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
from nanolib.meters.clock import synchronizer
from nanolib.meters.energy import EnergyMeter
from nanolib.meters.layers import LayerProfiler
from nanolib.meters.profiling import ProfilingConfig
from nanolib.meters.sink import Sink
from nanolib.stats.compare import hodges_lehmann
from nanolib.stats.intervals import Interval

PLAIN, AGAIN = "plain", "again"
_Kind = str | ProfilingConfig  # of a call: bare, or with a profiler
_BLOCK_S, _MAX_CALLS = 0.2, 16  # calls in a row, whose rows are handed over together, as they are in use
_MIN_ROUNDS, _MAX_ROUNDS = 6, 1000  # six is the least from which a median has a 95 % interval
_SAMPLES = 20


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
    precision: float = 0.002,
    seed: int = 0,
) -> list[Overhead]:
    """The cost of each mode of profiling, in single calls that alternate with bare ones.

    A mode is taken apart into the calls that it consists of: most are watched alone, each k-th is looked at closely. Every round
    runs all kinds of calls in random order and then in the reverse (ABBA), so that drift hits all alike; a mode's datum is the mean
    of its calls, k − 1 watched and one looked at, over the bare one's. Handing rows over is part of the call. What the threads
    beside it take (one reading of every power source per interval, and the rows written) is measured by itself and added in full,
    as if no core were free for them.

    Args:
        model: What is profiled.
        call: Calls it once.
        modes: Name → how closely to look.
        sink: Where rows go.
        budget_s: Stop after this long; six rounds are made all the same.
        precision: Stop when every interval's half-width is at most this.
        seed: Of the order.

    Returns:
        One per mode, and first the bare call against itself.
    """
    kinds = _kinds(modes)
    order, random_order = list(kinds), random.Random(seed)
    wall: dict[_Kind, list[float]] = {kind: [] for kind in kinds}
    cpu: dict[_Kind, list[float]] = {kind: [] for kind in kinds}
    rows = dict.fromkeys(kinds, 0.0)
    synchronize = synchronizer(next(model.parameters()).device)
    for kind in kinds:  # what a first call compiles or allocates is not part of the cost
        _timed(model, call, kind, 1, sink, synchronize)
    block_s = min(_BLOCK_S, budget_s / (2 * len(kinds) * _MIN_ROUNDS))
    calls = min(_MAX_CALLS, max(1, round(block_s / float(_timed(model, call, PLAIN, 1, sink, synchronize)[0][0]))))
    end, reading_s, rounds = time.monotonic() + budget_s, _reading_s(), 0
    while rounds < _MIN_ROUNDS or (time.monotonic() < end and rounds < _MAX_ROUNDS):
        random_order.shuffle(order)
        both = {kind: np.zeros(2) for kind in kinds}
        for kind in [*order, *reversed(order)]:
            spent, rows[kind] = _timed(model, call, kind, calls, sink, synchronize)
            both[kind] += spent / 2
        for kind, (seconds, busy) in both.items():
            wall[kind].append(seconds)
            cpu[kind].append(busy)
        rounds += 1
        if rounds % _MIN_ROUNDS == 0 and _settled(wall, modes, precision):
            break
    plain_s = float(np.median(wall[PLAIN]))
    row_s = _writing_s(sink)
    found = [
        Overhead("again", *(_share(x[AGAIN], x[PLAIN]) for x in (wall, cpu)), rounds, 0.0, (0.0, 1e3 * plain_s), 0.0)
    ]
    for name, config in modes.items():
        per_call = float(_amortised(rows, config))
        threads = reading_s / (config.power_sample_interval_ms / 1e3) + per_call * row_s / plain_s
        shares = (_share(_amortised(x, config), x[PLAIN]) for x in (wall, cpu))
        closest = float(np.median(wall[_looking(config)]))
        found.append(
            Overhead(
                name,
                *(Interval(*(end + threads for end in share)) for share in shares),
                rounds,
                threads,
                (1e3 * closest, 1e3 * plain_s),
                per_call,
            )
        )
    return found


def _kinds(modes: Mapping[str, ProfilingConfig]) -> list[_Kind]:
    """The kinds of calls that modes consist of, each once."""
    configs = [config for mode in modes.values() for config in (_watching(mode), _looking(mode))]
    return list(dict.fromkeys([PLAIN, AGAIN, *configs]))


def _watching(config: ProfilingConfig) -> ProfilingConfig:
    """A call that is not looked at closely."""
    return replace(config, modules=False, capture_activations=False, deep_profiling=False)


def _looking(config: ProfilingConfig) -> ProfilingConfig:
    """A call that is; the same where the mode has none."""
    return replace(config, every_kth_token=1) if config.looks else _watching(config)


def _amortised(series: Mapping[_Kind, Any], config: ProfilingConfig) -> Any:
    """Per call of a mode: k − 1 watched ones and one looked at."""
    k = config.every_kth_token
    watched, looked = (np.asarray(series[kind(config)], dtype=float) for kind in (_watching, _looking))
    return ((k - 1) * watched + looked) / k


def _timed(
    model: nn.Module,
    call: Callable[[], object],
    kind: _Kind,
    calls: int,
    sink: Sink | None,
    synchronize: Callable[[], object],
) -> tuple[np.ndarray, float]:
    """Wall and processor seconds of one call, and the rows it made; after a bare call, so that all kinds follow the same."""
    call()
    if isinstance(kind, str):
        return _seconds(call, calls, synchronize), 0.0
    calls = 1 if kind.looks else calls
    with LayerProfiler(model, kind, sink=sink) as profiler:
        seconds = _seconds(call, calls, synchronize, profiler.flush)
    return seconds, profiler.rows / calls


def _seconds(
    call: Callable[[], object], calls: int, synchronize: Callable[[], object], last: Callable[[], object] = lambda: None
) -> np.ndarray:
    synchronize()
    start, busy = time.perf_counter(), time.thread_time()
    for _ in range(calls):
        call()
    last()
    synchronize()
    return np.array([time.perf_counter() - start, time.thread_time() - busy]) / calls


def _share(watched: Any, plain: Any) -> Interval:
    """The cost as a share, from pairs."""
    low, estimate, high = hodges_lehmann(np.log(watched) - np.log(plain), 0.95)
    return Interval(math.expm1(low), math.expm1(estimate), math.expm1(high))


def _settled(wall: Mapping[_Kind, list[float]], modes: Mapping[str, ProfilingConfig], precision: float) -> bool:
    shares = [_share(_amortised(wall, config), wall[PLAIN]) for config in modes.values()]
    return all((share.high - share.low) / 2 <= precision for share in shares)


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
