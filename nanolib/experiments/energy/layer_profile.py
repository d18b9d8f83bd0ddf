"""Where a model's time goes, layer by layer and operation by operation, and what finding out costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from torch import nn

from nanolib.measurement import BadInput, Measurement, Provenance
from nanolib.meters.energy.meter import EnergyMeter, Window
from nanolib.meters.layers.overhead import measure_overhead
from nanolib.meters.layers.profiler import LayerProfiler
from nanolib.meters.layers.profiling import ProfilingConfig
from nanolib.meters.layers.recording import STATISTICS, ModuleTime
from nanolib.meters.time.clock import synchronizer
from nanolib.meters.time.sampler import interval_of
from nanolib.store import Run, Store, traces

_MIN_CALLS = 12


def profile(
    phase: str,
    model: nn.Module,
    call: Callable[[], object],
    modes: dict[str, ProfilingConfig],
    params: Any,
) -> Iterator[Measurement]:
    """Watch calls for a while; rows, samples and statistics go to the trace of the case as well.

    At least twelve calls are made, and two that are looked at closely.

    Args:
        phase: Scope of the rows begins with it.
        model: What is called.
        call: Calls it once.
        modes: How closely to look; the last is the deepest, and taken.
        params: Of the energy notebook: how long, and what tells the power.

    Returns:
        Per layer a `layer_time` (ms per call, with operations and statistics in its details) and per source of power a
        `layer_energy` (J per call), which is the window's by the layer's share of the time.
    """
    *_, config = modes.values()
    trace = traces.current()
    device = next((weight.device for weight in model.parameters()), "cpu")
    sample_s = config.power_sample_interval_ms / 1e3
    meter = EnergyMeter(params.sources(), sample_s=sample_s, sink=trace, device=device)
    synchronize = synchronizer(device)
    least = max(_MIN_CALLS, config.every_kth_token + 1 if config.has_details else 0)
    calls = 0
    with meter, LayerProfiler(model, config, sink=trace) as profiler, meter.window(phase) as window:
        while calls < least or time.monotonic() < window.start_s + params.window_s:
            begin = time.monotonic()
            call()
            synchronize()  # or it is the time of launching the token, not of making it
            trace.put("tokens", [(trace.at_us(begin), round(1e9 * (time.monotonic() - begin)))])
            calls += 1
    layers = [layer for layer in profiler.results() if layer.inside == "" and layer.calls_ms]
    whole = sum(statistics.median(layer.calls_ms) for layer in layers)
    for layer in layers:
        row = _layer_row(phase, layer, whole)
        yield row
        yield from _energy_rows(row, meter, window, calls)


def _layer_row(phase: str, layer: ModuleTime, whole_ms: float) -> Measurement:
    median = statistics.median(layer.calls_ms)
    details: dict[str, object] = {
        "layer": layer.name,
        "kind": layer.kind,
        "share": median / whole_ms,
    }
    means = {name: statistics.fmean(values) for name, values in layer.values.items()}
    if activations := {name: means.pop(name) for name in STATISTICS if name in means}:
        details["activations"] = activations
    if layer.passes:
        # of one pass, whose operations belong together; what they leave of a call is between them
        middle = sorted(layer.passes, key=lambda one: one.ms)[len(layer.passes) // 2]
        between = max(0.0, median - sum(middle.operations.values()))
        details |= {
            "operations_ms": middle.operations | {"between": between},
            "deep_passes": len(layer.passes),
            "deep": means,
        }
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


def _energy_rows(
    row: Measurement, meter: EnergyMeter, window: Window, calls: int
) -> Iterator[Measurement]:
    """The window's energy by the layer's share of the time: no sensor sees a layer."""
    for track in meter.tracks:
        try:
            energy = track.energy(window)
        except BadInput:  # too few readings: the window's own row says so
            continue
        low, estimate, high = (end * row.details["share"] / calls for end in energy)
        yield Measurement(
            "layer_energy",
            estimate,
            low,
            high,
            1.0,
            n=1,
            provenance=Provenance.ESTIMATED,
            method=f"attributed:time_share {track.source.name}",
            scope=row.scope,
            message="the window's energy by the layer's share of the forward pass; no sensor sees a layer",
            details={"layer": row.details["layer"], "of": track.source.of},
        )


def overheads(
    phase: str,
    model: nn.Module,
    call: Callable[[], object],
    modes: dict[str, ProfilingConfig],
    params: Any,
) -> Iterator[Measurement]:
    """What each mode costs, and first what the bare call costs against itself; see `measure_overhead`.

    Rows are written as they would be in earnest, to a database that is thrown away.
    """
    limits = {"budget_s": params.budget_s, "rel_ci": params.rel_ci}
    folder = TemporaryDirectory(prefix="nanolib-overhead-")
    with folder, Store(Path(folder.name) / "traces.sqlite") as store:
        store.add(Run(experiment="overhead", machine={"machine_id": ""}, run_id="overhead"))
        sink = store.new_trace("overhead", phase)
        yield from measure_overhead(model, call, modes, scope=phase, sink=sink, **limits)
