"""The model notebook's timed cases: a model at one shape that runs, trains or generates."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from nanolib.config import PRESETS, NanoConfig
from nanolib.experiments.model.determinism import determinism_rows
from nanolib.experiments.model.look import (
    Counted,
    Look,
    count_by_running,
    elements_moved,
    look_at,
)
from nanolib.experiments.model.shaped_case import ShapedCase
from nanolib.experiments.model.steps import Generating, Inferring, Step, Training
from nanolib.measurement import Measurement, exact
from nanolib.meters.ceilings import rate
from nanolib.meters.flops import BACKWARD_FACTOR, count_flops, model_flops
from nanolib.meters.memory import MIB
from nanolib.models import attention, text
from nanolib.models.optimize import is_compiled
from nanolib.models.optimize import unsupported as unsupported_on
from nanolib.models.user import context_length, hugging_face_config, missing
from nanolib.run.case import Case, Measuring, Plan
from nanolib.run.memory_plan import (
    UNCOUNTED,
    Workload,
    breakdown_rows,
    memory_rows,
    trace,
    unattributed_rows,
)
from nanolib.run.peaks_case import rate_rows, roofline_ms

Mode = Literal["inference", "training", "generation"]


@dataclass(frozen=True)
class ModelCase(ShapedCase):
    """A model that runs, trains or generates."""

    mode: Mode
    optimization: str = "eager"

    @property
    def model_case(self) -> ModelCase:
        """Itself."""
        return self

    @property
    def planned_as(self) -> ModelCase:
        """The case with the same plan: the name is left out, and a compiled model is the eager one."""
        eager = is_compiled(self.optimization) or self.optimization == "cuda_graph"
        return replace(self, name="", optimization="eager" if eager else self.optimization)

    @property
    def _look(self) -> Look:
        return look_at(self.planned_as)

    @property
    def context_length(self) -> int | None:
        """The longest sequence, tokens; None if it is not known."""
        if self.runs_code:
            return None
        if self.own:
            return context_length(hugging_face_config(self.preset, self.overrides))
        return self.config.context_length

    @property
    def position(self) -> int:
        """Tokens in the cache before those whose work is counted."""
        return 0

    @property
    def counted(self) -> Counted | None:
        """Weights, work and traffic by formula; None if only a run can count them."""
        if self.own:
            return self._look.counted
        config, length = self.config, 1 if self.position else self.seq_len
        parts = model_flops(config, self.batch_size, length, self._kept, position=self.position)
        moved = elements_moved(self.mode, config.parameter_count, config.parameter_count)
        if self.position:  # a token attends to itself too, which is not in the cache yet
            keys = round((self._kept(1, self.position + 1) - 1) * config.kv_heads)
            cached = 2 * config.num_layers * self.batch_size * keys * config.head_dim
            moved = config.decoded_parameters(self.batch_size) + cached
        backward = BACKWARD_FACTOR if self.mode == "training" else 0
        flops = parts["total"] * (1 + backward)
        return Counted(config.parameter_count, flops, moved * self.item)

    def _kept(self, q_len: int, kv_len: int) -> float:
        """Query-key pairs that its attention keeps per head; all of them if the input decides."""
        config = self.config
        options = attention.shared_options(config.attention_type, config.attention_options)
        found = attention.work(config.attention_type, q_len, kv_len, causal=True, options=options)
        return (found or attention.work("dense", q_len, kv_len, causal=True)).kept

    @property
    def item(self) -> int:
        """Bytes of a weight."""
        return getattr(torch, self.dtype).itemsize

    def __str__(self) -> str:
        """Preset, shape and mode."""
        return f"{self.name} {self.mode} n={self.seq_len} batch={self.batch_size} {self.attention_type} {self.dtype}"

    def unsupported(self) -> str:
        """Why this machine cannot run it, as far as is known without running your code."""
        reason = ""
        if self.own and not self.runs_code:
            reason = missing(self.preset) or self.plan().unsupported
        return reason or unsupported_on(self.optimization, self.device)

    def plan(self) -> Plan:
        """The peak memory, counted without running the case."""
        return self._look.plan

    def not_planned(self) -> str:
        """Why its memory cannot be planned; empty if it can."""
        if self.own:
            return ""
        options = attention.shared_options(self.attention_type, self.config.attention_options)
        if self.attention_type == "flex":
            return UNCOUNTED
        known = attention.work(self.attention_type, 1, 1, causal=True, options=options)
        return "" if known else "what is kept depends on the input"

    def at_depth(
        self, depth: int, optimizer: str = "adamw", layers: str = "num_layers"
    ) -> tuple[nn.Module, Iterator[Workload]]:
        """Build the model with another number of blocks, and its calls.

        Args:
            depth: Blocks; 0 for the model's own number.
            optimizer: A key of `OPTIMIZERS`.
            layers: The option that sets the number of blocks.
        """
        overrides = self.overrides | ({layers: depth} if depth else {})
        model = replace(self, overrides=overrides).build()
        return model, self.step(model, self.no_ids(), 1e-3, optimizer).workloads()

    def no_ids(self) -> torch.Tensor:
        """Return ids of the case's shape, all 0: int64 [batch, length + 1]."""
        return torch.zeros(self.batch_size, self.seq_len + 1, dtype=torch.int64, device=self.device)

    def formulas(self, ceilings: dict[str, float] | None = None) -> dict[str, float | str]:
        """Predict by formula, without planning memory.

        Args:
            ceilings: As `roofline_ms` takes them.

        Returns:
            `parameters`, `weight_memory` (MiB of weights), `flops` and `bytes` (see `Counted`), and
            `latency` (ms, roofline) if the ceilings are known.
        """
        if (counted := self.counted) is None:
            return {}
        predicted: dict[str, float | str] = {
            "parameters": counted.parameters,
            "weight_memory": counted.parameters * self.item / MIB,
            "flops": counted.flops,
            "bytes": counted.bytes,
        }
        latency = roofline_ms(counted.flops, counted.bytes, self.dtype, ceilings or {})
        return predicted if latency is None else predicted | {"latency": latency}

    def known(self, ceilings: dict[str, float]) -> dict[str, Any]:
        """What is predicted; if it takes data, its FLOPs are counted by a run first."""
        counted = self.counted
        if counted is None or (counted.count and counted.count.unread_masks):
            count_by_running(self.planned_as)
        return self.predict(ceilings)

    def step(
        self, model: nn.Module, ids: torch.Tensor, learning_rate: float, optimizer: str = "adamw"
    ) -> Step:
        """Build the calls that are timed and whose memory is measured."""
        if self.mode == "inference":
            return Inferring(model, ids[:, :-1], self.optimization)
        return Training(model, ids, self.optimization, learning_rate, optimizer)

    @property
    def group(self) -> str:
        """See `Case.group`: all optimizations and dtypes of one model, shape and mode."""
        overrides = json.dumps(self.overrides, sort_keys=True)
        model = (self.device, self.preset, overrides, self.attention_type)
        return " ".join(map(str, (*model, self.seq_len, self.batch_size, self.mode)))

    @property
    def title(self) -> str:
        """See `Case.title`."""
        return f"{self.optimization} {self.dtype}"

    @property
    def is_baseline(self) -> bool:
        """See `Case.is_baseline`: the eager model in each dtype."""
        return self.optimization == "eager"

    def measure(self, params: Any, ceilings: dict[str, float]) -> Measuring:
        """Measure size, work and memory, and times in turns with the others of its group."""
        predicted = self.known(ceilings)
        model = self.build(params.seed)
        weights = tuple(model.parameters())
        count, weight_memory = (
            sum(p.numel() for p in weights),
            sum(p.nbytes for p in weights) / MIB,
        )
        for metric, size in (("parameters", count), ("weight_memory", weight_memory)):
            yield exact(metric, size, method="count", predicted=predicted[metric])
        ids = text_batch(self, params.corpus, params.seed)
        step = self.step(model, ids, params.learning_rate)
        yield from step.against_eager(self.optimization)  # before a step changes the weights
        flops, scope = int(predicted["flops"]), {"scope": step.scope}
        count = self.counted.count
        if count is None and isinstance(step, Inferring):
            count = count_flops(step.eager_result)
        message = count.message if count else ""
        yield exact("flops", flops, method="kept", message=message, **scope)
        if count:
            yield exact("flops", count.full, predicted=flops, method="flop_counter", **scope)
        if self.optimization == "checkpoint" and isinstance(step, Training):
            computed = count_flops(step.result)
            yield exact("flops", computed.kept, method="computed", **scope)
        yield exact("bytes", predicted["bytes"], **scope)
        if isinstance(step, Generating):
            yield from step.measure_prompt(params, self.device)
        timed = yield params.timed(self.device, step.phases, total=step.scope)
        whole = replace(timed.pop(step.scope), predicted=predicted.get("latency"))
        yield from (*timed.values(), whole)
        yield from rate_rows(whole, flops, self.dtype, ceilings)
        yield rate("tokens_per_second", step.tokens, whole)
        for work in step.workloads():
            trace(work, self, params)  # first: under a counter of memory nothing compiled runs
            yield from self._memory_rows(work, model)
        is_first = self.mode == "inference" and self.seq_len == min(params.seq_lens)
        compiles = self.optimization != "eager" or self.attention_type == "flex"
        if params.determinism and is_first and not compiles:
            yield from determinism_rows(model, ids[:, :-1])

    def _memory_rows(self, work: Workload, model: nn.Module) -> list[Measurement]:
        """Measure the peak of a call, by kind if a counter sees its tensors."""
        if self.planned_as.optimization == self.optimization:
            planned = self._look.breakdowns.get(work.scope)
            return breakdown_rows(work, model, self.device, self.plan(), planned)
        rows = memory_rows if self.device.startswith("cuda") else unattributed_rows
        return rows(work, self.device, self.plan())


