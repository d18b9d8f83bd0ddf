"""Compute reference attention in float64, and count the work of dense attention."""

from dataclasses import dataclass

import torch
from torch import Tensor


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Compute attention in float64 under a mask. Return zero for a query that sees no key.

    Args:
        q: Queries, shape [batch, heads, q_len, head_dim].
        k: Keys, shape [batch, kv_heads, kv_len, head_dim].
        v: Values, with the shape of `k`.
        mask: Whether a query sees a key, bool, shape [..., q_len, kv_len].

    Returns:
        Output in float64, with the shape of `q`.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = q.double() @ k.mT * q.shape[-1] ** -0.5
    weights = torch.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1)
    return torch.nan_to_num(weights, nan=0.0) @ v


def causal_mask(q_len: int, kv_len: int, device: torch.device | str = "cpu") -> Tensor:
    """Make the causal mask, bool, shape [q_len, kv_len].

    Query i has position kv_len - q_len + i, and sees no key after that position.
    """
    return torch.ones(q_len, kv_len, dtype=torch.bool, device=device).tril_(kv_len - q_len)


def relative_error(out: Tensor, reference: Tensor) -> float:
    """Compute ‖out − reference‖ / ‖reference‖ in float64."""
    out, reference = out.cpu().double(), reference.cpu().double()  # MPS has no float64.
    return float((out - reference).norm() / reference.norm().clamp_min(1e-300))


BLOCK_SIZE = 128  # Default side of a tile, in tokens.


@dataclass(frozen=True)
class Work:
    """Query-key pairs and tiles of one attention call, counted from the mask.

    Attributes:
        kept: Query-key pairs that the mask keeps, per head on average.
        total: Query-key pairs of dense attention with the same causality.
        kept_tiles: Tiles of the score matrix with at least one kept pair, per head on average.
        total_tiles: All tiles of the score matrix.

    Example:
        >>> Work(kept=10, total=40, kept_tiles=1, total_tiles=4)
        Work(kept=10, total=40, kept_tiles=1, total_tiles=4)
    """

    kept: float
    total: int
    kept_tiles: float
    total_tiles: int

    @property
    def sparsity(self) -> float:
        """Share of the pairs of dense attention that the mask removes.

        The share is 0 for a causal `prefix_lm`, which keeps more pairs than causal attention.
        """
        return max(0.0, 1 - self.kept / self.total)

    @property
    def block_sparsity(self) -> float:
        """Share of the score matrix's tiles that contain no kept pair."""
        return 1 - self.kept_tiles / self.total_tiles

    def flops(self, batch: int, heads: int, head_dim: int) -> int:
        """Count the FLOPs of a forward pass: 4 · batch · heads · kept · head_dim.

        A multiply-add counts as two operations.
        """
        return round(4 * batch * heads * self.kept * head_dim)


def allowed_pairs(q_len: int, kv_len: int, causal: bool) -> int:
    """Count the query-key pairs of dense attention. The last query sees all keys."""
    if not causal:
        return q_len * kv_len
    return q_len * (kv_len - q_len) + q_len * (q_len + 1) // 2


def tile_count(length: int, size: int) -> int:
    """Count the tiles of `size` tokens that cover `length` tokens."""
    return -(-length // size)


def dense_work(q_len: int, kv_len: int, causal: bool) -> Work:
    """Count the query-key pairs and the tiles of dense attention.

    Each tile has the side `BLOCK_SIZE`.
    """
    kept = allowed_pairs(q_len, kv_len, causal)
    rows = [min(start + BLOCK_SIZE, q_len) for start in range(0, q_len, BLOCK_SIZE)]
    keys = (stop + kv_len - q_len if causal else kv_len for stop in rows)
    kept_tiles = sum(tile_count(length, BLOCK_SIZE) for length in keys)
    return Work(kept, kept, kept_tiles, len(rows) * tile_count(kv_len, BLOCK_SIZE))
