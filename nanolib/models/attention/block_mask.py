"""Which keys each block of queries attends to: the plan that the block-sparse kernel follows, and what it keeps."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import _disable_current_modes

from nanolib.models.attention.patterns.pattern import Pattern, Run, merge_runs, tile_count
from nanolib.models.attention.work import Work, allowed_pairs


@contextmanager
def real_tensors() -> Iterator[None]:
    """Masks are kept between calls: made while someone plans, or builds a model without data, they must be real all the same."""
    with _disable_current_modes(), torch.device("cpu"):
        yield


def on_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A mask's own, real tensor on a device; without data where someone plans."""
    planning = detect_fake_mode()
    return (planning.from_tensor(x) if planning else x).to(device)


class OnDevices:
    """A mask's own tensor, moved to each device once: each upload would let the host wait for the device."""

    def __init__(self, x: torch.Tensor) -> None:
        self._x = x
        self._moved: dict[torch.device, torch.Tensor] = {}

    def on(self, device: torch.device) -> torch.Tensor:
        """The tensor there; without data where someone plans."""
        if self._x.device == device:
            return self._x
        moved, planning = self._moved.get(device), detect_fake_mode()
        if moved is None or getattr(moved, "fake_mode", None) is not planning:  # what a plan has moved holds no data
            moved = self._moved[device] = on_device(self._x, device)
        return moved


