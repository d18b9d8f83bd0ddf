"""Define the parameters and cases of the energy notebook: energy, layers and profiling overhead."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, field_validator
from torch import nn

from nanolib.experiments.model.case import ModelCase, ModelWorkCase
from nanolib.experiments.model.cases import OwnModelParams, model_name
from nanolib.experiments.model.steps import Generating
from nanolib.measurement import Measurement, Measurements, Provenance, exact
from nanolib.meters.clock import synchronizer
from nanolib.meters.energy import EnergyMeter
from nanolib.meters.flops import count_flops
from nanolib.meters.integration import ReplaySource, read_trace
from nanolib.meters.layers import LayerProfiler
from nanolib.meters.machine import resolve_device
from nanolib.meters.overhead import measure_overhead
from nanolib.meters.recording import MODES, ModuleTime, Trace
from nanolib.meters.sampler import interval_of
from nanolib.run.case import Batch, Case, Ceilings, Grid, Length, Measuring, Predicted, Preset
from nanolib.run.memory_plan import Workload, trace

Phase = Literal["prefill", "decode", "training_step"]


class Params(OwnModelParams):
    """Parameters of the energy notebook.

    Attributes:
        presets: Names in `nanolib.PRESETS`.
        overrides: Fields of `NanoConfig` that differ from the preset.
        model: Your own model instead of the presets, as `package.module:build` or
            `hf:LlamaForCausalLM` (extra `hf`).
        model_options: Arguments of your model's function, or of the class's configuration.
        seq_lens: Lengths of the prompt or of a training sequence, tokens.
        batch_size: Sequences per batch.
        new_tokens: Tokens to generate before decoding restarts at the end of the prompt.
        dtype: Dtype of the weights.
        phases: Phases to measure: `prefill`, `decode`, `training_step`.
        window_s: Length of a measurement window, s. A window needs ten updates of the sensor.
        idle_s: Length of the idle window before each measurement window, at least 2 s.
        power_trace: CSV file of a power recording to replay, with the columns `t_s` (s) and
            `power_w` (W), or empty to use this machine's sensors.
        profiling: Profiling modes whose overhead is measured, or empty for none. The deepest
            mode profiles the layers.
    """

    NAME = "energy"
    CHOSEN: ClassVar = {"dtype": "dtype"}
    MAIN = (
        "presets",
        "model",
        "model_options",
        "overrides",
        "seq_lens",
        "batch_size",
        "new_tokens",
        "dtype",
        "phases",
        "window_s",
        "power_trace",
        "profiling",
        "device",
        "label",
    )

    presets: Grid[Preset] = Field(["decoder_nano"])
    seq_lens: Grid[Length] = Field([128])
    batch_size: Batch = 1
    new_tokens: Length = 32
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    phases: list[Phase] = Field(["prefill", "decode", "training_step"], min_length=1)
    window_s: float = Field(1.2, gt=0, le=86_400)
    idle_s: float = Field(2.0, ge=2, le=3600)
    power_trace: str = ""
    profiling: list[Literal["minimal", "standard", "deep"]] = Field([*MODES])

    @field_validator("power_trace")
    @classmethod
    def _is_a_recording(cls, path: str) -> str:
        if path:
            read_trace(path)
        return path

    def sources(self) -> list[ReplaySource] | None:
        """Return the recording as the source of power, or None for the sensors of this machine."""
        return [ReplaySource(*read_trace(self.power_trace))] if self.power_trace else None


@dataclass(frozen=True)
class EnergyCase(ModelWorkCase):
    """Case of one phase of one model at one shape."""

    # `nano ab` compares blocks of timed calls, but this case measures one window of seconds.
    supports_ab = False

    phase: Phase
    new_tokens: int
    dtype: str

    @property
    def model_case(self) -> ModelCase:
        """Return the case of the model notebook that does the same work."""
        if self.phase == "training_step":
            return ModelCase(*self.shape, "training")
        return ModelCase(*self.shape, "generation", new_tokens=self.new_tokens)

    @property
    def tokens(self) -> int:
        """Return the number of tokens that one call reads or generates."""
        return self.batch_size * (1 if self.phase == "decode" else self.seq_len)

    def __str__(self) -> str:
        """Return the model, the phase and the shape."""
        return f"{self.name} {self.phase} n={self.seq_len} batch={self.batch_size} {self.dtype}"

    def predict(self, ceilings: Ceilings | None = None) -> Predicted:
        """Return the number of weights, and the FLOPs, the bytes and the tokens of one call.

        No formula counts the work of a prefill, which computes the logits of the last position.
        """
        predicted = self.model_case.formulas() | {"tokens": self.tokens}
        if self.phase == "prefill":
            for name in ("flops", "bytes"):
                predicted.pop(name, None)
        return predicted

    def measure(self, params: Params, ceilings: Ceilings) -> Measuring:
        """Measure energy, power and time, and profile the layers.

        Without a sensor, energy is a labeled estimate.
        """
        call = step = self.model_case.step(params.seed)
        if isinstance(step, Generating):
            step.generation.all_tokens()
            call = getattr(step.generation, self.phase)
        for _ in range(2):
            call()
        trace(Workload(self.phase, call), self, params)
        readings = Trace()
        yield readings
        yield from self._energy_rows(call, params, readings)
        if params.profiling:
            yield from self._profile_rows(step.model, call, params, readings)

    def _energy_rows(
        self, call: Callable[[], object], params: Params, readings: Trace
    ) -> Measurements:
        """Yield FLOPs, time per call, and energy and power from each source."""
        counted = count_flops(call)
        yield exact("flops", counted.kept, method="kept", message=counted.message, scope=self.phase)
        with EnergyMeter(params.sources(), device=self.device, trace=readings) as meter:
            idle = meter.idle(params.idle_s)
            call()
            calls = 0
            with meter.window(self.phase) as window:
                while time.monotonic() < window.start_s + params.window_s:
                    call()
                    calls += 1
            rows = meter.measurements(window, idle=idle, tokens=calls * self.tokens)
            rows += [row for row in meter.measurements(idle) if row.metric == "power"]
        once = {
            "n": 1,
            "method": "window",
            "scope": self.phase,
            "details": {"calls": calls, "seconds": window.seconds},
        }
        message = "mean over one window"
        yield Measurement("latency", 1e3 * window.seconds / calls, message=message, **once)
        yield Measurement("tokens_per_second", calls * self.tokens / window.seconds, **once)
        yield from rows

    def _profile_rows(
        self, model: nn.Module, call: Callable[[], object], params: Params, readings: Trace
    ) -> Measurements:
        """Measure the overhead of each profiling mode, and then profile calls in a window.

        The deepest mode profiles the layers. Its overhead decides how often the window records a
        call in detail. The window has at least twelve calls, and detailed calls of each kind.

        Yields:
            An `overhead` row per mode, and a row that compares the baseline with itself. A
            `layer_time` row per layer (ms per call), with operations in the details. A
            `layer_energy` row per layer and source (J per call), from the layer's share of the
            time.
        """
        modes = {name: mode() for name, mode in MODES.items() if name in params.profiling}
        rows = list(
            measure_overhead(
                model,
                call,
                modes,
                scope=self.phase,
                budget_s=params.budget_s,
                rel_ci=params.rel_ci,
            )
        )
        yield from rows
        *_, config = modes.values()
        if config.turns:
            config = config.replace(every_kth_token=rows[-1].details["detailed_every"])
        meter = EnergyMeter(params.sources(), device=self.device, trace=readings)
        profiler = LayerProfiler(model, config, trace=readings)
        synchronize, calls = synchronizer(self.device), 0
        least = max(12, 1 + (len(config.turns) - 1) * config.every_kth_token)
        with meter, profiler, meter.window(self.phase) as window:
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
        whole_ms = sum(sum(layer.calls_ms) for layer in layers)
        for layer in layers:
            row = _layer_row(self.phase, layer, whole_ms)
            yield row
            yield from (_energy_row(row, energy, calls) for energy in joules)


def _layer_row(phase: str, layer: ModuleTime, whole_ms: float) -> Measurement:
    details = {"layer": layer.name, "share": sum(layer.calls_ms) / whole_ms}
    if layer.passes:
        # The rest of the call is the time between operations.
        operations = {name: ms / layer.passes for name, ms in layer.operations.items()}
        between = statistics.median(layer.calls_ms) - sum(operations.values())
        details["operations_ms"] = operations | {"between": max(0.0, between)}
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


def cases(params: Params) -> list[Case]:
    """List the cases of each phase, model and length."""
    device = resolve_device(params.device)
    return [
        EnergyCase(
            device,
            model_name(preset, overrides),
            preset,
            overrides,
            seq_len,
            params.batch_size,
            phase,
            params.new_tokens,
            params.dtype,
        )
        for preset, overrides in params.models()
        for seq_len in params.seq_lens
        for phase in params.phases
    ]
