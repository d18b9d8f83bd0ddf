"""Block-sparse attention that computes only the tiles its pattern keeps, forward and backward.

Each block of queries gathers the keys of its kept tiles (a view where they are contiguous) and attends to them alone. The
backward pass recomputes the scores block by block, so that memory stays linear in the sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pydantic
import torch
from torch.nn.functional import scaled_dot_product_attention

from nanolib.models.attention.patterns import PATTERNS
from nanolib.models.attention.patterns.pattern import Run, merge_runs
from nanolib.models.attention.work import Work, allowed_pairs
from nanolib.validation import StrictModel


class Options(StrictModel):
    """Options of `sparse`.

    Attributes:
        pattern: A key of `PATTERNS`.
        window: Reach of the local part, tokens.
        global_tokens: Leading positions that see and are seen by all (`local_global`).
        random_tokens: Random keys per query, for patterns that draw them.
        sparsity: Share of connections to remove, in [0, 1); it then sets `window` to the largest that removes as many.
        block_size: Side of a tile: what is skipped, and how many queries attend at once.
        seed: For patterns that draw random keys.
    """

    pattern: str = "local_global"
    window: int = pydantic.Field(256, gt=0)
    global_tokens: int = pydantic.Field(32, ge=0)
    random_tokens: int = pydantic.Field(0, ge=0)
    sparsity: float | None = pydantic.Field(None, ge=0, lt=1)
    block_size: int = pydantic.Field(128, gt=0)
    seed: int = 0

    @classmethod
    def complaint_prefix(cls) -> str:
        """What stands before a field's name in a complaint."""
        return "attention_options."

    @pydantic.field_validator("pattern")
    @classmethod
    def _known_pattern(cls, value: str) -> str:
        if value not in PATTERNS:
            raise ValueError(f"{value!r} is no pattern; use one of {', '.join(PATTERNS)}")
        return value


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


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float | None, options: Options
) -> torch.Tensor:
    """Sparse attention; see `nanolib.models.attention.attend`."""
    blocks = plan(q.shape[2], k.shape[2], causal, _key(options))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _BlockSparse.apply(q, k, v, blocks, scale)


