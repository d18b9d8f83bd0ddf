"""What a profiler found: the time of a module over its calls, and a layer operation by operation."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from nanolib.meters.layers.activations import STATISTICS


@dataclass
class ModuleTime:
    """What one module took.

    Attributes:
        name: As `named_modules` has it; empty for the model itself.
        kind: `model`, `block`, or the class of the module.
        inside: The timed module that called it, by name; of several the first. Those inside the model itself add up to it.
        calls_ms: Each call, ms, those of deep passes left out.
        statistics: Sampled calls → `STATISTICS` of the output, shape [calls, 4]; empty where none were taken.
    """

    name: str
    kind: str
    inside: str | None = None
    calls_ms: list[float] = field(default_factory=list)
    statistics: torch.Tensor = field(default_factory=lambda: torch.empty(0, len(STATISTICS)))

    @property
    def total_ms(self) -> float:
        """Of all calls."""
        return sum(self.calls_ms)


@dataclass
class DeepLayer:
    """What deep passes saw of one block, or of a module beside the blocks.

    Attributes:
        name: As `named_modules` has it.
        passes_ms: Its time in each deep pass, without the instrument's own work.
        operations: Operation → its time in each pass, ms, all calls of it together.
        statistics: `attention_entropy` (nats), `attention_max_weight`, `attention_sparsity`, `mlp_kill_ratio`,
            `norm_variance_ratio` → one value per pass (mean, where the layer has several).
        unseen: Of a block, what the passes did not show, and why.
    """

    name: str
    passes_ms: list[float] = field(default_factory=list)
    operations: dict[str, list[float]] = field(default_factory=dict)
    statistics: dict[str, list[float]] = field(default_factory=dict)
    unseen: list[str] = field(default_factory=list)

    @property
    def between_ms(self) -> list[float]:
        """What each pass spent between operations: Python, and memory given back."""
        return [
            whole - sum(ms[at] for ms in self.operations.values())
            for at, whole in enumerate(self.passes_ms)
        ]
