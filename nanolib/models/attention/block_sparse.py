"""Compute block-sparse attention on CPU, forward and backward, over the kept tiles only.

For each block of queries, nanolib gathers the keys of the kept tiles, and computes two matrix
products in float32. Each thread computes some of the heads, because a single block is too small to
divide. The backward pass computes the scores again, block by block, so that memory use grows only
linearly with the sequence length. On other devices, nanolib calls torch's SDPA for each block.
"""

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from nanolib.models.attention import block_loops
from nanolib.models.attention.block_mask import BlockMask, Plan, QueryBlock
from nanolib.models.attention.partial import wide_type
from nanolib.models.attention.patterns import copy_to_device
from nanolib.models.attention.reference import tile_count
from nanolib.torch_internals import (
    FakeTensor,
    detect_fake_mode,
    disable_dispatch_modes,
    dispatch_modes,
)

# Number of scores in one matrix product. In float32, the scores use 1 MiB of a core's cache.
_SCORES = 2**18


def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """Compute attention over the kept tiles.

    Args:
        q: Queries, shape [batch, heads, q_len, head_dim].
        k: Keys, shape [batch, kv_heads, kv_len, head_dim].
        v: Values, with the shape of `k`.
        mask: Block mask for the lengths of `q` and `k`.

    Returns:
        Output with the shape and dtype of `q`. The output of a query without any key is zero.
    """
    kernel = _BlockSparse.apply if q.device.type == "cpu" else attend_by_blocks
    return kernel(q, k, v, mask)


class _BlockSparse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
        # The loop skips blocks without a key, so their output must be zero from the start.
        whole = all(block.keys for plan in mask.plans for block in plan)
        out = torch.empty_like(q) if whole else torch.zeros_like(q)
        ctx.save_for_backward(q, k, v)
        ctx.mask, dtype = mask, wide_type(q)
        inputs = q.to(dtype), k.to(dtype).contiguous(), v.to(dtype).contiguous()
        _over_heads("forward", (inputs[0], out), inputs[1:], mask)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        dtype = wide_type(q)
        # Every block adds to these sums. In bfloat16, a large sum would lose small additions.
        dq, dk, dv = (torch.zeros(x.shape, dtype=dtype) for x in (q, k, v))
        queries, d_results, keys, values = (x.to(dtype).contiguous() for x in (q, d_out, k, v))
        _over_heads("backward", (queries, d_results, dq), (keys, values, dk, dv), ctx.mask)
        return dq, dk, dv, None  # Autograd converts the gradients.


