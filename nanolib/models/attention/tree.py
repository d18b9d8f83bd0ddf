"""Decoding over keys that are sharded across ranks: every rank attends to its own, and the parts are reduced.

softmax(q kᵀ) v over all keys = Σ_r e^(lse_r − m) o_r / Σ_r e^(lse_r − m), with m the largest lse. Three forms send the same sum in
different ways; `ring` and `pass_q` are what they are compared with.

Source: Shyam et al., Tree Attention (arXiv 2408.04093); for `pass_q`, Yang et al. (arXiv 2411.01783).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from nanolib.measurement import BadInput
from nanolib.models.attention import check_shapes
from nanolib.models.attention.partial import finite, merge, nonzero, partial_attention
from nanolib.models.attention.ranks import (
    NO_TIMER,
    BlockTimer,
    Hop,
    all_gather,
    gather_lengths,
    world_of,
)
from nanolib.models.attention.sharding import Sharding

TREE_ALGORITHMS = ("three_allreduce", "fused", "gather")
ALGORITHMS = (*TREE_ALGORITHMS, "ring", "pass_q")


def tree_attention_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: Any = None,
    algorithm: str = "fused",
    scale: float | None = None,
    layout: Sharding | None = None,
    timer: BlockTimer = NO_TIMER,
) -> torch.Tensor:
    """Attention of the newest tokens over a sequence whose keys lie on several ranks, each holding the next stretch of it.

    Args:
        q: The queries of the last q_len positions, the same on every rank, shape [batch, heads, q_len, head_dim].
        k: This rank's keys, shape [batch, kv_heads, local_len, head_dim]; kv_heads divides heads; local_len may be 0 and differ.
        v: Shape as `k`.
        group: The process group; None means all ranks. Without `torch.distributed` there is one.
        algorithm: `three_allreduce` (largest lse, denominator, numerator), `fused` (largest lse, then both sums packed),
            `gather` (one all-gather of outputs and lse); or `ring` (keys and values go around), `pass_q` (shares of the queries
            go around).
        scale: Factor on the scores; None means head_dim ** -0.5.
        layout: Which positions each rank holds, one piece each in order of rank. Several queries need it, and `ring`: when None
            they gather the lengths, for which the host waits.
        timer: Times the parts.

    Returns:
        Shape and dtype of `q`, the same on every rank. Zero where there is no key at all.

    Raises:
        BadInput: An unknown algorithm, or shapes that do not fit each other or the layout.
    """
    if algorithm not in ALGORITHMS:
        raise BadInput(f"algorithm: {algorithm!r} is not known; use one of {', '.join(ALGORITHMS)}")
    check_shapes(q, k, v, causal=False)
    if q.dtype != k.dtype or q.dtype != v.dtype:
        raise BadInput(f"k, v: {k.dtype} and {v.dtype}; give q's {q.dtype}, on empty shards too")
    rank, world = world_of(group)
    if layout is None and (q.shape[2] > 1 or algorithm == "ring"):
        with timer.time_block("comm_lengths"):
            layout = Sharding.from_lengths(gather_lengths(k.shape[2], k.device, group))
    if layout is not None:
        _check(layout, rank, world, k.shape[2])
    return _BY_NAME[algorithm](_Decode(q, k, v, layout, scale, group, timer)).to(q.dtype)


def attend_alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same on one rank, which holds all keys and sends nothing.

    Args:
        q: As in `tree_attention_decode`.
        k: All keys, shape [batch, kv_heads, seq_len, head_dim].
        v: Shape as `k`.
    """
    call = _Decode(q, k, v, Sharding.from_lengths([k.shape[2]]), None, None, NO_TIMER)
    return partial_attention(q, k, v, mask=call.visible(0))[0].to(q.dtype)


def _check(layout: Sharding, rank: int, world: int, kv_len: int) -> None:
    if layout.world != world or layout.length(rank) != kv_len:
        held = layout.length(rank % layout.world)
        raise BadInput(
            f"layout: {layout.world} ranks, {held} positions here; there are {world} ranks and {kv_len} keys here"
        )
    if layout != Sharding.from_lengths([layout.length(each) for each in range(world)]):
        raise BadInput(
            "layout: decoding takes one piece per rank, in order; use Sharding.contiguous or Sharding.from_lengths"
        )


@dataclass(frozen=True)
class _Decode:
    """The arguments of `tree_attention_decode`, checked."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    layout: Sharding | None
    scale: float | None
    group: Any
    timer: BlockTimer

    def visible(self, rank: int) -> torch.Tensor | None:
        """True where a rank's key lies at or before the query, [q_len, local_len]; None where all do."""
        q_len = self.q.shape[2]
        if q_len == 1:
            return None
        ((start, stop),), total = self.layout.pieces[rank], self.layout.total
        if stop <= total - q_len + 1:
            return None
        queries, keys = (
            torch.arange(*span, device=self.q.device)
            for span in ((total - q_len, total), (start, stop))
        )
        return keys <= queries[:, None]

    def local(self) -> tuple[torch.Tensor, torch.Tensor]:
        with self.timer.time_block("comp_local_attention"):
            mask = self.visible(world_of(self.group)[0])
            return partial_attention(self.q, self.k, self.v, mask=mask, scale=self.scale)

    def largest(self, lse: torch.Tensor) -> torch.Tensor:
        """The largest log-sum-exp of all ranks; 0 where no rank has a key."""
        return finite(self.reduced(lse.clone(), "comm_max_lse", dist.ReduceOp.MAX))

    def reduced(
        self, x: torch.Tensor, name: str, operation: Any = dist.ReduceOp.SUM
    ) -> torch.Tensor:
        """All ranks' x as one; x is used up."""
        with self.timer.time_block(name):
            x = (
                x.contiguous()
            )  # collectives add up storages: a kernel's strides are not those of an empty shard
            if world_of(self.group)[1] > 1:
                dist.all_reduce(x, op=operation, group=self.group)
            return x


