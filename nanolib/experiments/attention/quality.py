"""Measure the loss of a trained decoder after sparse attention replaces dense attention.

Losses are paired by seed: the dense and the sparse model start from the same weights and read the
same text in the same order.
"""

import functools
from dataclasses import dataclass
from statistics import fmean  # The result of `sum` differs between versions of Python.
from typing import Any, ClassVar

import torch

from nanolib.config import NanoConfig
from nanolib.measurement import Measurements
from nanolib.models import Transformer, create_model, text
from nanolib.models.attention.sparse import watched_work
from nanolib.models.training import next_token_loss, train
from nanolib.run.case import Case, Ceilings, over_seeds

_TRAINED, _TUNED, _HELD_OUT = 0, 1, 2  # Each stream has different batches of text.
_HELD_OUT_BATCHES, _BATCH, _RATE = 6, 8, 3e-3
_Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class QualityCase(Case):
    """Case that measures the loss of a small decoder with one sparse attention.

    Attributes:
        name: Name of the attention for people.
        options: Options of the attention `sparse`.
        seq_len: Sequence length, in bytes of text.
        seeds: Number of decoders, each with its own initial weights.
        steps: Training steps of the dense decoder.
        finetune_steps: Further training steps of both decoders.
        d_model: Width of the decoder.
        num_layers: Number of layers.
    """

    supports_ab: ClassVar[bool] = False  # The case has no timings that `nano ab` could compare.

    name: str
    options: dict[str, Any]
    seq_len: int
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
            the scopes `replaced` and `fine_tuned`. All rows are means over seeds with intervals.
            Losses are in nats per byte.
        """
        shape = {"seq_len": self.seq_len, "d_model": self.d_model, "num_layers": self.num_layers}
        sparse = _config(**shape, attention_type="sparse", attention_options=self.options)
        sparsities, losses, replaced, tuned = [], [], [], []
        for seed in range(self.seeds):
            weights, dense_loss, dense_tuned = _train_dense(
                self.device, self.steps, self.finetune_steps, seed, **shape
            )
            model = create_model(sparse, self.device, seed=0)
            # The dense model has no score layer for the pattern `dca`, so the layer is untrained.
            model.load_state_dict(weights, strict=False)
            with watched_work() as found:
                replaced.append(_loss(model) - dense_loss)
            sparsities.append(fmean(work.sparsity for work in found))
            losses.append(dense_loss)
            tuned.append(_tuned_loss(model, self.finetune_steps, seed) - dense_tuned)
        yield over_seeds("sparsity", sparsities, predicted=self.options.get("sparsity"))
        yield over_seeds("loss", losses, "dense")
        yield over_seeds("loss_difference", replaced, "replaced", paired=True)
        yield over_seeds("loss_difference", tuned, "fine_tuned", paired=True)


def _config(seq_len: int, **rest: Any) -> NanoConfig:
    return NanoConfig(vocab_size=text.VOCAB_SIZE, context_length=seq_len, num_heads=4, **rest)


def _batches(model: Transformer, stream: int, count: int, seed: int = 0) -> list[torch.Tensor]:
    """Return batches of text. Only held-out batches come from the last tenth of the text."""
    data = text.load("")
    cut = len(data) * 9 // 10
    part = data[cut:] if stream == _HELD_OUT else data[:cut]
    generator = torch.Generator().manual_seed(1000 * seed + stream)
    length, device = model.config.context_length + 1, next(model.parameters()).device
    return list(text.batches(part, count, _BATCH, length, generator, device))


@torch.no_grad()
def _loss(model: Transformer) -> float:
    """Return the loss on held-out text, nats per byte."""
    held_out = _batches(model, _HELD_OUT, _HELD_OUT_BATCHES)
    return fmean(float(next_token_loss(model, ids)) for ids in held_out)


def _tuned_loss(model: Transformer, steps: int, seed: int) -> float:
    """Fine-tune a model on the text for a seed, and return the loss on held-out text."""
    train(model, _batches(model, _TUNED, steps, seed), _RATE / 3)
    return _loss(model)


@functools.lru_cache(maxsize=64)  # All sparse attentions share the dense decoders.
def _train_dense(
    device: str, steps: int, finetune_steps: int, seed: int, **shape: int
) -> tuple[_Weights, float, float]:
    """Train a dense decoder and return its weights, its loss, and the loss after a fine-tune."""
    model = create_model(_config(**shape), device, seed=seed)
    train(model, _batches(model, _TRAINED, steps, seed), _RATE)
    weights = {name: x.detach().clone() for name, x in model.state_dict().items()}
    return weights, _loss(model), _tuned_loss(model, finetune_steps, seed)
