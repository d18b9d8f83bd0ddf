"""How often the ranks meet, and what each sends: formulas for attention across ranks.

Collectives are counted as rings, which is how gloo does them and NCCL does large ones: a rank sends 2(W − 1)/W of an all-reduced
payload, W − 1 times an all-gathered one, (W − 1)/W of one that is sent all to all.
"""

from __future__ import annotations

from dataclasses import dataclass

from nanolib.models.attention.sharding import Sharding


@dataclass(frozen=True)
class Traffic:
    """What one call sends.

    Attributes:
        rounds: Collectives and exchanges in a row, each of which waits for the one before.
        hops: Messages in a row: a ring of W ranks passes an all-reduce on 2(W − 1) times, an all-gather W − 1 times.
        sent: Bytes that each rank sends, by rank.
    """

    rounds: int
    hops: int
    sent: tuple[float, ...]

    @property
    def total(self) -> float:
        """Bytes that all ranks send."""
        return sum(self.sent)


def all_reduce_bytes(payload: float, world: int) -> float:
    """Bytes that each rank sends."""
    return 2 * (world - 1) / world * payload


def all_gather_bytes(payload: float, world: int) -> float:
    """Bytes that each rank sends; the payload is one rank's part."""
    return (world - 1) * payload


def all_to_all_bytes(payload: float, world: int) -> float:
    """Bytes that each rank sends; the payload is all that a rank holds."""
    return (world - 1) / world * payload


def decode_traffic(
    algorithm: str,
    layout: Sharding,
    *,
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    q_len: int = 1,
    itemsize: int,
) -> Traffic:
    """Of `tree_attention_decode`, with the layout given.

    Args:
        algorithm: One of `tree.ALGORITHMS`.
        layout: Which keys each rank holds.
        batch: Sequences.
        heads: Of the queries.
        kv_heads: Of the keys.
        head_dim: Width of a head.
        q_len: Queries per sequence.
        itemsize: Bytes per element of q, k, v; sums travel in 4.
    """
    world, rows = layout.world, batch * heads * q_len
    if world == 1:
        return Traffic(0, 0, (0.0,))
    reduced = {
        "three_allreduce": (rows, rows, rows * head_dim),
        "fused": (rows, rows * (head_dim + 1)),
    }
    if parts := reduced.get(algorithm):
        sent = sum(all_reduce_bytes(4 * part, world) for part in parts)
        return Traffic(len(parts), 2 * len(parts) * (world - 1), (sent,) * world)
    if algorithm == "gather":
        return Traffic(1, world - 1, (all_gather_bytes(4 * rows * (head_dim + 1), world),) * world)
    if algorithm == "ring":
        return _ring_traffic(layout, 2 * batch * kv_heads * head_dim * itemsize)
    # pass_q: a share of the queries with its sums at each hop; then the outputs, padded to the largest share
    group = heads // kv_heads * q_len
    edges = [batch * kv_heads * share // world for share in range(world + 1)]
    shares = [edges[share + 1] - edges[share] for share in range(world)]
    hops = [
        sum(shares[(rank - step) % world] for step in range(world - 1))
        * group
        * (2 * head_dim + 1)
        * 4
        for rank in range(world)
    ]
    gathered = all_gather_bytes(4 * max(shares) * group * head_dim, world)
    return Traffic(world, 2 * (world - 1), tuple(part + gathered for part in hops))


def prefill_traffic(
    algorithm: str,
    layout: Sharding,
    *,
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    itemsize: int,
) -> Traffic:
    """Of a forward pass of `ring_attention` (`ring`, `zigzag`) or `ulysses_attention` (`ulysses`), with the layout given."""
    world = layout.world
    if world == 1:
        return Traffic(0, 0, (0.0,))
    if algorithm == "ulysses":
        repeated = max(1, world // kv_heads)
        elements = [
            layout.length(rank) * batch * (2 * heads + 2 * kv_heads * repeated)
            for rank in range(world)
        ]
        # Queries, keys and values go out by this rank's length; outputs come back by the others', which differ by one at most.
        return Traffic(
            4,
            4 * (world - 1),
            tuple(all_to_all_bytes(count * head_dim * itemsize, world) for count in elements),
        )
    return _ring_traffic(layout, 2 * batch * kv_heads * head_dim * itemsize)


def _ring_traffic(layout: Sharding, per_key: int) -> Traffic:
    """Every shard passes by but that of the next rank; `per_key` is the bytes of a key and its value."""
    world, total = layout.world, layout.total
    lengths = [layout.length((rank + 1) % world) for rank in range(world)]
    sent = tuple(float(per_key * (total - length)) for length in lengths)
    return Traffic(world - 1, world - 1, sent)
