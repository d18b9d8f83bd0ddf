"""The keys and values that a model keeps of what it has read."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

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

    def __init__(
        self, config: NanoConfig, batch_size: int, max_len: int, device: torch.device | str = "cpu"
    ) -> None:
        shape = (batch_size, config.kv_heads, max_len, config.head_dim)
        dtype = getattr(torch, config.dtype)
        self.keys = [
            torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_layers)
        ]
        self.values = [
            torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_layers)
        ]
        scored = (
            config.num_layers
            if attention.chooses_by_score(config.attention_type, config.attention_options)
            else 0
        )
        self.scores = [
            torch.empty(batch_size, max_len, dtype=dtype, device=device) for _ in range(scored)
        ]
        self.length = 0

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All buffers."""
        return [*self.keys, *self.values, *self.scores]

    @property
    def start(self) -> int:
        """The position of the next token."""
        return self.length

    def append_scores(self, layer: int, scores: torch.Tensor) -> torch.Tensor:
        """Write the new positions' scores of one layer and return all so far."""
        stop = self.length + scores.shape[1]
        self.scores[layer][:, self.length : stop] = scores
        return self.scores[layer][:, :stop]

    def append(
        self, layer: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new positions of one layer and return all of its keys and values so far (views)."""
        stop = self.length + k.shape[2]
        self.keys[layer][:, :, self.length : stop] = k
        self.values[layer][:, :, self.length : stop] = v
        return self.keys[layer][:, :, :stop], self.values[layer][:, :, :stop]


class StaticCache:
    """The buffers of a `KVCache` for one token at a time, with shapes and addresses that stay: what a CUDA graph replays.

    A token writes its key and value at a position that is read from a tensor, and attends to the whole buffers under a mask.

    Args:
        cache: Whose buffers these are; its `length` stays as it is.

    Attributes:
        start: The position of the next token, int64 [1]; whoever replays sets it.
    """

    def __init__(self, cache: KVCache) -> None:
        self._keys, self._values, self.length = cache.keys, cache.values, cache.length
        for buffer in cache.tensors:
            buffer[:, :, cache.length :] = (
                0  # what is masked is multiplied by zero, and must not be NaN
            )
        device, max_len = cache.keys[0].device, cache.keys[0].shape[2]
        self.start = torch.full((1,), cache.length, dtype=torch.int64, device=device)
        self._positions = torch.arange(max_len, device=device)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write one token's key and value, shape [batch, kv_heads, 1, head_dim]; attention of its query over all so far."""
        keys = self._keys[layer].index_copy_(2, self.start, k)
        values = self._values[layer].index_copy_(2, self.start, v)
        seen = (self._positions <= self.start)[None]  # [1, max_len]
        return scaled_dot_product_attention(
            q, keys, values, attn_mask=seen, enable_gqa=q.shape[1] != k.shape[1]
        )
