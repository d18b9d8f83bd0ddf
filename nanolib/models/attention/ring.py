"""Ring attention: keys and values go around the ranks while each attends with its own queries; forward and backward.

The next hop is under way while the block at hand is computed. A rank sees `world` blocks of keys; with causality and one piece per
rank the last rank has work at each of them and the first at one: `Sharding.zigzag` gives every rank as much.

Source: Liu et al., Ring Attention (arXiv 2310.01889); zigzag as in github.com/zhuzilin/ring-flash-attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

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
from nanolib.models.attention.ranks import Ranks
from nanolib.models.attention.sharding import Piece, Sharding


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    layout: Sharding | None = None,
    group: Any = None,
    scale: float | None = None,
    overlap: bool = True,
    timer: Any = None,
) -> torch.Tensor:
    """Attention over a sequence that is sharded across ranks, queries, keys and values alike; can be differentiated.

    Args:
        q: This rank's queries, shape [batch, heads, local_len, head_dim].
        k: This rank's keys, shape [batch, kv_heads, local_len, head_dim]; kv_heads divides heads.
        v: Shape as `k`.
        causal: Whether a query sees no later position.
        layout: Which positions each rank holds; None means one piece each in order of rank, whose lengths are gathered.
        group: The process group; None means all ranks.
        scale: Factor on the scores; None means head_dim ** -0.5.
        overlap: Whether a hop is under way while a block is computed; without it the two can be told apart in time.
        timer: Times the parts `comp_blocks` and `comm_hop`; see `Ranks`.

    Returns:
        Shape and dtype of `q`.

    Raises:
        BadInput: Shapes that do not fit each other or the layout.
    """
    check_shapes(q, k, v, causal=False)
    ranks = Ranks(group, timer)
    layout = ranks.layout(layout, k.shape[2], k.device)
    ranks.layout(layout, q.shape[2], q.device)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _Ring.apply(q, k, v, causal, layout, ranks, scale, overlap)


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
        scale: float,
        overlap: bool,
    ):
        out = torch.zeros_like(q, dtype=wide_type(q))
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=out.dtype)
        for owner, keys, values in rotate(k, v, layout, ranks, overlap):
            with ranks.time("comp_blocks"):
                for mine, theirs, diagonal in _blocks(layout, ranks.rank, owner, causal):
                    seen = keys[:, :, theirs], values[:, :, theirs]
                    part = partial_attention(q[:, :, mine], *seen, causal=diagonal, scale=scale)
                    merge(out[:, :, mine], lse[:, :, mine], *part)
                    del part, seen
            del keys, values  # or the next ones would come while these are still held
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = (causal, layout, ranks, scale, overlap)
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor):
        q, k, v, out, lse = ctx.saved_tensors
        causal, layout, ranks, scale, overlap = ctx.rest
        grad_q = torch.zeros_like(q, dtype=out.dtype)
        back = None  # the gradients of a rank's keys follow its keys around, one hop behind, and come home in the end
        for owner, keys, values in rotate(k, v, layout, ranks, overlap):
            with ranks.time("comp_blocks"):
                grads = [torch.zeros_like(x, dtype=out.dtype) for x in (keys, values)]
                for mine, theirs, diagonal in _blocks(layout, ranks.rank, owner, causal):
                    queries = [x[:, :, mine] for x in (grad_out, q, out, lse)]
                    seen = keys[:, :, theirs], values[:, :, theirs]
                    found = block_gradients(*queries, *seen, diagonal, scale)
                    grad_q[:, :, mine] += found[0]
                    for grad, more in zip(grads, found[1:], strict=True):
                        grad[:, :, theirs] += more
                    del found, queries, seen
            if back is not None:
                with ranks.time("comm_hop"):
                    for grad, more in zip(grads, back.wait(), strict=True):
                        grad += more
            del keys, values
            if ranks.world > 1:
                with ranks.time("comm_hop"):
                    back = ranks.hop(grads, layout.length((owner - 1) % ranks.world))
        if back is not None:
            with ranks.time("comm_hop"):
                grads = back.wait()
        return grad_q.to(q.dtype), grads[0].to(k.dtype), grads[1].to(v.dtype), *(None,) * 5


def rotate(
    k: torch.Tensor, v: torch.Tensor, layout: Sharding, ranks: Ranks, overlap: bool
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Pass keys and values around the ring; yields whose they are, and they, this rank's own first."""
    held, hop = [k, v], None
    for step in range(ranks.world):
        owner = (ranks.rank - step) % ranks.world
        is_last, length = step == ranks.world - 1, layout.length((owner - 1) % ranks.world)
        if overlap and not is_last:
            with ranks.time("comm_hop"):
                hop = ranks.hop(held, length)
        yield owner, *held
        if not is_last:
            with ranks.time("comm_hop"):
                held = (hop or ranks.hop(held, length)).wait()


