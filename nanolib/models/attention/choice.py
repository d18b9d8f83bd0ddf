"""Patterns that look at the input: which keys each head keeps, chosen from the queries and keys themselves.

A chooser takes q, k and the options and returns a `Choice`, made where q and k lie: the host waits for nothing until it asks for
the blocks. A new one is a function and a line in `CHOOSERS`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import avg_pool2d

from nanolib.models.attention.block_mask import BlockMask, OnDevices, Plan, QueryBlock, plan_of_tiles, real_tensors
from nanolib.models.attention.patterns.options import SparseOptions
from nanolib.models.attention.patterns.pattern import Run, merge_runs, tile_count


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
        block_size: Side of a tile.
    """

    table: torch.Tensor
    key_size: int
    window: int
    heads: int
    q_len: int
    kv_len: int
    causal: bool
    block_size: int

    def blocks(self) -> BlockMask:
        """The mask in blocks, on the host, which waits for it."""
        shape = (self.q_len, self.kv_len, self.causal, self.block_size)
        tables = self.table.flatten(0, 1).cpu()
        if self.window:
            plans = [plan for table in tables for plan in [self._plan_of_tokens(table)] * self.heads]
        else:
            plans = [plan_of_tiles(table, *shape) for table in tables]
        return BlockMask(tuple(plans), *shape)

    def _plan_of_tokens(self, table: torch.Tensor) -> Plan:
        size, offset = self.block_size, self.kv_len - self.q_len
        return tuple(
            self._block_of_tokens((row * size, min((row + 1) * size, self.q_len)), kept.nonzero().flatten(), offset)
            for row, kept in enumerate(table)
        )

    def _block_of_tokens(self, rows: Run, far: torch.Tensor, offset: int) -> QueryBlock:
        first, last = rows[0] + offset, rows[1] - 1 + offset
        reach = last + 1 if self.causal else self.kv_len
        far_runs = [(token, token + 1) for token in far.tolist()]
        runs = merge_runs([*far_runs, (first - self.window + 1, last + self.window)], reach)
        i, j = torch.arange(first, last + 1)[:, None], torch.cat([torch.arange(*run) for run in runs])
        mask = ((i - j).abs() < self.window) | torch.isin(j, far)
        mask = mask & (j <= i) if self.causal else mask
        count = int(mask.sum())
        tiles = tile_count(len(j), self.block_size)  # of work: the chosen keys are packed together
        return QueryBlock(rows, tuple(runs), None if count == mask.numel() else mask, tiles, count)


def top_k(
    q: torch.Tensor, k: torch.Tensor, causal: bool, options: SparseOptions, scores: torch.Tensor | None
) -> Choice:
    """Each row of tiles keeps its own tile and those with the highest estimated scores, as many as the sparsity leaves.

    Without a sparsity, `window` tokens are kept.
    """
    size = options.block_size
    estimated, allowed, own = _tile_scores(q, k, causal, size)
    counts = allowed.sum(dim=1, keepdim=True)
    if options.sparsity is None:
        kept = counts.clamp(max=max(1, round(options.window / size)))
    else:
        kept = ((1 - options.sparsity) * counts).round().clamp(min=1)
    rank = estimated.masked_fill(own, float("inf")).argsort(dim=-1, descending=True).argsort(dim=-1)
    return _of_tiles((rank < kept) & allowed, q, k, causal, size)


def threshold(
    q: torch.Tensor, k: torch.Tensor, causal: bool, options: SparseOptions, scores: torch.Tensor | None
) -> Choice:
    """Each row of tiles keeps its own tile and the fewest tiles whose estimated attention adds up to `mass`.

    When causal the attention is that to earlier tiles alone: the mean of a row's own keys knows of the future.
    """
    size = options.block_size
    estimated, allowed, own = _tile_scores(q, k, causal, size)
    estimated = estimated.masked_fill(own, float("-inf")) if causal else estimated
    # the first row has no earlier tile: all its weights are 0 / 0
    weights, order = torch.softmax(estimated, dim=-1).nan_to_num().sort(dim=-1, descending=True)
    before = weights.cumsum(dim=-1) - weights  # what the better ones have gathered
    kept = torch.zeros_like(estimated, dtype=torch.bool).scatter(-1, order, before < options.mass)
    return _of_tiles((kept | own) & allowed, q, k, causal, size)


