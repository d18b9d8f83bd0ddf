"""Random tiles: every row of tiles keeps its own one and others drawn at random, the same number in each row.

Source: the random part of Zaheer et al. (2020), Big Bird, arXiv 2007.14062.
"""

from __future__ import annotations

import torch

from nanolib.models.attention.patterns.options import SparseOptions
from nanolib.models.attention.patterns.pattern import Pattern, of_tiles, tile_count


def pattern(options: SparseOptions, kv_len: int) -> Pattern:
    """The random pattern.

    Args:
        options: `block_size`, `seed`; `sparsity` is the share of tiles removed in each row, without it `random_tokens` (as whole
            tiles) are kept beside the row's own.
        kv_len: Keys.
    """
    tiles = tile_count(kv_len, options.block_size)
    kept = 1 + -(-options.random_tokens // options.block_size)
    if options.sparsity is not None:
        kept = max(1, round((1 - options.sparsity) * tiles))
    return of_tiles(draw(tiles, min(kept, tiles), options.seed), options.block_size)


def draw(tiles: int, kept: int, seed: int) -> torch.Tensor:
    """Which tiles each row keeps: bool [tiles, tiles], `kept` in each row, its own among them."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(tiles, tiles, generator=generator)
    order.fill_diagonal_(-1.0)
    table = torch.zeros(tiles, tiles, dtype=torch.bool)
    return table.scatter_(1, order.argsort(dim=1)[:, :kept], True)
