"""Patterns that look at the input: which keys each head keeps, chosen from the queries and keys themselves.

A chooser takes q, k and the options and returns a `Choice`, made where q and k lie: the host waits for nothing until it asks for
the blocks. A new one is a function and a line in `CHOOSERS`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import avg_pool1d

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
    counts = allowed.sum(dim=1)
    if options.sparsity is None:
        kept = counts.clamp(max=max(1, round(options.window / size)))
    else:
        kept = ((1 - options.sparsity) * counts).round().clamp(min=1)
    rank = estimated.masked_fill(own, float("inf")).argsort(dim=-1, descending=True).argsort(dim=-1)
    return _of_tiles((rank < kept[:, None]) & allowed, q, k, causal, size)


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
    q_len, kv_len, offset = q.shape[2], k.shape[2], k.shape[2] - q.shape[2]
    q_means = q.detach()[:, :, ::size].float() if causal else _tile_means(q.detach(), size)
    k_means = _tile_means(k.detach(), size)
    k_means = k_means.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = q_means @ k_means.mT * q.shape[-1] ** -0.5
    # positions of each row's first query
    first = torch.arange(tile_count(q_len, size), device=q.device)[:, None] * size + offset
    last = (first + size - 1).clamp(max=kv_len - 1)
    tiles = torch.arange(tile_count(kv_len, size), device=q.device)[None, :]
    allowed = tiles * size <= last if causal else torch.ones_like(tiles <= first)
    own = (first // size <= tiles) & (tiles <= last // size)
    return scores.masked_fill(~allowed, float("-inf")), allowed, own


def _tile_means(x: torch.Tensor, size: int) -> torch.Tensor:
    batch, heads, length, width = x.shape
    flat = x.float().mT.reshape(batch * heads, width, length)
    pooled = avg_pool1d(flat, size, ceil_mode=True)
    return pooled.mT.reshape(batch, heads, -1, width)


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
    first = torch.arange(tile_count(q_len, size), device=q.device) * size + kv_len - q_len
    known = (
        first // size * size if causal else torch.full_like(first, kv_len)
    )  # how many tokens each block chooses among
    values = values.to(torch.float32 if q.device.type == "mps" else torch.float64)  # MPS has no float64
    table = _stand_out(values, known, options.global_tokens)
    drawn = _drawn(q_len, kv_len, causal, size, options.random_tokens, options.seed).on(q.device)
    table = table.scatter(-1, drawn.expand(len(table), -1, -1), True)[:, None, :, :kv_len]
    return Choice(table, 1, options.window, q.shape[1], q_len, kv_len, causal, size)


def _stand_out(scores: torch.Tensor, known: torch.Tensor, most: int) -> torch.Tensor:
    """Which tokens become global: bool [batch, blocks, tokens + 1], the last one never.

    Args:
        scores: Of each token, [batch, tokens].
        known: Among how many leading tokens each block of queries chooses, int64 [blocks].
        most: At most so many of them.
    """
    tokens = scores.shape[-1]
    inside = torch.arange(tokens, device=scores.device) < known[:, None]
    among = torch.where(inside, scores[:, None], 0.0)
    mean = among.sum(dim=-1, keepdim=True) / known[:, None]
    spread = ((torch.where(inside, among - mean, 0.0) ** 2).sum(dim=-1, keepdim=True) / known[:, None]).sqrt()
    count = (inside & (among > mean + spread)).sum(dim=-1, keepdim=True).clamp(min=1).minimum(known[:, None])
    best = torch.where(inside, among, float("-inf")).topk(min(most, tokens), dim=-1).indices
    best = torch.where(torch.arange(best.shape[-1], device=best.device) < count, best, tokens)
    return torch.zeros(*among.shape[:-1], tokens + 1, dtype=torch.bool, device=best.device).scatter(-1, best, True)


@functools.lru_cache(maxsize=64)
def _drawn(q_len: int, kv_len: int, causal: bool, size: int, count: int, seed: int) -> OnDevices:
    """Random keys of each block of queries, int64 [blocks, count]; `kv_len` where it knows none."""
    rows = []
    with real_tensors():
        for start in range(0, q_len, size):
            place = (start + kv_len - q_len) // size
            known = place * size if causal else kv_len
            generator = torch.Generator().manual_seed(seed * 1_000_003 + place)
            none = torch.full((count,), kv_len)
            rows.append(torch.randint(known, (count,), generator=generator) if known else none)
        return OnDevices(torch.stack(rows))


CHOOSERS: dict[str, Callable[..., Choice]] = {"top_k": top_k, "threshold": threshold, "dca": dca}
