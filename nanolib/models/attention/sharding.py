"""Split a sequence over ranks: one piece each, or two that share causal work evenly (zigzag)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanolib.measurement import BadInput

Piece = tuple[int, int]  # positions [start, stop)


@dataclass(frozen=True)
class Sharding:
    """Pieces of a sequence over ranks, in each rank's order.

    Attributes:
        pieces: Per rank, positions [start, stop) of each piece. A piece may be empty.
    """

    pieces: tuple[tuple[Piece, ...], ...]

    @classmethod
    def contiguous(cls, total: int, world: int) -> Sharding:
        """Give each rank one piece, in order. Lengths differ by one at most."""
        return cls(tuple((piece,) for piece in _split(total, world)))

    @classmethod
    def zigzag(cls, total: int, world: int) -> Sharding:
        """Give rank r the pieces r and 2·world − 1 − r of 2·world: with causality every rank has the same number of pairs."""
        pieces = _split(total, 2 * world)
        return cls(tuple((pieces[rank], pieces[-1 - rank]) for rank in range(world)))

    @classmethod
    def from_lengths(cls, lengths: Sequence[int]) -> Sharding:
        """Give each rank one piece of its length, in order."""
        edges = itertools.accumulate(lengths, initial=0)
        return cls(tuple((piece,) for piece in itertools.pairwise(edges)))

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.pieces)

    @property
    def total(self) -> int:
        """Number of positions."""
        return sum(self.length(rank) for rank in range(self.world))

    def length(self, rank: int) -> int:
        """Return the number of a rank's positions."""
        return sum(stop - start for start, stop in self.pieces[rank])

    def take(self, x: Tensor, rank: int, dim: int = 2) -> Tensor:
        """Return a rank's part of a whole sequence, a view if it is one piece."""
        if x.shape[dim] != self.total:
            raise BadInput(
                f"x: {x.shape[dim]} positions in dimension {dim}; this layout has {self.total}"
            )
        parts = [x.narrow(dim, start, stop - start) for start, stop in self.pieces[rank]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def _split(total: int, parts: int) -> list[Piece]:
    edges = [total * part // parts for part in range(parts + 1)]
    return list(itertools.pairwise(edges))
