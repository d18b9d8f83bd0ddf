"""Strided tiles: a query sees its own tile and every `stride`-th one from it.

Source: Child, Gray, Radford & Sutskever (2019), Sparse Transformer, arXiv 1904.10509; of tiles instead of positions, so that whole
tiles can be skipped.
"""

from __future__ import annotations

import torch

from nanolib.models.attention.patterns.options import SparseOptions
from nanolib.models.attention.patterns.pattern import Pattern, of_tiles, tile_count


def pattern(options: SparseOptions, kv_len: int) -> Pattern:
    """The strided pattern: the distance in tiles is a multiple of the stride.

    Args:
        options: `block_size`; `sparsity` sets the stride to 1 / (1 − sparsity); without it `window` tokens are one stride.
        kv_len: Keys.
    """
    stride = max(1, round(options.window / options.block_size))
    if options.sparsity is not None:
        stride = max(1, round(1 / (1 - options.sparsity)))
    place = torch.arange(tile_count(kv_len, options.block_size))
    return of_tiles((place[:, None] - place[None, :]) % stride == 0, options.block_size)
