"""Build what nanolib measures: transformers, attention kinds and the text they read.

Models do not import the meters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanolib.config import NanoConfig
from nanolib.measurement import BadInput
from nanolib.models.transformer import Transformer
from nanolib.models.user import fresh_weights

__all__ = ["Transformer", "create_model", "generate_random_batch"]


def create_model(
    config: NanoConfig, device: str | torch.device = "cpu", seed: int | None = None
) -> Transformer:
    """Build a transformer with random weights.

    Args:
        config: The model. Its dtype is that of the weights.
        device: Device of the weights. `meta` builds only shapes.
        seed: Seeds a separate generator, so that the same seed gives the same model.

    Returns:
        The model, in training mode.

    Raises:
        BadInput: The config's attention options are not valid for its kind.

    Example:
        >>> model = create_model(NanoConfig(num_layers=2, vocab_size=256, context_length=64), seed=0)
        >>> model(generate_random_batch(1, 64, vocab_size=256)).shape
        torch.Size([1, 64, 256])
    """
    with fresh_weights(device, getattr(torch, config.dtype), seed):
        return Transformer(config)


def generate_random_batch(
    batch_size: int,
    context_length: int,
    vocab_size: int,
    device: str | torch.device = "cpu",
    seed: int | None = None,
) -> Tensor:
    """Draw uniform random token ids.

    Args:
        batch_size: Sequences.
        context_length: Tokens per sequence.
        vocab_size: Ids are in [0, vocab_size).
        device: Device of the ids.
        seed: Seeds a separate generator.

    Returns:
        int64, shape [batch_size, context_length].

    Raises:
        BadInput: A size is not positive.

    Example:
        >>> generate_random_batch(2, 8, vocab_size=256).shape
        torch.Size([2, 8])
    """
    sizes = {"batch_size": batch_size, "context_length": context_length, "vocab_size": vocab_size}
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise BadInput(f"{name}: must be a whole number above 0, got {size!r}")
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (batch_size, context_length), generator=generator).to(device)