@dataclass(frozen=True)
class QueryBlock:
    """One block of queries and the keys it attends to.

    Attributes:
        rows: Queries [start, stop).
        runs: Key ranges [start, stop), in order: whole kept tiles, cut at the sequence's end.
        mask: True where a query sees a key, shape [rows, keys in runs]; None where all do.
        kept_tiles: How many tiles `runs` covers.
        kept: Connections in the mask.
    """

    rows: Run
    runs: tuple[Run, ...]
    mask: torch.Tensor | None
    kept_tiles: int
    kept: int

    @functools.cached_property
    def keys(self) -> int:
        """How many keys `runs` hold."""
        return sum(stop - start for start, stop in self.runs)

    @functools.cached_property
    def blind(self) -> torch.Tensor | None:
        """Which queries see no key, bool [rows, 1]; None where each sees some."""
        if self.mask is None:
            return None
        with real_tensors():
            blind = ~self.mask.any(dim=1, keepdim=True)
            return blind if blind.any() else None

    @functools.cached_property
    def hidden(self) -> tuple[int, torch.Tensor | None]:
        """From which of its keys on some query does not see them, and which do not: bool [rows, keys from there]."""
        if self.mask is None:
            return 0, None
        with real_tensors():
            hidden = ~self.mask
            first = int(hidden.any(dim=0).int().argmax())  # often the diagonal's tile alone
            return first, hidden[:, first:].contiguous()

    @functools.cached_property
    def index(self) -> torch.Tensor:
        """The keys, int64 [keys]."""
        with real_tensors():
            return torch.cat([torch.arange(*run) for run in self.runs])

    def pieces(self, length: int, heads: int) -> tuple[int, torch.Tensor]:
        """The keys in the largest equal pieces that start at multiples of their size: that size, and which pieces.

        Args:
            length: Keys of the whole sequence, which the size must divide.
            heads: So many sequences one after the other, since only along the first dimension is torch's gather a plain copy.
        """
        unit = math.gcd(length, self._alignment)
        if (length, heads) not in self._pieces:
            with real_tensors():
                index = np.concatenate([np.arange(start // unit, stop // unit) for start, stop in self.runs])
                of_heads = index + np.arange(heads)[:, None] * (length // unit)
                self._pieces[length, heads] = torch.from_numpy(of_heads.ravel())
        return unit, self._pieces[length, heads]

    def masks(self, group: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        """From which key on some query does not see them, which do not, and which queries see nothing; empty where all see.

        Args:
            group: Query heads that share the keys; the rows are those of all of them.
        """
        if group not in self._masks:
            with real_tensors():
                first, hidden = self.hidden
                rows = (_NO_MASK if x is None else x.repeat(group, 1) if group > 1 else x for x in (hidden, self.blind))
                self._masks[group] = (first, *rows)
        return self._masks[group]

    def on(self, x: torch.Tensor, device: torch.device) -> torch.Tensor:
        """One of this block's own tensors on a device."""
        return self._moved.setdefault(id(x), OnDevices(x)).on(device)

    @functools.cached_property
    def _moved(self) -> dict[int, OnDevices]:
        return {}

    @functools.cached_property
    def _masks(self) -> dict[int, tuple[int, torch.Tensor, torch.Tensor]]:
        return {}

    @functools.cached_property
    def _alignment(self) -> int:
        return math.gcd(*itertools.chain(*self.runs))

    @functools.cached_property
    def _pieces(self) -> dict[tuple[int, int], torch.Tensor]:
        return {}


with real_tensors():  # whoever plans may be the first to import this
    _NO_MASK = torch.tensor([], dtype=torch.bool)
Plan = tuple[QueryBlock, ...]


@dataclass(frozen=True)
class BlockMask:
    """A mask in blocks, shared by all heads or one for each.

    Attributes:
        plans: One plan for all; or one per head, those of the first sequence of the batch first.
        q_len: Queries.
        kv_len: Keys.
        causal: Whether the future is masked.
        block_size: Side of a tile.
        patterns: What each head's plan was made of, causality apart; none where it was chosen from the input.
    """

    plans: tuple[Plan, ...]
    q_len: int
    kv_len: int
    causal: bool
    block_size: int
    patterns: tuple[Pattern, ...] = ()

    @property
    def shared(self) -> bool:
        """Whether one plan serves all heads."""
        return len(self.plans) == 1

    @property
    def work(self) -> Work:
        """Connections and tiles kept, per head on average."""
        blocks = [block for plan in self.plans for block in plan]
        heads = len(self.plans)
        tiles = tile_count(self.q_len, self.block_size) * tile_count(self.kv_len, self.block_size)
        total = allowed_pairs(self.q_len, self.kv_len, self.causal)
        kept, kept_tiles = sum(block.kept for block in blocks), sum(block.kept_tiles for block in blocks)
        if heads == 1:
            return Work(kept, total, kept_tiles, tiles)
        return Work(kept / heads, total, kept_tiles / heads, tiles)

    def elements(self, head: int = 0, rows: Sequence[int] | None = None) -> torch.Tensor:
        """The mask that dense attention must be given to equal this: bool [q_len or rows, kv_len]."""
        plan = self.plans[0 if self.shared else head]
        wanted = range(self.q_len) if rows is None else rows
        mask = torch.zeros(len(wanted), self.kv_len, dtype=torch.bool)
        for at, row in enumerate(wanted):
            block = plan[row // self.block_size]
            if block.runs:
                seen = slice(None) if block.mask is None else block.mask[row - block.rows[0]]
                mask[at, block.index[seen]] = True
        return mask


def plan_of(pattern: Pattern, q_len: int, kv_len: int, causal: bool, size: int) -> Plan:
    """The kept tiles of every block of queries.

    Args:
        pattern: Which connections are kept, causality apart.
        q_len: Queries; they stand at the last positions of the keys.
        kv_len: Keys.
        causal: Whether the future is masked.
        size: Side of a tile.
    """
    return tuple(
        _block(pattern, (start, min(start + size, q_len)), q_len, kv_len, causal, size)
        for start in range(0, q_len, size)
    )


def _block(pattern: Pattern, rows: Run, q_len: int, kv_len: int, causal: bool, size: int) -> QueryBlock:
    offset = kv_len - q_len
    first, last = rows[0] + offset, rows[1] - 1 + offset
    reach = last + 1 if causal else kv_len
    candidates = merge_runs(pattern.runs(first, last), reach)
    # The pattern's ranges may hold empty tiles: keep only those in which some query sees some key.
    tiles = sorted({tile for start, stop in candidates for tile in range(start // size, -(-stop // size))})
    spans = [(tile * size, min((tile + 1) * size, reach)) for tile in tiles]
    masked = ((span, positional_mask(pattern, *rows, *span, offset, causal)) for span in spans)
    return block_of(rows, [(span, mask) for span, mask in masked if mask.any()], reach)


def block_of(rows: Run, kept: Sequence[tuple[Run, torch.Tensor]], reach: int) -> QueryBlock:
    """A block from its kept tiles, each with its mask, bool [rows, keys of the tile]."""
    if not kept:
        return QueryBlock(rows, (), None, 0, 0)
    mask = torch.cat([mask for _, mask in kept], dim=1)
    count = int(mask.sum())
    runs = merge_runs([span for span, _ in kept], reach)
    return QueryBlock(rows, tuple(runs), None if count == mask.numel() else mask, len(kept), count)


def positional_mask(pattern: Pattern, q0: int, q1: int, k0: int, k1: int, offset: int, causal: bool) -> torch.Tensor:
    """The pattern over queries [q0, q1) and keys [k0, k1), causality applied: bool [q1 − q0, k1 − k0]."""
    i = torch.arange(q0 + offset, q1 + offset)[:, None]
    j = torch.arange(k0, k1)[None, :]
    mask = pattern.sees(i, j)
    return mask & (j <= i) if causal else mask


def plan_of_tiles(table: torch.Tensor, q_len: int, kv_len: int, causal: bool, size: int) -> Plan:
    """The plan that keeps the tiles of a table.

    Args:
        table: True where a tile is kept, bool [query tiles, key tiles]; tiles of queries count from the first query.
        q_len: Queries.
        kv_len: Keys.
        causal: Whether the future is masked.
        size: Side of a tile.
    """
    return tuple(_tile_blocks(table, q_len, kv_len, causal, size))


def _tile_blocks(table: torch.Tensor, q_len: int, kv_len: int, causal: bool, size: int) -> Iterator[QueryBlock]:
    offset = kv_len - q_len
    for row, kept in enumerate(table.tolist()):
        rows = (row * size, min((row + 1) * size, q_len))
        reach = rows[1] + offset if causal else kv_len
        spans = [
            (tile * size, min((tile + 1) * size, reach))
            for tile, keep in enumerate(kept)
            if keep and tile * size < reach
        ]
        runs = tuple(merge_runs(spans, reach))
        whole = rows[0] + offset + 1 if causal else kv_len  # keys before this are seen by every query of the block
        if runs and runs[-1][1] > whole:
            # numpy: a table per head means thousands of small ones, whose making torch would be slow at
            j = np.concatenate([np.arange(*run) for run in runs])
            mask = j[None, :] <= np.arange(rows[0] + offset, rows[1] + offset)[:, None]
            yield QueryBlock(rows, runs, torch.from_numpy(mask), len(spans), int(mask.sum()))
        else:
            keys = sum(stop - start for start, stop in runs)
            yield QueryBlock(rows, runs, None, len(spans), keys * (rows[1] - rows[0]))


def window_for(
    sparsity: float, make: Callable[[int], Pattern], q_len: int, kv_len: int, causal: bool, size: int
) -> int:
    """The largest window with which `make` still removes the share asked for (1 where none does)."""
    allowed = allowed_pairs(q_len, kv_len, causal)
    low, high = 1, kv_len
    while low < high:  # removed connections fall as the window grows
        middle = (low + high + 1) // 2
        kept = sum(block.kept for block in plan_of(make(middle), q_len, kv_len, causal, size))
        low, high = (middle, high) if 1 - kept / allowed >= sparsity else (low, middle - 1)
    return low
