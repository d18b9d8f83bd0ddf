"""Compute ring attention, forward and backward.

Each rank keeps its queries, and passes keys and values to the next rank.

By default, each transfer to the next rank (a hop) overlaps with the computation of a block of keys.
If attention is causal and each rank has one piece, the first of W ranks computes one block, and the
last rank computes W blocks. `Sharding.zigzag` gives every rank the same work.

Source: Liu et al., Ring Attention (arXiv 2310.01889), with zigzag as in
github.com/zhuzilin/ring-flash-attention.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nanolib.models.attention import check_shapes
from nanolib.models.attention.partial import (
    few_rows,
    finite,
    fold_groups,
    masked_scores,
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
    causal: bool = True,
    layout: Sharding | None = None,
    group: Any = None,
    overlap: bool = True,
    timer: Any = None,
) -> Tensor:
    """Compute attention over a sequence that is sharded across ranks, with a backward pass.

    Args:
        q: This rank's queries, shape [batch, heads, local_len, head_dim].
        k: This rank's keys, shape [batch, kv_heads, local_len, head_dim]. kv_heads must divide
            heads.
        v: This rank's values, with the shape of `k`.
        causal: Whether a query sees only keys at or before its own position.
        layout: Positions of the tokens on each rank, or None for one piece per rank, in rank order.
        group: Process group, or None for all ranks.
        overlap: Whether a hop runs while the rank computes a block. Without overlap, a timer times
            hops and blocks separately.
        timer: Timer of the parts `comp_blocks` and `comm_hop`, as in `Ranks`.

    Returns:
        Output with the shape and dtype of `q`.

    Raises:
        BadInput: The shapes do not fit each other or the layout.
    """
    check_shapes(q, k, v)
    ranks = Ranks(group, timer)
    layout = ranks.layout(layout, k.shape[2], k.device)
    ranks.layout(layout, q.shape[2], q.device)
    return _Ring.apply(q, k, v, causal, layout, ranks, overlap)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Any,
        k: Any,
        v: Any,
        causal: bool,
        layout: Sharding,
        ranks: Ranks,
        overlap: bool,
    ):
        out = torch.zeros_like(q, dtype=wide_type(q))
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=out.dtype)
        for owner, keys, values in rotate(k, v, layout, ranks, overlap):
            with ranks.time("comp_blocks"):
                for mine, theirs, diagonal in _blocks(layout, ranks.rank, owner, causal):
                    seen = keys[:, :, theirs], values[:, :, theirs]
                    part = partial_attention(q[:, :, mine], *seen, causal=diagonal)
                    merge(out[:, :, mine], lse[:, :, mine], *part)
                    del part, seen
            del keys, values  # The next keys can use the memory of the current keys.
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = (causal, layout, ranks, overlap)
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor):
        q, k, v, out, lse = ctx.saved_tensors
        causal, layout, ranks, overlap = ctx.rest
        grad_q = torch.zeros_like(q, dtype=out.dtype)
        # The gradients of a rank's keys follow the keys one hop later, and return to that rank.
        back = None
        for owner, keys, values in rotate(k, v, layout, ranks, overlap):
            with ranks.time("comp_blocks"):
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
                with ranks.time("comm_hop"):
                    for grad, more in zip(grads, back(), strict=True):
                        grad += more
            del keys, values
            if ranks.world > 1:
                with ranks.time("comm_hop"):
                    back = ranks.hop(grads, layout.length((owner - 1) % ranks.world))
        if back is not None:
            with ranks.time("comm_hop"):
                grads = back()
        return grad_q.to(q.dtype), grads[0].to(k.dtype), grads[1].to(v.dtype), *(None,) * 4


def rotate(
    k: Tensor, v: Tensor, layout: Sharding, ranks: Ranks, overlap: bool
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Pass keys and values around the ring. In each step, yield an owner, its keys and values."""
    current, hop = [k, v], None
    for step in range(ranks.world):
        owner = (ranks.rank - step) % ranks.world
        is_last, length = step == ranks.world - 1, layout.length((owner - 1) % ranks.world)
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
            if piece[0] == piece[1] or other[0] == other[1] or (causal and other[0] >= piece[1]):
                continue
            yield mine, theirs, causal and piece == other


def _local_slices(pieces: tuple[Piece, ...]) -> Iterator[tuple[slice, Piece]]:
    at = 0
    for start, stop in pieces:
        yield slice(at, at + stop - start), (start, stop)
        at += stop - start


def block_gradients(
    grad_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the part of the gradients that comes from a block of keys.

    Args:
        grad_out: Gradient of the output, with the shape of `q`.
        q: Queries, shape [batch, heads, q_len, head_dim].
        out: Output over all keys, float32, with the shape of `q`.
        lse: Log-sum-exp over all keys, float32, shape [batch, heads, q_len].
        k: Keys, shape [batch, kv_heads, kv_len, head_dim].
        v: Values, with the shape of `k`.
        causal: Whether query i sees only the keys 0 to i.

    Returns:
        Gradients of q, k and v, float32, or float64 if `q` is float64.
    """
    kv_heads = k.shape[1]
    folded, k, v = fold_groups(q, k, v, causal)
    grad, whole, lse = (x.reshape(folded.shape[: x.dim()]) for x in (grad_out, out, lse))
    if q.device.type == "cpu":
        wide = [x.to(out.dtype) for x in (grad, folded, k, v, whole)]
        grad_q, *grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *wide, lse, 0.0, causal
        )
    else:
        grad_q, *grads = plain_gradients(grad, folded, whole, lse, k, v, causal)
    if k.shape[1] > kv_heads:  # The gradients of repeated keys add up.
        grads = [x.unflatten(1, (kv_heads, -1)).sum(dim=2) for x in grads]
    return grad_q.reshape(q.shape), *grads


def plain_gradients(
    grad_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `block_gradients` by matrix products, for equal numbers of query and key heads."""
    wide, scale = wide_type(q), q.shape[-1] ** -0.5
    k, v = k.to(wide), v.to(wide)  # Convert keys and values once for all parts.
    grad_q, grad_k, grad_v = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
    for rows in few_rows(q, k):
        scores = masked_scores(q, k, causal, rows)
        weights = scores.sub_(finite(lse[:, :, rows])[..., None]).exp_()
        grad, whole = (x[:, :, rows].to(wide) for x in (grad_out, out))
        grad_v += weights.mT @ grad
        grad_scores = grad @ v.mT
        grad_scores.sub_((grad * whole).sum(dim=-1, keepdim=True)).mul_(weights).mul_(scale)
        grad_q[:, :, rows] = grad_scores @ k
        grad_k += grad_scores.mT @ q[:, :, rows].to(wide)
    return grad_q, grad_k, grad_v
