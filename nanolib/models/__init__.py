"""What is measured: transformers, attention kinds and the text they read. Models know nothing of the meters."""

from __future__ import annotations

import torch

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
        config: What to build; its dtype is that of the weights.
        device: Where; `meta` builds shapes only.
        seed: Draws the weights from a generator of their own, so that the same seed gives the same model.

    Returns:
        The model, in training mode.

    Raises:
        BadInput: The config's attention options do not fit its kind.

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
) -> torch.Tensor:
    """Draw uniform random token ids.

    Args:
        batch_size: Sequences.
        context_length: Tokens per sequence.
        vocab_size: Ids lie in [0, vocab_size).
        device: Where.
        seed: Draws them from a generator of their own.

    Returns:
        int64, shape [batch_size, context_length].

    Raises:
        BadInput: A size that is not positive.

    Example:
        >>> generate_random_batch(2, 8, vocab_size=256).shape
        torch.Size([2, 8])
    """
    sizes = {"batch_size": batch_size, "context_length": context_length, "vocab_size": vocab_size}
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise BadInput(f"{name}: {size!r} will not do; give a whole number above 0")
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (batch_size, context_length), generator=generator).to(device)
