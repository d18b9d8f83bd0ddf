"""The model notebook's cases: a model at one shape, running, training or generating."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from nanolib.config import PRESETS, NanoConfig
from nanolib.experiments.model.look import Counted, count_by_running, look_at
from nanolib.experiments.model.steps import Generating, Inferring, Training
from nanolib.measurement import exact
from nanolib.meters.flops import BACKWARD_FACTOR, model_flops
from nanolib.meters.memory import MIB
from nanolib.models import attention, create_model, text
from nanolib.models.optimise import is_compiled
from nanolib.models.optimise import unsupported as unsupported_on
from nanolib.models.user import build_model, context_length, hugging_face_config, missing, runs_code
from nanolib.run.case import Case, Measuring, Plan
from nanolib.run.memory_plan import Workload
from nanolib.run.peaks_case import roofline_ms
from nanolib.run.rows import UNCOUNTED, holding_rows, memory_rows, trace, unattributed_rows

Mode = Literal["inference", "training", "generation"]


@dataclass(frozen=True)
class ShapedCase(Case):
    """A model at one shape; `name` is what charts call the model."""

    name: str
    preset: str
    overrides: dict[str, Any]
    attention_type: str
    seq_len: int
    batch_size: int
    dtype: str

    @property
    def own(self) -> bool:
        """Whether it is the user's own model: then `preset` says where it comes from and `overrides` are its options."""
        return self.preset not in PRESETS

    @property
    def runs_code(self) -> bool:
        """Whether to build the model is to run code of the user's."""
        return self.own and runs_code(self.preset)

    @property
    def config(self) -> NanoConfig:
        """The configuration of a preset's model."""
        changes = {"attention_type": self.attention_type, "dtype": self.dtype}
        return NanoConfig.from_preset(self.preset, **self.overrides | changes)

    def build(self, seed: int | None = None) -> nn.Module:
        """The model, in training mode."""
        if self.own:
            return build_model(self.preset, self.overrides, self.device, self.dtype, seed)
        return create_model(self.config, self.device, seed)

    @property
    def model_case(self) -> ModelCase:
        """The training step of the same model at the same shape."""
        shape = {field.name: getattr(self, field.name) for field in dataclasses.fields(ShapedCase)}
        return ModelCase(**shape, mode="training")


