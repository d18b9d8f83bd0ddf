"""A model at one shape: where it comes from, and how it is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from nanolib.config import PRESETS, NanoConfig
from nanolib.models import create_model
from nanolib.models.user import build_model, runs_code
from nanolib.run.case import Case


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
        """Whether it is the user's own model: `preset` names it, and `overrides` are its options."""
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
