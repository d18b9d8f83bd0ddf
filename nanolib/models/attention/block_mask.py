"""Find the keys that each block of queries attends to, and count the kept pairs.

A mask consists of numpy arrays, which have data in a memory plan too. A memory plan therefore has
the same blocks as a run.
"""

import bisect
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanolib.measurement import BadInput
from nanolib.models.attention.patterns import (
    BY_CORNERS,
    WINDOWED,
    MaskMod,
    Options,
    PatternInputs,
    import_mask,
    on_cpu,
    static_mask_mod,
)
from nanolib.models.attention.reference import Work, allowed_pairs, tile_count

# The tables of a mask with more tiles take minutes and gigabytes.
_MOST_TILES = 2**26


@dataclass(frozen=True, eq=False)
class QueryBlock:
    """A block of queries, and the keys that the block attends to.

    Attributes:
        rows: Range [start, stop) of the queries.
        unit: Number of keys in each piece. The keys of the block consist of such pieces. `unit`
            divides the length of the sequence and the start of each piece.
        pieces: Indices of the pieces, in order, int64.
        hidden_from: Index of the first key that at least one query of the block does not see.
        hidden: Whether a query does not see a key, bool [rows, keys from `hidden_from` on].
    """

    rows: tuple[int, int]
    unit: int
    pieces: np.ndarray
    hidden_from: int
    hidden: np.ndarray

    @property
    def keys(self) -> int:
        """Number of keys."""
        return self.unit * len(self.pieces)

    @functools.cached_property
    def start(self) -> int:
        """Index of the first key if the keys are one range, otherwise −1."""
        first, last = self.pieces[[0, -1]].tolist()
        return first * self.unit if last - first == len(self.pieces) - 1 else -1

    @property
    def scores(self) -> int:
        """Number of query-key pairs that the kernel computes."""
        return (self.rows[1] - self.rows[0]) * self.keys

    @property
    def kept(self) -> int:
        """Number of query-key pairs that the block keeps."""
        return self.scores - int(self.hidden.sum())

    @functools.cached_property
    def blind(self) -> bool:
        """Whether at least one query sees no key."""
        return self.hidden.shape[1] == self.keys and bool(self.hidden.all(axis=1).any())

    @property
    def positions(self) -> np.ndarray:
        """Positions of the block's keys, int64."""
        return tile_positions(self.pieces, self.unit)


def tile_positions(tiles: np.ndarray, size: int) -> np.ndarray:
    """Return the positions of all tokens in the tiles, int64."""
    return (tiles[:, None] * size + np.arange(size)).ravel()


Plan = tuple[QueryBlock, ...]


@dataclass(frozen=True, eq=False)
class BlockMask:
    """Mask that lists the keys that each block of queries attends to.

    Attributes:
        plans: Blocks of the mask: one tuple for all heads, one tuple per head, or one tuple per
            head of each sequence.
        q_len: Number of queries.
        kv_len: Number of keys.
        causal: Whether a query sees only keys at or before its own position.
        block_size: Side of a tile, in tokens.
        mask_mod: Mask from which the blocks were found.
        options: Options of the pattern, with the window that has the requested sparsity. The value
            is None if the mask depends on the input.
    """

    plans: tuple[Plan, ...]
    q_len: int
    kv_len: int
    causal: bool
    block_size: int
    mask_mod: MaskMod
    options: Options | None = None

    @property
    def is_shared(self) -> bool:
        """Whether all heads share the same blocks."""
        return len(self.plans) == 1

    @functools.cached_property
    def work(self) -> Work:
        """Query-key pairs and tiles that the mask keeps, per head on average."""
        size, heads = self.block_size, len(self.plans)
        blocks = [block for plan in self.plans for block in plan]
        kept = sum(block.kept for block in blocks) / heads
        tiles = sum(tile_count(block.keys, size) for block in blocks) / heads
        grid = tile_count(self.q_len, size) * tile_count(self.kv_len, size)
        return Work(kept, allowed_pairs(self.q_len, self.kv_len, self.causal), tiles, grid)

    def elements(self, b: int, h: int, rows: Tensor) -> Tensor:
        """Return a head's mask of the queries `rows` as bool [rows, kv_len].

        The mask function computes the result, so a reference under this mask also shows pairs that
        the blocks have missed.
        """
        keys = np.arange(self.kv_len)
        return torch.from_numpy(self.mask_mod(b, h, rows.numpy()[:, None], keys))


