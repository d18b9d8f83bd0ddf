"""Masks as torch's FlexAttention takes them: which tiles it computes, which of them are whole, and a rule for the others.

The rule is arithmetic on positions, and a look into a small table where tiles or keys were drawn or chosen: no mask of
queries × keys is ever in memory.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config
from torch._guards import detect_fake_mode
from torch._higher_order_ops.flex_attention import flex_attention as operation
from torch.nn.attention.flex_attention import BlockMask as FlexMask
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import avg_pool2d

from nanolib.models.attention.block_mask import BlockMask, OnDevices, Plan, real_tensors
from nanolib.models.attention.choice import Choice
from nanolib.models.attention.patterns.pattern import seen, tile_count
from nanolib.models.own_code import with_own_code

Rule = Callable[[Any, Any, Any, Any], Any]  # (batch, head, query, key) -> whether the query sees the key

_KERNEL_TILE = (
    128  # of queries and of keys: torch's kernels for GPUs need multiples of it, backward ones for Hopper too
)
_LEAST_HEAD_DIM = 16


def kernel_tile(device: str, block_size: int) -> int:
    """The tile in which the kernel skips: the one asked for, or on a GPU the next larger one that it can take."""
    if torch.device(device).type != "cuda":
        return block_size
    return -(-block_size // _KERNEL_TILE) * _KERNEL_TILE


def not_lowered(device: str, dtype: torch.dtype, head_dim: int, q_len: int, block_size: int) -> str:
    """Why `sparse` follows its blocks in a loop; empty where it goes through FlexAttention.

    On CUDA a loop over blocks of queries would be thousands of launches. The queries of a single block, as in decoding, are one
    product without a loop, and FlexAttention would be compiled for each new length of keys.
    """
    if torch.device(device).type != "cuda":
        return "FlexAttention is compiled for CUDA alone"
    if q_len <= block_size:
        return "a single block of queries needs no loop"
    if dtype == torch.float64:
        return "FlexAttention has no kernel for float64"
    return f"FlexAttention needs a head_dim of {_LEAST_HEAD_DIM} or more" if head_dim < _LEAST_HEAD_DIM else ""


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: FlexMask, scale: float | None, pattern: tuple[Any, ...]
) -> torch.Tensor:
    """Attention over the kept tiles by FlexAttention, compiled; planned, by its operation without a kernel.

    Args:
        q: Shape [batch, heads, q_len, head_dim].
        k: Shape [batch, kv_heads, kv_len, head_dim].
        v: Shape as `k`.
        mask: Of the same lengths.
        scale: Factor on the scores; None means head_dim ** -0.5.
        pattern: What the mask was made of, by which its kernel is kept.

    Returns:
        Shape and dtype of `q`; a query without any key gets zero.
    """
    if detect_fake_mode():
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return operation(q, k, v, lambda score, *_: score, mask.as_tuple(), scale, {}, (), ())[0]
    kernel = compiled(q.shape, k.shape, q.dtype, pattern)
    graph = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    # else the backward pass may write over what the graph has saved; what is compiled here serves other processes too
    with torch._functorch.config.patch(donated_buffer=False) if graph else contextlib.nullcontext():
        out = kernel(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.to(q.dtype)


def allow_repeated_backward() -> None:
    """Let this process call the backward pass of a compiled graph again, as `attend` has compiled it."""
    torch._functorch.config.donated_buffer = False


@functools.lru_cache(maxsize=64)
def compiled(*of: Any) -> Any:
    """FlexAttention through torch.compile, for one shape, dtype and pattern.

    A full graph, since dynamo would else run unfused what it cannot compile, and say nothing.
    """
    return torch.compile(with_own_code(flex_attention), dynamic=False, fullgraph=True)


# masks that depend on the shape alone

_masks: dict[tuple[int, torch.device, int], tuple[Any, FlexMask]] = {}
_KEPT = 16


def of_blocks(mask: BlockMask, device: torch.device) -> FlexMask:
    """A pattern's mask, kept for the next call with the same one.

    Args:
        mask: As `sparse.choose_mask` makes it of a pattern.
        device: Where the inputs lie.
    """
    planning = detect_fake_mode()
    key = (id(mask), device, id(planning))
    if key not in _masks:
        while len(_masks) >= _KEPT:
            _masks.pop(next(iter(_masks)))
        _masks[key] = ((mask, planning), made(mask, device))  # both are held, so that their ids stay their own
    return _masks[key][1]


def made(mask: BlockMask, device: torch.device) -> FlexMask:
    """`of_blocks` without its memory."""
    size = kernel_tile(device.type, mask.block_size)
    first, offset = mask.patterns[0], mask.kv_len - mask.q_len
    with real_tensors():
        kept, whole = (torch.stack(each)[None] for each in zip(*_tiles_of(mask, size), strict=True))
        table = None if first.table is None else torch.stack([pattern.table for pattern in mask.patterns])[None]
    kept, whole = (OnDevices(x).on(device) for x in (kept, whole))
    table = None if table is None else OnDevices(table).on(device)
    rule = _rule(first.mask, table, (offset, first.size, first.size), offset, mask.causal)
    return _flex_mask(kept, whole, mask.q_len, mask.kv_len, size, rule)


def _tiles_of(mask: BlockMask, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    counts = [_pairs_in_tiles(plan, mask.q_len, mask.kv_len, size) for plan in mask.plans[: len(mask.patterns)]]
    return [(count > 0, count == size * size) for count in counts]


def _pairs_in_tiles(plan: Plan, q_len: int, kv_len: int, size: int) -> torch.Tensor:
    """How many pairs of each tile are kept: int64 [query tiles, key tiles]."""
    columns = tile_count(kv_len, size)
    counts = torch.zeros(tile_count(q_len, size), columns * size, dtype=torch.int64)
    for block in plan:
        if not block.runs:
            continue
        start, stop = block.rows
        # the kernel's tile may be another one than the plan's
        for tile in range(start // size, tile_count(stop, size)):
            first, last = max(start, tile * size), min(stop, (tile + 1) * size)
            rows = None if block.mask is None else block.mask[first - start : last - start]
            counts[tile, block.index] += last - first if rows is None else rows.sum(dim=0)
    return counts.unflatten(1, (columns, size)).sum(dim=-1)


# masks that follow the input


def of_choice(choice: Choice) -> FlexMask:
    """The mask of a chooser, made on its device."""
    device, size, shape = choice.table.device, choice.block_size, (choice.q_len, choice.kv_len, choice.causal)
    tile = kernel_tile(device.type, size)
    may, fits, near, within = (x.on(device) for x in _reach(*shape, choice.window, tile))
    share = _shares(choice, tile)
    kept, whole = (share > 0) & may | near, (share == 1) & fits | within
    window = choice.window
    local = (lambda i, j: (i - j).abs() < window) if window else None
    rule = _rule(local, choice.table, (0, size, choice.key_size), choice.kv_len - choice.q_len, choice.causal)
    return _flex_mask(kept, whole, choice.q_len, choice.kv_len, tile, rule)


def _shares(choice: Choice, tile: int) -> torch.Tensor:
    """How much of each of the kernel's tiles is kept, float32 [batch, heads or 1, query tiles, key tiles]."""
    table, sides = choice.table, []
    for dim, size, length in ((2, choice.block_size, choice.q_len), (3, choice.key_size, choice.kv_len)):
        piece = math.gcd(size, tile)
        if piece < size:  # in pieces that fit both
            table = table.repeat_interleave(size // piece, dim).narrow(dim, 0, tile_count(length, piece))
        sides.append(tile // piece)
    return avg_pool2d(table.float(), sides, ceil_mode=True)


@functools.lru_cache(maxsize=64)
def _reach(q_len: int, kv_len: int, causal: bool, window: int, tile: int) -> tuple[OnDevices, ...]:
    """What the shape alone says of the kernel's tiles: bool [query tiles, key tiles] each.

    Returns:
        Which may be kept, which may be kept whole, of which the window keeps something, and which it keeps whole.
    """
    with real_tensors():
        first, start = torch.arange(0, q_len, tile)[:, None] + kv_len - q_len, torch.arange(0, kv_len, tile)
        last, end = ((x + tile).clamp(max=kv_len) - 1 for x in (first, start))
        may = start <= last if causal else torch.ones_like(start <= last)
        fits = (first + tile <= kv_len) & (start + tile <= kv_len)
        fits = fits & (end <= first) if causal else fits
        near = (first - end < window) & (start - last < window) & may
        within = (last - start < window) & (end - first < window) & fits
        return tuple(OnDevices(x) for x in (may, fits, near & (window > 0), within))


# what both need


def _rule(
    near: Callable[[Any, Any], Any] | None,
    table: torch.Tensor | None,
    grid: tuple[int, int, int],
    offset: int,
    causal: bool,
) -> Rule:
    """Whether a query sees a key.

    Args:
        near: By arithmetic on two positions.
        table: By where they lie in it: bool [batch or 1, heads or 1, rows, columns].
        grid: Position of the table's first row less the first query's, queries per row, keys per column.
        offset: Position of the first query.
        causal: Whether the future is masked.
    """
    batches, heads = (1, 1) if table is None else table.shape[:2]
    before, row_size, key_size = grid

    def rule(b: Any, h: Any, q: Any, j: Any) -> Any:
        i = q + offset
        found = None
        if table is not None:
            place = (q + before) // row_size, j // key_size
            found = table[b if batches > 1 else 0, h if heads > 1 else 0, *place]
        kept = seen(i, j, near, found)
        return kept & (j <= i) if causal else kept

    return rule


def _flex_mask(kept: torch.Tensor, whole: torch.Tensor, q_len: int, kv_len: int, tile: int, rule: Rule) -> FlexMask:
    """From tables of tiles, bool [batch or 1, heads or 1, query tiles, key tiles]; as `from_kv_blocks`, which asks the host."""
    tables = torch.stack([kept > whole, whole])
    (part_counts, whole_counts), (parts, wholes) = _listed(tables)
    (q_part_counts, q_whole_counts), (q_parts, q_wholes) = _listed(tables.mT)
    by_query = part_counts, parts, whole_counts, wholes
    by_key = q_part_counts, q_parts, q_whole_counts, q_wholes
    return FlexMask((q_len, kv_len), *by_query, *by_key, BLOCK_SIZE=(tile, tile), mask_mod=rule)


def _listed(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many columns are true in each row, and which, in order; the others follow."""
    ordered = table.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return table.sum(dim=-1, dtype=torch.int32), ordered.to(torch.int32).contiguous()
