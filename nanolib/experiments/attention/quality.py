"""Measure the loss of a trained decoder after sparse attention replaces dense attention.

Losses are paired by seed: the dense and the sparse model start from the same weights and read the
same text in the same order.
"""

import functools
from dataclasses import dataclass, replace
from statistics import fmean  # The result of `sum` differs between versions of Python.
from typing import Any, ClassVar

import torch

from nanolib.config import NanoConfig
from nanolib.measurement import Measurements, exact
from nanolib.models import Transformer, create_model, text
from nanolib.models.attention.patterns import BY_TILE, DYNAMIC, WINDOWED
from nanolib.models.attention.sparse import watched_work
from nanolib.models.training import train
from nanolib.run.case import Case, Ceilings, over_seeds

# These patterns have no option `sparsity`. A search over another option reaches the target.
_SEARCHED = {"threshold": "mass", "dca": "window"}
QUALITY_PATTERNS = (*WINDOWED, *BY_TILE, *_SEARCHED)
_TRAINED, _TUNED, _HELD_OUT = 0, 1, 2  # Each stream has different batches of text.
_HELD_OUT_BATCHES, _BATCH, _RATE = 6, 8, 3e-3
_BISECTIONS = 8
_Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class QualityCase(Case):
    """Case that measures the loss of a small decoder with one pattern at one target sparsity."""

    supports_ab: ClassVar[bool] = False  # The case has no timings that `nano ab` could compare.

    name: str
    pattern: str
    target: float
    seq_len: int
    block_size: int
    seeds: int
    steps: int
    finetune_steps: int
    d_model: int
    num_layers: int

    def __str__(self) -> str:
        return f"{self.name} loss, n={self.seq_len}, {self.seeds} seeds"

    def measure(self, params: Any, ceilings: Ceilings) -> Measurements:
        """Measure the loss difference from the dense model, before and after a fine-tune.

        Yields:
            Rows of `sparsity` of the mask, `loss` of the dense model, and `loss_difference` with
            the scopes `replaced` and `fine_tuned`. Losses are means over seeds with intervals, nats
            per byte.
        """
        # All patterns use the same dense case, so nanolib trains each dense model only once.
        dense = replace(self, name="", pattern="dense", target=0.0, seeds=1)
        sparsities, losses, replaced, tuned = [], [], [], []
        for seed in range(self.seeds):
            weights, dense_loss, dense_tuned = _train_dense(dense, seed)
            sparse = self._sparse(weights, **self._options(weights))
            with watched_work() as found:
                replaced.append(self._loss(sparse) - dense_loss)
            sparsities.append(fmean(work.sparsity for work in found))
            losses.append(dense_loss)
            tuned.append(self._tuned_loss(sparse, seed) - dense_tuned)
        if self.pattern in DYNAMIC:  # The sparsity of a dynamic pattern depends on the input.
            yield over_seeds("sparsity", sparsities)
        else:
            yield exact("sparsity", sparsities[0], method="mask")
        yield over_seeds("loss", losses, "dense")
        yield over_seeds("loss_difference", replaced, "replaced", paired=True)
        yield over_seeds("loss_difference", tuned, "fine_tuned", paired=True)

    def _config(self, **changes: Any) -> NanoConfig:
        shape = {"d_model": self.d_model, "num_layers": self.num_layers, "num_heads": 4}
        shape |= {"vocab_size": text.VOCAB_SIZE, "context_length": self.seq_len}
        return NanoConfig(**shape | changes)

    def _batches(self, stream: int, count: int, seed: int = 0) -> list[torch.Tensor]:
        """Return batches of text. Only held-out batches come from the last tenth of the text."""
        data = text.load("")
        cut = len(data) * 9 // 10
        part = data[cut:] if stream == _HELD_OUT else data[:cut]
        generator = torch.Generator().manual_seed(1000 * seed + stream)
        return list(text.batches(part, count, _BATCH, self.seq_len + 1, generator, self.device))

    @torch.no_grad()
    def _loss(self, model: Transformer) -> float:
        """Return the loss on held-out text, nats per byte."""
        return fmean(float(model.loss(ids)) for ids in self._batches(_HELD_OUT, _HELD_OUT_BATCHES))

    def _tuned_loss(self, model: Transformer, seed: int) -> float:
        """Fine-tune a model on the text for a seed, and return the loss on held-out text."""
        train(model, self._batches(_TUNED, self.finetune_steps, seed), _RATE / 3)
        return self._loss(model)

    def _sparse(self, weights: _Weights, **options: Any) -> Transformer:
        options |= {"pattern": self.pattern, "block_size": self.block_size}
        config = self._config(attention_type="sparse", attention_options=options)
        model = create_model(config, self.device, seed=0)
        # The dense model has no score layer for the pattern `dca`, so that layer starts untrained.
        model.load_state_dict(weights, strict=False)
        return model

    def _options(self, weights: _Weights) -> dict[str, Any]:
        """Return options of the pattern that reach the target sparsity."""
        count = max(1, round((1 - self.target) * self.seq_len / 8))
        options = {"global_tokens": count, "random_tokens": self.block_size}
        if self.pattern not in _SEARCHED:
            return options | {"sparsity": self.target}
        if self.pattern == "dca":
            options["random_tokens"] = count
        name = _SEARCHED[self.pattern]
        ids = self._batches(_HELD_OUT, _HELD_OUT_BATCHES)[0]
        low, high = 0.0, 1.0
        for _ in range(_BISECTIONS):
            share = (low + high) / 2
            options[name] = share if name == "mass" else max(1, round(share * self.seq_len))
            with watched_work() as found, torch.no_grad():
                self._sparse(weights, **options).loss(ids)
            removed = fmean(work.sparsity for work in found)
            low, high = (share, high) if removed > self.target else (low, share)
        return options


@functools.lru_cache(maxsize=64)
def _train_dense(case: QualityCase, seed: int) -> tuple[_Weights, float, float]:
    """Train a dense decoder and return its weights, its loss, and the loss after a fine-tune."""
    model = create_model(case._config(), case.device, seed=seed)
    train(model, case._batches(_TRAINED, case.steps, seed), _RATE)
    weights = {name: x.detach().clone() for name, x in model.state_dict().items()}
    return weights, case._loss(model), case._tuned_loss(model, seed)
