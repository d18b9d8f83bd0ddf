"""The block-sparse kernel, forward and backward: it computes the kept tiles and nothing else.

On CPU each block of queries gathers the keys of its kept tiles and attends to them by two matrix products in float32.
Heads are spread over threads, since a single block is too small to be divided. On other devices each block goes through torch's
SDPA. The backward pass recomputes the scores block by block, so that memory stays linear in the sequence.
"""

from __future__ import annotations

import functools
import itertools
import operator
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from nanolib.models.attention import block_loops
from nanolib.models.attention.block_mask import BlockMask, Plan, QueryBlock, real_tensors
from nanolib.models.attention.patterns.pattern import Run

_Turn = tuple[int, slice, slice, Plan]  # a sequence, its query heads, its key heads, and their plan
_SCORES = 2**18  # at once, per thread: 1 MiB of float32, which stay near the core


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
        dtype = _accumulator(q)
        # float32 sums: every block adds its share, and in bfloat16 the later ones would be lost
        dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
        inputs = (x.to(dtype).contiguous() for x in (q, k, v, out, d_out))
        _over_heads(functools.partial(_backward_heads, *inputs, ctx.mask, ctx.scale, dq, dk, dv), k)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _accumulator(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# forward


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask, scale: float) -> torch.Tensor:
    out = torch.zeros_like(q)
    for q_part, k_part, v_part, out_part, plan in _parts(q, k, v, out, mask):
        for block in plan:
            if not block.runs:
                continue
            seen = None if block.mask is None else block.on(block.mask, q.device)
            attended = scaled_dot_product_attention(
                q_part[:, :, slice(*block.rows)],
                _gather(k_part, block.runs),
                _gather(v_part, block.runs),
                attn_mask=seen,
                scale=scale,
                enable_gqa=q_part.shape[1] != k_part.shape[1],
            )
            if block.blind is not None:  # a query without any key gets zero, whatever the kernel makes of it
                attended = attended.masked_fill(block.on(block.blind, q.device), 0)
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
    _over_heads(functools.partial(_forward_heads, queries, keys, values, mask, scale, out), k)
    return out


def _forward_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: BlockMask,
    scale: float,
    out: torch.Tensor,
    heads: list[tuple[int, int]],
) -> None:
    for b, queries, kv, lists in _turns(heads, mask, q, k):
        _loop("forward")(
            *(_by_kv_head(x[b, queries], kv) for x in (q, out)), k[b, kv], v[b, kv], *lists.arguments(), scale
        )
        del lists  # its buffers, before the next turn's are made


def _turns(
    heads: list[tuple[int, int]], mask: BlockMask, q: torch.Tensor, k: torch.Tensor
) -> Iterator[tuple[int, slice, slice, _Lists]]:
    """Those of `_together`, each with its lists; of a plan that is made without computing, those that tell its memory."""
    turns = list(_together(heads, mask, q.shape[1], k.shape[1]))
    if not isinstance(q, FakeTensor):
        for b, queries, kv, plan in turns:
            yield b, queries, kv, _Lists.of(plan, q[b, queries], k[b, kv])
        return
    for (b, queries, kv, plan), blocks in _telling(turns):
        lists = _Lists.of(plan, q[b, queries], k[b, kv], blocks)
        if lists.together < kv.stop - kv.start:  # one group of heads: the others are alike
            group = (queries.stop - queries.start) // (kv.stop - kv.start)
            queries, kv = (slice(x.start, x.start + lists.together * of) for x, of in ((queries, group), (kv, 1)))
        yield b, queries, kv, lists
        del lists