@dataclass(frozen=True)
class ModelCase(ShapedCase):
    """A model that runs, trains or generates."""

    mode: Mode
    optimisation: str = "eager"

    @property
    def model_case(self) -> ModelCase:
        """Itself."""
        return self

    @property
    def counted(self) -> Counted | None:
        """What torch counts of a model that no formula knows; None where that takes data."""
        return look_at(self.planned_as).counted

    @property
    def context_length(self) -> int | None:
        """The longest sequence, tokens; None where nobody knows one."""
        if self.runs_code:
            return None
        return (
            context_length(hugging_face_config(self.preset, self.overrides))
            if self.own
            else self.config.context_length
        )

    @property
    def position(self) -> int:
        """Tokens that are cached before those whose work is counted."""
        return 0

    @property
    def flops(self) -> int:
        """Of a forward pass; attention counts the pairs that its mask keeps, all of them where the input decides."""
        if self.own:
            return self.counted.flops
        config = self.config
        length = 1 if self.position else self.seq_len
        return model_flops(config, self.batch_size, length, self._kept, position=self.position)[
            "total"
        ]

    def _kept(self, q_len: int, kv_len: int) -> float:
        """Query-key pairs that its attention keeps per head, all where the input decides."""
        config = self.config
        options = attention.shared_options(config.attention_type, config.attention_options)
        found = attention.work(config.attention_type, q_len, kv_len, causal=True, options=options)
        return (found or attention.work("dense", q_len, kv_len, causal=True)).kept

    @property
    def work(self) -> float:
        """FLOPs of what is timed: in training the backward pass too, as far as weights learn."""
        if self.mode != "training":
            return self.flops
        return self.counted.training_flops if self.own else self.flops * (1 + BACKWARD_FACTOR)

    @property
    def moved(self) -> int:
        """Bytes that must move at least once.

        A forward pass reads the weights. A training step reads them twice, writes gradients, and fused AdamW reads those, the
        weights and both states, and writes all but the gradients. A token after a prompt reads weights and the keys and values of
        the cache that its attention keeps.
        """
        if self.own and self.position:
            return self.counted.read
        if self.mode == "training":
            learning = self.counted.learning if self.own else self.parameter_count
            return (2 * self.parameter_count + (1 + 4 + 3) * learning) * self._item
        if not self.position:
            return self.parameter_count * self._item
        config = self.config
        keys = (
            self._kept(1, self.position + 1) - 1
        )  # a token sees itself too, which no cache holds yet
        cached = (
            2
            * config.num_layers
            * self.batch_size
            * round(keys * config.kv_heads)
            * config.head_dim
        )
        return (config.decoded_parameters(self.batch_size) + cached) * self._item

    @property
    def _item(self) -> int:
        return getattr(torch, self.dtype).itemsize

    @property
    def parameter_count(self) -> int:
        """Weights of the model."""
        return self.counted.parameters if self.own else self.config.parameter_count

    def __str__(self) -> str:
        """Preset, shape and mode."""
        return f"{self.name} {self.mode} n={self.seq_len} batch={self.batch_size} {self.attention_type} {self.dtype}"

    def unsupported(self) -> str:
        """Why this machine cannot run it, as far as can be told without running code of the user's."""
        if (
            self.own
            and not self.runs_code
            and (reason := missing(self.preset) or self.plan().unsupported)
        ):
            return reason
        return unsupported_on(self.optimisation, self.device)

    def plan(self) -> Plan:
        """The peak memory of a case, counted without running it; of a compiled or captured model it is the eager one's."""
        if reason := self.not_planned():
            return Plan(reason=reason)
        return look_at(self.planned_as).plan

    def at_depth(
        self, depth: int, optimizer: str = "adamw", layers: str = "num_layers"
    ) -> tuple[nn.Module, Iterator[Workload]]:
        """Its model with so many blocks, and its calls.

        Args:
            depth: Blocks; 0 for its own.
            optimizer: A key of `OPTIMIZERS`.
            layers: The option that says how many blocks there are.
        """
        overrides = self.overrides | ({layers: depth} if depth else {})
        model = dataclasses.replace(self, overrides=overrides).build()
        return model, self.step(model, self.no_ids(), 1e-3, optimizer).workloads()

    def no_ids(self) -> torch.Tensor:
        """Ids of its shape, all 0: int64 [batch, length + 1]."""
        return torch.zeros(self.batch_size, self.seq_len + 1, dtype=torch.int64, device=self.device)

    @property
    def planned_as(self) -> ModelCase:
        """What has the same plan: what is called otherwise, and a preset that is compiled or captured."""
        eager = is_compiled(self.optimisation) or self.optimisation == "cuda_graph"
        optimisation = "eager" if eager else self.optimisation
        return dataclasses.replace(self, name="", optimisation=optimisation)

    def not_planned(self) -> str:
        """Why its memory cannot be planned; empty where it can."""
        if self.own:
            return ""
        options = attention.shared_options(self.attention_type, self.config.attention_options)
        if self.attention_type == "flex":
            return UNCOUNTED
        known = attention.work(self.attention_type, 1, 1, causal=True, options=options)
        return "" if known else "what is kept depends on the input"

    def formulas(self, ceilings: dict[str, float] | None = None) -> dict[str, float | str]:
        """What formulas say before anything runs, without planning its memory.

        Args:
            ceilings: As `roofline_ms` takes them.

        Returns:
            `parameters`, `footprint` (MiB of weights), `flops` (FLOP: the forward pass, or in training forward and backward),
            `bytes` (as `moved`),
            `latency` (ms, roofline) where the ceilings are known; in generation `flops`,
            `bytes` and `latency` are those of one token.
        """
        if self.own and self.counted is None:
            return {}
        count, work, moved = self.parameter_count, self.work, self.moved
        predicted: dict[str, float | str] = {
            "parameters": count,
            "footprint": count * self._item / MIB,
            "flops": work,
            "bytes": moved,
        }
        if (latency := roofline_ms(work, moved, self.dtype, ceilings or {})) is not None:
            predicted["latency"] = latency
        return predicted

    def known(self, ceilings: dict[str, float]) -> dict[str, Any]:
        """What is predicted; where tensors without data would not do, its FLOPs are counted by a run first."""
        if self.own and self.counted is None:
            count_by_running(self.planned_as)
        return self.predict(ceilings)

    def step(
        self, model: nn.Module, ids: torch.Tensor, learning_rate: float, optimizer: str = "adamw"
    ) -> Inferring | Training | Generating:
        """Its calls: what its times and its memory are of."""
        if self.mode == "inference":
            return Inferring(model, ids[:, :-1], self.optimisation)
        return Training(model, ids, self.optimisation, learning_rate, optimizer)

    @property
    def group(self) -> str:
        """See `Case.group`: all optimisations and types of one model, shape and mode."""
        model = (
            self.device,
            self.preset,
            json.dumps(self.overrides, sort_keys=True),
            self.attention_type,
        )
        return " ".join(map(str, (*model, self.seq_len, self.batch_size, self.mode)))

    @property
    def title(self) -> str:
        """See `Case.title`."""
        return f"{self.optimisation} {self.dtype}"

    @property
    def is_baseline(self) -> bool:
        """See `Case.is_baseline`: each type as it is."""
        return self.optimisation == "eager"

    def measure(self, params: Any, ceilings: dict[str, float]) -> Measuring:
        """Its size, memory and rates, and in turns with others of its group its times."""
        predicted = self.known(ceilings)
        model = self.build(params.seed)
        weights = tuple(model.parameters())
        count = sum(p.numel() for p in weights)
        yield exact("parameters", count, method="count", predicted=predicted["parameters"])
        footprint = sum(p.nbytes for p in weights) / MIB
        yield exact("footprint", footprint, method="count", predicted=predicted["footprint"])
        ids = text_batch(self, params.corpus, params.seed)
        step = self.step(model, ids, params.learning_rate)
        yield from step.measure(self, params, predicted, ceilings)
        for work in step.workloads():
            trace(
                work, self, params
            )  # before the memory is counted: under a counter nothing compiled runs
            if self.optimisation == "cuda_graph" or (
                is_compiled(self.optimisation) and self.device.startswith("cuda")
            ):
                yield from memory_rows(work, self.device, self.plan())
            elif is_compiled(self.optimisation):
                yield from unattributed_rows(work, self.device, self.plan())
            else:
                known = {} if self.not_planned() else look_at(self.planned_as).holdings
                yield from holding_rows(
                    work, model, self.device, self.plan(), known.get(work.scope)
                )


