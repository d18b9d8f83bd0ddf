"""How much of the attention matrix a kind keeps: connections and tiles, and the FLOPs that follow."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_SIZE = 128  # side of a tile unless told


@dataclass(frozen=True)
class Work:
    """What an attention kind computes, counted from its mask.

    Attributes:
        kept: Query-key pairs that take part, per head.
        total: Pairs that dense attention of the same causality has: the causal triangle, or all.
        kept_tiles: Tiles of the score matrix that are computed.
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
        """Share of connections removed, of the causal triangle when causal."""
        return 1 - self.kept / self.total

    @property
    def block_sparsity(self) -> float:
        """Share of tiles skipped, of the whole grid."""
        return 1 - self.kept_tiles / self.total_tiles

    def flops(self, batch: int, heads: int, head_dim: int) -> int:
        """Forward FLOPs of the two products: 4 · batch · heads · kept · head_dim (a multiply-add counts two)."""
        return 4 * batch * heads * self.kept * head_dim


def allowed_pairs(q_len: int, kv_len: int, causal: bool) -> int:
    """Query-key pairs of dense attention; causality is aligned at the end."""
    if not causal:
        return q_len * kv_len
    return q_len * (kv_len - q_len) + q_len * (q_len + 1) // 2


def dense_work(q_len: int, kv_len: int, causal: bool) -> Work:
    """Everything that causality allows, in tiles of `BLOCK_SIZE`; the last of a row or column may be cut off by the length."""
    kept = allowed_pairs(q_len, kv_len, causal)
    rows, columns = -(-q_len // BLOCK_SIZE), -(-kv_len // BLOCK_SIZE)
    if not causal:
        return Work(kept, kept, rows * columns, rows * columns)
    last_key = (min((row + 1) * BLOCK_SIZE, q_len) + kv_len - q_len for row in range(rows))
    return Work(kept, kept, sum(-(-keys // BLOCK_SIZE) for keys in last_key), rows * columns)
