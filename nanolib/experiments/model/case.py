"""Define the cases of the model notebook: inference, training and generation."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from nanolib.config import PRESETS, NanoConfig
from nanolib.experiments.model.determinism import determinism_rows
from nanolib.experiments.model.look import (
    Counted,
    count_by_formula,
    count_by_running,
    look_at,
    random_ids,
)
from nanolib.experiments.model.steps import Generating, Inferring, Step, Training
from nanolib.measurement import Measurement, exact
from nanolib.meters.ceilings import rate
from nanolib.meters.flops import count_flops
from nanolib.meters.tensor_bytes import storage_bytes
from nanolib.models import attention, create_model
from nanolib.models.optimize import is_compiled
from nanolib.models.optimize import unsupported as unsupported_on
from nanolib.models.user import (
    build_model,
    context_length,
    hugging_face_config,
    runs_code,
)
from nanolib.numbers import MIB
from nanolib.run.case import Case, Ceilings, Measuring, Plan, Predicted
from nanolib.run.memory_plan import UNCOUNTED, breakdown_rows, memory_rows, trace
from nanolib.run.peaks_case import rate_rows, roofline_ms


@dataclass(frozen=True)
class ModelCase(Case):
    """Case of one model in one mode: inference, training or generation.

    In generation, the model reads a prompt of `seq_len` tokens and generates `new_tokens` tokens.
    Charts show the `name` of the case.
    """

    VARIES: ClassVar = ("optimization", "dtype", "name")

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
    def own(self) -> bool:
        """Return whether `preset` names a user's model. `overrides` then contains its options."""
        return self.preset not in PRESETS

    @property
    def runs_code(self) -> bool:
        """Return whether building the model runs the user's code."""
        return self.own and runs_code(self.preset)

    @property
    def config(self) -> NanoConfig:
        """Return the configuration of a preset's model."""
        changes = {"attention_type": self.attention_type, "dtype": self.dtype}
        return NanoConfig.from_preset(self.preset, **self.overrides | changes)

    @property
    def context_length(self) -> int | None:
        """Return the context length of the model in tokens, or None if the length is not known."""
        if self.runs_code:
            return None
        if self.own:
            return context_length(hugging_face_config(self.preset, self.overrides))
        return self.config.context_length

    @property
    def item(self) -> int:
        """Return the size of a weight, in bytes."""
        return getattr(torch, self.dtype).itemsize

    def build(self, seed: int | None = None) -> nn.Module:
        """Build the model, in training mode."""
        if self.own:
            return build_model(self.preset, self.overrides, self.device, self.dtype, seed)
        return create_model(self.config, self.device, seed)

    def not_planned(self) -> str:
        """Return why the memory cannot be planned, or an empty string."""
        if self.own:
            return ""
        options = attention.shared_options(self.attention_type, self.config.attention_options)
        if self.attention_type == "flex":
            return UNCOUNTED
        known = attention.work(self.attention_type, 1, 1, causal=True, options=options)
        return "" if known else "the mask depends on the input"

    def no_ids(self) -> Tensor:
        """Return token ids that are all 0, int64, shape [batch_size, seq_len + 1]."""
        return torch.zeros(self.batch_size, self.seq_len + 1, dtype=torch.int64, device=self.device)

    @property
    def position(self) -> int:
        """Return the number of tokens in the cache before the call whose FLOPs nanolib counts.

        nanolib counts the first decoding step, after the prompt.
        """
        return self.seq_len if self.mode == "generation" else 0

    @property
    def model_case(self) -> Self:
        """Return this case, which is already a `ModelCase`."""
        return self

    @property
    def planned_as(self) -> Self:
        """Return the case to plan, without a name, and eager if this case is compiled or captured."""
        eager = is_compiled(self.optimization) or self.optimization == "cuda_graph"
        return replace(self, name="", optimization="eager" if eager else self.optimization)

    def counted(self, run: bool = False) -> Counted | None:
        """Return the work of one call, or None if only a run can count the work.

        Args:
            run: Whether to run a model whose FLOPs depend on data.
        """
        if not self.own:
            return count_by_formula(self)
        counted = look_at(self.planned_as).counted
        if run and (counted is None or counted.count.unread_masks):
            return count_by_running(self.planned_as)
        return counted

    def __str__(self) -> str:
        """Return the name of the model, the mode and the shape."""
        shape = f"n={self.seq_len} batch={self.batch_size} {self.attention_type} {self.dtype}"
        return f"{self.name} {self.mode} {shape}"

    def unsupported(self) -> str:
        """Return why the case cannot run here. The check runs none of the user's code."""
        if not self.runs_code and (reason := self.plan().unsupported):
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

    def at_depth(self, layers: str, depth: int) -> Step:
        """Build the calls of a model with `depth` blocks.

        Args:
            layers: Name of the option for the number of blocks.
            depth: Number of blocks, or 0 to leave the option as it is.
        """
        overrides = self.overrides | ({layers: depth} if depth else {})
        model = replace(self, overrides=overrides).build()
        return self.step(model, self.no_ids())

    def formulas(self, ceilings: Ceilings | None = None) -> Predicted:
        """Predict the work and the time of a call by formula, without planning memory.

        Returns:
            A dict with `parameters`, `flops` and `bytes` as in `Counted`, and `weight_memory` in
            MiB. If the peak rates are known, the dict also has the roofline `latency` in ms. If
            only a run can count the work, the dict is empty.
        """
        if (counted := self.counted()) is None:
            return {}
        predicted = {
            "parameters": counted.parameters,
            "weight_memory": counted.parameters * self.item / MIB,
            "flops": counted.flops,
            "bytes": counted.bytes,
        }
        latency = roofline_ms(counted.flops, counted.bytes, self.dtype, ceilings or {})
        return predicted if latency is None else predicted | {"latency": latency}

    def step(self, model: nn.Module, ids: Tensor) -> Step:
        """Build the calls whose time and memory are measured.

        Args:
            model: Model of the case.
            ids: Token ids, int64, shape [batch_size, seq_len + 1].
        """
        if self.mode == "training":
            return Training(model, ids, self.optimization)
        if self.mode == "generation":
            return Generating(model, ids[:, :-1], self.new_tokens, self.optimization)
        return Inferring(model, ids[:, :-1], self.optimization)

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
        count = self.counted(run=True).count
        predicted = self.predict(ceilings)
        model = self.build(params.seed)
        sizes = {
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "weight_memory": storage_bytes(model.parameters()) / MIB,
        }
        for metric, size in sizes.items():
            yield exact(metric, size, method="count", predicted=predicted[metric])
        ids = random_ids(self, params.seed)
        step = self.step(model, ids)
        # A training step changes the weights, so the comparison comes before the timing.
        yield from step.against_eager(self.optimization)
        flops, scope = int(predicted["flops"]), {"scope": step.scope}
        if count is None and isinstance(step, Inferring):
            count = count_flops(partial(step.result, step.eager))
        yield exact("flops", flops, method="kept", message=count.message if count else "", **scope)
        if count:
            yield exact("flops", count.full, predicted=flops, method="flop_counter", **scope)
        if self.optimization == "checkpoint" and isinstance(step, Training):
            yield exact("flops", count_flops(step).kept, method="computed", **scope)
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
            yield from self.measure_memory(work)
        is_first = self.mode == "inference" and self.seq_len == min(params.seq_lens)
        is_eager = self.optimization == "eager" and self.attention_type != "flex"
        if is_first and is_eager:
            yield from determinism_rows(model, ids[:, :-1])

    def measure_memory(self, work: Step) -> list[Measurement]:
        """Measure the peak memory of a call, with its parts if the counter sees all tensors."""
        if self.planned_as.optimization == self.optimization:
            return breakdown_rows(work, self.device, self.plan())
        # The memory counter misses the tensors of a compiled model.
        return memory_rows(work, self.device, self.plan(), self.device.startswith("cuda"))


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
