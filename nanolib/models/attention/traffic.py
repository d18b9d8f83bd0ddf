"""Compute the communication steps and the bytes of attention across ranks by formula.

The formulas assume ring collectives, as in gloo, and in NCCL for large messages. In an all-reduce
over W ranks, each rank sends 2(W − 1)/W of the payload. In an all-gather each rank sends its
payload W − 1 times, and in an all-to-all (W − 1)/W of the payload.
"""

from __future__ import annotations

from dataclasses import dataclass

from nanolib.models.attention.ranks import Sharding


@dataclass(frozen=True)
class Traffic:
    """The communication of one call.

    Attributes:
        rounds: Number of collectives and exchanges that follow each other.
        hops: Number of messages that follow each other. In a ring of W ranks an all-reduce has
            2(W − 1) messages and an all-gather has W − 1 messages.
        sent: Bytes that each rank sends, by rank.
    """

    rounds: int
    hops: int
    sent: tuple[float, ...]


def traffic_of(
    algorithm: str,
    layout: Sharding,
    *,
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    itemsize: int,
    q_len: int = 1,
) -> Traffic:
    """Compute the traffic of a forward pass across ranks.

    Args:
        algorithm: One of `tree.ALGORITHMS` to decode, or `ring`, `zigzag` or `ulysses` for a whole
            sequence.
        layout: Positions of the keys of each rank.
        batch: Number of sequences.
        heads: Number of query heads.
        kv_heads: Number of key heads.
        head_dim: Width of a head.
        itemsize: Bytes per element of q, k and v. Sums take 4 bytes per element.
        q_len: Number of decoded queries per sequence.
    """
    world, rows = layout.world, batch * heads * q_len
    if world == 1:
        return Traffic(0, 0, (0.0,))
    if algorithm in ("ring", "zigzag"):
        return _ring_traffic(layout, 2 * batch * kv_heads * head_dim * itemsize)
    if algorithm == "ulysses":
        row = batch * (2 * heads + 2 * max(kv_heads, world)) * head_dim * itemsize
        # Outputs have the lengths of the other ranks, which differ by at most one.
        sent = ((world - 1) / world * layout.length(rank) * row for rank in range(world))
        return Traffic(4, 4 * (world - 1), tuple(sent))
    if algorithm == "gather":
        return Traffic(1, world - 1, ((world - 1) * 4 * rows * (head_dim + 1),) * world)
    if algorithm == "pass_q":
        # Shares of the queries travel with their sums. The outputs are padded to the largest share.
        shares, group = Sharding.contiguous(batch * kv_heads, world), heads // kv_heads * q_len
        hops = _ring_traffic(shares, 4 * group * (2 * head_dim + 1))
        largest = max(map(shares.length, range(world)))
        gathered = (world - 1) * 4 * largest * group * head_dim
        return Traffic(world, 2 * (world - 1), tuple(part + gathered for part in hops.sent))
    # The largest log-sum-exp is reduced before the sums, which `fused` sends at once.
    reductions = 3 if algorithm == "three_allreduce" else 2
    sent = 2 * (world - 1) / world * 4 * rows * (head_dim + 2)
    return Traffic(reductions, 2 * reductions * (world - 1), (sent,) * world)


def _ring_traffic(layout: Sharding, per_key: int) -> Traffic:
    """Compute a ring's traffic, in which a rank sends every shard except the next rank's."""
    world, total = layout.world, layout.total
    lengths = [layout.length((rank + 1) % world) for rank in range(world)]
    sent = tuple(float(per_key * (total - length)) for length in lengths)
    return Traffic(world - 1, world - 1, sent)
