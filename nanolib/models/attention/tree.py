"""Decode with keys that are sharded across ranks, and combine the results of the ranks.

Rank r computes the output o_r and the log-sum-exp lse_r over its own keys. The output over all keys
is Σ_r e^(lse_r − m) o_r / Σ_r e^(lse_r − m), where m is the largest lse_r. The algorithms
`three_allreduce`, `fused` and `gather` compute these sums in different ways. The algorithms `ring`
and `pass_q` are baselines.

Source: Shyam et al., Tree Attention (arXiv 2408.04093), and Yang et al. (arXiv 2411.01783) for
`pass_q`.
"""

from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from nanolib.measurement import BadInput
from nanolib.models.attention import check_shapes
from nanolib.models.attention.partial import (
    finite,
    merge,
    partial_attention,
    wide_type,
)
from nanolib.models.attention.ranks import Ranks, Sharding
from nanolib.models.attention.sequence import rotate


def tree_attention_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Sharding,
    algorithm: str = "fused",
    timer=None,
) -> Tensor:
    """Compute attention of the newest token over keys that are sharded across ranks.

    Args:
        q: Queries of the last position, the same on every rank, shape [batch, heads, 1, head_dim].
        k: This rank's keys, shape [batch, kv_heads, local_len, head_dim]. kv_heads must divide
            heads. The number of keys may be 0, and may differ between ranks.
        v: This rank's values, with the shape of `k`.
        layout: Positions of the keys on each rank.
        algorithm: Name in `ALGORITHMS`. `three_allreduce` finds the largest lse_r, and then sums
            the denominator and the numerator in separate messages. `fused` sums the denominator
            and the numerator in one message. `gather` gathers o_r and lse_r from all ranks. `ring`
            passes keys and values around the ranks, and `pass_q` passes queries.
        timer: Timer of the parts, as in `Ranks`.

    Returns:
        Output with the shape and dtype of `q`, the same on every rank. If no rank has a key, the
        output is zero.

    Raises:
        BadInput: The algorithm is unknown, or the shapes do not fit each other or the layout.
    """
    if algorithm not in ALGORITHMS:
        raise BadInput(f"algorithm: {algorithm!r} is not known; use one of {', '.join(ALGORITHMS)}")
    check_shapes(q, k, v)
    if q.shape[2] != 1:
        raise BadInput(f"q: {q.shape[2]} tokens per sequence; decoding takes one new token")
    ranks = Ranks(timer)
    ranks.check(layout, k)
    return _BY_NAME[algorithm](_Decode(q, k, v, layout, ranks)).to(q.dtype)


class _Decode(NamedTuple):
    """The checked arguments of `tree_attention_decode`."""

    q: Tensor
    k: Tensor
    v: Tensor
    layout: Sharding
    ranks: Ranks

    def local(self) -> tuple[Tensor, Tensor]:
        """Compute output and log-sum-exp over this rank's keys."""
        with self.ranks.time("comp_local_attention"):
            return partial_attention(self.q, self.k, self.v)


def _sum(call: _Decode, packed: bool) -> Tensor:
    """Sum denominator and numerator over all ranks, packed in one message or one after another."""
    (out, lse), ranks = call.local(), call.ranks
    with ranks.time("comm_max_lse"):
        largest = ranks.all_reduce(lse.clone(), dist.ReduceOp.MAX)
    with ranks.time("comp_num_den"):
        den = torch.exp(lse - finite(largest))[..., None]
        sums = {"comm_sum_den": den, "comm_sum_num": out * den}
        if packed:
            sums = {"comm_sum_packed": torch.cat([*sums.values()], dim=-1)}
    for name, x in sums.items():
        with ranks.time(name):
            sums[name] = ranks.all_reduce(x)
    with ranks.time("comp_final_output"):
        found = [*sums.values()]
        den, num = found[0].tensor_split([1], dim=-1) if packed else found
        return num / den.clamp(min=1)  # The largest weight is 1, and without any key, den is 0.


def _gather(call: _Decode) -> Tensor:
    out, lse = call.local()
    with call.ranks.time("comp_num_den"):
        packed = torch.cat([out, lse[..., None]], dim=-1)
    with call.ranks.time("comm_gather"):
        parts = call.ranks.all_gather(packed)
    with call.ranks.time("comp_final_output"):
        out, lse = parts[..., :-1], parts[..., -1]
        weights = torch.softmax(lse, dim=0).nan_to_num()  # Without any key, weights are 0 / 0.
        return (out * weights[..., None]).sum(dim=0)


def _ring(call: _Decode) -> Tensor:
    """Pass keys and values around the ranks."""
    found = None
    for _, *keys in rotate([call.k, call.v], call.layout, call.ranks, overlap=False):
        with call.ranks.time("comp_local_attention"):
            part = partial_attention(call.q, *keys)
        if found:
            with call.ranks.time("comp_num_den"):
                part = merge(*found, *part)
        found = part
    return found[0]


def _pass_q(call: _Decode) -> Tensor:
    """Pass shares of the queries and their partial results around the ranks, but no keys."""
    ranks, (batch, kv_heads, _, head_dim) = call.ranks, call.k.shape
    heads = batch * kv_heads
    # Queries of one key head stay together, so a rank reads the keys of each head only once.
    shares = Sharding.contiguous(heads, ranks.world)
    q, *keys = (x.reshape(1, 1, heads, -1, head_dim) for x in (call.q, call.k, call.v))
    with ranks.time("comp_num_den"):
        queries = shares.take(q, ranks.rank)
        # Each row of the state has the query, the output and the log-sum-exp.
        rows = pad(queries.to(wide_type(queries)), (0, head_dim + 1))
        rows[..., -1] = -torch.inf
    steps = rotate([rows], shares, ranks, overlap=False)
    del rows  # Only one state exists at a time.
    for owner, state in steps:
        with ranks.time("comp_local_attention"):
            queries = state[0, ..., :head_dim].to(q.dtype)
            part = partial_attention(queries, *(shares.take(x, owner)[0] for x in keys))
        with ranks.time("comp_num_den"):
            merge(state[0, ..., head_dim:-1], state[0, ..., -1], *part)
    with ranks.time("comm_gather"):
        # At the end, rank r has the share of rank r + 1. Padding gives all shares the same size.
        missing = max(shares.lengths) - state.shape[2]
        parts = ranks.all_gather(pad(state[..., head_dim:-1], (0, 0, 0, 0, 0, missing)))
    with ranks.time("comp_final_output"):
        found = [parts[rank - 1][:, :, :length] for rank, length in enumerate(shares.lengths)]
        return torch.cat(found, dim=2).reshape(call.q.shape)


_BY_NAME = {
    "three_allreduce": partial(_sum, packed=False),
    "fused": partial(_sum, packed=True),
    "gather": _gather,
    "ring": _ring,
    "pass_q": _pass_q,
}
ALGORITHMS = tuple(_BY_NAME)