@functools.lru_cache(maxsize=64)
def static_mask(options: Options, q_len: int, kv_len: int, causal: bool, heads: int) -> BlockMask:
    """Create the mask of a pattern that ignores the values of q and k.

    All layers and calls with the same arguments share the cached mask.

    Args:
        options: Options of the pattern.
        q_len: Number of queries. The queries have the last positions of the sequence.
        kv_len: Number of keys.
        causal: Whether a query sees only keys at or before its own position.
        heads: Number of query heads. If your own mask uses h, each head has its own mask.

    Raises:
        BadInput: The mask has too many tiles, or your own mask keeps no pair of a whole sequence.
    """
    size = options.block_size
    tiles = tile_count(q_len, size) * tile_count(kv_len, size)
    if tiles > _MOST_TILES:
        raise BadInput(
            f"block_size: {size} gives {tiles:,} tiles at {kv_len:,} tokens, more than "
            f"{_MOST_TILES:,}; use larger tiles"
        )
    options = _choose_window(options, q_len, kv_len, causal)
    is_own, offset = options.pattern == "own", kv_len - q_len
    keeps = static_mask_mod(options, q_len, kv_len, causal, None)
    side = size if options.pattern in BY_CORNERS else 1

    def find(head: tuple[int, int], start: int, stop: int, reach: int) -> tuple[np.ndarray, int]:
        positions = _corners(start + offset, stop + offset, side)
        keys = np.union1d(_corners(0, reach, side), positions)
        kept = keeps(*head, positions[:, None] - offset, keys)
        return np.unique(keys[kept.any(axis=0)] // size), 0

    count = heads if is_own and uses_index(options, 1) else 1
    shape = options.hides_future(causal), q_len, kv_len, size, size
    plans = tuple(make_plan(keeps, (0, head), find, *shape) for head in range(count))
    mask = BlockMask(plans, q_len, kv_len, causal, size, keeps, options)
    # With a cache, a query may see no key, although earlier or later queries of a sequence do.
    if is_own and not offset and not mask.work.kept:
        raise BadInput(
            f"attention_options.mask_mod: {options.mask_mod} keeps none of {q_len} x {kv_len} "
            "pairs; return true for the pairs to keep"
        )
    return mask


def _choose_window(options: Options, q_len: int, kv_len: int, causal: bool) -> Options:
    """Replace a requested sparsity by the largest window with at least this sparsity.

    If no window has this sparsity, the function sets a window of 1.
    """
    if options.sparsity is None or options.pattern not in WINDOWED:
        return options

    def minus_sparsity(window: int) -> float:
        tried = options.model_copy(update={"window": window, "sparsity": None})
        mask = static_mask.__wrapped__(tried, q_len, kv_len, causal, 1)  # Trials are not cached.
        return -mask.work.sparsity

    # A larger window removes fewer pairs.
    found = bisect.bisect_right(range(1, kv_len + 1), -options.sparsity, key=minus_sparsity)
    return options.model_copy(update={"window": max(1, found), "sparsity": None})


@functools.lru_cache(maxsize=64)
def uses_index(options: Options, place: int) -> bool:
    """Return whether your own mask uses b (`place` 0) or h (`place` 1)."""
    mask_mod = import_mask(PatternInputs(options, 1, torch.device("cpu")))

    def keeps(index: Tensor) -> Tensor:
        at = [torch.tensor(0)] * 4
        at[place] = index
        return mask_mod(*at)

    try:
        with on_cpu():  # Without `out_dims`, torch refuses a result that depends on the index.
            torch.vmap(keeps, out_dims=None, randomness="same")(torch.arange(1))
    except (RuntimeError, ValueError):
        return True
    return False


def make_plan(
    mask_mod: MaskMod,
    head: tuple[int, int],
    find: Callable[..., tuple[np.ndarray, int]],
    causal: bool,
    q_len: int,
    kv_len: int,
    size: int,
    key_size: int,
) -> Plan:
    """Create the blocks of queries of one head.

    Args:
        mask_mod: Mask of the queries and keys.
        head: Index of the sequence and of the head in the mask.
        find: Function of `head`, of the first query of a block, of the index after the last query,
            and of the number of leading keys that the block may see. The function returns the
            indices of the tiles of keys that the block attends to, in order, int64, and how many
            of the tiles' leading keys all queries see. nanolib does not evaluate these keys.
        causal: Whether a query sees only keys at or before its own position.
        q_len: Number of queries.
        kv_len: Number of keys.
        size: Number of queries in each block.
        key_size: Number of keys in each tile.
    """
    blocks = []
    for start in range(0, q_len, size):
        stop = min(start + size, q_len)
        reach = stop + kv_len - q_len if causal else kv_len
        tiles, begin = find(head, start, stop, reach)
        keys = tile_positions(tiles, key_size)
        keys, unit = keys[keys < reach], math.gcd(key_size, reach, kv_len)
        kept = mask_mod(*head, np.arange(start, stop)[:, None], keys[begin:])
        first = int(np.append(kept.all(axis=0), False).argmin())
        blocks.append(
            QueryBlock((start, stop), unit, keys[::unit] // unit, begin + first, ~kept[:, first:])
        )
    return tuple(blocks)


def _corners(start: int, stop: int, side: int) -> np.ndarray:
    """List the ends of [start, stop), and the positions at which tiles begin or end."""
    begins = np.arange((start // side + 1) * side, stop, side)
    return np.unique(np.concatenate([[start, stop - 1], begins, begins - 1]))
