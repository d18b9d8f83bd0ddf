"""Compute Ulysses attention across ranks.

Each rank exchanges its shard of the sequence for a shard of the heads, computes attention, and
reverses the exchange. Each exchange is an all-to-all.

Source: Jacobs et al., DeepSpeed Ulysses (arXiv 2309.14509).
"""

from typing import Any

import torch
from torch import Tensor

from nanolib.measurement import BadInput
from nanolib.models.attention import attend, check_shapes
from nanolib.models.attention.partial import wide_type
from nanolib.models.attention.ranks import Ranks, Sharding


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Sharding,
    causal: bool = True,
    timer: Any = None,
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
    world = ranks.world
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads % world or (kv_heads % world and world % kv_heads):
        raise BadInput(
            f"q, k: {heads} and {kv_heads} heads cannot be shared by {world} ranks; choose a number of ranks that divides both"
        )
    if kv_heads % world:
        k, v = (x.repeat_interleave(world // kv_heads, dim=1) for x in (k, v))
    ranks.check(layout, q, k)
    lengths = [layout.length(rank) for rank in range(world)]
    if any(len(pieces) > 1 for pieces in layout.pieces):
        raise BadInput(
            "layout: has several pieces per rank; give one piece per rank, since Ulysses needs no zigzag"
        )
    with ranks.time("comm_all_to_all"):
        whole = [_AllToAll.apply(x, True, lengths, ranks) for x in (q, k, v)]
    with ranks.time("comp_attention"):
        if q.device.type == "cpu":  # All algorithms across ranks compute in the wide dtype.
            whole = [x.to(wide_type(x)) for x in whole]
        out = attend("dense", *whole, causal=causal).to(q.dtype)
    with ranks.time("comm_all_to_all"):
        return _AllToAll.apply(out, False, lengths, ranks)


class _AllToAll(torch.autograd.Function):
    """Exchange shards of the sequence for shards of the heads, or back.

    The backward pass exchanges the gradient in the other direction.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, to_heads: bool, lengths: list[int], ranks: Ranks) -> Tensor:
        ctx.rest = (to_heads, lengths, ranks)
        return _exchange(x, to_heads, lengths, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor):
        to_heads, *rest = ctx.rest
        return _exchange(grad, not to_heads, *rest), None, None, None


def _exchange(x: Tensor, to_heads: bool, lengths: list[int], ranks: Ranks) -> Tensor:
    """Exchange [batch, heads, local_len, …] for [batch, heads / world, total_len, …], or back."""
    if ranks.world == 1:
        return x
    batch, heads, _, head_dim = x.shape
    if to_heads:
        parts, heads, coming = x.chunk(ranks.world, dim=1), heads // ranks.world, lengths
    else:
        parts, coming = x.split(lengths, dim=2), [lengths[ranks.rank]] * ranks.world
    shapes = [(batch, heads, length, head_dim) for length in coming]
    return torch.cat(ranks.all_to_all(parts, shapes), dim=2 if to_heads else 1)
