"""Define the cases of the model notebook: inference, training, generation and training loss."""

import itertools
import json
import math
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, Self

from torch import Tensor, nn

from nanolib.config import PRESETS, NanoConfig
from nanolib.experiments.model.data import text_batch, text_batches
from nanolib.experiments.model.determinism import determinism_rows
from nanolib.experiments.model.look import (
    Counted,
    ShapedCase,
    count_by_formula,
    count_by_running,
    look_at,
)
from nanolib.experiments.model.steps import Generating, Inferring, Step, Training
from nanolib.measurement import Measurement, Measurements, exact
from nanolib.meters.ceilings import rate
from nanolib.meters.flops import count_flops
from nanolib.meters.memory import MIB
from nanolib.meters.tensor_bytes import storage_bytes
from nanolib.models.optimize import is_compiled
from nanolib.models.optimize import unsupported as unsupported_on
from nanolib.models.training import train
from nanolib.models.user import missing
from nanolib.run.case import Case, Ceilings, Measuring, Plan, Predicted
from nanolib.run.memory_plan import Workload, breakdown_rows, memory_rows, trace
from nanolib.run.peaks_case import rate_rows, roofline_ms


@dataclass(frozen=True)
class ModelCase(ShapedCase):
    """Case of one model in one mode: inference, training or generation."""

    mode: Literal["inference", "training", "generation"]
    optimization: str = "eager"

    # The cache contains this many tokens before the call whose FLOPs nanolib counts.
    position: ClassVar[int] = 0

    @property
    def model_case(self) -> Self:
        """Return this case, which is already a `ModelCase`."""
        return self

    @property
    def planned_as(self) -> Self:
        """Return the case to plan, without a name, and eager if this case is compiled or captured."""
        eager = is_compiled(self.optimization) or self.optimization == "cuda_graph"
        return replace(self, name="", optimization="eager" if eager else self.optimization)

    @property
    def counted(self) -> Counted | None:
        """Return the work of one call, or None if only a run can count the work."""
        return look_at(self.planned_as).counted if self.own else count_by_formula(self)

    @property
    def work(self) -> dict[str, float]:
        """Return `parameters` and `flops` of a call, or an empty dict if only a run can count them."""
        counted = self.counted
        return {"parameters": counted.parameters, "flops": counted.flops} if counted else {}

    def __str__(self) -> str:
        """Return the name of the model, the mode and the shape."""
        shape = f"n={self.seq_len} batch={self.batch_size} {self.attention_type} {self.dtype}"
        return f"{self.name} {self.mode} {shape}"

    def unsupported(self) -> str:
        """Return why this machine cannot run the case. The check runs none of the user's code."""
        reason = ""
        if self.own and not self.runs_code:
            reason = missing(self.preset) or self.plan().unsupported
        return reason or unsupported_on(self.optimization, self.device)

    def plan(self) -> Plan:
        """Plan the peak memory without running the case."""
        return look_at(self.planned_as).plan

    def at_depth(self, depth: int, optimizer: str = "adamw", layers: str = "num_layers") -> Step:
        """Build the calls of a model with `depth` blocks, or with all blocks if `depth` is 0."""
        overrides = self.overrides | ({layers: depth} if depth else {})
        model = replace(self, overrides=overrides).build()
        return self.step(model, self.no_ids(), 1e-3, optimizer)

    def predict(self, ceilings: Ceilings | None = None) -> Predicted:
        """Return the predictions of formulas, and the planned peak memory in MiB."""
        predicted = self.formulas(ceilings)
        if predicted and (planned := self.plan().most) is not None:
            predicted["peak_memory"] = planned / MIB
        return predicted

    def formulas(self, ceilings: Ceilings | None = None) -> Predicted:
        """Predict the work of a call, and its roofline `latency` in ms if the peak rates are known."""
        if (counted := self.counted) is None:
            return {}
        predicted = {
            "parameters": counted.parameters,
            "weight_memory": counted.parameters * self.item / MIB,
            "flops": counted.flops,
            "bytes": counted.bytes,
        }
        latency = roofline_ms(counted.flops, counted.bytes, self.dtype, ceilings or {})
        return predicted if latency is None else predicted | {"latency": latency}

    def known(self, ceilings: Ceilings) -> dict[str, Any]:
        """Predict the work. If the FLOPs depend on data, run the model once to count the FLOPs."""
        counted = self.counted
        if counted is None or (counted.count and counted.count.unread_masks):
            count_by_running(self.planned_as)
        return self.predict(ceilings)

    def step(
        self, model: nn.Module, ids: Tensor, learning_rate: float, optimizer: str = "adamw"
    ) -> Step:
        """Build the calls whose time and memory are measured."""
        if self.mode == "inference":
            return Inferring(model, ids[:, :-1], self.optimization)
        return Training(model, ids, self.optimization, learning_rate, optimizer)

    @property
    def group(self) -> str:
        """Return the name of the group, which all optimizations and dtypes of a case share."""
        overrides = json.dumps(self.overrides, sort_keys=True)
        model = (self.device, self.preset, overrides, self.attention_type)
        return " ".join(map(str, (*model, self.seq_len, self.batch_size, self.mode)))

    @property
    def title(self) -> str:
        """Return the optimization and the dtype, which differ within a group."""
        return f"{self.optimization} {self.dtype}"

    @property
    def is_baseline(self) -> bool:
        """Return whether the model is eager. Each dtype has its own eager baseline."""
        return self.optimization == "eager"

    def measure(self, params: Any, ceilings: Ceilings) -> Measuring:
        """Measure size, work and memory, and time the calls in turns with the group's other cases."""
        predicted = self.known(ceilings)
        model = self.build(params.seed)
        sizes = {
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "weight_memory": storage_bytes(model.parameters()) / MIB,
        }
        for metric, size in sizes.items():
            yield exact(metric, size, method="count", predicted=predicted[metric])
        ids = text_batch(self, params.corpus, params.seed)
        step = self.step(model, ids, params.learning_rate)
        # A training step changes the weights, so the comparison comes before the timing.
        yield from step.against_eager(self.optimization)
        flops, scope = int(predicted["flops"]), {"scope": step.scope}
        count = self.counted.count
        if count is None and isinstance(step, Inferring):
            count = count_flops(step.eager_result)
        yield exact("flops", flops, method="kept", message=count.message if count else "", **scope)
        if count:
            yield exact("flops", count.full, predicted=flops, method="flop_counter", **scope)
        if self.optimization == "checkpoint" and isinstance(step, Training):
            yield exact("flops", count_flops(step.result).kept, method="computed", **scope)
        yield exact("bytes", predicted["bytes"], **scope)
        if isinstance(step, Generating):
            yield from step.measure_prompt(params, self.device)
        timed = yield params.timed(self.device, step.phases, total=step.scope)
        whole = replace(timed.pop(step.scope), predicted=predicted.get("latency"))
        yield from (*timed.values(), whole)
        yield from rate_rows(whole, flops, self.dtype, ceilings)
        yield rate("tokens_per_second", step.tokens, whole)
        for work in step.workloads():
            # The trace comes first, because compiled code does not run under a memory counter.
            trace(work, self, params)
            yield from self._memory_rows(work, model)
        is_first = self.mode == "inference" and self.seq_len == min(params.seq_lens)
        is_eager = self.optimization == "eager" and self.attention_type != "flex"
        if params.determinism and is_first and is_eager:
            yield from determinism_rows(model, ids[:, :-1])

    def _memory_rows(self, work: Workload, model: nn.Module) -> list[Measurement]:
        look = look_at(self.planned_as)
        if self.planned_as.optimization == self.optimization:
            planned = look.breakdowns.get(work.scope)
            return breakdown_rows(work, model, self.device, look.plan, planned)
        # The memory counter misses the tensors of a compiled model.
        return memory_rows(work, self.device, look.plan, counted=self.device.startswith("cuda"))


