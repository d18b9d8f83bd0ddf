"""An encoder–decoder transformer: the encoder reads the first half of a sequence, the decoder goes on with the second."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from nanolib.config import NanoConfig
from nanolib.models import attention
from nanolib.models.cache import KVCache
from nanolib.models.transformer import (
    MLP,
    Attention,
    Block,
    RotaryEmbedding,
    check_length,
    greedy,
    initialise,
    next_token_loss,
    run_block,
)


class CrossCache(KVCache):
    """A decoder's cache.

    Attributes:
        memory: Per layer, keys and values of what the encoder read, shape [batch, kv_heads, source, head_dim].
    """

    def __init__(self, config: NanoConfig, batch_size: int, max_len: int, device: torch.device | str = "cpu") -> None:
        super().__init__(config, batch_size, max_len, device)
        self.memory: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All buffers."""
        return [*super().tensors, *(x for pair in self.memory for x in pair)]


class CrossAttention(nn.Module):
    """Dense attention of the decoder's positions to all of the encoder's."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        d, kv = config.d_model, config.kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(d, d, bias=False)
        self.k_proj = nn.Linear(d, kv, bias=False)
        self.v_proj = nn.Linear(d, kv, bias=False)
        self.out_proj = nn.Linear(d, d, bias=False)

    def remember(self, encoded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the encoder's result, shape [batch, source, d_model]; each [batch, kv_heads, source, head_dim]."""
        k, v = (proj(encoded).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for proj in (self.k_proj, self.v_proj))
        return k, v

    def forward(self, x: torch.Tensor, memory: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """x: shape [batch, length, d_model]; the result has the same."""
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        out = attention.attend("dense", q, *memory, causal=False)
        return self.out_proj(out.transpose(1, 2).flatten(2))


class DecoderBlock(nn.Module):
    """x + attention(norm(x)), then x + cross_attention(norm(x), memory), then x + mlp(norm(x))."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.attention_norm, self.cross_norm, self.mlp_norm = (nn.RMSNorm(config.d_model, eps=1e-5) for _ in range(3))
        self.attention = Attention(config)
        self.cross = CrossAttention(config)
        self.mlp = MLP(config)

    def forward(
        self,
        x: torch.Tensor,
        memory: tuple[torch.Tensor, torch.Tensor],
        rope: RotaryEmbedding | None,
        cache: KVCache | None,
        layer: int,
    ) -> torch.Tensor:
        """x: shape [batch, length, d_model]; the result has the same."""
        x = x + self.attention(self.attention_norm(x), rope, cache, layer)
        x = x + self.cross(self.cross_norm(x), memory)
        return x + self.mlp(self.mlp_norm(x))


class EncoderDecoder(nn.Module):
    """The model that a `NanoConfig` of architecture `encoder_decoder` describes; `attention_type` is that of self-attention.

    Example:
        >>> model = EncoderDecoder(NanoConfig(architecture="encoder_decoder", num_layers=2, d_model=64, vocab_size=256))
        >>> model(torch.zeros(1, 8, dtype=torch.long)).shape  # the encoder reads four tokens, the decoder the other four
        torch.Size([1, 4, 256])
    """

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.config = config.model_copy(deep=True)
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        rope = config.positional == "rope"
        self.rope = RotaryEmbedding(config.head_dim, config.context_length) if rope else None
        self.encoder = nn.ModuleList(Block(config, causal=False) for _ in range(config.num_layers))
        self.encoder_norm = nn.RMSNorm(config.d_model, eps=1e-5)
        self.decoder = nn.ModuleList(DecoderBlock(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.d_model, eps=1e-5)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.checkpointing: bool | int = False  # or how many of the first blocks of each stack
        initialise(self, config.num_layers)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits for the second half of each sequence.

        Args:
            ids: int64, shape [batch, length], length at least 2; the encoder reads the first length // 2.

        Returns:
            Shape [batch, length − length // 2, vocab_size].

        Raises:
            BadInput: More tokens than the context holds.
        """
        check_length(ids, 0, self.config)
        source, target = ids.split([ids.shape[1] // 2, ids.shape[1] - ids.shape[1] // 2], dim=1)
        encoded = self.encode(source)
        return self.head(self._hidden(target, [block.cross.remember(encoded) for block in self.decoder], None))

    def encode(self, source: torch.Tensor) -> torch.Tensor:
        """The encoder's normed result, shape [batch, source, d_model]."""
        x = self.embedding(source)
        for layer, block in enumerate(self.encoder):
            x = run_block(block, self.checkpointing, layer, x, self.rope, None, layer)
        return self.encoder_norm(x)

    def _hidden(
        self, ids: torch.Tensor, memory: list[tuple[torch.Tensor, torch.Tensor]], cache: KVCache | None
    ) -> torch.Tensor:
        x = self.embedding(ids)
        for layer, block in enumerate(self.decoder):
            x = run_block(block, self.checkpointing, layer, x, memory[layer], self.rope, cache, layer)
        if cache is not None:
            cache.length += ids.shape[1]
        return self.norm(x)

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy over the second half of each sequence, nats; ids as in `forward`, plus one."""
        return next_token_loss(self, ids)

    def new_cache(self, batch_size: int, prompt_len: int, new_tokens: int) -> CrossCache:
        """An empty cache for what follows a prompt, which the encoder reads."""
        return CrossCache(self.config, batch_size, 1 + new_tokens, self.embedding.weight.device)

    def prefill(self, ids: torch.Tensor, cache: CrossCache) -> torch.Tensor:
        """Let the encoder read a prompt, whose last token starts the decoder; logits, shape [batch, vocab_size]."""
        check_length(ids, 0, self.config)
        cache.memory = []  # of an earlier prompt, before another is made beside it
        encoded = self.encode(ids)
        cache.memory = [block.cross.remember(encoded) for block in self.decoder]
        return self.decode(ids[:, -1], cache)

    def decode(self, ids: torch.Tensor, cache: CrossCache) -> torch.Tensor:
        """Read one token per sequence, ids of shape [batch]; logits for the next, shape [batch, vocab_size]."""
        check_length(ids[:, None], cache.length, self.config)
        return self.head(self._hidden(ids[:, None], cache.memory, cache)[:, -1])

    def generate(self, prompt: torch.Tensor, new_tokens: int) -> Iterator[torch.Tensor]:
        """Greedy continuation of `prompt`; see `Transformer.generate`."""
        return greedy(self, prompt, new_tokens)
