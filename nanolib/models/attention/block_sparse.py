"""The block-sparse kernel on CPU, forward and backward: it computes the kept tiles and nothing else.

Each block of queries gathers the keys of its kept tiles and attends to them by two matrix products in float32. Heads are spread
over threads, since a single block is too small to be divided. The backward pass recomputes the scores block by block, so that
memory stays linear in the sequence. On other devices each block goes through torch's SDPA.
"""

from __future__ import annotations

import functools
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from nanolib.models.attention import block_loops
from nanolib.models.attention.block_mask import BlockMask, Plan, QueryBlock
from nanolib.models.attention.patterns import placed

_SCORES = 2**18  # at once, per thread: 1 MiB of float32, which stay near the core
_Heads = list[tuple[int, int]]  # key heads, (batch, kv_head), those of a sequence in a row


def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> Tensor:
    """Attention over the kept tiles.

    Args:
        q: Shape [batch, heads, q_len, head_dim].
        k: Shape [batch, kv_heads, kv_len, head_dim].
        v: Shape as `k`.
        mask: Which keys each block of queries sees; of the same lengths.
        scale: Factor on the scores.

    Returns:
        Shape and dtype of `q`; a query without any key gets zero.
    """
    return (_BlockSparse.apply if q.device.type == "cpu" else attend_by_blocks)(
        q, k, v, mask, scale
    )


class _BlockSparse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> Tensor:
        whole = all(block.runs for plan in mask.plans for block in plan)
        out = torch.empty_like(q) if whole else torch.zeros_like(q)
        ctx.save_for_backward(q, k, v, out)
        ctx.mask, ctx.scale = mask, scale
        dtype = _accumulator(q)
        inputs = q.to(dtype), k.to(dtype).contiguous(), v.to(dtype).contiguous()
        _over_heads("forward", (inputs[0], out), inputs[1:], mask, scale)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out = ctx.saved_tensors
        dtype = _accumulator(q)
        # float32 sums: every block adds its share, and in bfloat16 the later ones would be lost
        dq, dk, dv = (torch.zeros(x.shape, dtype=dtype) for x in (q, k, v))
        queries, keys, values, results, d_results = (
            x.to(dtype).contiguous() for x in (q, k, v, out, d_out)
        )
        _over_heads(
            "backward",
            (queries, results, d_results, dq),
            (keys, values, dk, dv),
            ctx.mask,
            ctx.scale,
        )
        del queries, keys, values, results, d_results  # before the sums are copied
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _turns(
    heads: _Heads, mask: BlockMask, query_heads: int, group: int
) -> Iterator[tuple[int, slice, slice, Plan]]:
    """What goes through the loop at once: under a shared mask all heads of a sequence, else one query head after the other.

    Args:
        heads: Which of them.
        mask: Which keys each block sees.
        query_heads: Of a sequence.
        group: Query heads that share their keys.

    Yields:
        The sequence, its query heads, its key heads, and their plan.
    """
    if mask.shared:
        for b, some in itertools.groupby(heads, key=lambda head: head[0]):
            numbers = [h for _, h in some]
            first, last = numbers[0], numbers[-1] + 1
            yield b, slice(first * group, last * group), slice(first, last), mask.plans[0]
        return
    for b, kv_head in heads:
        for h in range(kv_head * group, (kv_head + 1) * group):
            yield b, slice(h, h + 1), slice(kv_head, kv_head + 1), mask.plan(b * query_heads + h)


