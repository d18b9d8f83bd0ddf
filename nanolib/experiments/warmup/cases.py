"""Define the parameters and the cases of the warm-up notebook.

Each case is a fresh process that times all steps from the first step on. The table computes the
mean after each number of warm-up steps from these times.
"""

import random
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field

from nanolib.config import PRESETS
from nanolib.experiments.model.case import ModelCase, ModelWorkCase
from nanolib.experiments.model.cases import OwnModelParams, model_name
from nanolib.measurement import Measurement, Measurements
from nanolib.meters.clock import clock_for
from nanolib.meters.latency import summarize
from nanolib.meters.machine import resolve_device
from nanolib.run.case import Batch, Case, Ceilings, Grid, Length, Plan, Predicted, Preset
from nanolib.run.memory_plan import Workload, trace
from nanolib.stats.changes import warm_up


class Params(OwnModelParams):
    """Parameters of the warm-up notebook.

    Attributes:
        presets: One name in `nanolib.PRESETS`.
        overrides: Fields of `NanoConfig` that differ from the preset.
        model: Your own model instead of the preset, as `package.module:build` or
            `hf:LlamaForCausalLM` (extra `hf`).
        model_options: Arguments of your model's function, or of the class's configuration.
        seq_len: Tokens per sequence.
        batch_size: Sequences per batch.
        warmup_steps: Numbers of warm-up steps to compare.
        steps: Number of measured steps after the warm-up.
        curve_steps: Number of steps in the curve of step times.
        processes: Number of fresh processes for each direction, run in random order.
        directions: Passes to time, `forward` or `forward_backward`.
        isolation: Isolation of each case, always `process`.
    """

    NAME = "warmup"
    MAIN = (
        "presets",
        "model",
        "model_options",
        "overrides",
        "seq_len",
        "batch_size",
        "warmup_steps",
        "steps",
        "processes",
        "directions",
        "device",
        "label",
    )
    LENGTHS = "seq_len"

    presets: list[Preset] = Field(["decoder_nano"], min_length=1, max_length=1)
    seq_len: Length = 64
    batch_size: Batch = 1
    warmup_steps: Grid[Annotated[int, Field(ge=0, le=1_000_000)]] = Field([0, 5])
    steps: int = Field(10, ge=6, le=100_000)
    curve_steps: int = Field(40, ge=20, le=100_000)
    processes: int = Field(5, ge=5, le=100)
    directions: list[Literal["forward", "forward_backward"]] = Field(
        ["forward_backward"], min_length=1
    )
    isolation: Literal["process"] = "process"


@dataclass(frozen=True)
class WarmupCase(ModelWorkCase):
    """Case that runs in a fresh process and times all steps from the first step on."""

    supports_ab = False  # `nano ab` needs rounds, and this case has none.

    direction: str
    process: int
    warmup_steps: tuple[int, ...]
    steps: int
    curve_steps: int

    @property
    def timed_steps(self) -> int:
        """Number of steps for both the curve and the measurement after the longest warm-up."""
        return max(self.curve_steps, max(self.warmup_steps) + self.steps)

    @property
    def dtype(self) -> str:
        """Return the dtype of the weights. For a preset, `overrides` may set the dtype."""
        overrides = self.overrides if self.preset in PRESETS else {}
        return overrides.get("dtype", "float32")

    @property
    def model_case(self) -> ModelCase:
        """Return the case of the model notebook whose step is timed."""
        return ModelCase(*self.shape, "inference" if self.direction == "forward" else "training")

    def __str__(self) -> str:
        """Return the direction and the number of the process."""
        return f"{self.direction} process {self.process}"

    def unsupported_reason(self) -> str:
        """Return nothing, since the check would warm up the process."""
        return ""

    def predict(self, ceilings: Ceilings | None = None) -> Predicted:
        """Return only the number of steps, because no formula predicts the time of cold steps."""
        return {"steps": self.timed_steps}

    def plan(self) -> Plan:
        """Return no plan, since planning would warm up the process."""
        return Plan(reason="planning would warm up the process")

    def measure(self, params: Params, ceilings: Ceilings) -> Measurements:
        """Measure the time of each step from the first step on, and the length of the warm-up."""
        step = self.model_case.step(params.seed)

        def forward_backward():
            step.forward()
            step.backward()
            step.model.zero_grad()

        call = step if self.direction == "forward" else forward_backward
        clock = clock_for(self.device)
        samples = [clock.time_block([call], 1, 1)[0][0] for _ in range(self.timed_steps)]
        trace(Workload(self.direction, call), self, params)
        yield summarize(
            samples,
            scope=self.direction,
            method=clock.method,
            details={"threads": torch.get_num_threads()},
        )
        yield _count_warmup(samples[: self.curve_steps], self.direction)


def cases(params: Params) -> list[Case]:
    """List one case per direction and process, in random order."""
    device = resolve_device(params.device)
    ((preset, overrides),) = params.models()
    found = [
        WarmupCase(
            device,
            model_name(preset, overrides),
            preset,
            overrides,
            params.seq_len,
            params.batch_size,
            direction,
            process,
            tuple(params.warmup_steps),
            params.steps,
            params.curve_steps,
        )
        for direction in params.directions
        for process in range(1, params.processes + 1)
    ]
    random.Random(params.seed).shuffle(found)
    return found


def _count_warmup(samples: list[float], scope: str) -> Measurement:
    """Return the number of slow first steps, or the reason if the curve does not settle."""
    found, reason = warm_up(samples)
    steady = None if found is None else float(np.median(samples[found:]))
    return Measurement(
        "warmup_needed",
        None if found is None else float(found),
        n=1,
        method="smoothed curve and PELT on medians of 5, and Tukey's severe fence",
        scope=scope,
        message=reason,
        details={"steady_median": steady},
    )
