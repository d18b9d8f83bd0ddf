"""Latency: blocks of calls, the median of block medians with its interval, steady state found, adaptive stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np
import torch

from nanolib.measurement import BadInput, Flag, Measurement
from nanolib.meters.cpu_load import BUSY_SHARE, CpuLoad, wait_for_compilers, watched_cpus
from nanolib.meters.time.clock import Call, Clock, CudaClock, clock_for
from nanolib.meters.time.cold import ColdClock
from nanolib.meters.time.collector import quiet_collector
from nanolib.meters.time.sampler import CONFIDENCE, BlockSampler, interval_of, settled, until_enough
from nanolib.meters.time.turns import Round, Timing, take_turns
from nanolib.stats.autocorrelation import ljung_box_p
from nanolib.stats.intervals import range_confidence
from nanolib.stats.outliers import count_outliers, remove_outliers
from nanolib.stats.steady import SteadyState

Outliers = Literal["keep", "remove"]
# Clock, phases, rel_ci, budget → ms, shape [blocks, calls per block, phases], and what is told of how they were taken.
Collect = Callable[[Clock, Mapping[str, Call], float, float], tuple[np.ndarray, dict[str, Any]]]


def measure(
    fn: Callable[[], object],
    rel_ci: float = 0.01,
    budget_s: float = 10.0,
    *,
    device: str | torch.device = "cpu",
    scope: str = "",
    predicted: float | None = None,
    outliers: Outliers = "keep",
    cold: bool = False,
    collect: Collect | None = None,
) -> Measurement:
    """Measure how long one call of `fn` takes.

    Args:
        fn: What to call; it takes no arguments.
        rel_ci: Stop when the interval's half-width is at most this share of the estimate.
        budget_s: Stop so long after the first call and a GPU's warm-up; at least six blocks are taken all the same.
        device: Where `fn` computes, which chooses the clock.
        scope: What the row says was measured.
        predicted: What a formula says, ms.
        outliers: `keep` labels them; `remove` drops them, to reproduce figures made that way, and says so.
        cold: Overwrite the last-level cache before each call.
        collect: Takes the blocks in the place of the rule above; `nano ab` interleaves them with another version's.

    Returns:
        Metric `latency`, ms: the median of block medians, and why it stopped in `details`.

    Raises:
        BadInput: A rel_ci or budget that is not positive, a call that only begins its work (it returns an iterator or a future),
            or one that torch gives up compiling.

    Example:
        >>> a = torch.rand(64, 64)
        >>> row = measure(lambda: a @ a, budget_s=0.2, scope="product")
        >>> row.unit, row.low <= row.estimate <= row.high
        ('ms', True)
        >>> print(row)
        latency product: ... ms [... … ...] (n=..., perf_counter)...
    """
    more = {"device": device, "outliers": outliers, "cold": cold, "collect": collect}
    result = measure_phases({scope: fn}, rel_ci, budget_s, **more)[scope]
    return replace(result, predicted=predicted)


def measure_phases(
    phases: Mapping[str, Callable[[], object]],
    rel_ci: float = 0.01,
    budget_s: float = 10.0,
    *,
    device: str | torch.device = "cpu",
    outliers: Outliers = "keep",
    cold: bool = False,
    total: str = "total",
    collect: Collect | None = None,
) -> dict[str, Measurement]:
    """Measure how long each phase of a repeated sequence takes.

    Such as a training step: forward, backward, optimizer. The phases run in turn, so that each is measured in the state that the
    one before leaves. The stopping rule and the steady state are those of the whole sequence.

    Args:
        phases: Scope of each phase and its call, in order.
        rel_ci: As in `measure`, for the sum of the phases.
        budget_s: As in `measure`.
        device: As in `measure`.
        outliers: As in `measure`.
        cold: As in `measure`; before each phase.
        total: The scope of their sum.
        collect: As in `measure`.

    Returns:
        For each scope a `latency`; with several phases also their sum.

    Example:
        >>> a = torch.rand(64, 64)
        >>> rows = measure_phases({"product": lambda: a @ a, "sum": lambda: a + a}, budget_s=0.2)
        >>> list(rows)
        ['product', 'sum', 'total']
    """
    for name, value in (("rel_ci", rel_ci), ("budget_s", budget_s)):
        if not (isinstance(value, int | float) and 0 < value < math.inf):
            raise BadInput(f"{name}: {value!r} will not do; give a number above 0")
    if outliers not in get_args(Outliers):
        raise BadInput(
            f"outliers: {outliers!r} will not do; use one of {', '.join(get_args(Outliers))}"
        )
    clock = ColdClock(clock_for(device), device) if cold else clock_for(device)
    wait_for_compilers()
    with watched_cpus() as load, quiet_collector():
        blocks, shape = (collect or until_enough)(clock, phases, rel_ci, budget_s)
    return _rows(clock, phases, blocks, shape, load, outliers=outliers, total=total)


def measure_alone(timing: Timing) -> dict[str, Measurement]:
    """`measure_phases` of a timing."""
    timed = {"device": timing.device, "total": timing.total, "collect": timing.collect}
    return measure_phases(timing.phases, timing.rel_ci, timing.budget_s, **timed)


def measure_in_turns(
    timings: Mapping[str, Timing],
    *,
    seed: int,
    within: Callable[[str], AbstractContextManager[object]] = lambda name: nullcontext(),
) -> tuple[dict[str, dict[str, Measurement]], list[Round]]:
    """Measure several things in rounds, a block of each in random order.

    Args:
        timings: By name.
        seed: Of the order.
        within: Gives, for a name, the context in which its calls are made. One that swallows an exception ends that name alone.

    Returns:
        For each name that came to its end the rows that `measure_phases` would give, and the rounds, from which `speed_up_row`
        makes ratios.
    """
    clocks = {name: clock_for(timing.device) for name, timing in timings.items()}
    samplers: dict[str, BlockSampler] = {}
    wait_for_compilers()
    with watched_cpus() as load, quiet_collector():
        for name, timing in timings.items():
            with within(name):
                sampler = BlockSampler(
                    clocks[name], timing.phases, timing.rel_ci, timing.budget_s, in_rounds=True
                )
                sampler.begin()
                samplers[name] = sampler
        rounds = take_turns(samplers, seed, within)
    rows = {}
    for name, sampler in samplers.items():
        with within(name):
            timing = timings[name]
            rows[name] = _rows(
                clocks[name], timing.phases, *sampler.result(), load, total=timing.total
            )
    return rows, rounds


def _rows(
    clock: Clock,
    phases: Mapping[str, Call],
    blocks: np.ndarray,
    shape: dict[str, Any],
    load: CpuLoad,
    *,
    outliers: Outliers = "keep",
    total: str = "total",
) -> dict[str, Measurement]:
    series = blocks.reshape(-1, len(phases))
    steady = settled(series.sum(axis=1), shape["calls_per_block"])
    scopes = {scope: series[:, i] for i, scope in enumerate(phases)}
    if len(phases) > 1:
        scopes[total] = series.sum(axis=1)
    shared = shape | load.details() | {"threads": torch.get_num_threads()}
    cached = shared.pop("cached", [])
    own: dict[str, dict[str, float]] = {}
    if isinstance(clock, CudaClock):
        shared |= clock.state.summary()
        own = dict(zip(phases, clock.apart(list(phases.values())), strict=True))
        if len(phases) > 1 and all(own.values()):
            own[total] = {
                name: sum(apart[name] for apart in own.values())
                for name in ("host_ms", "device_ms")
            }
    return {
        scope: summarise(
            samples,
            calls_per_block=shape["calls_per_block"],
            steady=steady,
            scope=scope,
            method=clock.method,
            outliers=outliers,
            details=shared | own.get(scope, {}) | ({"cached": True} if scope in cached else {}),
        )
        for scope, samples in scopes.items()
    }


def summarise(
    samples: Sequence[float] | np.ndarray,
    *,
    calls_per_block: int = 1,
    steady: SteadyState | None = None,
    scope: str = "",
    method: str = "perf_counter",
    outliers: Outliers = "keep",
    details: Mapping[str, Any] | None = None,
) -> Measurement:
    """Summarise a series of timings as a `latency` row.

    It has the estimate with its interval, labels and descriptive figures.

    Args:
        samples: Milliseconds per call in the order taken, shape [blocks · calls_per_block].
        calls_per_block: Calls that make one block.
        steady: Where the series settles; found here when None.
        scope: What was measured.
        method: The clock.
        outliers: As in `measure`.
        details: More for the row's details.
    """
    x = np.asarray(samples, dtype=float)
    steady = steady or settled(x, calls_per_block)
    cut_blocks = math.ceil(steady.cut / calls_per_block) if steady.steady else 0
    kept = x[cut_blocks * calls_per_block :]
    medians = np.median(kept.reshape(-1, calls_per_block), axis=1)
    flags = _flags(medians, steady, details or {})
    if outliers == "remove":
        medians = remove_outliers(medians)
        flags = [flag for flag in flags if flag not in (Flag.OUTLIERS_MILD, Flag.OUTLIERS_SEVERE)]
        flags.append(Flag.OUTLIERS_REMOVED)
        method += ", outliers removed"
    low, estimate, high, confidence = interval_of(medians)
    lag_p = ljung_box_p(medians)
    if lag_p is not None and lag_p < 0.01:
        flags.append(Flag.AUTOCORRELATED)
    return Measurement(
        "latency",
        estimate,
        low,
        high,
        confidence,
        n=len(medians),
        samples=tuple(float(v) for v in x),
        method=method,
        scope=scope,
        flags=tuple(flags),
        details={
            **(details or {}),
            **_description(kept),
            "calls_per_block": calls_per_block,
            "warmup_cut": cut_blocks * calls_per_block,
            "changes": list(steady.changes),
            "ljung_box_p": lag_p,
        },
    )


def _flags(medians: np.ndarray, steady: SteadyState, details: Mapping[str, Any]) -> list[Flag]:
    counts = count_outliers(medians)
    told = {
        Flag.OUTLIERS_SEVERE: counts.severe > 0,
        Flag.OUTLIERS_MILD: counts.mild > 0 and not counts.severe,
        Flag.NO_STEADY_STATE: not steady.steady,
        Flag.SLOWDOWN: steady.slowdown,
        Flag.FEW_BLOCKS: range_confidence(len(medians)) < CONFIDENCE,
        Flag.CACHED_RESULT: details.get("cached", False),
        Flag.BUSY_MACHINE: (details.get("others_share") or 0.0) > BUSY_SHARE,
        Flag.THROTTLED: "throttled_by" in details,
        Flag.LAUNCH_BOUND: details.get("host_ms", 0.0) >= details.get("device_ms", math.inf),
    }
    return [flag for flag, holds in told.items() if holds]


def _description(samples: np.ndarray) -> dict[str, float]:
    mean = float(samples.mean())
    sd = float(samples.std(ddof=1)) if len(samples) > 1 else 0.0
    p5, p50, p95, p99 = (float(v) for v in np.percentile(samples, [5, 50, 95, 99]))
    mad = float(np.median(np.abs(samples - p50)))
    cv = sd / mean if mean else 0.0
    return {
        "mean": mean,
        "sd": sd,
        "cv": cv,
        "p5": p5,
        "p50": p50,
        "p95": p95,
        "p99": p99,
        "mad": mad,
    }
