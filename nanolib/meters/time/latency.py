"""Latency: blocks of calls, the median of block medians with its interval, steady state found, adaptive stop."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np
import torch

from nanolib.measurement import BadInput, Flag, Measurement
from nanolib.meters.cpu_load import BUSY_SHARE, watched_cpus
from nanolib.meters.time.call_check import CallCheck
from nanolib.meters.time.clock import Call, Clock, CudaClock, clock_for
from nanolib.meters.time.cold import ColdClock
from nanolib.meters.time.collector import quiet_collector
from nanolib.stats.autocorrelation import ljung_box_p
from nanolib.stats.intervals import TooFewSamples, median_interval, range_confidence
from nanolib.stats.outliers import count_outliers, remove_outliers
from nanolib.stats.steady import GROUP, SteadyState, leading_slow_samples, steady_state

MIN_BLOCKS, MAX_BLOCKS, FLOOR_BLOCKS = 20, 100, 6  # six are the fewest that give a 95 % interval
_BLOCK_MS = 5.0  # a block lasts at least this: long beside the clock and the scheduler's slices
_BLOCK_RESOLUTIONS = 1000
_CONFIDENCE = 0.95

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
        collect: As in `measure`.

    Returns:
        For each scope a `latency`; with several phases also their sum, with scope `total`.

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
        raise BadInput(f"outliers: {outliers!r} will not do; use one of {', '.join(get_args(Outliers))}")
    clock = ColdClock(clock_for(device), device) if cold else clock_for(device)
    with watched_cpus() as load, quiet_collector():
        blocks, shape = (collect or _collect)(clock, phases, rel_ci, budget_s)
    series = blocks.reshape(-1, len(phases))
    steady = _steady(series.sum(axis=1), shape["calls_per_block"])
    scopes = {scope: series[:, i] for i, scope in enumerate(phases)}
    if len(phases) > 1:
        scopes["total"] = series.sum(axis=1)
    shared = shape | load.details() | {"threads": torch.get_num_threads()}
    cached = shared.pop("cached", [])
    own: dict[str, dict[str, float]] = {}
    if isinstance(clock, CudaClock):
        shared |= clock.state.summary()
        own = dict(zip(phases, clock.apart(list(phases.values())), strict=True))
        if len(phases) > 1 and all(own.values()):
            own["total"] = {name: sum(apart[name] for apart in own.values()) for name in ("host_ms", "device_ms")}
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
    steady = steady or _steady(x, calls_per_block)
    cut_blocks = math.ceil(steady.cut / calls_per_block) if steady.steady else 0
    kept = x[cut_blocks * calls_per_block :]
    medians = np.median(kept.reshape(-1, calls_per_block), axis=1)
    flags = _flags(medians, steady, details or {})
    if outliers == "remove":
        medians = remove_outliers(medians)
        flags = [flag for flag in flags if flag not in (Flag.OUTLIERS_MILD, Flag.OUTLIERS_SEVERE)]
        flags.append(Flag.OUTLIERS_REMOVED)
        method += ", outliers removed"
    low, estimate, high, confidence = _interval(medians)
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


def _steady(series: np.ndarray, calls_per_block: int) -> SteadyState:
    """Change points, and on top of them the cold calls at the very start, which medians of 5 cannot see."""
    found = steady_state(series, group=max(GROUP, calls_per_block))
    cold = leading_slow_samples(series) if len(series) >= 8 else 0
    if cold <= found.cut or cold >= len(series) / 2:
        return found
    return SteadyState(cold, found.changes, found.steady, found.slowdown)


def _interval(medians: np.ndarray) -> tuple[float | None, float, float | None, float | None]:
    """The 95 % interval of the median; with too few blocks their range and the coverage that it has."""
    try:
        low, estimate, high = median_interval(medians, _CONFIDENCE)
    except TooFewSamples:
        estimate = float(np.median(medians))
        if len(medians) < 2:
            return None, estimate, None, None
        return float(medians.min()), estimate, float(medians.max()), range_confidence(len(medians))
    return low, estimate, high, _CONFIDENCE


def _flags(medians: np.ndarray, steady: SteadyState, details: Mapping[str, Any]) -> list[Flag]:
    counts = count_outliers(medians)
    told = {
        Flag.OUTLIERS_SEVERE: counts.severe > 0,
        Flag.OUTLIERS_MILD: counts.mild > 0 and not counts.severe,
        Flag.NO_STEADY_STATE: not steady.steady,
        Flag.SLOWDOWN: steady.slowdown,
        Flag.FEW_BLOCKS: range_confidence(len(medians)) < _CONFIDENCE,
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
    return {"mean": mean, "sd": sd, "cv": cv, "p5": p5, "p50": p50, "p95": p95, "p99": p99, "mad": mad}


def _collect(
    clock: Clock, phases: Mapping[str, Call], rel_ci: float, budget_s: float
) -> tuple[np.ndarray, dict[str, Any]]:
    """Blocks until one of the rules stops it: ms, shape [blocks, calls per block, phases]."""
    checks = {
        scope: call if isinstance(call, CallCheck) else CallCheck(call, scope or "fn", BadInput)
        for scope, call in phases.items()
    }
    calls = [check.call for check in checks.values()]
    # the first call is cold, and may compile: the second one sizes the block, and the budget is for what follows it
    first = clock.time_block(list(checks.values()), 1, 1)
    clock.warm_up(calls)
    start = time.perf_counter()
    second = clock.time_block(list(checks.values()), 1, 1)
    probes = [sum(first[0]), sum(second[0])]
    per_block, inner = _block_shape(max(probes[1], 1e-6), clock, several=len(calls) > 1)
    blocks = [second] if probes[1] >= _BLOCK_MS * 4 else []  # so slow a call is a block by itself
    while True:
        blocks.append(clock.time_block(calls, per_block, inner))
        gc.collect()  # cheap: what lived before is frozen
        elapsed = time.perf_counter() - start
        if len(blocks) >= MAX_BLOCKS:
            stop = "max_blocks"
        elif elapsed >= budget_s and len(blocks) >= FLOOR_BLOCKS:
            stop = "budget"
        elif len(blocks) >= MIN_BLOCKS and _precise(np.asarray(blocks).sum(axis=2), rel_ci):
            stop = "precision"
        else:
            continue
        shape = {"calls_per_block": per_block, "inner": inner, "first_calls": probes, "stop": stop}
        shape["cached"] = [scope for scope, check in checks.items() if check.is_cached]
        return np.asarray(blocks), shape | {"precision": rel_ci, "budget_s": budget_s, "elapsed_s": elapsed}


def _block_shape(call_ms: float, clock: Clock, several: bool) -> tuple[int, int]:
    """Calls per block, and how many back-to-back calls one reading spans."""
    readable = _BLOCK_RESOLUTIONS * clock.resolution_ms()
    inner = 1 if several else math.ceil(readable / call_ms)
    return math.ceil(_BLOCK_MS / (call_ms * inner)), inner


def _precise(totals: np.ndarray, rel_ci: float) -> bool:
    """Whether the steady part is long enough and its interval narrow enough; totals [blocks, calls], of enough blocks."""
    medians = np.median(totals, axis=1)
    low, estimate, high = median_interval(medians)
    if high - low > 3 * rel_ci * estimate:
        return False  # far off even with the warm-up in it: skip the costlier search
    steady = _steady(totals.reshape(-1), totals.shape[1])
    medians = medians[math.ceil(steady.cut / totals.shape[1]) :] if steady.steady else medians
    low, estimate, high, _ = _interval(medians)
    return len(medians) >= MIN_BLOCKS and high - low <= 2 * rel_ci * estimate
