"""A decoder-only transformer: RMSNorm, RoPE, SwiGLU or GELU, grouped-query attention, KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from nanolib.config import NanoConfig
from nanolib.measurement import BadInput, Unsupported
from nanolib.models import attention
from nanolib.models.cache import KVCache, StaticCache

Cache = KVCache | StaticCache


class RotaryEmbedding(nn.Module):
    """Rotates pairs (i, i + head_dim / 2) by position · base^(−2i/head_dim). Source: Su et al. (2021), arXiv 2104.09864."""

    def __init__(self, head_dim: int, max_len: int, base: float = 10_000.0) -> None:
        super().__init__()
        frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angle = torch.outer(torch.arange(max_len, dtype=torch.float32), frequency)
        for name, halves in {
            "cos": [angle.cos(), angle.cos()],
            "sin": [-angle.sin(), angle.sin()],
        }.items():
            self.register_buffer(
                name, torch.cat(halves, dim=-1).to(torch.get_default_dtype()), persistent=False
            )

    def forward(self, x: torch.Tensor, start: int | torch.Tensor) -> torch.Tensor:
        """Rotate x, shape [batch, heads, length, head_dim], whose first position is `start`; a tensor is of one token."""

        def rows(table: torch.Tensor) -> torch.Tensor:
            if isinstance(start, torch.Tensor):
                return table.index_select(0, start)
            return table[start : start + x.shape[2]]

        cos, sin = (rows(table).to(x.dtype) for table in (self.cos, self.sin))
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


class Attention(nn.Module):
    """Projections, RoPE, the configured attention kind, output projection."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        d, kv = config.d_model, config.kv_heads * config.head_dim
        self.kind = config.attention_type
        self.options = attention.shared_options(config.attention_type, config.attention_options)
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(d, d, bias=False)
        self.k_proj = nn.Linear(d, kv, bias=False)
        self.v_proj = nn.Linear(d, kv, bias=False)
        self.out_proj = nn.Linear(d, d, bias=False)
        scored = attention.chooses_by_score(config.attention_type, config.attention_options)
        self.token_score = nn.Linear(d, 1, bias=False) if scored else None

    def forward(
        self, x: torch.Tensor, rope: RotaryEmbedding | None, cache: Cache | None, layer: int
    ) -> torch.Tensor:
        """x: shape [batch, length, d_model]; the result has the same."""
        batch, length, _ = x.shape
        q, k, v = (
            proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        start = cache.start if cache else 0
        if rope is not None:
            q, k = rope(q, start), rope(k, start)
        if isinstance(cache, StaticCache):
            return self._joined(cache.attend(layer, q, k, v))
        scores = None
        if self.token_score is not None:
            scores = self.token_score(x)[..., 0]
            # A choice has no gradient. This factor is one, and hands the score that of its token's value.
            v = v * (1 + (scores - scores.detach()))[:, None, :, None]
            scores = (
                scores.detach() if cache is None else cache.append_scores(layer, scores.detach())
            )
        if cache is not None:
            k, v = cache.append(layer, k, v)
        return self._joined(
            attention.attend(self.kind, q, k, v, causal=True, options=self.options, scores=scores)
        )

    def _joined(self, heads: torch.Tensor) -> torch.Tensor:
        return self.out_proj(heads.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x)); or GELU: down(gelu(up(x)))."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        d, width = config.d_model, config.mlp_width
        self.gate = nn.Linear(d, width, bias=False) if config.mlp == "swiglu" else None
        self.up = nn.Linear(d, width, bias=False)
        self.down = nn.Linear(width, d, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: shape [..., d_model]; the result has the same."""
        up = self.up(x)
        return self.down(F.gelu(up) if self.gate is None else F.silu(self.gate(x)) * up)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model, eps=1e-5)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.d_model, eps=1e-5)
        self.mlp = MLP(config)

    def forward(
        self, x: torch.Tensor, rope: RotaryEmbedding | None, cache: Cache | None, layer: int
    ) -> torch.Tensor:
        """x: shape [batch, length, d_model]; the result has the same."""
        x = x + self.attention(self.attention_norm(x), rope, cache, layer)
        return x + self.mlp(self.mlp_norm(x))


# Whoever takes a loss of a user's model says how to do without, in the words of each notebook that does.
WITHOUT_LOSS = (
    "train: false and loss_steps: 0 in model, directions: [forward] in warmup, "
    "phases: [prefill] in energy, modes: [forward] in fp8"
)


def next_token_loss(
    model: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor
) -> torch.Tensor:
    """Mean cross-entropy of predicting each token from those before it, nats.

    Args:
        model: ids → logits of all positions.
        ids: int64, shape [batch, length + 1].

    Raises:
        Unsupported: The model returns something else.
    """
    logits, wanted = model(ids[:, :-1]), [ids.shape[0], ids.shape[1] - 1]
    shape = list(logits.shape) if isinstance(logits, torch.Tensor) else []
    if len(shape) != 3 or shape[:2] != wanted:
        returned = f"logits of shape {shape}" if shape else type(logits).__name__
        raise Unsupported(
            f"the model returns {returned}, and a loss takes logits of shape {[*wanted, 'vocab']}; return them, alone or as "
            f".logits, or leave the loss out: {WITHOUT_LOSS}"
        )
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


@torch.no_grad()
def _initialize(model: nn.Module, num_layers: int) -> None:
    """GPT-2's: N(0, 0.02), and the projections into the residual stream scaled by 1/√(2·layers).

    They are drawn in float32 for weights of any type.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        residual = name.endswith(("out_proj.weight", "down.weight"))
        drawn = torch.empty(parameter.shape, dtype=torch.float32)
        parameter.copy_(drawn.normal_(std=0.02 / (2 * num_layers) ** 0.5 if residual else 0.02))


class Transformer(nn.Module):
    """The model that `NanoConfig` describes.

    Example:
        >>> model = Transformer(NanoConfig(num_layers=2, d_model=64, vocab_size=256))
        >>> len(model.blocks)
        2
    """

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.config = config.model_copy(
            deep=True
        )  # a later change of the caller's config must not reach the model
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        rope = config.positional == "rope"
        self.rope = RotaryEmbedding(config.head_dim, config.context_length) if rope else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.d_model, eps=1e-5)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.checkpointing = (
            False  # whether blocks compute their activations again in the backward pass
        )
        _initialize(self, config.num_layers)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        """Logits for every position.

        Args:
            ids: int64, shape [batch, length].
            cache: Holds what came before `ids`, and takes them in.

        Returns:
            Shape [batch, length, vocab_size].

        Raises:
            BadInput: More tokens than the context holds.
        """
        return self.head(self.hidden(ids, cache))

    def hidden(self, ids: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        """The final, normed residual stream, shape [batch, length, d_model]."""
        length = ids.shape[1] + (cache.length if cache else 0)
        if length > self.config.context_length:
            raise BadInput(
                f"ids: {length} tokens exceed context_length {self.config.context_length}; "
                "raise it in the config or shorten the sequence"
            )
        x = self.embedding(ids)
        for layer, block in enumerate(self.blocks):
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, self.rope, cache, layer, use_reentrant=False)
            else:
                x = block(x, self.rope, cache, layer)
        if isinstance(cache, KVCache):
            cache.length += ids.shape[1]
        return self.norm(x)

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of predicting each token from those before it, nats; ids as in `forward`, plus one."""
        return next_token_loss(self, ids)

    def new_cache(self, batch_size: int, prompt_len: int, new_tokens: int) -> KVCache:
        """An empty cache with room for a prompt and what follows it."""
        return KVCache(
            self.config, batch_size, prompt_len + new_tokens, self.embedding.weight.device
        )

    def prefill(self, ids: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Read a prompt into `cache`; logits of its last position, shape [batch, vocab_size]."""
        return self.head(self.hidden(ids, cache)[:, -1])

    def decode(self, ids: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Read one token per sequence, ids of shape [batch]; logits for the next, shape [batch, vocab_size].

        The cache takes the token in; a static one has its position set by the caller.
        """
        return self.head(self.hidden(ids[:, None], cache)[:, -1])

    @torch.no_grad()
    def generate(self, prompt: torch.Tensor, new_tokens: int) -> Iterator[torch.Tensor]:
        """Greedy continuation of `prompt` (int64 [batch, length]): yields ids of shape [batch], one token at a time."""
        cache = self.new_cache(*prompt.shape, new_tokens)
        ids = self.prefill(prompt, cache).argmax(dim=-1)
        for left in range(new_tokens, 0, -1):
            yield ids
            if left > 1:
                ids = self.decode(ids, cache).argmax(dim=-1)