def _tile_scores(
    q: torch.Tensor, k: torch.Tensor, causal: bool, size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores of tiles by the means of their queries and keys; when causal by their first query, which knows nothing of the future.

    Returns:
        Scores, shape [batch, heads, query tiles, key tiles], −inf where causality forbids the tile; which tiles it
        allows, and which is each row's own, both bool [query tiles, key tiles].

    Source: the pooled estimate of MInference (Jiang et al., 2024, arXiv 2407.02490).
    """
    batch, heads, q_len, _ = q.shape
    q_means = q.detach()[:, :, ::size].float() if causal else _tile_means(q.detach(), size)
    k_means = _tile_means(k.detach(), size)
    # query heads that share their keys, one after the other
    q_means = q_means.reshape(batch, k.shape[1], -1, q.shape[-1])
    scores = (q_means @ k_means.mT).view(batch, heads, -1, k_means.shape[2]) * q.shape[-1] ** -0.5
    allowed, forbidden, own = (x.on(q.device) for x in _grid(q_len, k.shape[2], causal, size))
    return scores.masked_fill(forbidden, float("-inf")), allowed, own


@functools.lru_cache(maxsize=64)
def _grid(q_len: int, kv_len: int, causal: bool, size: int) -> tuple[OnDevices, OnDevices, OnDevices]:
    """Tiles that causality allows, those that it forbids, and each row's own: bool [query tiles, key tiles]."""
    with real_tensors():
        first = torch.arange(0, q_len, size)[:, None] + kv_len - q_len  # position of each row's first query
        last = (first + size - 1).clamp(max=kv_len - 1)
        starts = torch.arange(0, kv_len, size)
        allowed = starts <= last if causal else torch.ones_like(starts <= first)
        return tuple(OnDevices(x) for x in (allowed, ~allowed, (first - size < starts) & (starts <= last)))


def _tile_means(x: torch.Tensor, size: int) -> torch.Tensor:
    """Over each tile's tokens, float32 [batch, heads, tiles, head_dim]; of the last one, over those that there are."""
    return avg_pool2d(x.float(), (size, 1), ceil_mode=True)


def _of_tiles(table: torch.Tensor, q: torch.Tensor, k: torch.Tensor, causal: bool, size: int) -> Choice:
    return Choice(table, size, 0, q.shape[1], q.shape[2], k.shape[2], causal, size)


def dca(q: torch.Tensor, k: torch.Tensor, causal: bool, options: SparseOptions, scores: torch.Tensor | None) -> Choice:
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
    q_len, kv_len, size = q.shape[2], k.shape[2], options.block_size
    drawn = _drawn(q_len, kv_len, causal, size, options.random_tokens, options.seed)
    known, drawn = (x.on(q.device) for x in drawn)
    values = values.to(torch.float32 if q.device.type == "mps" else torch.float64)  # MPS has no float64
    table = _stand_out(values, known, options.global_tokens)
    table = table.scatter(-1, drawn.expand(len(table), -1, -1), True)[:, None, :, :kv_len]
    return Choice(table, 1, options.window, q.shape[1], q_len, kv_len, causal, size)


def _stand_out(scores: torch.Tensor, known: torch.Tensor, most: int) -> torch.Tensor:
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
    spread = ((among - mean).masked_fill(beyond, 0).square().sum(dim=-1, keepdim=True) / known).sqrt()
    among = among.masked_fill(beyond, float("-inf"))
    count = (among > mean + spread).sum(dim=-1, keepdim=True).clamp(min=1).minimum(known)
    best = among.topk(min(most, tokens), dim=-1).indices
    best = best.masked_fill(torch.arange(best.shape[-1], device=best.device) >= count, tokens)
    return torch.zeros(*among.shape[:-1], tokens + 1, dtype=torch.bool, device=best.device).scatter(-1, best, True)


@functools.lru_cache(maxsize=64)
def _drawn(q_len: int, kv_len: int, causal: bool, size: int, count: int, seed: int) -> tuple[OnDevices, OnDevices]:
    """Among how many leading tokens each block of queries chooses, int64 [blocks, 1], and its random ones.

    Returns:
        The latter int64 [blocks, count]; `kv_len` where it knows none.
    """
    with real_tensors():
        places = [(start + kv_len - q_len) // size for start in range(0, q_len, size)]
        known = [place * size if causal else kv_len for place in places]
        rows = [
            _some(count, among, kv_len, seed * 1_000_003 + place) for among, place in zip(known, places, strict=True)
        ]
        return OnDevices(torch.tensor(known)[:, None]), OnDevices(torch.stack(rows))


def _some(count: int, among: int, none: int, seed: int) -> torch.Tensor:
    if not among:
        return torch.full((count,), none)
    return torch.randint(among, (count,), generator=torch.Generator().manual_seed(seed))


CHOOSERS: dict[str, Callable[..., Choice]] = {"top_k": top_k, "threshold": threshold, "dca": dca}
