"""Store the keys and values of the tokens that a model has read."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nanolib.config import NanoConfig
from nanolib.models import attention


class KVCache:
    """Keys and values of the tokens read so far, in buffers of fixed size.

    Attributes:
        keys: Keys of each layer, shape [batch, kv_heads, max_len, head_dim].
        values: Values of each layer, with the shape of the keys.
        scores: Scores of each layer, shape [batch, 1, max_len]. The pattern `dca` chooses global
            tokens by these scores. The list is empty for other patterns.
        length: Number of filled positions.
    """

    def __init__(
        self, config: NanoConfig, batch_size: int, max_len: int, device: torch.device | str = "cpu"
    ) -> None:
        layers, dtype = config.num_layers, getattr(torch, config.dtype)

        def buffers(count: int, *shape: int) -> list[Tensor]:
            return [torch.empty(shape, dtype=dtype, device=device) for _ in range(count)]

        shape = (batch_size, config.kv_heads, max_len, config.head_dim)
        options = attention.shared_options(config.attention_type, config.attention_options)
        scored = attention.chooses_by_score(options)
        self.keys, self.values = buffers(layers, *shape), buffers(layers, *shape)
        self.scores = buffers(layers if scored else 0, batch_size, 1, max_len)
        self.length = 0

    @property
    def tensors(self) -> list[Tensor]:
        """All buffers."""
        return [*self.keys, *self.values, *self.scores]

    @property
    def start(self) -> int:
        """The position of the next token."""
        return self.length

    def append(self, buffer: Tensor, x: Tensor) -> Tensor:
        """Write `x` after the filled positions of a buffer, and return all filled positions."""
        stop = self.length + x.shape[2]
        buffer[:, :, self.length : stop] = x
        return buffer[:, :, :stop]


class StaticCache:
    """The buffers of a `KVCache`, with the fixed shapes and addresses that a CUDA graph needs.

    `attend` writes the key and value of a token at the position `start`. The token attends to the
    whole buffers under a mask.

    Args:
        cache: Cache that provides the buffers. The `length` of this cache does not change.

    Attributes:
        start: Position of the next token, int64 [1]. The caller sets this position.
    """

    def __init__(self, cache: KVCache) -> None:
        self._keys, self._values, self.length = cache.keys, cache.values, cache.length
        for buffer in cache.tensors:
            buffer[:, :, cache.length :] = 0  # Masked values get weight 0, but NaN · 0 is NaN.
        device, max_len = cache.keys[0].device, cache.keys[0].shape[2]
        self.start = torch.full((1,), cache.length, dtype=torch.int64, device=device)
        self._positions = torch.arange(max_len, device=device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write one token's key and value, and attend to all tokens so far."""
        keys = self._keys[layer].index_copy_(2, self.start, k)
        values = self._values[layer].index_copy_(2, self.start, v)
        seen = (self._positions <= self.start)[None]  # [1, max_len]
        return scaled_dot_product_attention(
            q, keys, values, attn_mask=seen, enable_gqa=q.shape[1] != k.shape[1]
        )
