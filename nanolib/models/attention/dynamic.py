"""Patterns that look at the input: which keys each head keeps, chosen from the queries and keys themselves.

A chooser takes q, k, causal, options and scores, and returns a `Choice`, made where q and k lie: the host waits for nothing until
it asks for the blocks. A new one is a function, and a name in `patterns.DYNAMIC`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.nn.functional import avg_pool2d, pad

from nanolib.models.attention.block_mask import BlockMask, QueryBlock, at_end, tile_positions
from nanolib.models.attention.patterns import DYNAMIC, MaskMod, Options, is_near, placed


@dataclass(frozen=True)
class Choice:
    """What a chooser keeps, in tables of cells: a block of queries and a tile of keys, or a single key.

    Attributes:
        chosen: The cells that are kept, bool [batch, heads, query blocks, key cells]; 1 head stands for all. On the input's device.
        some: The cells of which some query sees some key, with the window and causality; shape as `chosen`.
        whole: The cells of which all queries see all keys, and which the sequence's end does not cut.
        key_size: Keys per cell.
        window: Reach of the local part that is kept next to `chosen`, tokens; 0 for none.
        heads: Query heads.
        q_len: Queries.
        kv_len: Keys.
        causal: Whether the future is masked.
        block_size: Queries per cell.
    """

    chosen: Tensor
    some: Tensor
    whole: Tensor
    key_size: int
    window: int
    heads: int
    q_len: int
    kv_len: int
    causal: bool
    block_size: int

    def mask_mod(self, chosen: Any) -> MaskMod:
        """Whether a query sees a key; `chosen` as in the class, a tensor or an array."""
        (batch, heads), offset = chosen.shape[:2], self.kv_len - self.q_len
        size, key_size, window = self.block_size, self.key_size, self.window

        def keeps(b: Any, h: Any, position: Any, kv_idx: Any) -> Any:
            kept = chosen[b % batch, h % heads, (position - offset) // size, kv_idx // key_size]
            return kept | is_near(position, kv_idx, window) if window else kept

        return at_end(keeps, offset, self.causal)

    def tiles(self, side: int) -> tuple[Tensor, Tensor]:
        """The tiles that hold a kept pair, and those that hold nothing else: bool [batch, heads, query tiles, key tiles].

        Args:
            side: Queries and keys of a tile; a multiple of `block_size`.
        """
        rows, columns = side // self.block_size, side // self.key_size
        shape = self.some.shape
        cut = 0, -shape[3] % columns, 0, -shape[2] % rows
        some, whole = (
            pad(x, cut).unflatten(3, (-1, columns)).unflatten(2, (-1, rows))
            for x in (self.some, self.whole)
        )
        return some.any(dim=5).any(dim=3), whole.all(dim=5).all(dim=3)

    def blocks(self) -> BlockMask:
        """The mask in blocks, on the host, which waits for it."""
        chosen, some, whole = (
            x.flatten(0, 1).cpu().numpy() for x in (self.chosen, self.some, self.whole)
        )
        keeps, plans = self.mask_mod(chosen[None]), []
        for head in range(len(chosen)):
            rows = enumerate(zip(some[head], whole[head], strict=True))
            plans.append(tuple(self._block(row, *cells, keeps, head) for row, cells in rows))
        alike = self.heads // self.chosen.shape[1]  # heads that share a table
        shared = tuple(plan for plan in plans for _ in range(alike))
        return BlockMask(shared, self.q_len, self.kv_len, self.causal, self.block_size)

    def _block(
        self, row: int, some: np.ndarray, whole: np.ndarray, keeps: MaskMod, head: int
    ) -> QueryBlock:
        start, stop = row * self.block_size, min((row + 1) * self.block_size, self.q_len)
        reach = stop + self.kv_len - self.q_len if self.causal else self.kv_len
        cells = some.nonzero()[0]
        keys = tile_positions(cells, self.key_size)
        keys = keys[keys < reach]
        # all queries see the leading whole cells: nothing is looked up there
        begin = int(np.append(whole[cells], False).argmin()) * self.key_size
        kept = keeps(0, head, np.arange(start, stop)[:, None], keys[begin:])
        return QueryBlock.of((start, stop), keys, self.kv_len, kept, begin)


def top_k(q: Tensor, k: Tensor, causal: bool, options: Options, scores: Tensor | None) -> Choice:
    """Each row of tiles keeps its own tile and those with the highest estimated scores, as many as the sparsity leaves.

    Without a sparsity, `window` tokens are kept.
    """
    cells = _Cells.of(q, k, causal, options.block_size, options.block_size)
    estimated, allowed, own = _tile_scores(q, k, cells)
    counts = allowed.sum(dim=1, keepdim=True)
    if options.sparsity is None:
        kept = counts.clamp(max=max(1, round(options.window / options.block_size)))
    else:
        kept = ((1 - options.sparsity) * counts).round().clamp(min=1)
    rank = estimated.masked_fill(own, float("inf")).argsort(dim=-1, descending=True).argsort(dim=-1)
    return cells.choice((rank < kept) & allowed)


def threshold(
    q: Tensor, k: Tensor, causal: bool, options: Options, scores: Tensor | None
) -> Choice:
    """Each row of tiles keeps its own tile and the fewest tiles whose estimated attention adds up to `mass`.

    When causal the attention is that to earlier tiles alone: the mean of a row's own keys knows of the future.
    """
    cells = _Cells.of(q, k, causal, options.block_size, options.block_size)
    estimated, allowed, own = _tile_scores(q, k, cells)
    estimated = estimated.masked_fill(own, float("-inf")) if causal else estimated
    # the first row has no earlier tile: all its weights are 0 / 0
    weights, order = torch.softmax(estimated, dim=-1).nan_to_num().sort(dim=-1, descending=True)
    before = weights.cumsum(dim=-1) - weights  # what the better ones have gathered
    kept = torch.zeros_like(estimated, dtype=torch.bool).scatter(-1, order, before < options.mass)
    return cells.choice((kept | own) & allowed)


def _tile_scores(q: Tensor, k: Tensor, cells: _Cells) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of tiles by the means of their queries and keys; when causal by their first query, which knows nothing of the future.

    Returns:
        Scores, shape [batch, heads, query tiles, key tiles], −inf if causality forbids the tile; which tiles it
        allows, and which is each row's own, both bool [query tiles, key tiles].

    Source: the pooled estimate of MInference (Jiang et al., 2024, arXiv 2407.02490).
    """
    size, q, k = cells.block_size, q.detach(), k.detach()
    q_means = q[:, :, ::size].float() if cells.causal else _tile_means(q, size)
    k_means = _tile_means(k, size)
    # query heads that share their keys, one after the other
    grouped = q_means.reshape(*k.shape[:2], -1, q.shape[-1])
    scores = (grouped @ k_means.mT).view(*q_means.shape[:3], -1) * q.shape[-1] ** -0.5
    allowed = (cells.start <= cells.last) | (not cells.causal)
    own = (cells.first - size < cells.start) & (cells.start <= cells.last)
    return scores.masked_fill(~allowed, float("-inf")), allowed, own


