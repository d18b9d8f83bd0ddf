"""Patterns that look at the input: which keys each head keeps, chosen from the queries and keys themselves.

A chooser takes q, k, causal, options and scores, and returns a `Choice`, made where q and k lie: the host waits for nothing until
it asks for the blocks. A new one is a function, and a name in `patterns.DYNAMIC`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.nn.functional import avg_pool2d

from nanolib.models.attention.block_mask import BlockMask, QueryBlock, merge_runs
from nanolib.models.attention.patterns import (
    DYNAMIC,
    MaskMod,
    Options,
    Run,
    is_near,
    placed,
    tile_count,
)


@dataclass(frozen=True)
class Choice:
    """What a chooser keeps.

    Attributes:
        table: True where a block of queries keeps a tile of keys, bool [batch, heads, query tiles, key tiles]; or a single key,
            bool [batch, 1, query tiles, keys]. On the device of the input; causality is applied on top.
        key_size: Keys per column: the side of a tile, or 1.
        window: Reach of the local part that is kept beside single keys, tokens; 0 where tiles are kept.
        heads: Query heads.
        q_len: Queries.
        kv_len: Keys.
        causal: Whether the future is masked.
        block_size: Queries per row of the table.
    """

    table: Tensor
    key_size: int
    window: int
    heads: int
    q_len: int
    kv_len: int
    causal: bool
    block_size: int

    def mask_mod(self) -> MaskMod:
        """Whether a query sees a key, as FlexAttention asks for it."""
        table, key_size, window, causal, size = (
            self.table,
            self.key_size,
            self.window,
            self.causal,
            self.block_size,
        )
        batch, heads, offset = *table.shape[:2], self.kv_len - self.q_len

        def keeps(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            position = q_idx + offset
            kept = table[b % batch, h % heads, q_idx // size, kv_idx // key_size]
            kept = kept | is_near(position, kv_idx, window) if window else kept
            return kept & (kv_idx <= position) if causal else kept

        return keeps

    def tiles(self, side: int) -> tuple[Tensor, Tensor]:
        """Which tiles hold a kept pair, and which hold nothing else: bool [batch, heads, query tiles, key tiles].

        All of it is done where the table is, and in no more memory than the table takes.
        """
        cell = self.block_size, self.key_size
        part = math.gcd(side, cell[0]), math.gcd(side, cell[1])
        shape = (self.q_len, self.kv_len), cell, part, side, self.window, self.causal
        row, column, *allowed, near, all_near = _parts(
            *shape, self.table.device, detect_fake_mode()
        )
        chosen = self.table[:, :, row][:, :, :, column]
        some, whole = (
            (x & y).unflatten(3, (-1, side // part[1])).unflatten(2, (-1, side // part[0]))
            for x, y in zip((chosen | near, chosen | all_near), allowed, strict=True)
        )
        return some.any(dim=5).any(dim=3), whole.all(dim=5).all(dim=3)

    def blocks(self) -> BlockMask:
        """The mask in blocks, on the host, which waits for it."""
        tables = self.table.flatten(0, 1).cpu().numpy()
        alike = self.heads * self.table.shape[0] // len(tables)  # heads that share a table
        plans = [
            tuple(self._block(row, kept) for row, kept in enumerate(table)) for table in tables
        ]
        shared = tuple(plan for plan in plans for _ in range(alike))
        return BlockMask(shared, self.q_len, self.kv_len, self.causal, self.block_size)

    def _block(self, row: int, kept: np.ndarray) -> QueryBlock:
        rows: Run = row * self.block_size, min((row + 1) * self.block_size, self.q_len)
        first, last = (position + self.kv_len - self.q_len for position in (rows[0], rows[1] - 1))
        columns, size = kept.nonzero()[0], self.key_size
        runs = [(at * size, (at + 1) * size) for at in columns.tolist()]
        if self.window:
            runs.append((first - self.window + 1, last + self.window))
        runs = merge_runs(runs, last + 1 if self.causal else self.kv_len)
        keys = np.concatenate([np.arange(0), *(np.arange(*run) for run in runs)])
        begin = int(
            np.searchsorted(keys, first + 1 - self.window)
        )  # all before are listed, and known to every query
        i, j = np.arange(first, last + 1)[:, None], keys[begin:]
        seen = np.broadcast_to(kept[j // size], (len(i), len(j)))
        seen = seen | is_near(i, j, self.window) if self.window else seen
        return QueryBlock.of(
            rows, runs, self.kv_len, seen & (j <= i) if self.causal else seen, begin
        )


@functools.lru_cache(maxsize=16)
def _parts(
    lengths: tuple[int, int],
    cell: tuple[int, int],
    part: tuple[int, int],
    side: int,
    window: int,
    causal: bool,
    device: torch.device,
    planning: object,
) -> tuple[Tensor, ...]:
    """Tiles in parts of which each is in one cell of a choice's table; of a shape the same in each call, so made once.

    Args:
        lengths: Queries and keys.
        cell: Queries and keys of a cell.
        part: Queries and keys of a part.
        side: Of a tile.
        window: As in `Choice`.
        causal: As in `Choice`.
        device: Where the table is.
        planning: The mode in which tensors have no data, if they have none.

    Returns:
        Of each row of parts the table's row, of each column its column; and bool [rows, columns]: where the lengths and causality
        allow a pair, and all; where the window has a pair, and all.
    """
    (q_len, kv_len), (height, width) = lengths, part
    row, start = (
        np.arange(0, tile_count(n, side) * side, step)
        for n, step in zip(lengths, part, strict=True)
    )
    first = row[:, None] + kv_len - q_len  # position of a part's first query
    last, stop = first + height - 1, start + width - 1
    some, whole = (first < kv_len) & (start < kv_len), (last < kv_len) & (stop < kv_len)
    last, stop = np.minimum(last, kv_len - 1), np.minimum(stop, kv_len - 1)
    arrays = (
        np.minimum(row, q_len - 1) // cell[0],
        np.minimum(start, kv_len - 1) // cell[1],
        some & (start <= last) if causal else some,
        whole & (stop <= first) if causal else whole,
        (start - last < window) & (first - stop < window) & (window > 0),
        (stop - first < window) & (last - start < window),
    )
    return tuple(placed(x, device) for x in arrays)


def top_k(q: Tensor, k: Tensor, causal: bool, options: Options, scores: Tensor | None) -> Choice:
    """Each row of tiles keeps its own tile and those with the highest estimated scores, as many as the sparsity leaves.

    Without a sparsity, `window` tokens are kept.
    """
    estimated, allowed, own = _tile_scores(q, k, causal, options.block_size)
    counts = allowed.sum(dim=1, keepdim=True)
    if options.sparsity is None:
        kept = counts.clamp(max=max(1, round(options.window / options.block_size)))
    else:
        kept = ((1 - options.sparsity) * counts).round().clamp(min=1)
    rank = estimated.masked_fill(own, float("inf")).argsort(dim=-1, descending=True).argsort(dim=-1)
    return _of_tiles((rank < kept) & allowed, q, k, causal, options)


def threshold(
    q: Tensor, k: Tensor, causal: bool, options: Options, scores: Tensor | None
) -> Choice:
    """Each row of tiles keeps its own tile and the fewest tiles whose estimated attention adds up to `mass`.

    When causal the attention is that to earlier tiles alone: the mean of a row's own keys knows of the future.
    """
    estimated, allowed, own = _tile_scores(q, k, causal, options.block_size)
    estimated = estimated.masked_fill(own, float("-inf")) if causal else estimated
    # the first row has no earlier tile: all its weights are 0 / 0
    weights, order = torch.softmax(estimated, dim=-1).nan_to_num().sort(dim=-1, descending=True)
    before = weights.cumsum(dim=-1) - weights  # what the better ones have gathered
    kept = torch.zeros_like(estimated, dtype=torch.bool).scatter(-1, order, before < options.mass)
    return _of_tiles((kept | own) & allowed, q, k, causal, options)


def _tile_scores(q: Tensor, k: Tensor, causal: bool, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of tiles by the means of their queries and keys; when causal by their first query, which knows nothing of the future.

    Returns:
        Scores, shape [batch, heads, query tiles, key tiles], −inf where causality forbids the tile; which tiles it
        allows, and which is each row's own, both bool [query tiles, key tiles].

    Source: the pooled estimate of MInference (Jiang et al., 2024, arXiv 2407.02490).
    """
    batch, heads, q_len, _ = q.shape
    kv_len = k.shape[2]
    q_means = q.detach()[:, :, ::size].float() if causal else _tile_means(q.detach(), size)
    k_means = _tile_means(k.detach(), size)
    # query heads that share their keys, one after the other
    q_means = q_means.reshape(batch, k.shape[1], -1, q.shape[-1])
    scores = (q_means @ k_means.mT).view(batch, heads, -1, k_means.shape[2]) * q.shape[-1] ** -0.5
    first = (
        torch.arange(0, q_len, size, device=q.device)[:, None] + kv_len - q_len
    )  # position of each row's first query
    last = (first + size - 1).clamp(max=kv_len - 1)
    starts = torch.arange(0, kv_len, size, device=q.device)
    allowed = starts <= (last if causal else kv_len + 0 * last)
    return (
        scores.masked_fill(~allowed, float("-inf")),
        allowed,
        (first - size < starts) & (starts <= last),
    )