@dataclass(frozen=True)
class GenerationCase(ModelCase):
    """Case of a model that reads a prompt and generates tokens.

    nanolib counts the FLOPs of the first decoding step.
    """

    new_tokens: int = 1

    @property
    def position(self) -> int:
        """Return the length of the prompt, in tokens."""
        return self.seq_len

    def step(
        self, model: nn.Module, ids: Tensor, learning_rate: float, optimizer: str = "adamw"
    ) -> Step:
        """Build the calls that read the prompt and generate one token."""
        return Generating(model, ids[:, :-1], self.new_tokens, self.optimization)

    def unsupported(self) -> str:
        """Return why the case cannot run, for example because the context is too short."""
        length = self.context_length
        if length is not None and self.seq_len + self.new_tokens > length:
            return (
                f"a prompt of {self.seq_len} and {self.new_tokens} new tokens exceed "
                f"the context_length {length}; shorten seq_lens or lower new_tokens"
            )
        return super().unsupported()


class ModelWorkCase(Case):
    """Case with the calls and the memory plan of a `ModelCase`. Subclasses define `model_case`."""

    @property
    def attention(self) -> str:
        """Return the attention type of a preset, or `own` for a user's model."""
        is_own = self.preset not in PRESETS
        return "own" if is_own else self.overrides.get("attention_type", "dense")

    @property
    def shape(self) -> tuple[Any, ...]:
        """Return the values of the first fields of a `ModelCase`, up to `dtype`."""
        named = (self.device, self.name, self.preset, self.overrides, self.attention)
        return (*named, self.seq_len, self.batch_size, self.dtype)

    @property
    def runs_code(self) -> bool:
        """Return whether building the model runs the user's code."""
        return self.model_case.runs_code

    def unsupported(self) -> str:
        """Return why this machine cannot run the model."""
        return self.model_case.unsupported()

    def plan(self) -> Plan:
        """Plan the peak memory of the model's call."""
        return self.model_case.plan()