def _telling(turns: list[_Turn]) -> list[tuple[_Turn, list[QueryBlock]]]:
    """What of the loops decides how much memory they need: turns over heads, each with two of its blocks.

    What is alive at a block is its own and what the block before it has left, beside the buffers of the turn. So of all pairs of
    neighbours those tell that no other pair, of the same kinds, exceeds in every size. After the last block comes the first, where
    there are heads that did not go with these.
    """
    pairs: dict[Any, tuple[_Turn, list[QueryBlock]]] = {}
    for turn in turns:
        blocks = [block for block in turn[3] if block.runs]
        heads = turn[2].stop - turn[2].start
        most, scores, together = _at_once(blocks, (turn[1].stop - turn[1].start) // heads, heads)
        after = [*blocks[1:], *(blocks[:1] if together < heads else [])]
        # a single one, of all heads at once, has none beside it
        for pair in list(zip(blocks, after, strict=False)) or [blocks]:
            kinds = tuple(len(block.runs) > 1 for block in pair)
            sizes = (scores, most, *(n for block in pair for n in (block.rows[1] - block.rows[0], block.keys)))
            pairs.setdefault((kinds, sizes), (turn, list(pair)))
    return [
        chosen
        for (kinds, sizes), chosen in pairs.items()
        if not any(
            kinds == other and sizes != larger and all(map(operator.le, sizes, larger)) for other, larger in pairs
        )
    ]


def _at_once(blocks: list[QueryBlock], group: int, heads: int) -> tuple[int, int, int]:
    """The most keys of a block, the most scores of a head's block, and how many heads go through the loop at once."""
    most = max((block.keys for block in blocks), default=0)
    scores = max((block.rows[1] - block.rows[0] for block in blocks), default=0) * group * most
    together = max(1, min(heads, _SCORES // scores)) if blocks else 1
    return most, scores, together


def _together(heads: list[tuple[int, int]], mask: BlockMask, query_heads: int, kv_heads: int) -> Iterator[_Turn]:
    """What goes through the loop at once: under a shared mask all heads of a sequence, else one query head after the other.

    Args:
        heads: Key heads, (batch, kv_head), those of a sequence in a row.
        mask: Which keys each block sees.
        query_heads: Of a sequence.
        kv_heads: Of a sequence.

    Yields:
        The sequence, its query heads, its key heads, and their plan.
    """
    group = query_heads // kv_heads
    if mask.shared:
        for b, some in itertools.groupby(heads, key=lambda head: head[0]):
            numbers = [h for _, h in some]
            first, last = numbers[0], numbers[-1] + 1
            yield b, slice(first * group, last * group), slice(first, last), mask.plans[0]
        return
    for b, kv_head in heads:
        for h in range(kv_head * group, (kv_head + 1) * group):
            yield b, slice(h, h + 1), slice(kv_head, kv_head + 1), mask.plans[b * query_heads + h]


def _by_kv_head(x: torch.Tensor, kv: slice) -> torch.Tensor:
    """Shape [heads, ...] → [kv_heads, group, ...]."""
    return x.unflatten(0, (kv.stop - kv.start, -1))


@dataclass
class _Lists:
    """A plan in the types that TorchScript takes, and how much of it goes through at once.

    Attributes:
        rows: Per block, its queries [start, stop).
        keys: How many keys it sees.
        firsts: Where they begin if they lie in one piece, else −1.
        units: Else how long the equal pieces are that they consist of,
        pieces: and which, of all heads one after the other; see `QueryBlock.pieces`.
        hidden_from: From which key on some query does not see them,
        hidden: and which do not, bool [group · rows, keys from there], or empty where all is seen.
        blind: bool [group · rows, 1], which of them see nothing, or empty where each sees some key.
        together: Heads at once: as many as keep their scores within the cache, or one where its blocks are large.
        scores_buffer: Room for their scores. Buffers serve all blocks: memory asked for anew would be cleared each time.
        taken_buffer: Room for their keys.
    """

    rows: list[list[int]]
    keys: list[int]
    firsts: list[int]
    units: list[int]
    pieces: list[torch.Tensor]
    hidden_from: list[int]
    hidden: list[torch.Tensor]
    blind: list[torch.Tensor]
    together: int
    scores_buffer: torch.Tensor
    taken_buffer: torch.Tensor

    @classmethod
    def of(cls, plan: Plan, q: torch.Tensor, k: torch.Tensor, only: list[QueryBlock] | None = None) -> _Lists:
        heads, length, head_dim = k.shape
        group = q.shape[0] // heads
        blocks = [block for block in plan if block.runs]
        most, scores, together = _at_once(blocks, group, heads)
        blocks = blocks if only is None else only
        pieces = [block.pieces(length, heads) if len(block.runs) > 1 else (1, _NO_PIECES) for block in blocks]
        masks = [block.masks(group) for block in blocks]
        like = {"dtype": _accumulator(q), "device": q.device}
        return cls(
            [list(block.rows) for block in blocks],
            [block.keys for block in blocks],
            [block.runs[0][0] if len(block.runs) == 1 else -1 for block in blocks],
            [unit for unit, _ in pieces],
            [block.on(index, q.device) for block, (_, index) in zip(blocks, pieces, strict=True)],
            [first for first, _, _ in masks],
            [block.on(hidden, q.device) for block, (_, hidden, _) in zip(blocks, masks, strict=True)],
            [block.on(blind, q.device) for block, (_, _, blind) in zip(blocks, masks, strict=True)],
            together,
            torch.empty(together * scores, **like),
            torch.empty(together * most * head_dim, **like),
        )

    def arguments(self) -> list[Any]:
        """The fields, in order."""
        return [getattr(self, field.name) for field in fields(self)]


with real_tensors():  # whoever plans may be the first to import this
    _NO_PIECES = torch.tensor([], dtype=torch.int64)


def _loop(name: str) -> Callable[..., None]:
    """A loop of `block_loops`, compiled where torch still can: two threads that run it do not wait for each other's Python.

    A dispatch mode sees the plain one, whose operations it counts.
    """
    return getattr(block_loops, name) if _get_current_dispatch_mode_stack() else _compiled_loop(name)


_COMPILING = threading.Lock()  # two threads come here at once, and Python 3.11 cannot parse in two


@functools.cache
def _compiled_loop(name: str) -> Callable[..., None]:
    loop = getattr(block_loops, name)
    with _COMPILING, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to give TorchScript up; the plain function then does the same
        try:
            return torch.jit.script(loop)
        except (AttributeError, RuntimeError):
            return loop


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
    for b, queries, kv, lists in _turns(heads, mask, q, k):
        by_queries = (_by_kv_head(x[b, queries], kv) for x in (q, out, d_out, dq))
        by_keys = (x[b, kv] for x in (k, v, dk, dv))
        _loop("backward")(*by_queries, *by_keys, *lists.arguments(), scale)
        del lists


# keys of a block


def _gather(x: torch.Tensor, runs: tuple[Run, ...]) -> torch.Tensor:
    """Keys of all heads, shape [batch, heads, keys, head_dim]: a view where they lie in one piece."""
    first, *others = (x[:, :, slice(*run)] for run in runs)
    return torch.cat([first, *others], dim=2) if others else first


# heads over threads


def _over_heads(work: Callable[[list[tuple[int, int]]], None], k: torch.Tensor) -> None:
    """Share the key heads of all sequences among threads, each computing on one core; alone they would leave cores idle.

    A dispatch mode (a counter of FLOPs or of live bytes) sees the calling thread only, so under one everything runs in it.
    """
    heads = [(b, h) for b in range(k.shape[0]) for h in range(k.shape[1])]
    threads = min(torch.get_num_threads(), len(heads))
    if k.device.type != "cpu" or threads < 2 or _get_current_dispatch_mode_stack():
        with torch.autocast(k.device.type, enabled=False):  # which other threads do not know of either
            work(heads)
        return
    inference, before = torch.is_inference_mode_enabled(), torch.get_num_threads()

    def run(part: list[tuple[int, int]]) -> None:
        torch.set_num_threads(before // threads)  # of this thread alone
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
