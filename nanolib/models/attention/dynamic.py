"""Choose the keys that each head keeps, from the values of queries and keys.

A chooser takes q, k, causal, options and scores, and returns a `Choice` on the device of q and k.
The host waits for the device only in `Choice.blocks`.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from nanolib.models.attention.block_mask import BlockMask, make_plan
from nanolib.models.attention.patterns import MaskMod, Options, align_queries, is_near


@dataclass(frozen=True, eq=False)
class Cells:
    """Cells into which a chooser divides the attention matrix.

    A cell has a block of queries, and either a tile of keys or a single key. The tables have type
    bool and shape [query blocks, key cells], and depend only on the sizes.

    Attributes:
        q_len: Number of queries.
        kv_len: Number of keys.
        causal: Whether a query sees only keys at or before its own position.
        block_size: Queries per cell.
        key_size: Keys per cell.
        window: Reach in tokens of the local window that is kept too, or 0 without a window.
        own: Whether at least one query of a cell has the same position as a key of the cell.
        allowed: Whether causality allows at least one pair of a cell.
        complete: Whether a cell ends within the sequence, and causality allows all pairs.
        near: Whether the window keeps at least one pair of a cell.
        within: Whether the window keeps all pairs of a cell.
    """

    q_len: int
    kv_len: int
    causal: bool
    block_size: int
    key_size: int
    window: int
    own: Tensor
    allowed: Tensor
    complete: Tensor
    near: Tensor
    within: Tensor


@functools.lru_cache(maxsize=4)  # Tables of single keys are large: a byte per block and key.
def cells_of(
    q_len: int,
    kv_len: int,
    causal: bool,
    size: int,
    key_size: int,
    window: int,
    device: torch.device,
) -> Cells:
    """Return the cells of these sizes, in the order of the attributes of `Cells`."""
    first = torch.arange(kv_len - q_len, kv_len, size, device=device)[:, None]
    start = torch.arange(0, kv_len, key_size, device=device)
    last, stop = first + size - 1, start + key_size - 1  # The last cell may be cut off.
    reached, whole = start <= last, (last < kv_len) & (stop < kv_len)
    return Cells(
        q_len,
        kv_len,
        causal,
        size,
        key_size,
        window,
        own=reached & (first <= stop),
        allowed=reached | (not causal),
        complete=whole & ((stop <= first) | (not causal)),
        near=(start < last + window) & (first < stop + window) & (window > 0),
        within=(stop < first + window) & (last < start + window),
    )


@dataclass(frozen=True, eq=False)
class Choice:
    """The cells that a chooser keeps.

    Attributes:
        chosen: Whether a cell is kept, bool [batch, heads, query blocks, key cells]. The dimension
            of the heads is 1 if all heads share the choice.
        cells: Tables that depend only on the sizes of the cells.
        heads: Number of query heads.
    """

    chosen: Tensor
    cells: Cells
    heads: int

    def mask_mod(self, chosen) -> MaskMod:
        """Return the `mask_mod` of a choice, given `chosen` as a tensor or as an array."""
        heads, cells = chosen.shape[1], self.cells
        offset, window = cells.kv_len - cells.q_len, cells.window

        def keeps(b, h, position, kv_idx):
            row, column = (position - offset) // cells.block_size, kv_idx // cells.key_size
            kept = chosen[b, h % heads, row, column]
            return kept | is_near(position, kv_idx, window) if window else kept

        return align_queries(keeps, offset, cells.causal)

    def kept_cells(self) -> tuple[Tensor, Tensor]:
        """Return whether a cell has a kept pair, and whether all pairs of a cell are kept."""
        some, whole = self.chosen | self.cells.near, self.chosen | self.cells.within
        return some & self.cells.allowed, whole & self.cells.complete

    def tiles(self, side: int) -> tuple[Tensor, Tensor]:
        """Return whether some but not all pairs of a tile are kept, and whether all are kept.

        Args:
            side: Side of a tile in tokens, a multiple of `block_size`.

        Returns:
            Two tables, bool [batch, heads, query tiles, key tiles].
        """
        shape = side // self.cells.block_size, side // self.cells.key_size
        # The average of a tile that is cut off counts the missing cells as zeros.
        some, whole = (
            avg_pool2d(x.float(), shape, ceil_mode=True, divisor_override=math.prod(shape))
            for x in self.kept_cells()
        )
        return (some > 0) & (whole < 1), whole == 1

    def blocks(self) -> BlockMask:
        """Create the block mask on the host. The host waits for the device."""
        chosen, some, whole = (x.cpu().numpy() for x in (self.chosen, *self.kept_cells()))
        keeps, cells = self.mask_mod(chosen), self.cells
        sizes = (cells.q_len, cells.kv_len, cells.block_size, cells.key_size)

        def find(head: tuple[int, int], start: int, *_: int) -> tuple[np.ndarray, int]:
            cell = (*head, start // cells.block_size)
            kept = some[cell].nonzero()[0]
            return kept, int(np.append(whole[cell][kept], False).argmin()) * cells.key_size

        heads = np.ndindex(chosen.shape[:2])
        plans = [make_plan(keeps, head, find, cells.causal, *sizes) for head in heads]
        alike = self.heads // chosen.shape[1]  # Consecutive heads share a table.
        shared = tuple(plan for plan in plans for _ in range(alike))
        return BlockMask(shared, *sizes[:2], cells.causal, cells.block_size, keeps)


def top_k(q: Tensor, k: Tensor, causal: bool, options: Options, scores: Tensor | None) -> Choice:
    """Keep the tiles on the diagonal, and in each row the tiles with the highest estimated scores.

    A row of queries has two tiles on the diagonal if the queries are not aligned with the keys.

    `sparsity` sets the number of kept tiles in a row.
    """
    cells, estimated = _tile_scores(q, k, causal, options.block_size)
    counts = cells.allowed.sum(dim=1, keepdim=True)
    kept = ((1 - options.tile_sparsity) * counts).round().clamp(min=1)
    ranked = estimated.masked_fill(cells.own, float("inf")).argsort(dim=-1, descending=True)
    return Choice((ranked.argsort(dim=-1) < kept) | cells.own, cells, q.shape[1])


def threshold(
    q: Tensor, k: Tensor, causal: bool, options: Options, scores: Tensor | None
) -> Choice:
    """Keep the tiles on the diagonal, and the fewest tiles per row whose attention sums to `mass`.

    nanolib estimates the attention of each tile. If causal, nanolib estimates the attention of
    earlier tiles only, because the mean key of a tile on the diagonal depends on later tokens.
    """
    cells, estimated = _tile_scores(q, k, causal, options.block_size)
    estimated = estimated.masked_fill(cells.own, float("-inf")) if causal else estimated
    # The first row has no earlier tile, so its weights are 0 / 0.
    weights, order = torch.softmax(estimated, dim=-1).nan_to_num().sort(dim=-1, descending=True)
    before = weights.cumsum(dim=-1) - weights  # Mass of the tiles with larger weights.
    kept = torch.zeros_like(estimated, dtype=torch.bool).scatter(-1, order, before < options.mass)
    return Choice(kept | cells.own, cells, q.shape[1])


def _tile_scores(q: Tensor, k: Tensor, causal: bool, size: int) -> tuple[Cells, Tensor]:
    """Estimate the score of each tile from the mean of its queries and the mean of its keys.

    If causal, nanolib uses the first query of a tile instead of the mean, because the mean depends
    on later tokens.

    Returns:
        The tiles, and their estimated scores, shape [batch, heads, query tiles, key tiles]. The
        score of a tile that causality forbids is −inf.

    Source: the pooled estimate of MInference (Jiang et al., 2024, arXiv 2407.02490).
    """
    cells = cells_of(q.shape[2], k.shape[2], causal, size, size, 0, q.device)
    q, k = q.detach(), k.detach()
    q_means = q[:, :, ::size].float() if causal else _tile_means(q, size)
    # Query heads that share a key head are adjacent.
    grouped = q_means.reshape(*k.shape[:2], -1, q.shape[-1])
    scores = (grouped @ _tile_means(k, size).mT).view(*q_means.shape[:3], -1) * q.shape[-1] ** -0.5
    return cells, scores.masked_fill(~cells.allowed, float("-inf"))


def _tile_means(x: Tensor, size: int) -> Tensor:
    """Average the tokens of each tile, float32 [batch, heads, tiles, head_dim]."""
    return avg_pool2d(x.float(), (size, 1), ceil_mode=True)


def dca(q: Tensor, k: Tensor, causal: bool, options: Options, scores: Tensor | None) -> Choice:
    """Keep a window, the tokens with the highest scores, and random keys.

    Dynamic Context Allocation chooses as global tokens the token with the highest score, and all
    tokens whose score is more than one standard deviation above the mean, but at most
    `global_tokens` tokens. nanolib draws random keys for each block of queries. If causal, nanolib
    chooses only among the tokens before the block, and token 0 for the first block. Decoding with a
    cache then chooses the same tokens as a pass over the whole sequence.

    Args:
        q: Queries, shape [batch, heads, q_len, head_dim].
        k: Keys, shape [batch, kv_heads, kv_len, head_dim].
        causal: Whether a query sees only keys at or before its own position.
        options: Options of the pattern. `sparsity` and `mass` have no effect.
        scores: Score of each token, shape [batch, kv_len], or None to use the norms of the keys.
    """
    values = k.detach().float().norm(dim=-1).mean(dim=1) if scores is None else scores.detach()
    wide = torch.float32 if q.device.type == "mps" else torch.float64  # MPS has no float64.
    q_len, kv_len, size = q.shape[2], k.shape[2], options.block_size
    known, drawn = _drawn(q_len, kv_len, causal, options, q.device)
    table = _stand_out(values.to(wide), known, options.global_tokens)
    table = table.scatter(-1, drawn.expand(len(table), -1, -1), True)[:, None]
    cells = cells_of(q_len, kv_len, causal, size, 1, options.window, q.device)
    return Choice(table, cells, q.shape[1])


def _stand_out(scores: Tensor, known: Tensor, most: int) -> Tensor:
    """Select the global tokens, bool [batch, blocks, tokens].

    Args:
        scores: Score of each token, shape [batch, tokens].
        known: Number of leading tokens from which to choose for each block, int64 [blocks, 1].
        most: Largest number of global tokens.
    """
    beyond = torch.arange(scores.shape[-1], device=scores.device) >= known
    among = scores[:, None].masked_fill(beyond, float("nan"))
    mean = among.nanmean(dim=-1, keepdim=True)
    spread = (among - mean).square().nanmean(dim=-1, keepdim=True).sqrt()
    among = among.masked_fill(beyond, float("-inf"))
    # A stable sort prefers the earlier of two equal scores, whatever the length of the cache.
    rank = among.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return ((among > mean + spread) | (rank == 0)) & (rank < most)


@functools.lru_cache(maxsize=64)
def _drawn(
    q_len: int, kv_len: int, causal: bool, options: Options, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Draw the random tokens of each block of queries.

    Returns:
        Number of leading tokens from which to choose for each block, int64 [blocks, 1], and the
        drawn tokens, int64 [blocks, random_tokens].
    """
    size, known, rows = options.block_size, [], []
    for start in range(kv_len - q_len, kv_len, size):
        place = start // size
        known.append(max(1, place * size) if causal else kv_len)
        source = np.random.RandomState([options.seed, place])
        rows.append(source.randint(known[-1], size=options.random_tokens))
    known = torch.tensor(known, device=device)[:, None]
    return known, torch.from_numpy(np.array(rows)).to(device)


CHOOSERS = {"top_k": top_k, "threshold": threshold, "dca": dca}
