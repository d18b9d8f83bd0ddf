"""The block-sparse kernel, forward and backward: it computes the kept tiles and nothing else.

On CPU each block of queries gathers the keys of its kept tiles and attends to them by two matrix products in float32.
Heads are spread over threads, since a single block is too small to be divided. On other devices each block goes through torch's
SDPA. The backward pass recomputes the scores block by block, so that memory stays linear in the sequence.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from nanolib.models.attention.block_mask import BlockMask, Plan, QueryBlock
from nanolib.models.attention.patterns.pattern import Run

# Scores this small need no shift before exp: e^60 is far from float32's limits, at either end. Larger ones are shifted by their
# row's maximum, which costs two more passes.
_SAFE_SCORE = 60.0
_SCORES = 2**19  # at once, per thread: 2 MiB of float32, which stay near the core


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask, scale: float) -> torch.Tensor:
    """Attention over the kept tiles.

    Args:
        q: Shape [batch, heads, q_len, head_dim].
        k: Shape [batch, kv_heads, kv_len, head_dim].
        v: Shape as `k`.
        mask: Which keys each block of queries sees; of the same lengths, shared or with batch · heads plans.
        scale: Factor on the scores.

    Returns:
        Shape and dtype of `q`; a query without any key gets zero.
    """
    return _BlockSparse.apply(q, k, v, mask, scale)


class _BlockSparse(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask, scale: float
    ) -> torch.Tensor:
        out = _forward_on_cpu(q, k, v, mask, scale) if q.device.type == "cpu" else _forward(q, k, v, mask, scale)
        ctx.save_for_backward(q, k, v, out)
        ctx.mask, ctx.scale = mask, scale
        return out

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out = ctx.saved_tensors
        dq = torch.empty_like(q)
        # float32 sums: every block adds its share, and in bfloat16 the later ones would be lost
        dk, dv = (torch.zeros(x.shape, dtype=_accumulator(x), device=x.device) for x in (k, v))
        _over_heads(functools.partial(_backward_heads, q, k, v, out, d_out, ctx.mask, ctx.scale, dq, dk, dv), k)
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None


def _accumulator(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# forward


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask, scale: float) -> torch.Tensor:
    out = torch.zeros_like(q)
    for q_part, k_part, v_part, out_part, plan in _parts(q, k, v, out, mask):
        for block in plan:
            if not block.runs:
                continue
            seen = None if block.mask is None else block.mask.to(q.device)
            attended = scaled_dot_product_attention(
                q_part[:, :, slice(*block.rows)],
                _gather(k_part, block.runs),
                _gather(v_part, block.runs),
                attn_mask=seen,
                scale=scale,
                enable_gqa=q_part.shape[1] != k_part.shape[1],
            )
            if seen is not None:  # a query without any key gets zero, whatever the kernel makes of it
                attended = attended.masked_fill(~seen.any(dim=1)[:, None], 0)
            out_part[:, :, slice(*block.rows)] = attended
    return out


def _parts(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, mask: BlockMask
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, tuple[QueryBlock, ...]]]:
    """What goes through the kernel together: everything under a shared plan, or head by head."""
    if mask.shared:
        yield q, k, v, out, mask.plans[0]
        return
    group = q.shape[1] // k.shape[1]
    for at, plan in enumerate(mask.plans):
        b, h = divmod(at, q.shape[1])
        yield (
            q[b : b + 1, h : h + 1],
            k[b : b + 1, h // group : h // group + 1],
            v[b : b + 1, h // group : h // group + 1],
            out[b : b + 1, h : h + 1],
            plan,
        )


def _forward_on_cpu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask, scale: float) -> torch.Tensor:
    whole = all(block.runs for plan in mask.plans for block in plan)
    out = torch.empty_like(q) if whole else torch.zeros_like(q)
    dtype = _accumulator(q)
    queries, keys, values = q.to(dtype), k.to(dtype).contiguous(), v.to(dtype).contiguous()
    shift = not _largest_norm(queries) * _largest_norm(keys) * abs(scale) < _SAFE_SCORE  # NaN shifts too
    _over_heads(functools.partial(_forward_heads, queries, keys, values, mask, scale, shift, out), k)
    return out


def _largest_norm(x: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dim=-1).amax()) if x.numel() else 0.0


def _forward_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: BlockMask,
    scale: float,
    shift: bool,
    out: torch.Tensor,
    heads: list[tuple[int, int]],
) -> None:
    """The query heads of some key heads, (batch, kv_head): under a shared mask together, else one by one."""
    group = q.shape[1] // k.shape[1]
    if mask.shared:
        for b, some in itertools.groupby(heads, key=lambda head: head[0]):
            numbers = [h for _, h in some]  # of one sequence, in a row
            first, last = numbers[0], numbers[-1] + 1
            kv, queries = slice(first, last), slice(first * group, last * group)
            _attend_plan(
                q[b, queries].unflatten(0, (-1, group)),
                k[b, kv],
                v[b, kv],
                mask.plans[0],
                scale,
                shift,
                out[b, queries],
            )
        return
    for b, kv_head in heads:
        kv = slice(kv_head, kv_head + 1)
        for h in range(kv_head * group, (kv_head + 1) * group):
            plan = mask.plans[b * q.shape[1] + h]
            _attend_plan(q[b, h : h + 1][None], k[b, kv], v[b, kv], plan, scale, shift, out[b, h : h + 1])


def _attend_plan(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, scale: float, shift: bool, out: torch.Tensor
) -> None:
    """As many heads at once as keeps their scores within the cache, and for them one block of queries after the other.

    Args:
        q: Queries, shape [kv_heads, group, q_len, head_dim].
        k: Shape [kv_heads, kv_len, head_dim].
        v: Shape as `k`.
        plan: Which keys each block sees.
        scale: Factor on the scores.
        shift: Whether scores need their row's maximum taken off.
        out: Filled in, shape [kv_heads · group, q_len, head_dim].
    """
    heads, group, _, head_dim = q.shape
    out = out.unflatten(0, (heads, group))
    blocks = [block for block in plan if block.runs]
    rows = max((block.rows[1] - block.rows[0] for block in blocks), default=0) * group
    most = max((block.keys for block in blocks), default=0)
    together = max(1, min(heads, _SCORES // max(1, rows * most)))
    # One set of buffers for all blocks: memory asked for anew would be cleared by the system each time.
    scores_buffer = torch.empty(together * rows * most, dtype=q.dtype)
    taken_buffer = torch.empty(together * most * head_dim, dtype=q.dtype)
    for start in range(0, heads, together):
        part = slice(start, min(start + together, heads))
        some_q, some_k, some_v, some_out = q[part], k[part], v[part], out[part]
        count = len(some_k)
        for block in blocks:
            height, keys = (block.rows[1] - block.rows[0]) * group, block.keys
            queries = some_q[:, :, slice(*block.rows)].reshape(count, height, head_dim)
            scores = scores_buffer[: count * height * keys].view(count, height, keys)
            taken = _taken(some_k, block, taken_buffer).transpose(1, 2)
            torch.baddbmm(scores, queries, taken, beta=0, alpha=scale, out=scores)
            total = _exponentials(scores, block.mask, group, shift)
            attended = torch.bmm(scores, _taken(some_v, block, taken_buffer)).div_(total)
            some_out[:, :, slice(*block.rows)] = attended.view(count, group, -1, head_dim)


def _exponentials(scores: torch.Tensor, mask: torch.Tensor | None, group: int, shift: bool) -> torch.Tensor:
    """Turn scores, shape [heads, group · rows, keys], into exponentials in place; returns their sums, one where there is no key."""
    shown = None if mask is None else mask.repeat(group, 1)
    if shift:
        if shown is not None:
            scores.masked_fill_(~shown, float("-inf"))
        highest = scores.amax(dim=-1, keepdim=True)
        scores.sub_(highest.masked_fill_(highest == float("-inf"), 0.0))
    scores.exp_()
    if shown is not None:
        scores.mul_(shown)
    total = scores.sum(dim=-1, keepdim=True)
    return total if shown is None else total.masked_fill_(total == 0, 1.0)


def _taken(x: torch.Tensor, block: QueryBlock, buffer: torch.Tensor) -> torch.Tensor:
    """Keys of some heads, shape [heads, keys, head_dim]: a view where they lie in one piece.

    Args:
        x: Shape [heads, kv_len, head_dim], contiguous.
        block: Which keys.
        buffer: Where to.
    """
    if len(block.runs) == 1:
        return x[:, slice(*block.runs[0])]
    heads, length, head_dim = x.shape
    unit, index = block.pieces(length, heads)
    taken = buffer[: heads * block.keys * head_dim]
    torch.index_select(x.reshape(-1, unit * head_dim), 0, index, out=taken.view(-1, unit * head_dim))
    return taken.view(heads, block.keys, head_dim)


# backward


def _backward_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    d_out: torch.Tensor,
    mask: BlockMask,
    scale: float,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    heads: list[tuple[int, int]],
) -> None:
    group = q.shape[1] // k.shape[1]
    dtype = dk.dtype
    for b, kv_head in heads:
        keys, values = k[b, kv_head].to(dtype), v[b, kv_head].to(dtype)
        for h in range(kv_head * group, (kv_head + 1) * group):
            queries, results, d_results = (x[b, h].to(dtype) for x in (q, out, d_out))
            share = (results * d_results).sum(dim=1, keepdim=True)
            for block in mask.plans[0 if mask.shared else b * q.shape[1] + h]:
                rows = slice(*block.rows)
                if not block.runs:
                    dq[b, h, rows] = 0
                    continue
                rows_q, rows_d = queries[rows], d_results[rows]
                taken_k, taken_v = _take(keys, block), _take(values, block)
                scores = (rows_q @ taken_k.T).mul_(scale)
                if block.mask is not None:
                    scores.masked_fill_(~block.mask.to(q.device), float("-inf"))
                weights = torch.softmax(scores, dim=1)
                if block.mask is not None:
                    weights = weights.nan_to_num_(nan=0.0)
                _add(dv[b, kv_head], weights.T @ rows_d, block)
                d_scores = (rows_d @ taken_v.T).sub_(share[rows]).mul_(weights).mul_(scale)
                dq[b, h, rows] = (d_scores @ taken_k).to(dq.dtype)
                _add(dk[b, kv_head], d_scores.T @ rows_q, block)


# keys of a block


def _gather(x: torch.Tensor, runs: tuple[Run, ...]) -> torch.Tensor:
    """Keys of all heads, shape [batch, heads, keys, head_dim]: a view where they lie in one piece."""
    if len(runs) == 1:
        return x[:, :, slice(*runs[0])]
    return torch.cat([x[:, :, slice(*run)] for run in runs], dim=2)


def _take(x: torch.Tensor, block: QueryBlock) -> torch.Tensor:
    """Keys of one head, shape [keys, head_dim]: a view where they lie in one piece."""
    if len(block.runs) == 1:
        return x[slice(*block.runs[0])]
    return x.index_select(0, block.index.to(x.device))


def _add(into: torch.Tensor, x: torch.Tensor, block: QueryBlock) -> None:
    if len(block.runs) == 1:
        into[slice(*block.runs[0])] += x
    else:
        into.index_add_(0, block.index.to(into.device), x)


# heads over threads


def _over_heads(work: Callable[[list[tuple[int, int]]], None], k: torch.Tensor) -> None:
    """Share the key heads of all sequences among threads, each computing on one core; alone they would leave cores idle.

    A dispatch mode (a counter of FLOPs or of live bytes) sees the calling thread only, so under one everything runs in it.
    """
    heads = [(b, h) for b in range(k.shape[0]) for h in range(k.shape[1])]
    threads = min(torch.get_num_threads(), len(heads))
    if k.device.type != "cpu" or threads < 2 or _get_current_dispatch_mode_stack():
        work(heads)
        return
    inference, before = torch.is_inference_mode_enabled(), torch.get_num_threads()

    def run(part: list[tuple[int, int]]) -> None:
        torch.set_num_threads(max(1, before // threads))  # of this thread alone
        with torch.inference_mode(inference), torch.no_grad():
            work(part)

    try:
        for done in [_pool(threads).submit(run, part) for part in _shares(heads, threads)]:
            done.result()
    finally:
        torch.set_num_threads(before)  # what new threads will start with, which a worker's own setting has changed


def _shares(heads: list[tuple[int, int]], count: int) -> list[list[tuple[int, int]]]:
    """The heads in so many parts, each in a row."""
    bounds = [len(heads) * at // count for at in range(count + 1)]
    return [heads[a:b] for a, b in itertools.pairwise(bounds)]


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="nanolib-heads")