def work(q_len: int, kv_len: int, *, causal: bool, options: Options) -> Work:
    """Connections and tiles that the pattern keeps, counted from its mask."""
    blocks = plan(q_len, kv_len, causal, _key(options))
    size = options.block_size
    return Work(
        kept=sum(block.kept for block in blocks),
        total=allowed_pairs(q_len, kv_len, causal),
        kept_tiles=sum(block.kept_tiles for block in blocks),
        total_tiles=-(-q_len // size) * -(-kv_len // size),
    )


def element_mask(q_len: int, kv_len: int, *, causal: bool, options: Options, row: int | None = None) -> torch.Tensor:
    """The mask that dense attention must be given to equal this kind: bool [q_len, kv_len], or one row of it, [1, kv_len]."""
    rows = (0, q_len) if row is None else (row, row + 1)
    return _mask(_pattern(q_len, kv_len, causal, _key(options)), *rows, 0, kv_len, kv_len - q_len, causal)


def _key(options: Options) -> tuple[Any, ...]:
    return tuple(getattr(options, name) for name in Options.model_fields)


@functools.lru_cache(maxsize=64)
def _pattern(q_len: int, kv_len: int, causal: bool, key: tuple[Any, ...]) -> Any:
    options = dict(zip(Options.model_fields, key, strict=True))
    window = options["window"]
    if options["sparsity"] is not None:
        window = _window_for(options["sparsity"], q_len, kv_len, causal, options)
    return PATTERNS[options["pattern"]](window, options["global_tokens"], kv_len)


@functools.lru_cache(maxsize=64)
def plan(q_len: int, kv_len: int, causal: bool, key: tuple[Any, ...]) -> tuple[QueryBlock, ...]:
    """The kept tiles of every block of queries; cached, since a model asks for the same plan in each layer.

    Args:
        q_len: Queries.
        kv_len: Keys.
        causal: Whether the future is masked.
        key: The values of `Options`, in order.
    """
    size = dict(zip(Options.model_fields, key, strict=True))["block_size"]
    return tuple(_plan_all(_pattern(q_len, kv_len, causal, key), q_len, kv_len, causal, size))


def _plan_all(pattern: Any, q_len: int, kv_len: int, causal: bool, size: int = 128) -> Iterator[QueryBlock]:
    for start in range(0, q_len, size):
        yield _plan_block(pattern, (start, min(start + size, q_len)), q_len, kv_len, causal, size)


def _plan_block(pattern: Any, rows: Run, q_len: int, kv_len: int, causal: bool, size: int) -> QueryBlock:
    offset = kv_len - q_len
    first, last = rows[0] + offset, rows[1] - 1 + offset
    reach = last + 1 if causal else kv_len
    candidates = merge_runs(pattern.runs(first, last), reach)
    # The pattern's ranges may hold empty tiles: keep only those in which some query sees some key.
    tiles = sorted({tile for start, stop in candidates for tile in range(start // size, -(-stop // size))})
    kept: list[tuple[Run, torch.Tensor]] = []
    for tile in tiles:
        span = (tile * size, min((tile + 1) * size, reach))
        mask = _mask(pattern, *rows, *span, offset, causal)
        if mask.any():
            kept.append((span, mask))
    if not kept:
        return QueryBlock(rows, (), None, 0, 0)
    mask = torch.cat([mask for _, mask in kept], dim=1)
    count = int(mask.sum())
    runs = merge_runs([span for span, _ in kept], reach)
    return QueryBlock(rows, tuple(runs), None if count == mask.numel() else mask, len(kept), count)


def _mask(pattern: Any, q0: int, q1: int, k0: int, k1: int, offset: int, causal: bool) -> torch.Tensor:
    i = torch.arange(q0 + offset, q1 + offset)[:, None]
    j = torch.arange(k0, k1)[None, :]
    mask = pattern.mask(i, j)
    return mask & (j <= i) if causal else mask


def _window_for(sparsity: float, q_len: int, kv_len: int, causal: bool, options: dict[str, Any]) -> int:
    """The largest window that still removes the share asked for (1 where none does)."""
    allowed = allowed_pairs(q_len, kv_len, causal)
    low, high = 1, kv_len
    while low < high:  # removed connections fall as the window grows
        middle = (low + high + 1) // 2
        blocks = _plan_all(
            PATTERNS[options["pattern"]](middle, options["global_tokens"], kv_len), q_len, kv_len, causal
        )
        removed = 1 - sum(block.kept for block in blocks) / allowed
        low, high = (middle, high) if removed >= sparsity else (low, middle - 1)
    return low


def _gather(x: torch.Tensor, runs: tuple[Run, ...]) -> torch.Tensor:
    if len(runs) == 1:
        return x[:, :, slice(*runs[0])]
    return torch.cat([x[:, :, slice(*run)] for run in runs], dim=2)


def _scatter_add(into: torch.Tensor, x: torch.Tensor, runs: tuple[Run, ...]) -> None:
    at = 0
    for start, stop in runs:
        into[:, :, start:stop] += x[:, :, at : at + stop - start]
        at += stop - start


class _BlockSparse(torch.autograd.Function):
    """Attention over the kept tiles; tensors as in `attend`, `blocks` from `plan`."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: tuple[QueryBlock, ...], scale: float
    ) -> torch.Tensor:
        out = torch.zeros_like(q)
        for block in blocks:
            if not block.runs:
                continue
            mask = None if block.mask is None else block.mask.to(q.device)
            out_block = scaled_dot_product_attention(
                q[:, :, slice(*block.rows)],
                _gather(k, block.runs),
                _gather(v, block.runs),
                attn_mask=mask,
                scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            if mask is not None:  # a query without any key gets zero, whatever the kernel makes of it
                out_block = out_block.masked_fill(~mask.any(dim=1)[:, None], 0)
            out[:, :, slice(*block.rows)] = out_block
        ctx.save_for_backward(q, k, v, out)
        ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out = ctx.saved_tensors
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        batch, heads, _, head_dim = q.shape
        grouped = (batch, k.shape[1], heads // k.shape[1], -1, head_dim)  # query heads by the key head they share
        for block in ctx.blocks:
            if not block.runs:
                continue
            rows = slice(*block.rows)
            q_rows, out_rows, d_rows = (x[:, :, rows].reshape(grouped) for x in (q, out, d_out))
            keys, values = (_gather(x, block.runs)[:, :, None] for x in (k, v))
            scores = (q_rows @ keys.transpose(-2, -1)).mul_(ctx.scale)
            if block.mask is not None:
                scores.masked_fill_(~block.mask.to(q.device), float("-inf"))
            weights = torch.softmax(scores, dim=-1)
            if block.mask is not None:
                weights = weights.nan_to_num_(nan=0.0)
            _scatter_add(dv, (weights.transpose(-2, -1) @ d_rows).sum(dim=2), block.runs)
            d_weights = d_rows @ values.transpose(-2, -1)
            d_scores = d_weights.sub_((d_rows * out_rows).sum(dim=-1, keepdim=True)).mul_(weights).mul_(ctx.scale)
            dq[:, :, rows] = (d_scores @ keys).reshape(batch, heads, -1, head_dim)
            _scatter_add(dk, (d_scores.transpose(-2, -1) @ q_rows).sum(dim=2), block.runs)
        return dq, dk, dv, None, None
