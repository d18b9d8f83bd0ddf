"""BigBird: a window, leading globals, and random tiles.

Source: Zaheer et al. (2020), Big Bird, arXiv 2007.14062.
"""

from __future__ import annotations

from nanolib.models.attention.patterns import local_global, random
from nanolib.models.attention.patterns.options import SparseOptions
from nanolib.models.attention.patterns.pattern import Pattern, of_tiles, tile_count


def pattern(options: SparseOptions, kv_len: int) -> Pattern:
    """The bigbird pattern: local_global, and random tiles that hold `random_tokens`.

    Args:
        options: `window`, `global_tokens`, `random_tokens`, `block_size`, `seed`.
        kv_len: Keys.
    """
    near = local_global.pattern(options, kv_len)
    tiles = tile_count(kv_len, options.block_size)
    kept = min(tiles, 1 + -(-options.random_tokens // options.block_size))
    far = of_tiles(random.draw(tiles, kept if options.random_tokens else 0, options.seed), options.block_size)
    return Pattern(
        mask=near.mask,
        runs=lambda first, last: [*near.runs(first, last), *far.runs(first, last)],
        table=far.table,
        size=far.size,
    )
