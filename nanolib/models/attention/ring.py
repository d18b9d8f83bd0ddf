"""Ring attention: keys and values go around the ranks while each attends with its own queries; forward and backward.

The next hop is under way while the block at hand is computed. A rank sees `world` blocks of keys; with causality and one piece per
rank the last rank has work at each of them and the first at one: `Sharding.zigzag` gives every rank as much.

Source: Liu et al., Ring Attention (arXiv 2310.01889); zigzag as in github.com/zhuzilin/ring-flash-attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from nanolib.measurement import BadInput
from nanolib.models.attention import check_shapes
from nanolib.models.attention.partial import (
    few_rows,
    finite,
    fold_groups,
    masked_scores,
    merge,
    partial_attention,
    unfold_groups,
    wide_type,
)
from nanolib.models.attention.ranks import NO_TIMER, BlockTimer, Hop, gather_lengths, world_of
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
    timer: BlockTimer = NO_TIMER,
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
        timer: Times the parts: `comp_blocks`, `comm_hop`.

    Returns:
        Shape and dtype of `q`.

    Raises:
        BadInput: Shapes that do not fit each other or the layout.
    """
    check_shapes(q, k, v, causal=False)
    rank, world = world_of(group)
    if layout is None:
        layout = Sharding.from_lengths(gather_lengths(q.shape[2], q.device, group))
    if layout.world != world or not q.shape[2] == k.shape[2] == layout.length(rank):
        raise BadInput(
            f"layout: {layout.world} ranks, {layout.length(rank % layout.world)} positions here; there are {world} ranks and "
            f"{q.shape[2]} queries, {k.shape[2]} keys here"
        )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _Ring.apply(q, k, v, causal, layout, group, scale, overlap, timer)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Any,
        k: Any,
        v: Any,
        causal: bool,
        layout: Sharding,
        group: Any,
        scale: float,
        *rest: Any,
    ):
        overlap, timer = rest
        out = torch.zeros_like(q, dtype=wide_type(q))
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=out.dtype)
        for owner, keys, values in _rotate(k, v, layout, group, overlap, timer):
            with timer.time_block("comp_blocks"):
                for mine, theirs, diagonal in _blocks(layout, world_of(group)[0], owner, causal):
                    seen = keys[:, :, theirs], values[:, :, theirs]
                    part = partial_attention(q[:, :, mine], *seen, causal=diagonal, scale=scale)
                    merge(out[:, :, mine], lse[:, :, mine], *part)
                    del part, seen
            del keys, values  # or the next ones would come while these are still held
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = (causal, layout, group, scale, overlap, timer)
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor):
        q, k, v, out, lse = ctx.saved_tensors
        causal, layout, group, scale, overlap, timer = ctx.rest
        rank, world = world_of(group)
        grad_q = torch.zeros_like(q, dtype=out.dtype)
        back = None  # the gradients of a rank's keys follow its keys around, one hop behind, and come home in the end
        for owner, keys, values in _rotate(k, v, layout, group, overlap, timer):
            with timer.time_block("comp_blocks"):
                grads = [torch.zeros_like(x, dtype=out.dtype) for x in (keys, values)]
                for mine, theirs, diagonal in _blocks(layout, rank, owner, causal):
                    found = block_gradients(
                        grad_out[:, :, mine],
                        q[:, :, mine],
                        keys[:, :, theirs],
                        values[:, :, theirs],
                        out[:, :, mine],
                        lse[:, :, mine],
                        diagonal,
                        scale,
                    )
                    grad_q[:, :, mine] += found[0]
                    for grad, more in zip(grads, found[1:], strict=True):
                        grad[:, :, theirs] += more
                    del found
            if back is not None:
                with timer.time_block("comm_hop"):
                    for grad, more in zip(grads, back.wait(), strict=True):
                        grad += more
            del keys, values
            if world > 1:
                with timer.time_block("comm_hop"):
                    coming = (*k.shape[:2], layout.length((owner - 1) % world), k.shape[3])
                    back = Hop(grads, [coming] * 2, group)
        if back is not None:
            with timer.time_block("comm_hop"):
                grads = back.wait()
        return grad_q.to(q.dtype), grads[0].to(k.dtype), grads[1].to(v.dtype), *(None,) * 6


def _rotate(
    k: torch.Tensor, v: torch.Tensor, layout: Sharding, group: Any, overlap: bool, timer: BlockTimer
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Whose keys and values are here, and they."""
    rank, world = world_of(group)
    held = [k, v]
    for step in range(world):
        owner, hop = (rank - step) % world, None
        last = step == world - 1
        shapes = [(*k.shape[:2], layout.length((owner - 1) % world), k.shape[3])] * 2
        if overlap and not last:
            with timer.time_block("comm_hop"):
                hop = Hop(held, shapes, group)
        yield owner, *held
        if not last:
            with timer.time_block("comm_hop"):
                held = (hop or Hop(held, shapes, group)).wait()


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
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a block of keys adds to the gradients, given output and log-sum-exp over all keys.

    Args:
        grad_out: Shape of `q`.
        q: Shape [batch, heads, q_len, head_dim].
        k: Shape [batch, kv_heads, kv_len, head_dim].
        v: Shape as `k`.
        out: Output over all keys, shape of `q`, float32.
        lse: Log-sum-exp over all keys, [batch, heads, q_len], float32.
        causal: Whether queries and keys are the same positions, and a query sees no later one.
        scale: Factor on the scores.

    Returns:
        Gradients of q, k and v; float32.
    """
    kv_shape = k.shape
    folded, k, v, group, fold = fold_groups(q, k, v, causal)
    grad, whole = (fold_groups(x, x[:, ::group], x[:, ::group], causal)[0] for x in (grad_out, out))
    weight = lse.reshape(folded.shape[:3])
    if q.device.type == "cpu":
        wide = [x.to(out.dtype) for x in (grad, folded, k, v, whole)]
        grad_q, grad_k, grad_v = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *wide, weight, 0.0, causal, scale=scale
            )
        )
    else:
        grad_q, grad_k, grad_v = plain_gradients(grad, folded, k, v, whole, weight, causal, scale)
    if group > 1 and fold == 1:  # keys were repeated: their gradients add up
        grad_k, grad_v = (x.unflatten(1, (-1, group)).sum(dim=2) for x in (grad_k, grad_v))
    return unfold_groups(grad_q, q.shape, group, fold), grad_k.view(kv_shape), grad_v.view(kv_shape)


def plain_gradients(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
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
