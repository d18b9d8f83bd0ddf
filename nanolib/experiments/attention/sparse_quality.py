"""What sparsity does to a model: the loss of a trained decoder when its dense attention is replaced, and after a fine-tune with it.

Everything is paired by seed: the dense model and the sparse one start from the same weights and read the same text in the same
order, so that what differs is the attention.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import fmean  # unlike `sum`, the same to the last digit in every Python
from typing import Any, ClassVar

import torch

from nanolib.config import NanoConfig
from nanolib.experiments.model.steps import planned_training
from nanolib.measurement import Measurement, exact
from nanolib.models import Transformer, create_model, text
from nanolib.models.attention.dynamic import CHOOSERS
from nanolib.models.attention.patterns import PATTERNS
from nanolib.models.attention.sparse import watched_work
from nanolib.models.training import train
from nanolib.run.case import Case, Plan
from nanolib.run.seeds import over_seeds

QUALITY_PATTERNS = (*PATTERNS, *CHOOSERS)
_TRAINED, _TUNED, _HELD_OUT = 0, 1, 2  # streams of text that share nothing but the seed
_HELD_OUT_BATCHES, _BATCH, _RATE = 6, 8, 3e-3
_BISECTIONS = 8
# What is turned until these remove the share asked for: their own options say what to keep, not how much.
_TURNED = {
    "threshold": ("mass", 1.0, False),
    "dca": ("window", 0.0, True),
}  # option, largest (0: the length), whole


@dataclass(frozen=True)
class QualityCase(Case):
    """One pattern at one sparsity in a small decoder, over seeds; `name` is what charts call it."""

    interleaves: ClassVar[bool] = False  # nothing is timed

    name: str
    pattern: str
    target: float
    seq_len: int
    block_size: int
    seeds: int
    steps: int
    tuning_steps: int
    d_model: int
    num_layers: int

    def __str__(self) -> str:
        """Pattern, sparsity and length."""
        return f"{self.name} loss, n={self.seq_len}, {self.seeds} seeds"

    @property
    def _like(self) -> QualityCase:
        return replace(self, name="", pattern="dense", target=0.0, seeds=1, steps=1, tuning_steps=1)

    def plan(self) -> Plan:
        """The peak memory of a training step of the dense model, which no pattern exceeds by much."""
        config = _config(self.seq_len, self.d_model, self.num_layers)
        return planned_training(self._like, config, _BATCH, self.seq_len)

    def measure(self, params: Any, ceilings: dict[str, float]) -> Iterator[Measurement]:
        """Loss above the dense model's with the pattern in its place, and after both were trained on for the same steps.

        Yields:
            `sparsity` as it came out, `loss` of the dense model, `loss_difference` in scope `replaced` and `fine_tuned`, nats per
            byte, each a mean over seeds with its interval.
        """
        data = text.load("")
        held_out = _batches(data, 0, _HELD_OUT, self.seq_len, self.device, _HELD_OUT_BATCHES)
        shape = (
            self.device,
            self.seq_len,
            self.steps,
            self.tuning_steps,
            self.d_model,
            self.num_layers,
        )
        sparsities, dense_losses, replaced, tuned = [], [], [], []
        for seed in range(self.seeds):
            dense = _dense(seed, *shape)
            sparse = _model(self, dense.weights, _options_for(self, dense.weights, held_out[0]))
            with watched_work() as found:
                replaced.append(_loss(sparse, held_out) - dense.loss)
            sparsities.append(fmean(work.sparsity for work in found))
            dense_losses.append(dense.loss)
            train(
                sparse,
                _batches(data, seed, _TUNED, self.seq_len, self.device, self.tuning_steps),
                _RATE / 3,
            )
            tuned.append(_loss(sparse, held_out) - dense.tuned_loss)
        if self.pattern in CHOOSERS:  # every input has its own
            yield over_seeds("sparsity", sparsities, "")
        else:
            yield exact("sparsity", sparsities[0], method="mask")
        yield over_seeds("loss", dense_losses, "dense")
        yield over_seeds("loss_difference", replaced, "replaced", paired=True)
        yield over_seeds("loss_difference", tuned, "fine_tuned", paired=True)


def quality_cases(
    device: str, patterns: list[str], targets: list[float], shape: dict[str, int]
) -> list[Case]:
    """Every pattern at every sparsity.

    Args:
        device: Where.
        patterns: Names in `QUALITY_PATTERNS`.
        targets: Shares of connections to remove.
        shape: The other fields of `QualityCase`.
    """
    return [
        QualityCase(device, f"{pattern} s={target:g}", pattern, target, **shape)
        for pattern in patterns
        for target in targets
    ]


def _config(seq_len: int, d_model: int, num_layers: int, **changes: Any) -> NanoConfig:
    shape = {"d_model": d_model, "num_layers": num_layers, "context_length": seq_len}
    return NanoConfig(vocab_size=text.VOCAB_SIZE, num_heads=4, **shape, **changes)


def _model(
    case: QualityCase, weights: dict[str, torch.Tensor], changes: dict[str, Any]
) -> Transformer:
    model = create_model(
        _config(case.seq_len, case.d_model, case.num_layers, **changes), case.device, seed=0
    )
    # the score that dca chooses by is not in a dense model: it starts untrained
    model.load_state_dict(weights, strict=False)
    return model


@dataclass(frozen=True)
class _Dense:
    """A trained dense decoder: its weights, its loss on held-out text, and that after it was trained on."""

    weights: dict[str, torch.Tensor]
    loss: float
    tuned_loss: float


@functools.lru_cache(maxsize=64)
def _dense(
    seed: int,
    device: str,
    seq_len: int,
    steps: int,
    tuning_steps: int,
    d_model: int,
    num_layers: int,
) -> _Dense:
    """The same for every pattern, so made once per process."""
    data = text.load("")
    held_out = _batches(data, 0, _HELD_OUT, seq_len, device, _HELD_OUT_BATCHES)
    model = create_model(_config(seq_len, d_model, num_layers), device, seed=seed)
    train(model, _batches(data, seed, _TRAINED, seq_len, device, steps), _RATE)
    weights = {name: x.detach().clone() for name, x in model.state_dict().items()}
    loss = _loss(model, held_out)
    train(model, _batches(data, seed, _TUNED, seq_len, device, tuning_steps), _RATE / 3)
    return _Dense(weights, loss, _loss(model, held_out))


def _batches(
    data: torch.Tensor, seed: int, stream: int, seq_len: int, device: str, count: int
) -> list[torch.Tensor]:
    """Windows of the text: its last tenth is for `_HELD_OUT` alone."""
    cut = len(data) * 9 // 10
    part = data[cut:] if stream == _HELD_OUT else data[:cut]
    generator = torch.Generator().manual_seed(1000 * seed + stream)
    return list(text.batches(part, count, _BATCH, seq_len + 1, generator, device))


@torch.no_grad()
def _loss(model: Transformer, batches: list[torch.Tensor]) -> float:
    return sum(float(model.loss(ids)) for ids in batches) / len(batches)


def _options_for(
    case: QualityCase, weights: dict[str, torch.Tensor], ids: torch.Tensor
) -> dict[str, Any]:
    """The config's changes that make the pattern remove the share asked for, on this text where the text decides."""
    options: dict[str, Any] = {"pattern": case.pattern, "block_size": case.block_size}
    if case.pattern == "local_global" or case.pattern == "bigbird":
        options |= {
            "global_tokens": max(1, round((1 - case.target) * case.seq_len / 8)),
            "random_tokens": case.block_size,
        }
    if case.pattern not in _TURNED:
        return {
            "attention_type": "sparse",
            "attention_options": options | {"sparsity": case.target},
        }
    name, largest, whole = _TURNED[case.pattern]
    if case.pattern == "dca":
        count = max(1, round((1 - case.target) * case.seq_len / 8))
        options |= {"global_tokens": count, "random_tokens": count}
    low, high = 0.0, largest or float(case.seq_len)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        value = max(1, round(middle)) if whole else middle
        changes = {"attention_type": "sparse", "attention_options": options | {name: value}}
        with watched_work() as found, torch.no_grad():
            _model(case, weights, changes).loss(ids)
        removed = fmean(work.sparsity for work in found)
        low, high = (middle, high) if removed > case.target else (low, middle)
    return changes
