"""Define the parameters and the cases of the warm-up notebook.

Each case is a fresh process that times all steps from the first step on. The same process measures
the latency after each number of warm-up steps.
"""

import random
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from nanolib.config import PRESETS, NanoConfig
from nanolib.experiments.model.cases import OwnModelParams
from nanolib.experiments.model.look import random_ids
from nanolib.measurement import Flag, Measurement, Measurements
from nanolib.meters.machine import resolve_device
from nanolib.meters.time.clock import clock_for
from nanolib.meters.time.latency import summarize
from nanolib.models import create_model
from nanolib.models.training import next_token_loss
from nanolib.models.user import build_model, logits_of, missing, runs_code
from nanolib.run.case import Case, Ceilings, Plan, Predicted
from nanolib.run.memory_plan import Workload, trace
from nanolib.run.params import Batch, Grid, Length, Preset
from nanolib.stats.steady import steady_state, warm_up


class Params(OwnModelParams):
    """Parameters of the warm-up notebook.

    Attributes:
        preset: A name in `nanolib.PRESETS`.
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

    NAME: ClassVar[str] = "warmup"
    MAIN: ClassVar = (
        "preset",
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
    LENGTHS: ClassVar[str] = "seq_len"

    preset: Preset = "decoder_nano"
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

    @property
    def presets(self) -> list[str]:
        """Return the preset as a list of one name."""
        return [self.preset]


@dataclass(frozen=True)
class WarmupCase(Case):
    """Case that runs in a fresh process and times all steps from the first step on."""

    supports_ab: ClassVar[bool] = False  # `nano ab` needs rounds, and this case has none.

    preset: str
    overrides: dict[str, Any]
    seq_len: int
    batch_size: int
    direction: str
    process: int
    warmup_steps: tuple[int, ...]
    steps: int
    curve_steps: int

    @property
    def timed_steps(self) -> int:
        """Number of steps for both the curve and the measurement after the longest warm-up."""
        return max(self.curve_steps, max(self.warmup_steps) + self.steps)

    def __str__(self) -> str:
        return f"{self.direction} process {self.process}"

    @property
    def runs_code(self) -> bool:
        """Whether the model is a function of the user."""
        return self.preset not in PRESETS and runs_code(self.preset)

    def unsupported(self) -> str:
        """Return why the model of the user cannot be found, or an empty string."""
        return "" if self.preset in PRESETS or self.runs_code else missing(self.preset)

    def predict(self, ceilings: Ceilings | None = None) -> Predicted:
        """Return only the number of steps, because no formula predicts the time of cold steps."""
        return {"steps": self.timed_steps}

    def plan(self) -> Plan:
        """Return no plan, since planning would warm up the process."""
        return Plan(reason="planning would warm up the process")

    def measure(self, params: Params, ceilings: Ceilings) -> Measurements:
        """Measure step times, the length of the warm-up, and the latency after `warmup_steps`."""
        if self.preset in PRESETS:
            config = NanoConfig.from_preset(self.preset, **self.overrides)
            model = create_model(config, self.device, seed=params.seed)
        else:
            model = build_model(self.preset, self.overrides, self.device, "float32", params.seed)
        call = logits_of(model)
        ids = random_ids(self, params.seed)

        def forward() -> None:
            with torch.inference_mode():
                call(ids[:, :-1])

        def forward_backward() -> None:
            next_token_loss(call, ids).backward()
            model.zero_grad()

        step = forward if self.direction == "forward" else forward_backward
        clock = clock_for(self.device)
        samples = [clock.time_block([step], 1, 1)[0][0] for _ in range(self.timed_steps)]
        trace(Workload(self.direction, step, tuple), self, params)
        how = {"method": clock.method, "details": {"threads": torch.get_num_threads()}}
        curve = samples[: self.curve_steps]
        yield summarize(curve, scope=self.direction, **how)
        yield _count_warmup(curve, self.direction)
        # The steady state of an empty series discards no samples.
        how["steady"] = steady_state([])
        for count in self.warmup_steps:
            counted, scope = samples[count : count + self.steps], f"{self.direction} after {count}"
            row = summarize(counted, scope=scope, **how)
            # LOW_SAMPLE_COUNT advises a larger budget_s, but `steps` sets the number of samples.
            flags = tuple(flag for flag in row.flags if flag is not Flag.LOW_SAMPLE_COUNT)
            yield replace(row, flags=flags, message="no samples are discarded")


def cases(params: Params) -> list[Case]:
    """List one case per direction and process, in random order."""
    device = resolve_device(params.device)
    ((preset, overrides),) = params.models()
    shape = (device, preset, overrides, params.seq_len, params.batch_size)
    asked = (tuple(params.warmup_steps), params.steps, params.curve_steps)
    found = [
        WarmupCase(*shape, direction, process, *asked)
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
