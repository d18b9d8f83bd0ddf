"""Compute attention over a sequence that is sharded across ranks, by a ring or by Ulysses.

In a ring, each rank keeps its queries, and passes keys and values to the next rank. By default,
each transfer to the next rank (a hop) overlaps with the computation of a block of keys. If
attention is causal and each rank has one piece, the first of W ranks computes one block, and the
last rank computes W blocks. `Sharding.zigzag` gives every rank the same work.

In Ulysses, each rank exchanges its shard of the sequence for a shard of the heads, computes
attention, and reverses the exchange. Each exchange is an all-to-all.

Source: Liu et al., Ring Attention (arXiv 2310.01889), with zigzag as in
github.com/zhuzilin/ring-flash-attention, and Jacobs et al., DeepSpeed Ulysses (arXiv 2309.14509).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nanolib.measurement import BadInput
from nanolib.models.attention import attend, check_shapes
from nanolib.models.attention.partial import (
    block_gradients,
    merge,
    partial_attention,
    wide_type,
)
from nanolib.models.attention.ranks import Piece, Ranks, Sharding


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Sharding,
    causal: bool = True,
    overlap: bool = True,
    timer=None,
) -> Tensor:
    """Compute attention over a sequence that is sharded across ranks, with a backward pass.

    Args:
        q: This rank's queries, shape [batch, heads, local_len, head_dim].
        k: This rank's keys, shape [batch, kv_heads, local_len, head_dim]. kv_heads must divide
            heads.
        v: This rank's values, with the shape of `k`.
        layout: Positions of the tokens on each rank.
        causal: Whether a query sees only keys at or before its own position.
        overlap: Whether a hop runs while the rank computes a block. Without overlap, a timer times
            hops and blocks separately.
        timer: Timer of the forward pass's parts `comp_blocks` and `comm_hop`, as in `Ranks`.

    Returns:
        Output with the shape and dtype of `q`.

    Raises:
        BadInput: The shapes do not fit each other or the layout.
    """
    check_shapes(q, k, v)
    ranks = Ranks(timer)
    ranks.check(layout, q, k)
    return _Ring.apply(q, k, v, causal, layout, ranks, overlap)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal: bool, layout: Sharding, ranks: Ranks, overlap: bool):
        out = torch.zeros_like(q, dtype=wide_type(q))
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=out.dtype)
        for owner, keys, values in rotate([k, v], layout, ranks, overlap):
            with ranks.time("comp_blocks"):
                for mine, theirs, diagonal in _blocks(layout, ranks.rank, owner, causal):
                    seen = keys[:, :, theirs], values[:, :, theirs]
                    part = partial_attention(q[:, :, mine], *seen, causal=diagonal)
                    merge(out[:, :, mine], lse[:, :, mine], *part)
                    del part, seen
            del keys, values  # The next keys can use the memory of the current keys.
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = (causal, layout, overlap)
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out: Tensor):
        q, k, v, out, lse = ctx.saved_tensors
        (causal, layout, overlap), ranks = ctx.rest, Ranks()
        grad_q = torch.zeros_like(q, dtype=out.dtype)
        # The gradients of a rank's keys follow the keys one hop later, and return to that rank.
        back = None
        for owner, keys, values in rotate([k, v], layout, ranks, overlap):
            grads = [torch.zeros_like(x, dtype=out.dtype) for x in (keys, values)]
            for mine, theirs, diagonal in _blocks(layout, ranks.rank, owner, causal):
                queries = [x[:, :, mine] for x in (grad_out, q, out, lse)]
                seen = keys[:, :, theirs], values[:, :, theirs]
                found = block_gradients(*queries, *seen, diagonal)
                grad_q[:, :, mine] += found[0]
                for grad, more in zip(grads, found[1:], strict=True):
                    grad[:, :, theirs] += more
                del found, queries, seen
            if back is not None:
                for grad, more in zip(grads, back(), strict=True):
                    grad += more
            del keys, values
            if ranks.world > 1:
                back = ranks.hop(grads, layout.lengths[owner - 1])
        if back is not None:
            grads = back()
        return grad_q, *grads, *(None,) * 4  # Autograd converts the gradients.


def rotate(
    current: list[Tensor], layout: Sharding, ranks: Ranks, overlap: bool
) -> Iterator[tuple[Any, ...]]:
    """Pass tensors around the ring. In each step, yield a rank and the tensors of its positions."""
    hop = None
    for step in range(ranks.world):
        owner = (ranks.rank - step) % ranks.world
        is_last, length = step == ranks.world - 1, layout.lengths[owner - 1]
        if overlap and not is_last:
            with ranks.time("comm_hop"):
                hop = ranks.hop(current, length)
        yield owner, *current
        if not is_last:
            with ranks.time("comm_hop"):
                current = (hop or ranks.hop(current, length))()


def _blocks(
    layout: Sharding, rank: int, owner: int, causal: bool
) -> Iterator[tuple[slice, slice, bool]]:
    """Yield slices of queries, slices of the keys that they see, and whether to mask causally."""
    for mine, piece in _local_slices(layout.pieces[rank]):
        for theirs, other in _local_slices(layout.pieces[owner]):
            if not causal or other[0] < piece[1]:
                yield mine, theirs, causal and piece == other


def _local_slices(pieces: tuple[Piece, ...]) -> Iterator[tuple[slice, Piece]]:
    """Yield the place of each piece in its rank's tensors, except of empty pieces."""
    offset = 0
    for start, stop in pieces:
        if start < stop:
            yield slice(offset, offset + stop - start), (start, stop)
        offset += stop - start


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Sharding,
    causal: bool = True,
    timer=None,
) -> Tensor:
    """Compute dense attention over a sequence that is sharded across ranks, with a backward pass.

    Args:
        q: This rank's queries, shape [batch, heads, local_len, head_dim]. The number of ranks
            must divide heads.
        k: This rank's keys, shape [batch, kv_heads, local_len, head_dim]. Either the number of
            ranks must divide kv_heads, or kv_heads must divide the number of ranks.
        v: This rank's values, with the shape of `k`.
        layout: Positions of the tokens on each rank, with one piece per rank.
        causal: Whether a query sees only keys at or before its own position.
        timer: Timer of the parts `comm_all_to_all` and `comp_attention`, as in `Ranks`.

    Returns:
        Output with the shape and dtype of `q`.

    Raises:
        BadInput: The shapes do not fit each other or the layout, or the heads do not fit the ranks.
    """
    check_shapes(q, k, v)
    ranks = Ranks(timer)
    world, heads, kv_heads = ranks.world, q.shape[1], k.shape[1]
    if heads % world or (kv_heads % world and world % kv_heads):
        raise BadInput(
            f"q, k: {heads} and {kv_heads} heads cannot be shared by {world} ranks; choose a "
            "number of ranks that divides both"
        )
    if kv_heads % world:
        k, v = (x.repeat_interleave(world // kv_heads, dim=1) for x in (k, v))
    ranks.check(layout, q, k)
    if any(len(pieces) > 1 for pieces in layout.pieces):
        raise BadInput(
            "layout: has several pieces per rank; give one, since Ulysses needs no zigzag"
        )
    with ranks.time("comm_all_to_all"):
        whole = [_exchange(x, True, layout.lengths, ranks) for x in (q, k, v)]
    with ranks.time("comp_attention"):
        if q.device.type == "cpu":  # All algorithms across ranks compute in the wide dtype.
            whole = [x.to(wide_type(x)) for x in whole]
        out = attend("dense", *whole, causal=causal).to(q.dtype)
    with ranks.time("comm_all_to_all"):
        return _exchange(out, False, layout.lengths, ranks)


def _exchange(x: Tensor, to_heads: bool, lengths: list[int], ranks: Ranks) -> Tensor:
    """Exchange [batch, heads, local_len, …] for [batch, heads / world, total_len, …], or back."""
    here = [lengths[ranks.rank]] * ranks.world
    if to_heads:  # Each rank gets some of the heads, so positions by rank come first.
        parts = x.unflatten(1, (ranks.world, -1)).permute(1, 3, 0, 2, 4).flatten(0, 1)
        return _AllToAll.apply(parts, ranks, here, lengths).permute(1, 2, 0, 3)
    parts = _AllToAll.apply(x.permute(2, 0, 1, 3), ranks, lengths, here)
    return parts.unflatten(0, (ranks.world, -1)).permute(2, 0, 3, 1, 4).flatten(1, 2)


class _AllToAll(torch.autograd.Function):
    """Exchange rows of x. The backward pass exchanges the gradient in the other direction."""

    @staticmethod
    def forward(ctx, x: Tensor, ranks: Ranks, sizes: list[int], incoming: list[int]) -> Tensor:
        ctx.rest = (ranks, incoming, sizes)
        return ranks.all_to_all(x, sizes, incoming)

    @staticmethod
    def backward(ctx, grad: Tensor):
        ranks, *sizes = ctx.rest
        return ranks.all_to_all(grad, *sizes), None, None, None