def _three_allreduce(call: _Decode) -> torch.Tensor:
    out, lse = call.local()
    top = call.largest(lse)
    with call.timer.time_block("comp_num_den"):
        den = torch.exp(lse - top)
        num = out * den[..., None]
    den = call.reduced(den, "comm_sum_den")
    num = call.reduced(num, "comm_sum_num")
    with call.timer.time_block("comp_final_output"):
        return num / nonzero(den)[..., None]


def _fused(call: _Decode) -> torch.Tensor:
    out, lse = call.local()
    top = call.largest(lse)
    with call.timer.time_block("comp_num_den"):
        weight = torch.exp(lse - top)[..., None]
        packed = torch.cat([out * weight, weight], dim=-1)
    packed = call.reduced(packed, "comm_sum_packed")
    with call.timer.time_block("comp_final_output"):
        return packed[..., :-1] / nonzero(packed[..., -1:])


def _gather(call: _Decode) -> torch.Tensor:
    out, lse = call.local()
    with call.timer.time_block("comp_num_den"):
        packed = torch.cat([out, lse[..., None]], dim=-1)
    with call.timer.time_block("comm_gather"):
        parts = all_gather(packed, call.group)
    with call.timer.time_block("comp_final_output"):
        out, lse = parts[..., :-1], parts[..., -1]
        weight = torch.exp(lse - finite(lse.amax(dim=0)))
        return (out * weight[..., None]).sum(dim=0) / nonzero(weight.sum(dim=0))[..., None]


def _ring(call: _Decode) -> torch.Tensor:
    """Every rank's keys and values pass by every rank."""
    rank, world = world_of(call.group)
    q, k, timer = call.q, call.k, call.timer
    out, lse = call.local()
    held = [k, call.v]
    for step in range(1, world):
        owner = (rank - step) % world
        with timer.time_block("comm_hop"):
            held = Hop(
                held, [(*k.shape[:2], call.layout.length(owner), k.shape[3])] * 2, call.group
            ).wait()
        with timer.time_block("comp_local_attention"):
            part = partial_attention(q, *held, mask=call.visible(owner), scale=call.scale)
        with timer.time_block("comp_num_den"):
            out, lse = merge(out, lse, *part)
    return out


def _pass_q(call: _Decode) -> torch.Tensor:
    """Each rank begins with a share of the queries; it goes around with what was found so far, and keys stay where they are."""
    rank, world = world_of(call.group)
    q, timer = call.q, call.timer
    batch, kv_heads, kv_len, head_dim = call.k.shape
    group = q.shape[1] // kv_heads
    # Queries of one key head stay together, so that its keys are read once; they travel with sums in the wide type.
    edges = [batch * kv_heads * share // world for share in range(world + 1)]
    keys, values = (x.reshape(1, batch * kv_heads, kv_len, head_dim) for x in (call.k, call.v))
    mask = call.visible(rank)
    mask = None if mask is None else mask.repeat(group, 1)
    state = None  # share of the heads × (query | output | log-sum-exp)
    for step in range(world):
        share = slice(edges[(rank - step) % world], edges[(rank - step) % world + 1])
        if step:
            with timer.time_block("comm_hop"):
                shape = (1, share.stop - share.start, group * q.shape[2], 2 * head_dim + 1)
                (state,) = Hop([state], [shape], call.group).wait()
        with timer.time_block("comp_local_attention"):
            asked = (
                q.reshape(1, -1, group * q.shape[2], head_dim)[:, share]
                if step == 0
                else state[..., :head_dim]
            )
            found = partial_attention(
                asked.to(q.dtype), keys[:, share], values[:, share], mask=mask, scale=call.scale
            )
        with timer.time_block("comp_num_den"):
            if step:
                found = merge(state[..., head_dim:-1], state[..., -1], *found)
            state = torch.cat([asked.to(found[0].dtype), found[0], found[1][..., None]], dim=-1)
    with timer.time_block("comm_gather"):
        # Rank r ends with share r + 1; shares differ by a head at most, and go padded to the largest.
        sizes = [stop - start for start, stop in itertools.pairwise(edges)]
        padded = state.new_zeros(1, max(sizes), *state.shape[2:3], head_dim)
        padded[:, : state.shape[1]] = state[..., head_dim:-1]
        parts = all_gather(padded, call.group).roll(1, dims=0)
    with timer.time_block("comp_final_output"):
        return torch.cat(
            [part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1
        ).reshape(q.shape)


_BY_NAME = {
    "three_allreduce": _three_allreduce,
    "fused": _fused,
    "gather": _gather,
    "ring": _ring,
    "pass_q": _pass_q,
}
