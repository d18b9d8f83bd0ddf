"""What a sparse pattern is: an element mask, and the key ranges outside which it is empty."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nanolib.measurement import BadInput

Run = tuple[int, int]


@dataclass(frozen=True)
class Pattern:
    """A sparse pattern, without causality (which is applied on top).

    Attributes:
        mask: (query positions [m, 1], key positions [1, n]) -> bool [m, n], True where a query sees a key, by arithmetic on the
            positions alone; None where whole tiles are kept.
        runs: (first and last query position) -> key ranges [start, stop) that hold every kept key of these
            queries, in order, disjoint; they may exceed the sequence's ends.
        table: Tiles that are kept beside it, bool [tiles, tiles], rows for queries; None for none.
        size: Side of such a tile, positions.
    """

    mask: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None
    runs: Callable[[int, int], list[Run]]
    table: torch.Tensor | None = None
    size: int = 1

    def sees(self, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        """True where a query sees a key; positions and result as of `mask`."""
        return seen(i, j, self.mask, None if self.table is None else self.table[i // self.size, j // self.size])


def seen(i: Any, j: Any, mask: Callable[[Any, Any], Any] | None, looked_up: Any) -> Any:
    """What index arithmetic, a table, or either of them keeps."""
    if mask is None:
        return looked_up
    return mask(i, j) if looked_up is None else mask(i, j) | looked_up


def tile_count(length: int, size: int) -> int:
    """Tiles of `size` that cover `length` positions."""
    return -(-length // size)


def of_tiles(table: torch.Tensor, size: int) -> Pattern:
    """The pattern that keeps whole tiles.

    Args:
        table: True where a tile is kept, bool [tiles, tiles], rows for queries.
        size: Side of a tile, positions.

    Raises:
        BadInput: When it is used, for a query before the first key: the table has no row for it.
    """
    rows = [row.nonzero().flatten().tolist() for row in table]

    def runs(first: int, last: int) -> list[Run]:
        if first < 0:
            raise BadInput(
                "q: more queries than keys; for a pattern of tiles give at most as many, or use pattern window"
            )
        kept = {tile for row in range(first // size, last // size + 1) for tile in rows[row]}
        return [(tile * size, (tile + 1) * size) for tile in sorted(kept)]

    return Pattern(None, runs, table, size)


def merge_runs(runs: list[Run], length: int) -> list[Run]:
    """`runs` cut to [0, length), sorted, with overlapping and touching ones joined."""
    merged: list[Run] = []
    for start, stop in sorted((max(0, start), min(length, stop)) for start, stop in runs):
        if start >= stop:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged
