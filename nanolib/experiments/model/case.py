"""Define the cases of the model notebook: inference, training and generation."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from nanolib.config import PRESETS, NanoConfig
from nanolib.experiments.model.look import (
    CallWork,
    count_by_formula,
    count_by_running,
    look_at,
    work_of_mask,
)
from nanolib.experiments.model.steps import (
    Generating,
    Inferring,
    Step,
    Training,
    determinism_rows,
)
from nanolib.measurement import Measurement, exact
from nanolib.meters.flops import count_flops
from nanolib.meters.memory import storage_bytes
from nanolib.models import create_model, generate_random_batch
from nanolib.models.training import is_compiled
from nanolib.models.training import unsupported_reason as unsupported_on
from nanolib.models.user import (
    build_model,
    context_length,
    hugging_face_config,
    runs_code,
)
from nanolib.numbers import MIB
from nanolib.run.case import Case, Ceilings, Measuring, Plan, Predicted
from nanolib.run.memory_plan import UNCOUNTED, breakdown_rows, memory_rows, trace
from nanolib.run.peaks import rate, rate_rows, roofline_ms

# A user's code gets ids below this number, because nanolib does not know the code's vocabulary.
_MOST_TOKENS = 256


@dataclass(frozen=True)
class ModelCase(Case):
    """Case of one model in one mode: inference, training or generation.

    In generation, the model reads a prompt of `seq_len` tokens and generates `new_tokens` tokens.
    Charts show the `name` of the case.
    """

    VARIES = ("optimization", "dtype", "name")

    name: str
    preset: str
    overrides: dict[str, Any]
    attention_type: str
    seq_len: int
    batch_size: int
    dtype: str
    mode: Literal["inference", "training", "generation"]
    optimization: str = "eager"
    new_tokens: int = 0

    @property
    def is_own_model(self) -> bool:
        """Return whether `preset` names a user's model. `overrides` then contains its options."""
        return self.preset not in PRESETS

    @property
    def runs_code(self) -> bool:
        """Return whether building the model runs the user's code."""
        return self.is_own_model and runs_code(self.preset)

    @property
    def config(self):
        """Return the configuration of the text model, or None for a user's code."""
        if self.runs_code:
            return None
        if self.is_own_model:
            return hugging_face_config(self.preset, self.overrides).get_text_config()
        changes = {"attention_type": self.attention_type, "dtype": self.dtype}
        return NanoConfig.from_preset(self.preset, **self.overrides | changes)

    @property
    def context_length(self) -> int | None:
        """Return the context length of the model in tokens, or None if the length is not known."""
        if self.runs_code:
            return None
        return context_length(self.config) if self.is_own_model else self.config.context_length

    @property
    def item(self) -> int:
        """Return the size of a weight, in bytes."""
        return getattr(torch, self.dtype).itemsize

    def build(self, seed: int | None = None) -> nn.Module:
        """Build the model, in training mode."""
        if self.is_own_model:
            return build_model(self.preset, self.overrides, self.device, self.dtype, seed)
        return create_model(self.config, self.device, seed)

    def random_ids(self, seed: int) -> Tensor:
        """Draw random token ids, int64, shape [batch_size, seq_len + 1].

        The ids are below 256 and below the size of the vocabulary, if nanolib knows this size.
        """
        tokens = min(_MOST_TOKENS, getattr(self.config, "vocab_size", _MOST_TOKENS))
        return generate_random_batch(self.batch_size, self.seq_len + 1, tokens, self.device, seed)

    def step(self, seed: int | None = None, model: nn.Module | None = None) -> Step:
        """Build the calls whose time and memory are measured.

        Args:
            seed: Seed of the weights and of the token ids, or None for any values.
            model: Model of the case, or None to build the model.
        """
        model = self.build(seed) if model is None else model
        ids = self.random_ids(seed or 0)
        if self.mode == "training":
            return Training(model, ids, self.optimization)
        if self.mode == "generation":
            return Generating(model, ids[:, :-1], self.new_tokens, self.optimization)
        return Inferring(model, ids[:, :-1], self.optimization)

    def plan_obstacle(self) -> str:
        """Return why the memory cannot be planned, or an empty string."""
        if self.is_own_model:
            return ""
        if self.attention_type == "flex":
            return UNCOUNTED
        known = work_of_mask(self.config, self.seq_len, self.seq_len)
        return "" if known else "the mask depends on the input"

    @property
    def planned_as(self) -> Self:
        """Return the case to plan: without a name, and eager if this is compiled or captured."""
        eager = is_compiled(self.optimization) or self.optimization == "cuda_graph"
        return replace(self, name="", optimization="eager" if eager else self.optimization)

    def count_work(self, run: bool = False) -> CallWork | None:
        """Return the work of one call, or None if only a run can count the work.

        Args:
            run: Whether to run a model whose FLOPs depend on data.
        """
        if not self.is_own_model:
            return count_by_formula(self)
        counted = look_at(self.planned_as).counted
        if run and (counted is None or counted.count.unread_masks):
            return count_by_running(self.planned_as)
        return counted

    def __str__(self) -> str:
        """Return the name of the model, the mode and the shape."""
        shape = f"n={self.seq_len} batch={self.batch_size} {self.attention_type} {self.dtype}"
        return f"{self.name} {self.mode} {shape}"

    def unsupported_reason(self) -> str:
        """Return why the case cannot run here. The check runs none of the user's code."""
        if not self.runs_code and (reason := self.plan().unsupported_reason):
            return reason
        length = self.context_length if self.mode == "generation" else None
        if length is not None and self.seq_len + self.new_tokens > length:
            return (
                f"a prompt of {self.seq_len} and {self.new_tokens} new tokens exceed "
                f"the context_length {length}; shorten seq_lens or lower new_tokens"
            )
        return unsupported_on(self.optimization, self.device)

    def plan(self) -> Plan:
        """Plan the peak memory without running the case."""
        return look_at(self.planned_as).plan

    def formulas(self, ceilings: Ceilings | None = None) -> Predicted:
        """Predict the work and the time of a call by formula, without planning memory.

        Returns:
            A dict with `parameters`, `flops` and `bytes` as in `CallWork`, and `weight_memory` in
            MiB. If the peak rates are known, the dict also has the roofline `latency` in ms. If
            only a run can count the work, the dict is empty.
        """
        if (work := self.count_work()) is None:
            return {}
        predicted = {
            "parameters": work.parameters,
            "weight_memory": work.parameters * self.item / MIB,
            "flops": work.flops,
            "bytes": work.bytes,
        }
        latency = roofline_ms(work.flops, work.bytes, self.dtype, ceilings or {})
        return predicted if latency is None else predicted | {"latency": latency}

    @property
    def title(self) -> str:
        """Return the optimization and the dtype, which differ within a group."""
        return f"{self.optimization} {self.dtype}"

    @property
    def is_baseline(self) -> bool:
        """Return whether the model is eager. Each dtype has its own eager baseline."""
        return self.optimization == "eager"

    def measure(self, params, ceilings: Ceilings) -> Measuring:
        """Measure size, work and memory, and time the calls in turns with the group's cases."""
        count = self.count_work(run=True).count
        predicted = self.predict(ceilings)
        model = self.build(params.seed)
        size = sum(x.numel() for x in model.parameters())
        yield exact("parameters", size, method="count", predicted=predicted["parameters"])
        mib = storage_bytes(model.parameters()) / MIB
        yield exact("weight_memory", mib, method="count", predicted=predicted["weight_memory"])
        step = self.step(params.seed, model)
        # A training step changes the weights, so the comparison comes before the timing.
        yield from step.against_eager(self.optimization)
        row, flops = partial(exact, scope=step.scope), int(predicted["flops"])
        if count is None and isinstance(step, Inferring):
            count = count_flops(partial(step.result, step.eager))
        yield row("flops", flops, method="kept", message=count.message if count else "")
        if count:
            yield row("flops", count.full, predicted=flops, method="flop_counter")
        if self.optimization == "checkpoint" and isinstance(step, Training):
            computed = count_flops(step)
            yield row("flops", computed.kept, method="computed", message=computed.message)
        yield row("bytes", predicted["bytes"])
        for work in step.workloads():
            if isinstance(work, Generating):  # A new length of the cache may compile kernels.
                work.generation.all_tokens()
            timed = yield params.timing(self.device, work.phases, total=work.scope)
            expected = predicted.get("latency") if work is step else None
            whole = replace(timed.pop(work.scope), predicted=expected)
            yield from (*timed.values(), whole)
            if work is step:
                yield from rate_rows(whole, flops, self.dtype, ceilings)
            yield rate("tokens_per_second", work.tokens, whole)
        for work in step.workloads():
            # The trace comes first, because compiled code does not run under a memory counter.
            trace(work, self, params)
            yield from self.measure_memory(work)
        is_first = self.mode == "inference" and self.seq_len == min(params.seq_lens)
        if is_first and self.is_baseline and self.attention_type != "flex":
            yield from determinism_rows(model, step.ids)

    def measure_memory(self, work: Step) -> list[Measurement]:
        """Measure the peak memory of a call, with its parts if the counter sees all tensors."""
        if self.planned_as.optimization == self.optimization:
            return breakdown_rows(work, self.device, self.plan())
        # The memory counter misses the tensors of a compiled model.
        return memory_rows(work, self.device, self.plan(), self.device.startswith("cuda"))


@dataclass(frozen=True)
class ModelWorkCase(Case):
    """Case with the calls and the memory plan of a `ModelCase`. Subclasses define `model_case`."""

    name: str
    preset: str
    overrides: dict[str, Any]
    seq_len: int
    batch_size: int

    @property
    def shape(self) -> tuple[Any, ...]:
        """Return the values of the first fields of a `ModelCase`, up to `dtype`."""
        kind = "own"
        if self.preset in PRESETS:
            kind = self.overrides.get("attention_type", "dense")
        return (
            self.device,
            self.name,
            self.preset,
            self.overrides,
            kind,
            self.seq_len,
            self.batch_size,
            self.dtype,
        )

    @property
    def runs_code(self) -> bool:
        """Return whether building the model runs the user's code."""
        return self.model_case.runs_code

    def unsupported_reason(self) -> str:
        """Return why this machine cannot run the model."""
        return self.model_case.unsupported_reason()

    def plan(self) -> Plan:
        """Plan the peak memory of the model's call."""
        return self.model_case.plan()
