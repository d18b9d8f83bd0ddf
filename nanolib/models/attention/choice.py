"""Patterns that look at the input: which keys each head keeps, chosen from the queries and keys themselves.

A chooser takes q, k and the options and returns a `BlockMask` with a plan per head. A new one is a function and a line in
`CHOOSERS`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import avg_pool1d

from nanolib.models.attention.block_mask import BlockMask, Plan, QueryBlock, plan_of_tiles
from nanolib.models.attention.patterns.options import SparseOptions
from nanolib.models.attention.patterns.pattern import Run, merge_runs, tile_count


def top_k(
    q: torch.Tensor, k: torch.Tensor, causal: bool, options: SparseOptions, scores: torch.Tensor | None
) -> BlockMask:
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
    return _from_tables((rank < kept[:, None]) & allowed, q, k, causal, size)


def threshold(
    q: torch.Tensor, k: torch.Tensor, causal: bool, options: SparseOptions, scores: torch.Tensor | None
) -> BlockMask:
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
    return _from_tables((kept | own) & allowed, q, k, causal, size)


def _tile_scores(
    q: torch.Tensor, k: torch.Tensor, causal: bool, size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores of tiles by the means of their queries and keys; when causal by their first query, which knows nothing of the future.

    Returns:
        Scores, shape [batch · heads, query tiles, key tiles], −inf where causality forbids the tile; which tiles it
        allows, and which is each row's own, both bool [query tiles, key tiles].

    Source: the pooled estimate of MInference (Jiang et al., 2024, arXiv 2407.02490).
    """
    q_len, kv_len, offset = q.shape[2], k.shape[2], k.shape[2] - q.shape[2]
    q_means = q.detach()[:, :, ::size].float() if causal else _tile_means(q.detach(), size)
    k_means = _tile_means(k.detach(), size)
    k_means = k_means.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = (q_means @ k_means.mT * q.shape[-1] ** -0.5).flatten(0, 1).cpu()
    first = torch.arange(tile_count(q_len, size))[:, None] * size + offset  # position of each row's first query
    last = (first + size - 1).clamp(max=kv_len - 1)
    tiles = torch.arange(tile_count(kv_len, size))[None, :]
    allowed = tiles * size <= last if causal else torch.ones(len(first), tiles.shape[1], dtype=torch.bool)
    own = (first // size <= tiles) & (tiles <= last // size)
    return scores.masked_fill(~allowed, float("-inf")), allowed, own


def _tile_means(x: torch.Tensor, size: int) -> torch.Tensor:
    batch, heads, length, width = x.shape
    flat = x.float().mT.reshape(batch * heads, width, length)
    pooled = avg_pool1d(flat, size, ceil_mode=True)
    return pooled.mT.reshape(batch, heads, -1, width)


def _from_tables(tables: torch.Tensor, q: torch.Tensor, k: torch.Tensor, causal: bool, size: int) -> BlockMask:
    shape = (q.shape[2], k.shape[2], causal, size)
    return BlockMask(tuple(plan_of_tiles(table, *shape) for table in tables), *shape)


def dca(
    q: torch.Tensor, k: torch.Tensor, causal: bool, options: SparseOptions, scores: torch.Tensor | None
) -> BlockMask:
    """Dynamic Context Allocation: a local window, the tokens with the highest score as globals, and random keys.

    The number of globals follows the input: tokens whose score lies more than one standard deviation above the mean, at
    least one and
    at most `global_tokens`. Random keys are drawn per block of queries. When causal, a block chooses among the tokens
    before it, so that no choice tells of the future, and decoding over a cache chooses as the whole sequence did.

    Args:
        q: Queries, shape [batch, heads, q_len, head_dim].
        k: Keys, shape [batch, kv_heads, kv_len, head_dim].
        causal: Whether the future is masked.
        options: `window`, `global_tokens`, `random_tokens`, `block_size`, `seed`.
        scores: Per token, shape [batch, kv_len]; None means the norm of its keys.
    """
    values = (k.detach().float().norm(dim=-1).mean(dim=1) if scores is None else scores.detach().float()).cpu()
    plans = [plan for row in values for plan in [_dca_plan(row, q.shape[2], causal, options)] * q.shape[1]]
    return BlockMask(tuple(plans), q.shape[2], k.shape[2], causal, options.block_size)


def _dca_plan(scores: torch.Tensor, q_len: int, causal: bool, options: SparseOptions) -> Plan:
    kv_len, size = len(scores), options.block_size
    offset = kv_len - q_len
    blocks = []
    for start in range(0, q_len, size):
        rows = (start, min(start + size, q_len))
        first, last = rows[0] + offset, rows[1] - 1 + offset
        reach = last + 1 if causal else kv_len
        place = first // size
        pool = scores[: place * size] if causal else scores
        far = torch.empty(0, dtype=torch.long)
        if len(pool):
            generator = torch.Generator().manual_seed(options.seed * 1_000_003 + place)
            drawn = torch.randint(len(pool), (options.random_tokens,), generator=generator)
            far = torch.cat([global_tokens(pool, options.global_tokens), drawn]).unique()
        far_runs = [(int(token), int(token) + 1) for token in far]
        runs = merge_runs([*far_runs, (first - options.window + 1, last + options.window)], reach)
        blocks.append(_dca_block(rows, runs, far, offset, causal, options))
    return tuple(blocks)


def _dca_block(
    rows: Run, runs: list[Run], far: torch.Tensor, offset: int, causal: bool, options: SparseOptions
) -> QueryBlock:
    i = torch.arange(rows[0] + offset, rows[1] + offset)[:, None]
    j = torch.cat([torch.arange(*run) for run in runs])
    mask = ((i - j).abs() < options.window) | torch.isin(j, far)
    mask = mask & (j <= i) if causal else mask
    count = int(mask.sum())
    tiles = tile_count(len(j), options.block_size)  # of work: the chosen keys are packed together
    return QueryBlock(rows, tuple(runs), None if count == mask.numel() else mask, tiles, count)


def global_tokens(scores: torch.Tensor, most: int) -> torch.Tensor:
    """The tokens that become global: int64, in order of position.

    Args:
        scores: Of each token, shape [tokens].
        most: At most so many; 0 means none.
    """
    spread = float(scores.std(unbiased=False))
    count = int((scores > scores.mean() + spread).sum())
    count = min(max(1, count), most, len(scores))
    return scores.topk(count).indices.sort().values


CHOOSERS: dict[str, Callable[..., BlockMask]] = {"top_k": top_k, "threshold": threshold, "dca": dca}