def _tile_means(x: Tensor, size: int) -> Tensor:
    """Over each tile's tokens, float32 [batch, heads, tiles, head_dim]; of the last one, over those that there are."""
    return avg_pool2d(x.float(), (size, 1), ceil_mode=True)


@dataclass(frozen=True)
class _Cells:
    """Where the cells of a choice are: positions of their first and last query, int64 [rows, 1], and key, int64 [columns].

    A cell that the sequence's end cuts has its last query or key beyond the end.
    """

    first: Tensor
    last: Tensor
    start: Tensor
    stop: Tensor
    heads: int
    q_len: int
    kv_len: int
    causal: bool
    block_size: int
    key_size: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, causal: bool, size: int, key_size: int) -> _Cells:
        """Cells of `size` queries and `key_size` keys."""
        heads, q_len, kv_len = q.shape[1], q.shape[2], k.shape[2]
        first = torch.arange(kv_len - q_len, kv_len, size, device=q.device)[:, None]
        start = torch.arange(0, kv_len, key_size, device=q.device)
        edges = first, first + size - 1, start, start + key_size - 1
        return cls(*edges, heads, q_len, kv_len, causal, size, key_size)

    def choice(self, chosen: Tensor, window: int = 0) -> Choice:
        """What is kept if these cells are chosen, and a window next to them."""
        some, whole = chosen, chosen
        if window:
            some = some | (self.start - self.last < window) & (self.first - self.stop < window)
            whole = whole | (self.stop - self.first < window) & (self.last - self.start < window)
        if self.causal:
            some, whole = some & (self.start <= self.last), whole & (self.stop <= self.first)
        whole = whole & (self.last < self.kv_len) & (self.stop < self.kv_len)
        shape = self.heads, self.q_len, self.kv_len, self.causal, self.block_size
        return Choice(chosen, some, whole, self.key_size, window, *shape)


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
    return _Cells.of(q, k, causal, options.block_size, 1).choice(table, options.window)


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
