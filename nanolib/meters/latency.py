"""Measure latency: the median of the block medians in the steady state, with its interval."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from nanolib.measurement import BadInput, Flag, Measurement, Unsupported
from nanolib.meters.call_check import CallCheck
from nanolib.meters.clock import Call, ColdClock, Device, clock_for
from nanolib.meters.interference import CpuLoad, interference_flags, wait_for_compilers, watch_cpus
from nanolib.meters.machine import resolve_device
from nanolib.meters.sampler import (
    CONFIDENCE,
    FLOOR_BLOCKS,
    BlockSampler,
    Collect,
    Timing,
    interval_of,
    pause_collector,
)
from nanolib.meters.turns import Round, take_turns
from nanolib.stats.changes import GROUP, SteadyState, steady_state
from nanolib.stats.intervals import count_outliers, ljung_box_p, without_outliers


def measure(
    fn: Call,
    rel_ci: float = 0.01,
    budget_s: float = 10.0,
    *,
    device: Device = "cpu",
    scope: str = "",
    cold: bool = False,
    collect: Collect | None = None,
) -> Measurement:
    """Measure how long one call of `fn` takes.

    Args:
        fn: Function to call without arguments.
        rel_ci: Sampling stops when the half-width of the interval is at most this share of the
            estimate.
        budget_s: Time after which sampling stops, s, but not before six blocks. This time does not
            include the first call or a GPU's warm-up.
        device: Device on which `fn` computes. nanolib uses the clock of this device.
        scope: Scope of the row.
        cold: Whether to overwrite the last-level cache before each call.
        collect: Function that takes all blocks, or None to use nanolib's stopping rule.

    Returns:
        A `latency` row, ms. The estimate is the median of block medians. The detail `stop` is the
        reason why sampling stopped.

    Raises:
        BadInput: A call only starts its work, such as a call that returns a future. Or this machine
            lacks the device, or a value is not above 0.

    Example:
        >>> a = torch.rand(64, 64)
        >>> row = measure(lambda: a @ a, budget_s=0.2, scope="product")
        >>> row.unit, row.low <= row.estimate <= row.high
        ('ms', True)
        >>> print(row)
        latency product: ... ms [... … ...] (n=..., perf_counter)...
    """
    for name, value in ("rel_ci", rel_ci), ("budget_s", budget_s):
        if not value > 0:  # A comparison with NaN is false.
            raise BadInput(f"{name}: must be above 0, got {value}")
    device = resolve_device(str(device))
    timing = Timing({scope: fn}, rel_ci, budget_s, device, cold=cold, collect=collect)
    return measure_phases(timing)[scope]


def measure_phases(timing: Timing) -> dict[str, Measurement]:
    """Measure how long each phase of a repeated sequence takes.

    For example, the phases of a training step are forward, backward and optimizer. The phases run
    in order. nanolib applies the stopping rule and finds the steady state for the whole sequence.

    Args:
        timing: Phases to time, and how to time them.

    Returns:
        Scope → `latency` row. If there are several phases, their sum has a row too.

    Example:
        >>> a = torch.rand(64, 64)
        >>> phases = {"product": lambda: a @ a, "sum": lambda: a + a}
        >>> list(measure_phases(Timing(phases, budget_s=0.2)))
        ['product', 'sum', 'total']
    """
    return measure_in_turns({"": timing}, seed=0)[0][""]


def measure_in_turns(
    timings: Mapping[str, Timing],
    *,
    seed: int,
    within: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> tuple[dict[str, dict[str, Measurement]], list[Round]]:
    """Measure several calls in rounds. A round has one block of each call, in random order.

    Args:
        timings: Name → phases to time.
        seed: Seed of the random order.
        within: Function that returns the context in which the calls of a name run. If the context
            suppresses an error, nanolib continues with the other names.

    Returns:
        Two values: the rows as name → scope → row, and the rounds for `speed_up_row`. Failed calls
        have no rows.

    Raises:
        BadInput: A call only starts its work.
    """
    samplers = {}
    wait_for_compilers()
    with watch_cpus() as load, pause_collector():
        for name, timing in timings.items():
            clock = clock_for(timing.device)
            if timing.cold:
                clock = ColdClock(clock, timing.device)
            sampler = BlockSampler(clock, timing)
            with within(name):
                sampler.begin()
                samplers[name] = sampler
        rounds = take_turns(samplers, seed, within)
    rows = {}
    for name, sampler in samplers.items():
        with within(name):
            rows[name] = _rows(timings[name], sampler, load)
    return rows, rounds


def _rows(timing: Timing, sampler: BlockSampler, load: CpuLoad) -> dict[str, Measurement]:
    """Make a row for each phase. If there are several phases, also make a row for their sum."""
    blocks, shape = sampler.result()
    clock, per_block = sampler.clock, shape["calls_per_block"]
    series = blocks.reshape(-1, len(timing.phases))
    total = series.sum(axis=1)
    steady = steady_state(total, max(GROUP, per_block))
    shared = shape | load.details() | {"threads": torch.get_num_threads()}
    launches = [{} for _ in timing.phases]
    if clock.gpu:
        shared |= clock.gpu.state.summary()
        if not timing.cold:
            launches = clock.gpu.host_and_device([*timing.phases.values()])

    row = partial(summarize, calls_per_block=per_block, steady=steady, method=clock.method)
    rows = {}
    for scope, samples, launch in zip(timing.phases, series.T, launches, strict=True):
        own = {"cached": sampler.checks[scope].is_cached} | launch
        rows[scope] = row(samples, scope=scope, details=shared | own)
    if len(rows) > 1:
        own = {name: sum(launch[name] for launch in launches) for name in launches[0]}
        rows[timing.total] = row(total, scope=timing.total, details=shared | own)
    return rows


def summarize(
    samples: Sequence[float] | np.ndarray,
    *,
    calls_per_block: int = 1,
    steady: SteadyState | None = None,
    scope: str = "",
    method: str = "perf_counter",
    remove_outliers: bool = False,
    details: Mapping[str, Any] | None = None,
) -> Measurement:
    """Summarize timings as a `latency` row: estimate, interval, flags and descriptive statistics.

    If the warm-up leaves fewer than six blocks, there is no steady state, and all blocks count.

    Args:
        samples: Time of each call, ms, in order, shape [blocks · calls_per_block].
        calls_per_block: Number of calls in a block.
        steady: Steady state of the samples. By default, `steady_state` finds the state.
        scope: Scope of the row.
        method: Method of the clock.
        remove_outliers: Whether to drop the blocks beyond the mild fences.
        details: More details of the row.
    """
    x = np.asarray(samples, dtype=float)
    steady = steady or steady_state(x)
    cut_blocks = math.ceil(steady.cut / calls_per_block)
    if cut_blocks and len(x) / calls_per_block - cut_blocks < FLOOR_BLOCKS:
        steady = replace(steady, steady=False)
    if not steady.steady:
        cut_blocks = 0
    kept = x[cut_blocks * calls_per_block :]
    medians = np.median(kept.reshape(-1, calls_per_block), axis=1)
    if remove_outliers:
        medians = without_outliers(medians)
        method += ", outliers removed"
    low, estimate, high, confidence = interval_of(medians)
    lag_p = ljung_box_p(medians)
    details = {
        **(details or {}),
        **_description(kept),
        "calls_per_block": calls_per_block,
        "warmup_cut": cut_blocks * calls_per_block,
        "ljung_box_p": lag_p,
    }
    mild, severe = count_outliers(medians)
    flags = {
        Flag.OUTLIERS_SEVERE: severe > 0 and not remove_outliers,
        Flag.OUTLIERS_MILD: mild > 0 and not severe and not remove_outliers,
        Flag.NO_STEADY_STATE: not steady.steady,
        Flag.GOT_SLOWER: steady.got_slower,
        Flag.LOW_SAMPLE_COUNT: confidence != CONFIDENCE,
        Flag.CACHED_RESULT: details.get("cached", False),
        Flag.OUTLIERS_REMOVED: remove_outliers,
        Flag.LAUNCH_BOUND: details.get("host_ms", 0.0) >= details.get("device_ms", math.inf),
        Flag.AUTOCORRELATED: lag_p is not None and lag_p < 0.01,
    }
    return Measurement(
        "latency",
        estimate,
        low,
        high,
        confidence,
        n=len(medians),
        samples=tuple(x.tolist()),
        method=method,
        scope=scope,
        flags=(*(flag for flag, is_set in flags.items() if is_set), *interference_flags(details)),
        details=details,
    )


def timed_call_ms(call: Callable[[], object]) -> float:
    """Return the time of one call, in ms. The time of a first call includes compilation.

    Raises:
        Unsupported: The call returns before its work ends.
    """
    checked, start = CallCheck(call, "call", Unsupported), time.perf_counter()
    checked()
    return (time.perf_counter() - start) * 1e3


def compile_row(first_ms: float, later_ms: float) -> Measurement:
    """Return the row of the compile time: the first call's time minus a later call's time."""
    return Measurement(
        "latency",
        max(0.0, first_ms - later_ms),
        n=1,
        method="first call minus a later call",
        scope="compile",
    )


def _description(samples: np.ndarray) -> dict[str, float]:
    mean = samples.mean()
    sd = samples.std(ddof=1) if len(samples) > 1 else 0.0
    found = {"mean": mean, "sd": sd, "cv": sd / mean if mean else 0.0}
    found |= {f"p{percent}": np.percentile(samples, percent) for percent in (5, 50, 95, 99)}
    found["mad"] = np.median(np.abs(samples - found["p50"]))
    return {name: float(value) for name, value in found.items()}
