"""How many warm-up steps are enough here? Several fresh processes, since in one process only the first step is cold.

Each process times every step from the very first. So each of them says what every setting would report, and a setting is compared
with another within the same process.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pydantic
import torch

from nanolib.config import PRESETS, NanoConfig
from nanolib.experiments.model.own_model import OwnModelParams, check_own
from nanolib.experiments.model.steps import check_loss
from nanolib.measurement import Flag, Measurement
from nanolib.meters.machine import resolve_device
from nanolib.meters.time.clock import clock_for
from nanolib.meters.time.latency import summarize
from nanolib.models import create_model, generate_random_batch, text
from nanolib.models.transformer import next_token_loss
from nanolib.models.user import build_model, logits_of, missing, runs_code
from nanolib.run import params as shared
from nanolib.run.case import Case, Plan
from nanolib.run.memory_plan import Workload
from nanolib.run.params import distinct, fitting_config, known_presets
from nanolib.run.rows import trace
from nanolib.stats.steady import steady_state, warm_up


class Params(OwnModelParams):
    """Parameters of the warm-up notebook.

    Attributes:
        preset: A name in `nanolib.PRESETS`.
        overrides: Fields of `NanoConfig` that differ from the preset.
        model: A model of your own in the preset's place: `package.module:build`, or `hf:LlamaForCausalLM` (extra `hf`).
        model_options: What that function, or that class's configuration, takes.
        seq_len: Tokens per sequence.
        batch_size: Sequences.
        warmup_steps: Settings: how many steps run before those that count.
        steps: Steps that count.
        curve_steps: Steps of the per-step curve, from the very first.
        processes: Fresh processes of each direction, launched in random order.
        directions: `forward`, `forward_backward`.
        isolation: Always `process`.
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

    preset: str = "decoder_tiny"
    overrides: dict[str, Any] = pydantic.Field(shared.SMALL)
    model: str = pydantic.Field("", max_length=500)
    model_options: dict[str, Any] = pydantic.Field(default_factory=dict)
    seq_len: int = pydantic.Field(64, gt=0, le=shared.MAX_SEQ_LEN)
    batch_size: int = pydantic.Field(1, gt=0, le=65_536)
    warmup_steps: list[Annotated[int, pydantic.Field(ge=0, le=1_000_000)]] = pydantic.Field(
        [0, 5], min_length=1, max_length=64
    )
    steps: int = pydantic.Field(10, ge=6, le=100_000)
    curve_steps: int = pydantic.Field(20, ge=20, le=100_000)
    processes: int = pydantic.Field(5, ge=5, le=100)
    directions: list[Literal["forward", "forward_backward"]] = pydantic.Field(
        ["forward"], min_length=1
    )
    isolation: Literal["process"] = "process"

    _distinct = pydantic.field_validator("warmup_steps", "directions")(distinct)

    _preset = pydantic.field_validator("preset")(lambda name: known_presets([name])[0])

    @pydantic.model_validator(mode="after")
    def _config_fits(self) -> Params:
        check_own(self, *self.reads)
        if not self.model:
            fitting_config(self.preset, self.overrides, longest=("seq_len", self.seq_len))
        return self


@dataclass(frozen=True)
class WarmupCase(Case):
    """One fresh process, in which every step is timed from the first."""

    supports_ab: ClassVar[bool] = False  # a process is the unit here

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
        """As many as the curve, or the longest setting, needs."""
        return max(self.curve_steps, max(self.warmup_steps) + self.steps)

    def __str__(self) -> str:
        """Direction and process."""
        return f"{self.direction} process {self.process}"

    @property
    def runs_code(self) -> bool:
        """See `Case.runs_code`."""
        return self.preset not in PRESETS and runs_code(self.preset)

    def unsupported(self) -> str:
        """Why the user's own model cannot be looked up."""
        return "" if self.preset in PRESETS or self.runs_code else missing(self.preset)

    def predict(self, ceilings: dict[str, float] | None = None) -> dict[str, float | str]:
        """The steps that run: what a cold process costs is in no formula."""
        return {"steps": self.timed_steps}

    def plan(self) -> Plan:
        """None."""
        return Plan(reason="to plan it would warm the process that must be cold")

    def measure(self, params: Params, ceilings: dict[str, float]) -> Iterator[Measurement]:
        """The curve, how many of its steps are slower than the steady state, and what each setting would report."""
        if self.preset in PRESETS:
            config = NanoConfig.from_preset(self.preset, **self.overrides)
            model = create_model(config, self.device, seed=params.seed)
            vocabulary = config.vocab_size
        else:
            model = build_model(self.preset, self.overrides, self.device, "float32", params.seed)
            vocabulary = text.VOCAB_SIZE
        if self.direction == "forward_backward":
            check_loss(model)
        call = logits_of(model)
        ids = generate_random_batch(
            self.batch_size, self.seq_len + 1, vocabulary, self.device, seed=params.seed
        )

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
        details = {"threads": torch.get_num_threads()}
        curve = samples[: self.curve_steps]
        yield summarize(curve, scope=self.direction, method=clock.method, details=details)
        yield _needed(curve, self.direction)
        for count in self.warmup_steps:
            spent = details | {"warmup_s": sum(samples[:count]) / 1e3}
            counted, scope = samples[count : count + self.steps], f"{self.direction} after {count}"
            yield _uncut(counted, scope, clock.method, spent)


def cases(params: Params) -> list[Case]:
    """For each direction its processes, all of them in random order."""
    device = resolve_device(params.device)
    ((preset, overrides),) = params.models([params.preset])
    shape = (device, preset, overrides, params.seq_len, params.batch_size)
    asked = (tuple(params.warmup_steps), params.steps, params.curve_steps)
    found: list[Case] = [
        WarmupCase(*shape, direction, process, *asked)
        for direction in params.directions
        for process in range(1, params.processes + 1)
    ]
    random.Random(params.seed).shuffle(found)
    return found


def _uncut(samples: list[float], scope: str, method: str, details: dict[str, Any]) -> Measurement:
    """The latency over all samples, warm or not: what someone who warms up this little would report."""
    whole = steady_state([])
    row = summarize(samples, scope=scope, method=method, details=details, steady=whole)
    # there are as many as `steps`, by no budget
    flags = tuple(flag for flag in row.flags if flag is not Flag.LOW_SAMPLE_COUNT)
    return replace(row, flags=flags, message="no sample is cut: this is what the setting gives")


def _needed(samples: list[float], scope: str) -> Measurement:
    """Steps at the head that are slower than the later ones; without a number where the curve gives no clear answer."""
    found, reason = warm_up(samples)
    steps = steady = None
    if found is not None:
        steps, steady = float(found), float(np.median(samples[found:]))
    return Measurement(
        "warmup_needed",
        steps,
        n=1,
        method="smoothed curve and PELT on medians of 5, and Tukey's severe fence",
        scope=scope,
        message=reason,
        details={"steady_median": steady},
    )
