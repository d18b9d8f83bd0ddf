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
from nanolib.models.attention.partial import finite, merge, nonzero, partial_attention, wide_type
from nanolib.models.attention.ranks import Ranks
from nanolib.models.attention.ring import rotate
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
    timer: Any = None,
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
        timer: Times the parts; see `Ranks`.

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
    ranks = Ranks(group, timer)
    if layout is not None:
        lengths = [layout.length(rank) for rank in range(layout.world)]
        if ranks.layout(layout, k.shape[2], k.device) != Sharding.from_lengths(lengths):
            raise BadInput(
                "layout: decoding takes one piece per rank, in order; use Sharding.contiguous or Sharding.from_lengths"
            )
    elif q.shape[2] > 1 or algorithm == "ring":
        with ranks.time("comm_lengths"):
            layout = ranks.layout(None, k.shape[2], k.device)
    return _BY_NAME[algorithm](_Decode(q, k, v, layout, scale, ranks)).to(q.dtype)


def attend_alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same on one rank, which holds all keys and sends nothing.

    Args:
        q: As in `tree_attention_decode`.
        k: All keys, shape [batch, kv_heads, seq_len, head_dim].
        v: Shape as `k`.
    """
    call = _Decode(q, k, v, Sharding.from_lengths([k.shape[2]]), None, None)
    return call.partial(0, k, v)[0].to(q.dtype)


@dataclass(frozen=True)
class _Decode:
    """The arguments of `tree_attention_decode`, checked."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    layout: Sharding | None
    scale: float | None
    ranks: Ranks | None

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

    def partial(
        self, owner: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over a rank's keys: output and log-sum-exp."""
        return partial_attention(self.q, k, v, mask=self.visible(owner), scale=self.scale)

    def local(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over this rank's keys."""
        with self.ranks.time("comp_local_attention"):
            return self.partial(self.ranks.rank, self.k, self.v)

    def largest(self, lse: torch.Tensor) -> torch.Tensor:
        """The largest log-sum-exp of all ranks; 0 if no rank has a key."""
        with self.ranks.time("comm_max_lse"):
            largest = self.ranks.all_reduce(lse.clone(), dist.ReduceOp.MAX)
        return finite(largest)

    def summed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """The sum of all ranks' x, timed by that name; x is used up."""
        with self.ranks.time(name):
            return self.ranks.all_reduce(x)


def _three_allreduce(call: _Decode) -> torch.Tensor:
    out, lse = call.local()
    top = call.largest(lse)
    with call.ranks.time("comp_num_den"):
        den = torch.exp(lse - top)
        num = out * den[..., None]
    den = call.summed(den, "comm_sum_den")
    num = call.summed(num, "comm_sum_num")
    with call.ranks.time("comp_final_output"):
        return num / nonzero(den)[..., None]


def _fused(call: _Decode) -> torch.Tensor:
    out, lse = call.local()
    top = call.largest(lse)
    with call.ranks.time("comp_num_den"):
        weight = torch.exp(lse - top)[..., None]
        packed = torch.cat([out * weight, weight], dim=-1)
    packed = call.summed(packed, "comm_sum_packed")
    with call.ranks.time("comp_final_output"):
        return packed[..., :-1] / nonzero(packed[..., -1:])


def _gather(call: _Decode) -> torch.Tensor:
    out, lse = call.local()
    with call.ranks.time("comp_num_den"):
        packed = torch.cat([out, lse[..., None]], dim=-1)
    with call.ranks.time("comm_gather"):
        parts = call.ranks.all_gather(packed)
    with call.ranks.time("comp_final_output"):
        out, lse = parts[..., :-1], parts[..., -1]
        weight = torch.exp(lse - finite(lse.amax(dim=0)))
        return (out * weight[..., None]).sum(dim=0) / nonzero(weight.sum(dim=0))[..., None]


def _ring(call: _Decode) -> torch.Tensor:
    """Every rank's keys and values pass by every rank."""
    found = None
    for owner, *held in rotate(call.k, call.v, call.layout, call.ranks, overlap=False):
        with call.ranks.time("comp_local_attention"):
            part = call.partial(owner, *held)
        if found:
            with call.ranks.time("comp_num_den"):
                part = merge(*found, *part)
        found = part
    return found[0]


def _pass_q(call: _Decode) -> torch.Tensor:
    """Each rank begins with a share of the queries; it goes around with what was found so far, and keys stay where they are."""
    q, ranks, world = call.q, call.ranks, call.ranks.world
    batch, kv_heads, kv_len, head_dim = call.k.shape
    rows = q.shape[1] // kv_heads * q.shape[2]
    # Queries of one key head stay together, so that its keys are read once; they travel with sums in the wide type.
    edges = [batch * kv_heads * share // world for share in range(world + 1)]
    shares = [slice(*edge) for edge in itertools.pairwise(edges)]
    keys, values = (x.reshape(1, batch * kv_heads, kv_len, head_dim) for x in (call.k, call.v))
    mask = call.visible(ranks.rank)
    mask = None if mask is None else mask.repeat(rows // q.shape[2], 1)
    with ranks.time("comp_num_den"):
        mine = q.reshape(1, batch * kv_heads, rows, head_dim)[:, shares[ranks.rank]]
        # share of the heads × (query | output | log-sum-exp)
        state = mine.new_zeros(*mine.shape[:3], 2 * head_dim + 1, dtype=wide_type(q))
        state[..., :head_dim] = mine
        state[..., -1] = -torch.inf
    for step in range(world):
        share = shares[(ranks.rank - step) % world]
        if step:
            with ranks.time("comm_hop"):
                (state,) = ranks.hop([state], share.stop - share.start, dim=1).wait()
        with ranks.time("comp_local_attention"):
            queries, seen = state[..., :head_dim].to(q.dtype), (keys[:, share], values[:, share])
            found = partial_attention(queries, *seen, mask=mask, scale=call.scale)
        with ranks.time("comp_num_den"):
            merge(state[..., head_dim:-1], state[..., -1], *found)
    with ranks.time("comm_gather"):
        # Rank r ends with share r + 1; shares differ by a head at most, and go padded to the largest.
        sizes = [share.stop - share.start for share in shares]
        padded = state.new_zeros(1, max(sizes), rows, head_dim)
        padded[:, : state.shape[1]] = state[..., head_dim:-1]
        parts = ranks.all_gather(padded).roll(1, dims=0)
    with ranks.time("comp_final_output"):
        heads = [part[:, :size] for part, size in zip(parts, sizes, strict=True)]
        return torch.cat(heads, dim=1).reshape(q.shape)


_BY_NAME = {
    "three_allreduce": _three_allreduce,
    "fused": _fused,
    "gather": _gather,
    "ring": _ring,
    "pass_q": _pass_q,
}
