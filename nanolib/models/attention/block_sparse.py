"""Compute block-sparse attention on CPU, forward and backward, over the kept tiles only.

For each block of queries, nanolib gathers the keys of the kept tiles, and computes two matrix
products in float32. Each thread computes some of the heads, because a single block is too small to
divide. The backward pass computes the scores again, block by block, so that memory use grows only
linearly with the sequence length. On other devices, nanolib calls torch's SDPA for each block.
"""

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
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from nanolib.models.attention import block_loops
from nanolib.models.attention.block_mask import BlockMask, Plan, QueryBlock
from nanolib.models.attention.partial import wide_type
from nanolib.models.attention.patterns import placed
from nanolib.torch_internals import FakeTensor, detect_fake_mode, dispatch_modes

# Number of scores in one matrix product. In float32, the scores use 1 MiB of a core's cache.
_SCORES = 2**18
_Heads = list[tuple[int, int]]  # Each pair is the index of a sequence and of a key head.


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
    return kernel(q, k, v, mask, q.shape[-1] ** -0.5)


class _BlockSparse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> Tensor:
        # The loop skips blocks without a key, so their output must be zero from the start.
        whole = all(block.runs for plan in mask.plans for block in plan)
        out = torch.empty_like(q) if whole else torch.zeros_like(q)
        ctx.save_for_backward(q, k, v, out)
        ctx.mask, ctx.scale, dtype = mask, scale, wide_type(q)
        inputs = q.to(dtype), k.to(dtype).contiguous(), v.to(dtype).contiguous()
        _over_heads("forward", (inputs[0], out), inputs[1:], mask, scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out = ctx.saved_tensors
        dtype = wide_type(q)
        # Every block adds to these sums. In bfloat16, a large sum would lose small additions.
        dq, dk, dv = (torch.zeros(x.shape, dtype=dtype) for x in (q, k, v))
        queries, keys, values, results, d_results = (
            x.to(dtype).contiguous() for x in (q, k, v, out, d_out)
        )
        by_query, by_key = (queries, results, d_results, dq), (keys, values, dk, dv)
        _over_heads("backward", by_query, by_key, ctx.mask, ctx.scale)
        # Deleting the inputs frees memory for the converted gradients.
        del queries, keys, values, results, d_results, by_query, by_key
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _key_heads(k: Tensor) -> _Heads:
    return list(itertools.product(range(k.shape[0]), range(k.shape[1])))


def _calls(
    q: Tensor, k: Tensor, mask: BlockMask, heads: _Heads
) -> Iterator[tuple[int, slice, slice, Plan]]:
    """Split heads into calls of a loop, by sequence if heads share a mask, otherwise by query head.

    Args:
        q: Queries, shape [batch, heads, q_len, head_dim].
        k: Keys, shape [batch, kv_heads, kv_len, head_dim].
        mask: Block mask for the lengths of `q` and `k`.
        heads: Key heads to compute.

    Yields:
        Index of the sequence, query heads, key heads, and the blocks that these heads share.
    """
    group = q.shape[1] // k.shape[1]
    if mask.shared:
        for b, some in itertools.groupby(heads, key=lambda head: head[0]):
            numbers = [h for _, h in some]
            first, last = numbers[0], numbers[-1] + 1
            yield b, slice(first * group, last * group), slice(first, last), mask.plans[0]
        return
    for b, kv_head in heads:
        for h in range(kv_head * group, (kv_head + 1) * group):
            yield b, slice(h, h + 1), slice(kv_head, kv_head + 1), mask.plan(b * q.shape[1] + h)


def _buffer_sizes(blocks: list[QueryBlock], group: int, heads: int) -> tuple[int, int, int]:
    """Return the heads per product, and the numbers of scores and keys that the buffers contain."""
    most = max((block.keys for block in blocks), default=0)
    scores = max((block.height for block in blocks), default=0) * group * most
    together = max(1, min(heads, _SCORES // max(1, scores)))
    return together, together * scores, together * most


def loop_bytes(name: str, q: Tensor, k: Tensor, mask: BlockMask) -> int:
    """Return the peak memory of a loop in bytes, without its inputs and outputs.

    At the peak, the loop uses the buffers for scores and keys, and the rows of a block. The loop
    copies these rows if heads share their keys. The backward pass also uses the gradients of the
    scores of two neighboring blocks.
    """
    heads, group = (k.shape[1], q.shape[1] // k.shape[1]) if mask.shared else (1, 1)
    most = 0
    for plan in mask.plans:
        blocks = [block for block in plan if block.runs]
        together, scores, keys = _buffer_sizes(blocks, group, heads)
        rows = together * group * q.shape[-1] * max((block.height for block in blocks), default=0)
        buffers, copies = scores + keys * q.shape[-1], rows * (group > 1 and len(plan) > 1)
        if name == "forward":
            most = max(most, buffers + copies + rows)
            continue
        sizes = [together * group * block.height * block.keys for block in blocks]
        neighbors = map(sum, itertools.pairwise([*sizes, *(sizes[:1] if together < heads else [])]))
        beyond = max([scores + max(rows, keys * q.shape[-1]), *neighbors])
        most = max(most, buffers + 3 * copies + beyond)
    return most * q.itemsize


def _over_heads(
    name: str,
    by_query: tuple[Tensor, ...],
    by_key: tuple[Tensor, ...],
    mask: BlockMask,
    scale: float,
) -> None:
    """Run a loop of `block_loops` over all key heads, on several threads if possible.

    A dispatch mode, such as a counter of FLOPs or of live bytes, sees only the calling thread. If a
    dispatch mode is active, the plain loop therefore runs in the calling thread.
    """
    q, k = by_query[0], by_key[0]
    if isinstance(q, FakeTensor):  # A memory plan counts the bytes of a loop without running it.
        torch.empty(loop_bytes(name, q, k, mask), dtype=torch.uint8)
        return
    modes = dispatch_modes()
    loop = getattr(block_loops, name) if modes else compiled_loop(name)

    def run(heads: _Heads) -> None:
        for b, queries, kv, plan in _calls(q, k, mask, heads):
            count = kv.stop - kv.start
            loop(
                *(x[b, queries].unflatten(0, (count, -1)) for x in by_query),
                *(x[b, kv] for x in by_key),
                _schedule(
                    plan, count, (queries.stop - queries.start) // count, q, k.shape[2], scale
                ),
            )

    heads = _key_heads(k)
    threads = min(torch.get_num_threads(), len(heads))
    if threads < 2 or modes:
        with torch.autocast("cpu", enabled=False):  # Other threads never autocast either.
            run(heads)
        return
    inference, before = torch.is_inference_mode_enabled(), torch.get_num_threads()

    def share(at: int) -> None:
        torch.set_num_threads(before // threads)  # The setting affects only this thread.
        with torch.inference_mode(inference), torch.no_grad():
            run(heads[len(heads) * at // threads : len(heads) * (at + 1) // threads])

    try:
        list(_pool(threads).map(share, range(threads)))
    finally:
        # `set_num_threads` in other threads has also changed the default for new threads.
        torch.set_num_threads(before)


def _schedule(
    plan: Plan, heads: int, group: int, q: Tensor, kv_len: int, scale: float
) -> block_loops.Schedule:
    """Convert the blocks of a mask to types that the loops accept, and allocate the buffers."""
    blocks = [block for block in plan if block.runs]
    together, scores, keys = _buffer_sizes(blocks, group, heads)
    converted = []
    for block in blocks:
        start = block.runs[0][0] if len(block.runs) == 1 else -1
        # In the tensor of keys, each head follows the previous head.
        pieces = np.arange(together)[:, None] * (kv_len // block.unit) + block.pieces
        pieces, hidden = torch.from_numpy(pieces.ravel()), torch.from_numpy(block.hidden)
        sizes = *block.rows, block.keys, start, block.unit
        converted.append(block_loops.Block(*sizes, pieces, block.hidden_from, hidden, block.blind))
    buffers = q.new_empty(scores), q.new_empty(keys * q.shape[-1])
    return block_loops.Schedule(converted, together, *buffers, scale)


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="nanolib-heads")


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


def attend_by_blocks(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float | None = None
) -> Tensor:
    """Compute attention block by block with torch's SDPA, on devices other than the CPU.

    The arguments are those of `attend`.
    """
    if mask.shared:
        return _attend_by_plan(q, k, v, mask.plans[0], scale)
    outs = []
    for b, queries, kv, plan in _calls(q, k, mask, _key_heads(k)):
        parts = q[b, queries][None], k[b, kv][None], v[b, kv][None]
        outs.append(_attend_by_plan(*parts, plan, scale))
    return torch.cat(outs).view_as(q)


def _attend_by_plan(q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float | None) -> Tensor:
    outs, grouped = [], q.shape[1] != k.shape[1]
    for block in plan:
        queries = q[:, :, slice(*block.rows)]
        if not block.runs:
            outs.append(torch.zeros_like(queries))
            continue
        keys, values = (
            torch.cat([x[:, :, slice(*run)] for run in block.runs], dim=2) for x in (k, v)
        )
        seen = _seen(block, q.device, detect_fake_mode()) if block.hidden.size else None
        out = scaled_dot_product_attention(
            queries, keys, values, attn_mask=seen, scale=scale, enable_gqa=grouped
        )
        # The output of a query without any key is zero, whatever the kernel computes.
        outs.append(out if seen is None else out.masked_fill(~seen.any(dim=1, keepdim=True), 0))
    return torch.cat(outs, dim=2)


@functools.lru_cache(maxsize=256)
def _seen(block: QueryBlock, device: torch.device, planning: object) -> Tensor:
    """Copy a block's mask to a device only once, because the host waits for each copy."""
    seen = np.ones((block.height, block.keys), dtype=bool)
    seen[:, block.hidden_from :] = ~block.hidden
    return placed(seen, device)