def _blocks(
    layout: Sharding, rank: int, owner: int, causal: bool
) -> Iterator[tuple[slice, slice, bool]]:
    """Pieces of queries and keys that see each other: where they lie, and whether they are the same piece, a triangle."""
    for mine, piece in _placed(layout.pieces[rank]):
        for theirs, other in _placed(layout.pieces[owner]):
            if piece[0] == piece[1] or other[0] == other[1] or (causal and other[0] >= piece[1]):
                continue
            yield mine, theirs, causal and piece == other


def _placed(pieces: tuple[Piece, ...]) -> Iterator[tuple[slice, Piece]]:
    at = 0
    for start, stop in pieces:
        yield slice(at, at + stop - start), (start, stop)
        at += stop - start


def block_gradients(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a block of keys adds to the gradients, given output and log-sum-exp over all keys.

    Args:
        grad_out: Shape of `q`.
        q: Shape [batch, heads, q_len, head_dim].
        out: Output over all keys, shape of `q`, float32.
        lse: Log-sum-exp over all keys, [batch, heads, q_len], float32.
        k: Shape [batch, kv_heads, kv_len, head_dim].
        v: Shape as `k`.
        causal: Whether queries and keys are the same positions, and a query sees no later one.
        scale: Factor on the scores.

    Returns:
        Gradients of q, k and v; float32.
    """
    kv_heads = k.shape[1]
    folded, k, v = fold_groups(q, k, v, causal)
    grad, whole, lse = (x.reshape(folded.shape[: x.dim()]) for x in (grad_out, out, lse))
    if q.device.type == "cpu":
        wide = [x.to(out.dtype) for x in (grad, folded, k, v, whole)]
        grad_q, *grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *wide, lse, 0.0, causal, scale=scale
        )
    else:
        grad_q, *grads = plain_gradients(grad, folded, whole, lse, k, v, causal, scale)
    if k.shape[1] > kv_heads:  # keys were repeated: their gradients add up
        grads = [x.unflatten(1, (kv_heads, -1)).sum(dim=2) for x in grads]
    return grad_q.reshape(q.shape), *grads


def plain_gradients(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same some queries at a time, for devices without that kernel; as many heads of keys as of queries."""
    wide = wide_type(q)
    k, v = k.to(wide), v.to(wide)  # once, and not for each part
    grad_q, (grad_k, grad_v) = (
        torch.empty_like(q, dtype=wide),
        (torch.zeros_like(x, dtype=wide) for x in (k, v)),
    )
    for rows in few_rows(q, k):
        weights = (
            masked_scores(q, k, causal, None, scale, rows)
            .sub_(finite(lse[:, :, rows])[..., None])
            .exp_()
        )
        grad, whole = (x[:, :, rows].to(wide) for x in (grad_out, out))
        grad_v += weights.mT @ grad
        grad_scores = grad @ v.mT
        grad_scores.sub_((grad * whole).sum(dim=-1, keepdim=True)).mul_(weights).mul_(scale)
        grad_q[:, :, rows] = grad_scores @ k
        grad_k += grad_scores.mT @ q[:, :, rows].to(wide)
    return grad_q, grad_k, grad_v