@dataclass(frozen=True)
class GenerationCase(ModelCase):
    """A prompt, and tokens generated one by one over its cache; FLOPs are of the first token."""

    new_tokens: int = 1

    @property
    def position(self) -> int:
        """The prompt's length."""
        return self.seq_len

    def step(
        self, model: nn.Module, ids: torch.Tensor, learning_rate: float, optimizer: str = "adamw"
    ) -> Step:
        """Build the calls: reading the prompt, and one token after it."""
        return Generating(model, ids[:, :-1], self.new_tokens, self.optimization)

    def unsupported(self) -> str:
        """See `ModelCase.unsupported`; also a prompt and tokens that exceed the context."""
        length = self.context_length
        if length is not None and self.seq_len + self.new_tokens > length:
            return (
                f"a prompt of {self.seq_len} and {self.new_tokens} new tokens exceed the context_length {length}; "
                "shorten seq_lens or lower new_tokens"
            )
        return super().unsupported()


def planned_training(case: Case, config: NanoConfig, batch_size: int, seq_len: int) -> Plan:
    """Plan the peak memory of a training step of a config's model, on a case's device."""
    fields = config.model_dump()
    shape = (config.attention_type, seq_len, batch_size, config.dtype)
    return ModelCase(case.device, "", min(PRESETS), fields, *shape, "training").plan()


def model_name(preset: str, overrides: dict[str, Any], optimization: str = "eager") -> str:
    """Return the name of a model in charts and tables; a changed model has its changes in it."""
    changed = ", ".join(f"{name} {value}" for name, value in overrides.items())
    if len(changed) > 60:
        digest = hashlib.sha256(json.dumps(overrides, sort_keys=True).encode()).hexdigest()
        changed = f"{changed[:50]} … {digest[:4]}"
    name = f"{preset} with {changed}" if changed else preset
    return name if optimization == "eager" else f"{name} ({optimization.replace('_', ' ')})"


def text_batch(case: Any, corpus: str, seed: int) -> torch.Tensor:
    """Return ids of real text for a case: int64 [batch_size, seq_len + 1], on its device."""
    generator = torch.Generator().manual_seed(seed)
    ids = text.batch(text.load(corpus), case.batch_size, case.seq_len + 1, generator)
    return ids.to(case.device)
