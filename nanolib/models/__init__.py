"""Build the transformers that nanolib measures, and draw random token ids.

Modules in `nanolib.models` never import `nanolib.meters`.
"""

import torch
from torch import Tensor

from nanolib.config import NanoConfig
from nanolib.models.transformer import Transformer
from nanolib.models.user import fresh_weights

__all__ = ["Transformer", "create_model", "generate_random_batch"]


def create_model(
    config: NanoConfig, device: str | torch.device = "cpu", seed: int | None = None
) -> Transformer:
    """Build a transformer with random weights.

    Args:
        config: Sizes, attention and dtype of the model.
        device: Device of the weights. On the device `meta`, weights have shapes but no data.
        seed: Seed of the weights, or None to use torch's global generator.

    Returns:
        The model, in training mode.

    Raises:
        BadInput: An attention option is unknown, or its value is not valid.

    Example:
        >>> config = NanoConfig(num_layers=2, vocab_size=256, context_length=64)
        >>> model = create_model(config, seed=0)
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
    """Draw random token ids from a uniform distribution.

    Args:
        batch_size: Number of sequences.
        context_length: Tokens per sequence.
        vocab_size: Number of different ids. All ids are in [0, vocab_size).
        device: Device of the ids.
        seed: Seed of the ids, or None to use torch's global generator.

    Returns:
        Token ids, int64, shape [batch_size, context_length].

    Example:
        >>> generate_random_batch(2, 8, vocab_size=256).shape
        torch.Size([2, 8])
    """
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (batch_size, context_length), generator=generator).to(device)
