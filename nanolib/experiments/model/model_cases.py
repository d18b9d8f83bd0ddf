"""The model notebook's cases: a model at one shape, running, training or generating; or trained on text for its loss."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from nanolib.config import PRESETS, NanoConfig
from nanolib.meters.flops import count_flops, model_flops
from nanolib.meters.memory import fake_tensors
from nanolib.models import attention, create_model
from nanolib.models.user import build_model, hugging_face_config, logits_of, runs_code
from nanolib.run.own_model import context_length
from nanolib.run.params import Case

Mode = Literal["inference", "training", "generation"]


@dataclass(frozen=True)
class ModelCase(Case):
    """One model on one shape; `name` is what charts call the model, `reduced` what was made smaller so that it fits."""

    name: str
    preset: str
    overrides: dict[str, Any]
    attention_type: str
    seq_len: int
    batch_size: int
    dtype: str
    mode: Mode
    optimisation: str = "eager"
    reduced: str = ""

    @property
    def own(self) -> bool:
        """Whether it is the user's own model: then `preset` says where it comes from and `overrides` are its options."""
        return self.preset not in PRESETS

    @property
    def runs_code(self) -> bool:
        """Whether to build the model is to run code of the user's."""
        return self.own and runs_code(self.preset)

    @property
    def context_length(self) -> int | None:
        """The longest sequence, tokens; None where nobody knows one."""
        if self.runs_code:
            return None
        return (
            context_length(hugging_face_config(self.preset, self.overrides)) if self.own else self.config.context_length
        )

    @property
    def config(self) -> NanoConfig:
        """The configuration of a preset's model."""
        changes = {"attention_type": self.attention_type, "dtype": self.dtype}
        return NanoConfig.from_preset(self.preset, **self.overrides | changes)

    @property
    def position(self) -> int:
        """Tokens that are cached before those whose work is counted."""
        return 0

    def build(self, seed: int | None = None) -> nn.Module:
        """The model, in training mode."""
        if self.own:
            return build_model(self.preset, self.overrides, self.device, self.dtype, seed)
        return create_model(self.config, self.device, seed)

    @property
    def flops(self) -> int:
        """Of a forward pass; attention counts the pairs that its mask keeps, all of them where the input decides."""
        if self.own:
            return _counted(self.case_id, self)[1]
        config = self.config
        options = attention.shared_options(config.attention_type, config.attention_options)

        def kept(q_len: int, kv_len: int, causal: bool) -> float:
            found = attention.work(config.attention_type, q_len, kv_len, causal=causal, options=options)
            return (found or attention.work("dense", q_len, kv_len, causal=causal)).kept

        length = 1 if self.position else self.seq_len
        return model_flops(config, self.batch_size, length, kept, position=self.position)["total"]

    @property
    def parameter_count(self) -> int:
        """Weights of the model."""
        return _counted(self.case_id, self)[0] if self.own else self.config.parameter_count

    def __str__(self) -> str:
        """Preset, shape and mode."""
        return f"{self.name} {self.mode} n={self.seq_len} batch={self.batch_size} {self.attention_type} {self.dtype}"


@dataclass(frozen=True)
class GenerationCase(ModelCase):
    """A prompt read at once, and tokens generated one by one over its KV cache; FLOPs are those of the first one."""

    new_tokens: int = 1

    @property
    def position(self) -> int:
        """The prompt's length."""
        return self.seq_len


@dataclass(frozen=True)
class LossCase(Case):
    """One model trained on real text for some steps."""

    interleaves: ClassVar[bool] = False  # nothing is timed

    name: str
    preset: str
    overrides: dict[str, Any]
    attention_type: str
    seq_len: int
    batch_size: int
    dtype: str
    steps: int
    learning_rate: float
    corpus: str

    own = ModelCase.own
    runs_code = ModelCase.runs_code
    config = ModelCase.config
    build = ModelCase.build

    def __str__(self) -> str:
        """Preset and steps."""
        return f"{self.name} loss over {self.steps} steps"


_KNOWN: dict[str, tuple[int, int]] = {}


def _counted(case_id: str, case: ModelCase) -> tuple[int, int]:
    """Parameters, and FLOPs of a forward pass as torch counts them, of a model that no formula knows; without running it."""
    if case_id not in _KNOWN:
        with fake_tensors():
            model = case.build().eval()
            ids = torch.zeros(case.batch_size, case.seq_len, dtype=torch.int64, device=case.device)
            with torch.no_grad():
                flops = count_flops(functools.partial(logits_of(model), ids))
            _KNOWN[case_id] = sum(p.numel() for p in model.parameters()), flops
    return _KNOWN[case_id]


def model_name(preset: str, overrides: dict[str, Any], optimisation: str = "eager") -> str:
    """What charts and tables call a model: one that was changed never goes by its bare name."""
    changed = ", ".join(f"{name} {value}" for name, value in overrides.items())
    if len(changed) > 60:
        changed = changed[:50] + " … " + hashlib.sha256(json.dumps(overrides, sort_keys=True).encode()).hexdigest()[:4]
    name = f"{preset} with {changed}" if changed else preset
    return name if optimisation == "eager" else f"{name} ({optimisation.replace('_', ' ')})"
