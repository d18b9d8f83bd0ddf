"""Define a decoder-only transformer with RMSNorm, RoPE, SwiGLU or GELU, and a KV cache."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nanolib.config import NanoConfig
from nanolib.measurement import BadInput
from nanolib.models import attention


class KVCache:
    """Keys and values of the tokens that the model has read, in buffers of fixed size.

    Attributes:
        keys: Keys of each layer, shape [batch, kv_heads, max_len, head_dim].
        values: Values of each layer, with the shape of the keys.
        scores: Scores of each layer, shape [batch, 1, max_len]. The pattern `dca` chooses global
            tokens by these scores. The list is empty for other patterns.
        length: Number of filled positions.
        position: Position of the next token, int64 [1], while a CUDA graph is captured, and None
            otherwise. The graph needs fixed shapes, so a token then attends to the whole buffers
            under the mask `seen`, and `length` does not change.
        seen: Whether the next token sees a position, bool [1, max_len].
    """

    position: Tensor | None = None
    seen: Tensor | None = None

    def __init__(
        self, config: NanoConfig, batch_size: int, max_len: int, device: torch.device | str = "cpu"
    ):
        dtype = getattr(torch, config.dtype)

        def buffers(*shape: int) -> list[Tensor]:
            return [
                torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_layers)
            ]

        shape = (batch_size, config.kv_heads, max_len, config.head_dim)
        self.keys, self.values = buffers(*shape), buffers(*shape)
        self.scores = buffers(batch_size, 1, max_len) if config.scores_tokens else []
        self.length = 0

    @property
    def tensors(self) -> list[Tensor]:
        """All buffers of keys, values and scores."""
        return [*self.keys, *self.values, *self.scores]

    def next_positions(self, length: int) -> slice | Tensor:
        """Return the positions of the next `length` tokens."""
        return slice(self.length, self.length + length) if self.position is None else self.position

    def append(self, buffer: Tensor, x: Tensor) -> Tensor:
        """Write `x` after the filled positions of a buffer, and return all filled positions."""
        buffer[:, :, self.next_positions(x.shape[2])] = x
        return buffer[:, :, : self.length + x.shape[2]] if self.position is None else buffer


class RotaryEmbedding(nn.Module):
    """Rotate each pair (i, i + head_dim / 2) by the angle position · 10,000^(−2i/head_dim).

    Source: Su et al. (2021), arXiv 2104.09864.
    """

    def __init__(self, head_dim: int, max_len: int):
        super().__init__()
        frequency = 10_000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angle = torch.outer(torch.arange(max_len, dtype=torch.float32), frequency)
        cos, sin = angle.cos(), angle.sin()
        table = torch.stack([torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)])
        self.register_buffer("table", table.to(torch.get_default_dtype()), persistent=False)

    def forward(self, x: Tensor, positions: slice | Tensor) -> Tensor:
        """Rotate x, shape [batch, heads, length, head_dim], at these positions."""
        cos, sin = self.table[:, positions].to(x.dtype)
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


class Attention(nn.Module):
    """Project the input to queries, keys and values, compute attention, and project the output."""

    def __init__(self, config: NanoConfig):
        super().__init__()
        d, kv = config.d_model, config.kv_heads * config.head_dim
        self.kind = config.attention_type
        self.options = attention.shared_options(config.attention_type, config.attention_options)
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(d, d, bias=False)
        self.k_proj = nn.Linear(d, kv, bias=False)
        self.v_proj = nn.Linear(d, kv, bias=False)
        self.out_proj = nn.Linear(d, d, bias=False)
        self.token_score = nn.Linear(d, 1, bias=False) if config.scores_tokens else None

    def forward(
        self, x: Tensor, rope: RotaryEmbedding, cache: KVCache | None, layer: int
    ) -> Tensor:
        """Map x, shape [batch, length, d_model], to the same shape."""
        batch, length, _ = x.shape
        q, k, v = (
            proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        positions = cache.next_positions(length) if cache else slice(0, length)
        q, k = rope(q, positions), rope(k, positions)
        scores = None
        if self.token_score is not None:
            scores = self.token_score(x)[..., 0]
            # The choice of tokens has no gradient. A factor of 1 on v gives scores a gradient.
            v = v * (1 + (scores - scores.detach()))[:, None, :, None]
            if cache:
                scores = cache.append(cache.scores[layer], scores[:, None])[:, 0]
        if cache:
            k, v = cache.append(cache.keys[layer], k), cache.append(cache.values[layer], v)
        if cache and cache.seen is not None:
            grouped = q.shape[1] != k.shape[1]
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=cache.seen, enable_gqa=grouped)
        else:
            out = attention.attend(
                self.kind, q, k, v, causal=True, options=self.options, scores=scores
            )
        return self.out_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Compute down(silu(gate(x)) · up(x)) for SwiGLU, or down(gelu(up(x))) for GELU."""

    def __init__(self, config: NanoConfig):
        super().__init__()
        d, width = config.d_model, config.mlp_width
        self.gate = nn.Linear(d, width, bias=False) if config.mlp == "swiglu" else None
        self.up = nn.Linear(d, width, bias=False)
        self.down = nn.Linear(width, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x, shape [..., d_model], to the same shape."""
        up = self.up(x)
        return self.down(F.gelu(up) if self.gate is None else F.silu(self.gate(x)) * up)


class Block(nn.Module):
    """Add attention(norm(x)) to x, and then add mlp(norm(x)) to the sum."""

    def __init__(self, config: NanoConfig):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model, eps=1e-5)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.d_model, eps=1e-5)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, rope: RotaryEmbedding, cache: KVCache | None, layer: int
    ) -> Tensor:
        """Map x, shape [batch, length, d_model], to the same shape."""
        x = x + self.attention(self.attention_norm(x), rope, cache, layer)
        return x + self.mlp(self.mlp_norm(x))


@torch.no_grad()
def _initialize(model: nn.Module, num_layers: int):
    """Draw the weights as in GPT-2, with a standard deviation of 0.02.

    The deviation is multiplied by 1/√(2·layers) for layers that write to the residual stream.
    nanolib draws weights of any dtype in float32.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        residual = name.endswith(("out_proj.weight", "down.weight"))
        drawn = torch.empty(parameter.shape, dtype=torch.float32)
        parameter.copy_(drawn.normal_(std=0.02 / (2 * num_layers) ** 0.5 if residual else 0.02))


class Transformer(nn.Module):
    """Transformer with the architecture of a `NanoConfig`.

    Example:
        >>> model = Transformer(NanoConfig(num_layers=2, d_model=64, vocab_size=256))
        >>> len(model.blocks)
        2
    """

    def __init__(self, config: NanoConfig):
        super().__init__()
        # A later change of the caller's config must not change the model.
        self.config = config.model_copy(deep=True)
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.rope = RotaryEmbedding(config.head_dim, config.context_length)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.d_model, eps=1e-5)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.checkpointing = False  # If true, the backward pass computes activations again.
        _initialize(self, config.num_layers)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, cache: KVCache | None = None) -> Tensor:
        """Compute logits for every position.

        Args:
            ids: Token ids, int64, shape [batch, length].
            cache: Cache of the tokens before `ids`. The model adds the keys and values of `ids`.

        Returns:
            Logits, shape [batch, length, vocab_size].

        Raises:
            BadInput: The cache and `ids` together have more tokens than `context_length`.
        """
        return self.head(self.hidden(ids, cache))

    def hidden(self, ids: Tensor, cache: KVCache | None = None) -> Tensor:
        """Compute the residual stream after the last norm, shape [batch, length, d_model]."""
        length = ids.shape[1] + (cache.length if cache else 0)
        if length > self.config.context_length:
            raise BadInput(
                f"ids: {length} tokens exceed context_length {self.config.context_length}; "
                "raise context_length or shorten the sequence"
            )
        x = self.embedding(ids)
        for layer, block in enumerate(self.blocks):
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, self.rope, cache, layer, use_reentrant=False)
            else:
                x = block(x, self.rope, cache, layer)
        if cache and cache.position is None:
            cache.length += ids.shape[1]
        return self.norm(x)

    def new_cache(self, batch_size: int, prompt_len: int, new_tokens: int) -> KVCache:
        """Create an empty cache for a prompt and the tokens after the prompt."""
        return KVCache(
            self.config, batch_size, prompt_len + new_tokens, self.embedding.weight.device
        )

    def prefill(self, ids: Tensor, cache: KVCache) -> Tensor:
        """Read a prompt into `cache`. Return the next token's logits, shape [batch, vocab_size]."""
        return self.head(self.hidden(ids, cache)[:, -1])

    def decode(self, ids: Tensor, cache: KVCache) -> Tensor:
        """Read one token per sequence, ids of shape [batch], into `cache`.

        Return the logits of the next token, shape [batch, vocab_size].
        """
        return self.prefill(ids[:, None], cache)
