"""Ulysses: an all-to-all turns shards of the sequence into shards of the heads, each rank attends to whole sequences, and back.

Source: Jacobs et al., DeepSpeed Ulysses (arXiv 2309.14509).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from nanolib.measurement import BadInput
from nanolib.models.attention import attend, check_shapes
from nanolib.models.attention.partial import wide_type
from nanolib.models.attention.ranks import NO_TIMER, BlockTimer, gather_lengths, world_of
from nanolib.models.attention.sharding import Sharding


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    layout: Sharding | None = None,
    group: Any = None,
    scale: float | None = None,
    kind: str = "dense",
    options: Any = None,
    timer: BlockTimer = NO_TIMER,
) -> torch.Tensor:
    """Attention over a sequence that is sharded across ranks, one piece each; can be differentiated.

    Args:
        q: This rank's queries, shape [batch, heads, local_len, head_dim]; the ranks divide the heads.
        k: This rank's keys, shape [batch, kv_heads, local_len, head_dim]; the ranks divide kv_heads, or kv_heads the ranks: then
            a head of keys goes to several ranks.
        v: Shape as `k`.
        causal: Whether a query sees no later position.
        layout: Which positions each rank holds, one piece each; None means in order of rank, and lengths are gathered.
        group: The process group; None means all ranks.
        scale: Factor on the scores; None means head_dim ** -0.5.
        kind: The attention kind of the whole sequences.
        options: Its options.
        timer: Times the parts: `comm_all_to_all`, `comp_attention`.

    Returns:
        Shape and dtype of `q`.

    Raises:
        BadInput: Shapes, or numbers of heads that do not fit the ranks.
    """
    check_shapes(q, k, v, causal=False)
    _, world = world_of(group)
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads % world or (kv_heads % world and world % kv_heads):
        raise BadInput(
            f"q, k: {heads} and {kv_heads} heads do not share out over {world} ranks; choose ranks that divide the heads"
        )
    if kv_heads % world:
        k, v = (x.repeat_interleave(world // kv_heads, dim=1) for x in (k, v))
    if layout is None:
        layout = Sharding.from_lengths(gather_lengths(q.shape[2], q.device, group))
    lengths = [layout.length(rank) for rank in range(world)]
    if any(len(pieces) > 1 for pieces in layout.pieces):
        raise BadInput(
            "layout: several pieces per rank; Ulysses takes one each (whole sequences need no zigzag)"
        )
    with timer.time_block("comm_all_to_all"):
        whole = [_AllToAll.apply(x, True, lengths, group) for x in (q, k, v)]
    with timer.time_block("comp_attention"):
        if q.device.type == "cpu":  # as all that is merged across ranks
            whole = [x.to(wide_type(x)) for x in whole]
        out = attend(kind, *whole, causal=causal, scale=scale, options=options).to(q.dtype)
    with timer.time_block("comm_all_to_all"):
        return _AllToAll.apply(out, False, lengths, group)


def _to_heads(x: torch.Tensor, lengths: list[int], group: Any) -> torch.Tensor:
    """[batch, heads, local_len, head_dim] → [batch, heads / world, total_len, head_dim]."""
    rank, world = world_of(group)
    if world == 1:
        return x
    batch, heads, local, head_dim = x.shape
    rows = batch * heads // world * head_dim  # elements per position and rank
    sent = (
        x.view(batch, world, heads // world, local, head_dim).transpose(0, 1).contiguous().flatten()
    )
    received = x.new_empty(rows * sum(lengths))
    dist.all_to_all_single(
        received,
        sent,
        [rows * length for length in lengths],
        [rows * lengths[rank]] * world,
        group=group,
    )
    parts = received.split([rows * length for length in lengths])
    shaped = [
        part.view(batch, heads // world, length, head_dim)
        for part, length in zip(parts, lengths, strict=True)
    ]
    return torch.cat(shaped, dim=2)


def _to_sequence(x: torch.Tensor, lengths: list[int], group: Any) -> torch.Tensor:
    """The inverse of `_to_heads`."""
    rank, world = world_of(group)
    if world == 1:
        return x
    batch, heads, _, head_dim = x.shape  # heads of this rank
    rows, local = batch * heads * head_dim, lengths[rank]
    sent = torch.cat([part.flatten() for part in x.split(lengths, dim=2)])
    received = x.new_empty(rows * local * world)
    dist.all_to_all_single(
        received, sent, [rows * local] * world, [rows * length for length in lengths], group=group
    )
    return (
        received.view(world, batch, heads, local, head_dim)
        .transpose(0, 1)
        .reshape(batch, world * heads, local, head_dim)
    )


class _AllToAll(torch.autograd.Function):
    """From shards of the sequence to shards of the heads, or back; its gradient goes the other way."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, to_heads: bool, lengths: list[int], group: Any
    ) -> torch.Tensor:
        ctx.rest = (to_heads, lengths, group)
        return (_to_heads if to_heads else _to_sequence)(x, lengths, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        to_heads, *rest = ctx.rest
        return (_to_sequence if to_heads else _to_heads)(grad, *rest), None, None, None
