"""Profile a model by layer and operation, and measure the overhead of profiling."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from nanolib.measurement import Measurement, Measurements, Provenance
from nanolib.meters.energy.meter import EnergyMeter
from nanolib.meters.layers.overhead import DETAIL_SHARES, measure_overhead
from nanolib.meters.layers.profiler import LayerProfiler
from nanolib.meters.layers.recording import MODES, ModuleTime
from nanolib.meters.time.clock import synchronizer
from nanolib.meters.time.sampler import interval_of
from nanolib.meters.trace import Trace

_MIN_CALLS = 12


def profile(
    phase: str, model: nn.Module, call: Callable[[], object], params: Any, readings: Trace
) -> Measurements:
    """Measure the overhead of each profiling mode, and then profile calls in a window.

    The overhead of the deepest mode decides how often the window records a call in detail. The
    window has at least twelve calls, and at least two of them are detailed in a mode with details.

    Args:
        phase: Phase of the model, and first word of the scope of each row.
        model: Model to profile.
        call: Function that calls the model once.
        params: Parameters of the energy notebook. The deepest mode in `profiling` profiles the
            layers.
        readings: Receiver of all readings of the window.

    Yields:
        An `overhead` row per mode, and a row that compares the baseline with itself. A `layer_time`
        row per layer (ms per call), with operations and statistics in the details. A
        `layer_energy` row per layer and source (J per call), from the layer's share of the time.
    """
    modes = {name: mode() for name, mode in MODES.items() if name in params.profiling}
    *_, config = modes.values()
    limits = {"budget_s": params.budget_s, "rel_ci": params.rel_ci}
    rows = [*measure_overhead(model, call, modes, DETAIL_SHARES, scope=phase, **limits)]
    yield from rows
    if config.has_details:
        config = config.replace(every_kth_token=rows[-1].details["detailed_every"])
    device = next((weight.device for weight in model.parameters()), "cpu")
    sample_s = config.power_sample_interval_ms / 1e3
    meter = EnergyMeter(params.sources(), sample_s=sample_s, device=device, trace=readings)
    synchronize = synchronizer(device)
    least = max(_MIN_CALLS, config.every_kth_token + 1 if config.has_details else 0)
    calls = 0
    profiler = LayerProfiler(model, config, trace=readings)
    with meter, profiler, meter.window(phase) as window:
        while calls < least or time.monotonic() < window.start_s + params.window_s:
            begin = time.monotonic()
            call()
            synchronize()  # Otherwise, nanolib would time only the launches.
            ns = round(1e9 * (time.monotonic() - begin))
            readings.rows["tokens"].append((readings.at_us(begin), ns))
            calls += 1
    rows = meter.measurements(window)
    joules = [row for row in rows if row.metric == "energy" and row.estimate is not None]
    layers = [layer for layer in profiler.results() if layer.inside == "" and layer.calls_ms]
    whole = sum(sum(layer.calls_ms) for layer in layers)
    for layer in layers:
        row = _layer_row(phase, layer, whole)
        yield row
        yield from (_energy_row(row, energy, calls) for energy in joules)


def _layer_row(phase: str, layer: ModuleTime, whole_ms: float) -> Measurement:
    details = {"layer": layer.name, "share": sum(layer.calls_ms) / whole_ms}
    if layer.passes:
        # The rest of the call is the time between operations.
        middle = sorted(layer.passes, key=lambda one: one.ms)[len(layer.passes) // 2]
        between = statistics.median(layer.calls_ms) - sum(middle.operations.values())
        details["operations_ms"] = middle.operations | {"between": max(0.0, between)}
    low, estimate, high, confidence = interval_of(np.asarray(layer.calls_ms))
    return Measurement(
        "layer_time",
        estimate,
        low,
        high,
        confidence,
        n=len(layer.calls_ms),
        samples=tuple(layer.calls_ms),
        method="wrapped_forward",
        scope=f"{phase} {layer.name}",
        details=details,
    )


def _energy_row(row: Measurement, window: Measurement, calls: int) -> Measurement:
    """Estimate a layer's energy from its share of the time, because no sensor measures a layer.

    Args:
        row: Row of the layer's time.
        window: Row of the energy of the window.
        calls: Number of calls in the window.
    """
    factor = row.details["share"] / calls
    return replace(
        window,
        metric="layer_energy",
        estimate=factor * window.estimate,
        low=factor * window.low,
        high=factor * window.high,
        provenance=Provenance.ESTIMATED,
        method=f"attributed:time_share {window.method}",
        scope=row.scope,
        message="energy of one call, times the layer's share of the forward pass",
        details={"layer": row.details["layer"], "of": window.details["of"]},
    )