def _tile_means(x: Tensor, size: int) -> Tensor:
    """Over each tile's tokens, float32 [batch, heads, tiles, head_dim]; of the last one, over those that there are."""
    return avg_pool2d(x.float(), (size, 1), ceil_mode=True)


def _of_tiles(table: Tensor, q: Tensor, k: Tensor, causal: bool, options: Options) -> Choice:
    return Choice(
        table, options.block_size, 0, q.shape[1], q.shape[2], k.shape[2], causal, options.block_size
    )


def dca(q: Tensor, k: Tensor, causal: bool, options: Options, scores: Tensor | None) -> Choice:
    """Dynamic Context Allocation: a local window, the tokens with the highest score as globals, and random keys.

    The number of globals follows the input: tokens whose score lies more than one standard deviation above the mean, at
    least one and at most `global_tokens`. Random keys are drawn per block of queries. When causal, a block chooses among the tokens
    before it, so that no choice tells of the future, and decoding over a cache chooses as the whole sequence did.

    Args:
        q: Queries, shape [batch, heads, q_len, head_dim].
        k: Keys, shape [batch, kv_heads, kv_len, head_dim].
        causal: Whether the future is masked.
        options: `window`, `global_tokens`, `random_tokens`, `block_size`, `seed`.
        scores: Per token, shape [batch, kv_len]; None means the norm of its keys.
    """
    values = k.detach().float().norm(dim=-1).mean(dim=1) if scores is None else scores.detach()
    values = values.to(
        torch.float32 if q.device.type == "mps" else torch.float64
    )  # MPS has no float64
    q_len, kv_len = q.shape[2], k.shape[2]
    known, drawn = _drawn(q_len, kv_len, causal, options, q.device, detect_fake_mode())
    table = _stand_out(values, known, options.global_tokens)
    table = table.scatter(-1, drawn.expand(len(table), -1, -1), True)[:, None, :, :kv_len]
    return Choice(table, 1, options.window, q.shape[1], q_len, kv_len, causal, options.block_size)


