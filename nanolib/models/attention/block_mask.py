"""Which keys each block of queries attends to: the plan that both kernels follow, and what it keeps.

All in numpy, so that a plan is the same whether tensors have data or not.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nanolib.measurement import BadInput
from nanolib.models.attention.patterns import (
    BY_CORNERS,
    DYNAMIC,
    PATTERNS,
    TABLED,
    WINDOWED,
    Device,
    MaskMod,
    Options,
    tile_count,
)
from nanolib.models.attention.work import Work, allowed_pairs

Run = tuple[int, int]  # [start, stop)


@dataclass(frozen=True, eq=False)
class QueryBlock:
    """One block of queries and the keys it attends to.

    Attributes:
        rows: Queries [start, stop).
        runs: Key ranges [start, stop), in order and apart.
        unit: The keys in equal pieces that begin at multiples of their length, which divides the sequence's: that length.
        pieces: And which pieces, int64.
        hidden_from: From which of its keys on some query does not see them.
        hidden: Which do not: bool [rows, keys from there], without columns if all queries see all.
    """

    rows: Run
    runs: tuple[Run, ...]
    unit: int
    pieces: np.ndarray
    hidden_from: int
    hidden: np.ndarray

    @classmethod
    def of(
        cls, rows: Run, keys: np.ndarray, kv_len: int, kept: np.ndarray, begin: int = 0
    ) -> QueryBlock:
        """Make a block.

        Args:
            rows: Queries [start, stop).
            keys: The keys it attends to, in order, int64.
            kv_len: Keys of the sequence.
            kept: True if a query sees a key, bool [rows, keys from `begin` on].
            begin: All queries see the keys before this one.
        """
        edges = np.flatnonzero(np.diff(keys) > 1) + 1
        starts, stops = (
            keys[np.r_[0, edges][: len(keys)]],
            keys[np.r_[edges, 0][: len(keys)] - 1] + 1,
        )
        unit = int(np.gcd.reduce([kv_len, *starts, *stops]))
        columns = (~kept).any(axis=0)
        first = int(columns.argmax()) if columns.any() else kept.shape[1]
        runs = tuple(zip(starts.tolist(), stops.tolist(), strict=True))
        return cls(rows, runs, unit, keys[::unit] // unit, begin + first, ~kept[:, first:])

    @property
    def keys(self) -> int:
        """How many keys it attends to."""
        return self.unit * len(self.pieces)

    @property
    def height(self) -> int:
        """How many queries it has."""
        return self.rows[1] - self.rows[0]

    @property
    def kept(self) -> int:
        """Connections."""
        return self.height * self.keys - int(self.hidden.sum())

    @functools.cached_property
    def blind(self) -> bool:
        """Whether some query sees no key."""
        return self.hidden.shape[1] == self.keys and bool(self.hidden.all(axis=1).any())

    @property
    def positions(self) -> np.ndarray:
        """The keys, int64."""
        return tile_positions(self.pieces, self.unit)


def tile_positions(tiles: np.ndarray, size: int) -> np.ndarray:
    """The positions of tiles, int64."""
    return (tiles[:, None] * size + np.arange(size)).ravel()


Plan = tuple[QueryBlock, ...]


@dataclass(frozen=True, eq=False)
class BlockMask:
    """A mask in blocks.

    Attributes:
        plans: One for all heads; one per head; or one per head of each sequence, those of the first sequence first.
        q_len: Queries.
        kv_len: Keys.
        causal: Whether the future is masked.
        block_size: Side of a tile.
    """

    plans: tuple[Plan, ...]
    q_len: int
    kv_len: int
    causal: bool
    block_size: int

    @property
    def shared(self) -> bool:
        """Whether one plan serves all heads."""
        return len(self.plans) == 1

    def plan(self, head: int) -> Plan:
        """That of a head, counted over the heads of all sequences."""
        return self.plans[head % len(self.plans)]

    @functools.cached_property
    def work(self) -> Work:
        """Connections and tiles kept, per head on average."""
        size, heads = self.block_size, len(self.plans)
        blocks = [block for plan in self.plans for block in plan]
        kept, tiles = (
            sum(block.kept for block in blocks),
            sum(tile_count(block.keys, size) for block in blocks),
        )
        if heads > 1:
            kept, tiles = kept / heads, tiles / heads
        grid = tile_count(self.q_len, size) * tile_count(self.kv_len, size)
        return Work(kept, allowed_pairs(self.q_len, self.kv_len, self.causal), tiles, grid)

    def elements(self, head: int = 0, rows: Sequence[int] | None = None) -> torch.Tensor:
        """The mask that dense attention must be given to equal this: bool [q_len or rows, kv_len]."""
        wanted = range(self.q_len) if rows is None else rows
        mask = np.zeros((len(wanted), self.kv_len), dtype=bool)
        for at, row in enumerate(wanted):
            block = self.plan(head)[row // self.block_size]
            mask[at, block.positions] = True
            mask[at, block.positions[block.hidden_from :]] = ~block.hidden[row - block.rows[0]]
        return torch.from_numpy(mask)


def work(q_len: int, kv_len: int, *, causal: bool, options: Options) -> Work | None:
    """Connections and tiles that the pattern keeps, counted from its mask; None where that depends on the input."""
    if options.pattern in DYNAMIC:
        return None
    return static_mask(options, q_len, kv_len, causal, 1).work


@functools.lru_cache(maxsize=64)
def static_mask(
    options: Options, q_len: int, kv_len: int, causal: bool, heads: int, size: int | None = None
) -> BlockMask:
    """The mask of a pattern that depends on the shape alone, kept for the next layer or call that asks for it.

    Args:
        options: The pattern, and what it reads.
        q_len: Queries; they are at the last positions of the keys.
        kv_len: Keys.
        causal: Whether the future is masked.
        heads: Query heads.
        size: Side of a tile in which is skipped; None means `block_size`.

    Raises:
        BadInput: More queries than keys, for a pattern with a table.
    """
    options = with_window(options, q_len, kv_len, causal)
    causal, size = options.hides_future(causal), size or options.block_size
    keeps = static_mask_mod(options, q_len, kv_len, causal, heads, None)
    plans = (
        _plan(keeps, options, head, q_len, kv_len, causal, size)
        for head in range(options.masked_heads(heads))
    )
    return BlockMask(tuple(plans), q_len, kv_len, causal, size)


@functools.lru_cache(maxsize=64)
def with_window(options: Options, q_len: int, kv_len: int, causal: bool) -> Options:
    """Options with a window where a sparsity was asked for: the largest that removes that share, 1 where none does.

    Raises:
        BadInput: As `static_mask`.
    """
    if q_len > kv_len and options.pattern in TABLED:
        raise BadInput(
            "q: more queries than keys; for a pattern of tiles or documents give at most as many, or use pattern window"
        )
    if options.sparsity is None or options.pattern not in WINDOWED:
        return options
    allowed, low, high = allowed_pairs(q_len, kv_len, causal), 1, kv_len
    while low < high:  # removed connections fall as the window grows
        middle = (low + high + 1) // 2
        found = options.model_copy(update={"window": middle})
        keeps = static_mask_mod(found, q_len, kv_len, causal, 1, None)
        plan = _plan(keeps, found, 0, q_len, kv_len, causal, options.block_size)
        enough = 1 - sum(block.kept for block in plan) / allowed >= options.sparsity
        low, high = (middle, high) if enough else (low, middle - 1)
    return options.model_copy(update={"window": low})


def static_mask_mod(
    options: Options, q_len: int, kv_len: int, causal: bool, heads: int, device: Device
) -> MaskMod:
    """The mask of a pattern, of queries and keys; options as `with_window` gives them."""
    mask_mod = PATTERNS[options.pattern](options, kv_len, heads, device)
    return at_end(mask_mod, kv_len - q_len, causal)


def at_end(mask_mod: MaskMod, offset: int, causal: bool) -> MaskMod:
    """A mask of positions as one of queries, whose first is at `offset`."""

    def keeps(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        position = q_idx + offset
        kept = mask_mod(b, h, position, kv_idx)
        return kept & (kv_idx <= position) if causal else kept

    return keeps if offset or causal else mask_mod


def _plan(
    keeps: MaskMod, options: Options, head: int, q_len: int, kv_len: int, causal: bool, size: int
) -> Plan:
    """The kept tiles of every block of queries, found at their corners if the pattern allows it."""
    blocks, offset = [], kv_len - q_len
    sides = (size, options.block_size) if options.pattern in BY_CORNERS else (1,)
    for start in range(0, q_len, size):
        stop = min(start + size, q_len)
        reach = stop + offset if causal else kv_len
        positions = _corners(start + offset, stop + offset, sides)
        near = positions[(positions >= 0) & (positions < kv_len)]
        keys = np.union1d(_corners(0, reach, sides), near)
        kept = keeps(0, head, positions[:, None] - offset, keys)
        tiles = np.unique(keys[kept.any(axis=0)] // size)
        keys = tile_positions(tiles, size)
        keys = keys[keys < reach]
        kept = keeps(0, head, np.arange(start, stop)[:, None], keys)
        blocks.append(QueryBlock.of((start, stop), keys, kv_len, kept))
    return tuple(blocks)


def _corners(start: int, stop: int, sides: Sequence[int]) -> np.ndarray:
    """Positions in [start, stop) at which a tile of one of these sides begins or ends, and both ends of the range."""
    begins = np.unique(
        np.concatenate(
            [[start], *(np.arange(-(-start // side) * side, stop, side) for side in sides)]
        )
    )
    return np.unique(np.concatenate([begins, begins[1:] - 1, [stop - 1]]))