@dataclass(frozen=True)
class GenerationCase(ModelCase):
    """A prompt read at once, and tokens generated one by one over its KV cache; FLOPs are those of the first one."""

    new_tokens: int = 1

    @property
    def position(self) -> int:
        """The prompt's length."""
        return self.seq_len

    def step(
        self, model: nn.Module, ids: torch.Tensor, learning_rate: float, optimizer: str = "adamw"
    ) -> Inferring | Training | Generating:
        """Reading the prompt, and one token after it."""
        return Generating(model, ids[:, :-1], self.new_tokens, self.optimisation)

    def unsupported(self) -> str:
        """Also a prompt and tokens that are too many for the model."""
        length = self.context_length
        if length is not None and self.seq_len + self.new_tokens > length:
            return (
                f"a prompt of {self.seq_len} and {self.new_tokens} new tokens exceed the context_length {length}; "
                "shorten seq_lens or lower new_tokens"
            )
        return super().unsupported()


def model_name(preset: str, overrides: dict[str, Any], optimisation: str = "eager") -> str:
    """What charts and tables call a model: one that was changed never goes by its bare name."""
    changed = ", ".join(f"{name} {value}" for name, value in overrides.items())
    if len(changed) > 60:
        digest = hashlib.sha256(json.dumps(overrides, sort_keys=True).encode()).hexdigest()
        changed = f"{changed[:50]} … {digest[:4]}"
    name = f"{preset} with {changed}" if changed else preset
    return name if optimisation == "eager" else f"{name} ({optimisation.replace('_', ' ')})"


def text_batch(case: Any, corpus: str, seed: int) -> torch.Tensor:
    """Ids that a case works on: real text, int64 [batch_size, seq_len + 1], on its device."""
    generator = torch.Generator().manual_seed(seed)
    return text.batch(text.load(corpus), case.batch_size, case.seq_len + 1, generator).to(
        case.device
    )