def _stand_out(scores: Tensor, known: Tensor, most: int) -> Tensor:
    """Which tokens become global: bool [batch, blocks, tokens + 1], the last one never.

    Args:
        scores: Of each token, [batch, tokens].
        known: Among how many leading tokens each block of queries chooses, int64 [blocks, 1].
        most: At most so many of them.
    """
    tokens = scores.shape[-1]
    beyond = torch.arange(tokens, device=scores.device) >= known
    among = scores[:, None].masked_fill(beyond, 0)
    mean = among.sum(dim=-1, keepdim=True) / known
    spread = (
        (among - mean).masked_fill(beyond, 0).square().sum(dim=-1, keepdim=True) / known
    ).sqrt()
    among = among.masked_fill(beyond, float("-inf"))
    count = (among > mean + spread).sum(dim=-1, keepdim=True).clamp(min=1).minimum(known)
    best = among.topk(min(most, tokens), dim=-1).indices
    best = best.masked_fill(torch.arange(best.shape[-1], device=best.device) >= count, tokens)
    return torch.zeros(*among.shape[:-1], tokens + 1, dtype=torch.bool, device=best.device).scatter(
        -1, best, True
    )


@functools.lru_cache(maxsize=64)
def _drawn(
    q_len: int, kv_len: int, causal: bool, options: Options, device: torch.device, planning: object
) -> tuple[Tensor, Tensor]:
    """Among how many leading tokens each block of queries chooses, int64 [blocks, 1], and its random ones.

    Returns:
        The latter int64 [blocks, random_tokens]; `kv_len` where it knows none.
    """
    size, count = options.block_size, options.random_tokens
    places = [(start + kv_len - q_len) // size for start in range(0, q_len, size)]
    known = [place * size if causal else kv_len for place in places]
    rows = np.full((len(places), count), kv_len)
    for row, place, among in zip(rows, places, known, strict=True):
        if among:
            source = np.random.RandomState((options.seed * 1_000_003 + place) % 2**32)
            row[:] = source.randint(2**32, size=count, dtype=np.uint32) % among
    return tuple(placed(x, device) for x in (np.array(known)[:, None], rows))


CHOOSERS: dict[str, Callable[..., Choice]] = dict(
    zip(DYNAMIC, (top_k, threshold, dca), strict=True)
)