def at_once(blocks: list[QueryBlock], group: int, heads: int) -> tuple[int, int, int]:
    """How many heads go at once (as many as keep their scores within the cache), their most scores, and their most keys."""
    most = max((block.keys for block in blocks), default=0)
    scores = max((block.height for block in blocks), default=0) * group * most
    together = max(1, min(heads, _SCORES // max(1, scores)))
    return together, together * scores, together * most


def loop_bytes(name: str, q: Tensor, k: Tensor, mask: BlockMask) -> int:
    """Bytes that a loop holds at its peak beside the tensors that it is given.

    That is room for scores and keys; the rows of a block, which are copied where heads share their keys; and going backward the
    gradients of its scores, which live until those of the next block do.
    """
    heads, group = (k.shape[1], q.shape[1] // k.shape[1]) if mask.shared else (1, 1)
    most = 0
    for plan in mask.plans:
        blocks = [block for block in plan if block.runs]
        together, scores, keys = at_once(blocks, group, heads)
        rows = together * group * q.shape[-1] * max((block.height for block in blocks), default=0)
        held, copies = scores + keys * q.shape[-1], rows * (group > 1 and len(plan) > 1)
        if name == "forward":
            most = max(most, held + copies + rows)
            continue
        sizes = [together * group * block.height * block.keys for block in blocks]
        neighbors = map(sum, itertools.pairwise([*sizes, *(sizes[:1] if together < heads else [])]))
        most = max(
            most, held + 3 * copies + max([scores + max(rows, keys * q.shape[-1]), *neighbors])
        )
    return most * q.itemsize


def _over_heads(
    name: str,
    by_query: tuple[Tensor, ...],
    by_key: tuple[Tensor, ...],
    mask: BlockMask,
    scale: float,
) -> None:
    """Run a loop of `block_loops` over the key heads of all sequences, shared among threads that compute on one core each.

    A dispatch mode (a counter of FLOPs or of live bytes) sees the calling thread only, so under one everything runs in it, and
    through the plain loop, whose operations it counts.
    """
    q, k = by_query[0], by_key[0]
    if isinstance(q, FakeTensor):  # what is planned is not computed
        torch.empty(loop_bytes(name, q, k, mask), dtype=torch.uint8)
        return
    modes = _get_current_dispatch_mode_stack()
    loop = getattr(block_loops, name) if modes else compiled_loop(name)
    group = q.shape[1] // k.shape[1]

    def run(heads: _Heads) -> None:
        for b, queries, kv, plan in _turns(heads, mask, q.shape[1], group):
            count = kv.stop - kv.start
            loop(
                *(x[b, queries].unflatten(0, (count, -1)) for x in by_query),
                *(x[b, kv] for x in by_key),
                _turn(plan, count, (queries.stop - queries.start) // count, q, k.shape[2], scale),
            )

    heads = [(b, h) for b in range(k.shape[0]) for h in range(k.shape[1])]
    threads = min(torch.get_num_threads(), len(heads))
    if threads < 2 or modes:
        with torch.autocast("cpu", enabled=False):  # which other threads do not know of either
            run(heads)
        return
    inference, before = torch.is_inference_mode_enabled(), torch.get_num_threads()

    def share(at: int) -> None:
        torch.set_num_threads(before // threads)  # of this thread alone
        with torch.inference_mode(inference), torch.no_grad():
            run(heads[len(heads) * at // threads : len(heads) * (at + 1) // threads])

    try:
        list(_pool(threads).map(share, range(threads)))
    finally:
        torch.set_num_threads(
            before
        )  # what new threads will start with, which a worker's own setting has changed


def _turn(
    plan: Plan, heads: int, group: int, q: Tensor, kv_len: int, scale: float
) -> block_loops.Turn:
    """A plan as the loops take it, and room for what goes through them at once."""
    blocks = [block for block in plan if block.runs]
    together, scores, keys = at_once(blocks, group, heads)
    taken = []
    for block in blocks:
        start = block.runs[0][0] if len(block.runs) == 1 else -1
        # of several heads whose keys lie one after the other
        pieces = np.arange(together)[:, None] * (kv_len // block.unit) + block.pieces
        pieces, hidden = torch.from_numpy(pieces.ravel()), torch.from_numpy(block.hidden)
        sizes = *block.rows, block.keys, start, block.unit
        taken.append(block_loops.Block(*sizes, pieces, block.hidden_from, hidden, block.blind))
    return block_loops.Turn(
        taken, together, q.new_empty(scores), q.new_empty(keys * q.shape[-1]), scale
    )


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="nanolib-heads")


_COMPILING = threading.Lock()  # two threads come here at once, and Python 3.11 cannot parse in two


@functools.cache
def compiled_loop(name: str) -> Callable[..., None]:
    """A loop of `block_loops`, compiled where torch still can: two threads that run it do not wait for each other's Python."""
    loop = getattr(block_loops, name)
    with _COMPILING, warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # torch means to give TorchScript up; the plain function then does the same
        try:
            return torch.jit.script(loop)
        except (AttributeError, RuntimeError):
            return loop


def attend_by_blocks(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> Tensor:
    """Block after block through torch's SDPA, for devices without the loops; arguments as of `attend`."""
    if mask.shared:
        return _through(q, k, v, mask.plans[0], scale)
    group = q.shape[1] // k.shape[1]
    outs = []
    for head in range(q.shape[0] * q.shape[1]):
        parts = (
            x.flatten(0, 1)[at][None, None]
            for x, at in ((q, head), (k, head // group), (v, head // group))
        )
        outs.append(_through(*parts, mask.plan(head), scale))
    return torch.cat(outs).view_as(q)


def _through(q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float) -> Tensor:
    outs = []
    for block in plan:
        queries = q[:, :, slice(*block.rows)]
        if not block.runs:
            outs.append(torch.zeros_like(queries))
            continue
        keys, values = (
            torch.cat([x[:, :, slice(*run)] for run in block.runs], dim=2) for x in (k, v)
        )
        seen = _seen(block, q.device, detect_fake_mode()) if block.hidden.size else None
        group = q.shape[1] != k.shape[1]
        out = scaled_dot_product_attention(
            queries, keys, values, attn_mask=seen, scale=scale, enable_gqa=group
        )
        # a query without any key gets zero, whatever the kernel makes of it
        outs.append(out if seen is None else out.masked_fill(~seen.any(dim=1, keepdim=True), 0))
    return torch.cat(outs, dim=2)


@functools.lru_cache(maxsize=256)
def _seen(block: QueryBlock, device: torch.device, planning: object) -> Tensor:
    """True where a query of the block sees a key of its runs, moved to a device once: an upload would let the host wait for it."""
    seen = np.ones((block.height, block.keys), dtype=bool)
    seen[:, block.hidden_from :] = ~block.hidden
    return placed(seen, device)