def _over_heads(
    name: str, by_query: tuple[Tensor, ...], by_key: tuple[Tensor, ...], mask: BlockMask
):
    """Run a loop of `block_loops` over all key heads, on several threads if possible.

    A dispatch mode, such as a counter of FLOPs or of live bytes, sees only the calling thread. If a
    dispatch mode is active, the plain loop therefore runs in the calling thread.
    """
    q, k = by_query[0], by_key[0]
    count, modes = k.shape[0] * k.shape[1], dispatch_modes()
    if isinstance(q, FakeTensor):  # In a plan, one product of heads uses as much memory as all.
        scores = max(block.scores for plan in mask.plans for block in plan)
        product = max(1, _SCORES // max(1, scores * q.shape[1] // k.shape[1]))
        count = min(k.shape[1], product)
    loop = getattr(block_loops, name) if modes else compiled_loop(name)

    def run(first: int, last: int):
        for b, queries, heads, plan in _calls(q, k, mask, first, last):
            parts = [x[b, queries].unflatten(0, (heads.stop - heads.start, -1)) for x in by_query]
            # No variable keeps the buffers of a schedule until the next schedule.
            loop(*parts, *(x[b, heads] for x in by_key), _schedule(plan, parts[0], k.shape[2]))

    cores = torch.get_num_threads()
    threads = min(cores, count)
    if threads < 2 or modes:
        with torch.autocast("cpu", enabled=False):  # Other threads never autocast either.
            run(0, count)
        return
    inference = torch.is_inference_mode_enabled()

    def share(index: int):
        torch.set_num_threads(cores // threads)  # The setting affects only this thread.
        with torch.inference_mode(inference), torch.no_grad():
            run(count * index // threads, count * (index + 1) // threads)

    try:
        list(_pool(threads).map(share, range(threads)))
    finally:
        # `set_num_threads` in other threads has also changed the default for new threads.
        torch.set_num_threads(cores)


def _calls(
    q: Tensor, k: Tensor, mask: BlockMask, first: int, last: int
) -> Iterator[tuple[int, slice, slice, Plan]]:
    """Split heads into calls of a loop, by sequence if heads share a mask, otherwise by query head.

    Args:
        q: Queries, shape [batch, heads, q_len, head_dim].
        k: Keys, shape [batch, kv_heads, kv_len, head_dim].
        mask: Block mask for the lengths of `q` and `k`.
        first: First key head, counted over all sequences.
        last: Index after the last key head.

    Yields:
        Index of the sequence, query heads, key heads, and the blocks that these heads share.
    """
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    if mask.is_shared:
        for b in range(first // kv_heads, tile_count(last, kv_heads)):
            start, stop = max(0, first - b * kv_heads), min(kv_heads, last - b * kv_heads)
            yield b, slice(start * group, stop * group), slice(start, stop), mask.plans[0]
        return
    for head in range(first * group, last * group):
        b, h = divmod(head, q.shape[1])
        kv_head, plan = h // group, mask.plans[head % len(mask.plans)]
        yield b, slice(h, h + 1), slice(kv_head, kv_head + 1), plan


def _schedule(plan: Plan, q: Tensor, kv_len: int) -> block_loops.Schedule:
    """Convert the blocks of a mask to types that the loops accept, and allocate the buffers.

    In a memory plan, the schedule has only the two largest blocks, because the peak depends on two
    neighboring blocks.

    Args:
        plan: Blocks that the heads share.
        q: Queries, shape [kv_heads, group, q_len, head_dim].
        kv_len: Number of keys.
    """
    heads, group, _, head_dim = q.shape
    blocks = [block for block in plan if block.keys]
    without_modes = contextlib.nullcontext()
    if isinstance(q, FakeTensor):
        blocks = sorted(blocks, key=lambda block: block.scores)[-2:]
        without_modes = disable_dispatch_modes()  # A mask is not part of the memory of a call.
    scores = group * max((block.scores for block in blocks), default=0)
    keys = max((block.keys for block in blocks), default=0)
    together = max(1, min(heads, _SCORES // max(1, scores)))
    # In the tensor of keys, each head follows the previous head.
    offsets = np.arange(together)[:, None] * kv_len
    with without_modes:
        converted = [
            block_loops.Block(
                *block.rows,
                block.keys,
                block.start,
                block.unit,
                torch.from_numpy((offsets // block.unit + block.pieces).ravel()),
                block.hidden_from,
                torch.from_numpy(block.hidden),
                block.blind,
            )
            for block in blocks
        ]
    buffers = q.new_empty(together * scores), q.new_empty(together * keys * head_dim)
    return block_loops.Schedule(converted, together, *buffers)


_pool = functools.cache(ThreadPoolExecutor)
_COMPILING = threading.Lock()  # In Python 3.11, parsing code in two threads at once can fail.


@functools.cache
def compiled_loop(name: str) -> Callable[..., None]:
    """Compile a loop of `block_loops` if torch can, because compiled loops run without the GIL."""
    loop = getattr(block_loops, name)
    with _COMPILING, warnings.catch_warnings():
        # torch deprecates TorchScript. The plain function computes the same result.
        warnings.simplefilter("ignore")
        try:
            return torch.jit.script(loop)
        except (AttributeError, RuntimeError):
            return loop


def attend_by_blocks(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """Compute attention block by block with torch's SDPA, on devices other than the CPU.

    The arguments are those of `attend`.
    """
    if mask.is_shared:
        return _attend_by_plan(q, k, v, mask.plans[0])
    outs = []
    for b, queries, heads, plan in _calls(q, k, mask, 0, k.shape[0] * k.shape[1]):
        outs.append(_attend_by_plan(q[b, queries], k[b, heads], v[b, heads], plan))
    return torch.cat(outs).view_as(q)


def _attend_by_plan(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
    """Compute attention of heads that share their blocks, shape [..., heads, length, head_dim]."""
    outs, grouped = [], q.shape[-3] != k.shape[-3]
    for block in plan:
        queries = q[..., slice(*block.rows), :]
        if not block.keys:
            outs.append(torch.zeros_like(queries))
            continue
        positions, seen = _copy_to_device(block, q.device, detect_fake_mode())
        keys, values = k.index_select(-2, positions), v.index_select(-2, positions)
        out = scaled_dot_product_attention(
            queries, keys, values, attn_mask=seen, enable_gqa=grouped
        )
        # The output of a query without any key is zero, whatever the kernel computes.
        outs.append(out if seen is None else out.masked_fill(~seen.any(dim=1, keepdim=True), 0))
    return torch.cat(outs, dim=-2)


@functools.lru_cache(maxsize=256)
def _copy_to_device(block: QueryBlock, device: torch.device, planning) -> tuple[Tensor, Any]:
    """Copy a block's positions and its mask, if any, to a device.

    nanolib copies them only once, because the host waits for each copy.
    """
    positions = copy_to_device(block.positions, device)
    if not block.hidden.size:
        return positions, None
    seen = np.ones((block.rows[1] - block.rows[0], block.keys), dtype=bool)
    seen[:, block.hidden_from :] = ~block.hidden
    return positions, copy_to_device(seen, device)
