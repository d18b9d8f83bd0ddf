"""Measure the loss of a trained decoder after sparse attention replaces dense attention.

Losses are paired by seed: the dense and the sparse model have the same weights and read the same
text.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean  # The result of `sum` differs between versions of Python.
from typing import Any, ClassVar

import torch

from nanolib.config import NanoConfig
from nanolib.measurement import Measurements
from nanolib.models import Transformer, create_model, training
from nanolib.models.attention.sparse import watched_work
from nanolib.run.case import Case, Ceilings, over_seeds

_HELD_OUT_BATCHES, _BATCH, _RATE = 6, 8, 3e-3


@dataclass(frozen=True)
class QualityCase(Case):
    """Case that measures the loss of a small decoder with one sparse attention.

    Attributes:
        name: Name of the attention for people.
        options: Options of the attention `sparse`.
        seq_len: Sequence length, in bytes of text.
        seeds: Number of decoders, each with its own initial weights.
        steps: Training steps of the dense decoder.
        d_model: Width of the decoder.
        num_layers: Number of layers.
    """

    supports_ab: ClassVar[bool] = False  # The case has no timings that `nano ab` could compare.

    name: str
    options: dict[str, Any]
    seq_len: int
    seeds: int
    steps: int
    d_model: int
    num_layers: int

    def __str__(self) -> str:
        return f"{self.name} loss, n={self.seq_len}, {self.seeds} seeds"

    def measure(self, params: Any, ceilings: Ceilings) -> Measurements:
        """Measure the loss difference from the dense model on held-out text.

        Yields:
            Rows of `sparsity` of the mask, `loss` of the dense model, and `loss_difference` with
            the scope `replaced`. All rows are means over seeds with intervals. Losses are in nats
            per byte.
        """
        shape = {"context_length": self.seq_len, "d_model": self.d_model}
        shape |= {
            "num_layers": self.num_layers,
            "num_heads": 4,
            "vocab_size": training.TEXT_VOCAB_SIZE,
        }
        sparse = NanoConfig(**shape, attention_type="sparse", attention_options=self.options)
        sparsities, losses, differences = [], [], []
        for seed in range(self.seeds):
            weights, dense_loss = _train_dense(self.device, self.steps, seed, **shape)
            model = create_model(sparse, self.device, seed=0)
            # The dense model has no score layer for the pattern `dca`, so the layer is untrained.
            model.load_state_dict(weights, strict=False)
            with watched_work() as found:
                differences.append(_loss(model) - dense_loss)
            sparsities.append(fmean(work.sparsity for work in found))
            losses.append(dense_loss)
        yield over_seeds("sparsity", sparsities, predicted=self.options.get("sparsity"))
        yield over_seeds("loss", losses, "dense")
        yield over_seeds("loss_difference", differences, "replaced", paired=True)


def _batches(model: Transformer, count: int, seed: int | None) -> Iterator[torch.Tensor]:
    """Draw batches of text: training text for a seed, or held-out text if the seed is None."""
    data = training.load_text("")
    cut = len(data) * 9 // 10
    part = data[cut:] if seed is None else data[:cut]
    generator = torch.Generator().manual_seed(seed or 0)
    length, device = model.config.context_length + 1, next(model.parameters()).device
    return training.text_batches(part, count, _BATCH, length, generator, device)


@torch.no_grad()
def _loss(model: Transformer) -> float:
    """Return the loss on held-out text, nats per byte."""
    held_out = _batches(model, _HELD_OUT_BATCHES, None)
    return fmean(float(training.next_token_loss(model, ids)) for ids in held_out)


@functools.lru_cache(maxsize=64)  # All sparse attentions share the dense decoders.
def _train_dense(
    device: str, steps: int, seed: int, **shape: int
) -> tuple[dict[str, torch.Tensor], float]:
    """Train a dense decoder, and return its weights and its loss on held-out text."""
    model = create_model(NanoConfig(**shape), device, seed=seed)
    training.train(model, _batches(model, steps, seed), _RATE)
    return model.state_dict(), _loss(model)
