"""Define dense attention: its output in float64, which every kind is compared with, and what masks keep of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None
) -> Tensor:
    """Compute softmax(scale · q kᵀ where mask) v in float64. A row without any key gives zero.

    Args:
        q: Shape [batch, heads, q_len, head_dim].
        k: Shape [batch, kv_heads, kv_len, head_dim].
        v: Shape as `k`.
        mask: True where a query may see a key, shape [q_len, kv_len].
        scale: Factor on the scores. None means head_dim ** -0.5.

    Returns:
        Shape of `q`, float64.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = q.double() @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    weights = torch.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1)
    return torch.nan_to_num(weights, nan=0.0) @ v


def causal_mask(q_len: int, kv_len: int, device: torch.device | str = "cpu") -> Tensor:
    """Make the causal mask: True if key j is at or before query i's position kv_len - q_len + i.

    Shape [q_len, kv_len].
    """
    position = torch.arange(kv_len - q_len, kv_len, device=device)[:, None]
    return torch.arange(kv_len, device=device)[None, :] <= position


def relative_error(out: Tensor, reference: Tensor) -> float:
    """Compute ‖out − reference‖ / ‖reference‖ in float64."""
    if out.device.type == "mps":  # it has no float64
        out, reference = out.cpu(), reference.cpu()
    reference = reference.double()
    return float((out.double() - reference).norm() / reference.norm().clamp_min(1e-300))


BLOCK_SIZE = 128  # side of a tile by default


@dataclass(frozen=True)
class Work:
    """The work of one attention call, counted from its mask.

    Attributes:
        kept: Query-key pairs that the mask keeps, per head.
        total: Pairs of dense attention with the same causality: the causal triangle, or all.
        kept_tiles: Tiles of the score matrix with a kept pair.
        total_tiles: Tiles of the whole grid.

    Example:
        >>> Work(kept=10, total=40, kept_tiles=1, total_tiles=4)
        Work(kept=10, total=40, kept_tiles=1, total_tiles=4)
    """

    kept: int
    total: int
    kept_tiles: int
    total_tiles: int

    @property
    def sparsity(self) -> float:
        """Share of connections removed. If causal, of the causal triangle."""
        return 1 - self.kept / self.total

    @property
    def block_sparsity(self) -> float:
        """Share of the grid's tiles that are skipped."""
        return 1 - self.kept_tiles / self.total_tiles

    def flops(self, batch: int, heads: int, head_dim: int) -> int:
        """Count the FLOPs of both products, forward: 4 · batch · heads · kept · head_dim.

        A multiply-add counts two.
        """
        return 4 * batch * heads * self.kept * head_dim


def allowed_pairs(q_len: int, kv_len: int, causal: bool) -> int:
    """Count the query-key pairs of dense attention. Causality is aligned at the end."""
    if not causal:
        return q_len * kv_len
    return q_len * (kv_len - q_len) + q_len * (q_len + 1) // 2


def dense_work(q_len: int, kv_len: int, causal: bool, options: Any = None) -> Work:
    """Count all pairs that causality allows, in tiles of `BLOCK_SIZE`.

    The sequence's end may cut the last tile of a row or a column. No option of a dense kind changes
    the count.
    """
    kept = allowed_pairs(q_len, kv_len, causal)
    rows, columns = -(-q_len // BLOCK_SIZE), -(-kv_len // BLOCK_SIZE)
    if not causal:
        return Work(kept, kept, rows * columns, rows * columns)
    last_key = (min((row + 1) * BLOCK_SIZE, q_len) + kv_len - q_len for row in range(rows))
    return Work(kept, kept, sum(-(-keys // BLOCK_SIZE) for keys in last_key), rows * columns)
