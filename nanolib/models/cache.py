"""The keys and values that a model keeps of what it has read."""

from __future__ import annotations

import torch

from nanolib.config import NanoConfig
from nanolib.models import attention


class KVCache:
    """Keys and values of what was read so far, in buffers of fixed size.

    Attributes:
        keys: Per layer, shape [batch, kv_heads, max_len, head_dim].
        values: As `keys`.
        scores: Per layer, shape [batch, max_len]: what `dca` chooses its globals by; empty for other patterns.
        length: Positions filled.
    """

    def __init__(self, config: NanoConfig, batch_size: int, max_len: int, device: torch.device | str = "cpu") -> None:
        shape = (batch_size, config.kv_heads, max_len, config.head_dim)
        dtype = getattr(torch, config.dtype)
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        scored = config.num_layers if attention.chooses_by_score(config.attention_type, config.attention_options) else 0
        self.scores = [torch.empty(batch_size, max_len, dtype=dtype, device=device) for _ in range(scored)]
        self.length = 0

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All buffers."""
        return [*self.keys, *self.values, *self.scores]

    def append_scores(self, layer: int, scores: torch.Tensor) -> torch.Tensor:
        """Write the new positions' scores of one layer and return all so far."""
        stop = self.length + scores.shape[1]
        self.scores[layer][:, self.length : stop] = scores
        return self.scores[layer][:, :stop]

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new positions of one layer and return all of its keys and values so far (views)."""
        stop = self.length + k.shape[2]
        self.keys[layer][:, :, self.length : stop] = k
        self.values[layer][:, :, self.length : stop] = v
        return self.keys[layer][:, :, :stop], self.values[layer][:, :, :stop]
