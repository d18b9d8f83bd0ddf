"""Which keys each block of queries attends to: the plan that both kernels follow, and what it keeps.

All in numpy, so that a plan is the same whether tensors have data or not.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nanolib.measurement import BadInput
from nanolib.models.attention.patterns import (
    DYNAMIC,
    PATTERNS,
    TABLED,
    WINDOWED,
    MaskMod,
    Options,
    Pattern,
    Run,
    tile_count,
)
from nanolib.models.attention.work import Work, allowed_pairs


@dataclass(frozen=True, eq=False)
class QueryBlock:
    """One block of queries and the keys it attends to.

    Attributes:
        rows: Queries [start, stop).
        runs: Key ranges [start, stop), in order and apart.
        unit: The keys in equal pieces that begin at multiples of their length, which divides the sequence's: that length.
        pieces: And which pieces, int64.
        hidden_from: From which of its keys on some query does not see them.
        hidden: Which do not: bool [rows, keys from there], without columns where all queries see all.
    """

    rows: Run
    runs: tuple[Run, ...]
    unit: int
    pieces: np.ndarray
    hidden_from: int
    hidden: np.ndarray

    @classmethod
    def of(
        cls, rows: Run, runs: list[Run], kv_len: int, kept: np.ndarray, begin: int = 0
    ) -> QueryBlock:
        """A block; `kept` is True where a query sees a key, bool [rows, keys from `begin` on], all before are seen."""
        unit = math.gcd(kv_len, *itertools.chain(*runs))
        pieces = _positions([(start // unit, stop // unit) for start, stop in runs])
        columns = (~kept).any(axis=0)
        first = int(columns.argmax()) if columns.any() else kept.shape[1]
        return cls(rows, tuple(runs), unit, pieces, begin + first, ~kept[:, first:])

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

    def pieces_of(self, heads: int, kv_len: int) -> np.ndarray:
        """The pieces of several heads whose keys lie one after the other, int64."""
        return (np.arange(heads)[:, None] * (kv_len // self.unit) + self.pieces).ravel()

    @property
    def positions(self) -> np.ndarray:
        """The keys, int64."""
        return _positions(self.runs)


def _positions(runs: Iterable[Run]) -> np.ndarray:
    return np.concatenate([np.arange(0), *(np.arange(*run) for run in runs)])


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


def merge_runs(runs: Iterable[Run], length: int) -> list[Run]:
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
    pattern = PATTERNS[options.pattern](options, kv_len, heads, None)
    causal, size = options.hides_future(causal), size or options.block_size
    plans = (
        _plan(pattern, head, q_len, kv_len, causal, size)
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
        pattern = PATTERNS[options.pattern](found, kv_len, 1, None)
        plan = _plan(pattern, 0, q_len, kv_len, causal, options.block_size)
        enough = 1 - sum(block.kept for block in plan) / allowed >= options.sparsity
        low, high = (middle, high) if enough else (low, middle - 1)
    return options.model_copy(update={"window": low})


def at_end(mask_mod: MaskMod, offset: int, causal: bool) -> MaskMod:
    """A mask of positions as one of queries, whose first is at `offset`."""

    def keeps(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        position = q_idx + offset
        kept = mask_mod(b, h, position, kv_idx)
        return kept & (kv_idx <= position) if causal else kept

    return keeps if offset or causal else mask_mod


def _plan(pattern: Pattern, head: int, q_len: int, kv_len: int, causal: bool, size: int) -> Plan:
    """The kept tiles of every block of queries; keys are looked at only where the pattern's runs are."""
    blocks, offset = [], kv_len - q_len
    keeps = at_end(pattern.mask_mod, offset, causal)
    for start in range(0, q_len, size):
        rows = start, min(start + size, q_len)
        last = rows[1] - 1 + offset
        reach = last + 1 if causal else kv_len
        runs = pattern.runs(head, start + offset, last)
        within = [(start // size * size, tile_count(stop, size) * size) for start, stop in runs]
        keys = _positions(merge_runs(within, reach))
        kept = keeps(0, head, np.arange(*rows)[:, None], keys)
        tiles = np.unique(keys[kept.any(axis=0)] // size)  # the runs may hold empty ones
        spans = merge_runs(((tile * size, (tile + 1) * size) for tile in tiles.tolist()), reach)
        blocks.append(QueryBlock.of(rows, spans, kv_len, kept[:, np.isin(keys // size, tiles)]))
    return tuple(blocks)