@dataclass(frozen=True)
class LossCase(ModelWorkCase, ShapedCase):
    """Case of a model that trains on real text for `steps` steps."""

    supports_ab: ClassVar[bool] = False  # The case has no timings that `nano ab` could compare.

    steps: int
    learning_rate: float
    corpus: str

    def __str__(self) -> str:
        """Return the name of the model and the number of steps."""
        return f"{self.name} loss over {self.steps} steps"

    @property
    def model_case(self) -> ModelCase:
        """Return the case of a training step of the same model at the same shape."""
        shape = (getattr(self, field.name) for field in fields(ShapedCase))
        return ModelCase(*shape, "training")

    def measure(self, params: Any, ceilings: Ceilings) -> Measurements:
        """Measure the loss before each step, and yield the mean of the last tenth of the losses."""
        model = self.build(params.seed)
        batches = text_batches(self, self.corpus, params.seed, self.steps)
        losses = train(model, batches, self.learning_rate).tolist()
        finite = [*itertools.takewhile(math.isfinite, losses)]
        if finite:
            last = finite[-max(1, len(finite) // 10) :]
            yield Measurement(
                "loss",
                sum(last) / len(last),
                n=len(last),
                samples=tuple(finite),
                method="byte text, AdamW",
                scope="training",
                message=f"mean over the last {len(last)} of {len(finite)} steps; one seed, so no interval",
            )
        if len(finite) < self.steps:
            raise ArithmeticError(
                f"the loss is not finite from step {len(finite) + 1} of {self.steps} on; "
                "lower learning_rate, or use float32"
            )


def planned_training(case: Case, config: NanoConfig, batch_size: int) -> Plan:
    """Plan the peak memory of one training step with `config` and the sequence length of `case`."""
    shape = (config.attention_type, case.seq_len, batch_size, config.dtype)
    named = ("", min(PRESETS), config.model_dump())
    return ModelCase(case.device, *named, *shape, "training").plan()
