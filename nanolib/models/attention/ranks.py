"""Split a sequence over ranks, exchange tensors between ranks, and predict the traffic.

A rank has one piece of the sequence, or two pieces that balance causal work (zigzag).

The formulas of the traffic assume ring collectives, as in gloo, and as in NCCL for large messages.
In an all-reduce over W ranks, each rank sends 2(W − 1)/W times the size of its payload. In an
all-gather, each rank sends its payload W − 1 times. In an all-to-all, each rank sends (W − 1)/W of
its payload.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from nanolib.measurement import BadInput

Piece = tuple[int, int]  # positions [start, stop)


@dataclass(frozen=True)
class Sharding:
    """The pieces of a sequence that each rank has.

    Attributes:
        pieces: Positions [start, stop) of each piece, by rank. A piece may be empty.
    """

    pieces: tuple[tuple[Piece, ...], ...]

    @classmethod
    def contiguous(cls, total: int, world: int) -> Self:
        """Give each rank one piece, in order. The lengths of the pieces differ by at most one."""
        return cls(tuple((piece,) for piece in _split(total, world)))

    @classmethod
    def zigzag(cls, total: int, world: int) -> Self:
        """Give rank r the pieces r and 2·world − 1 − r of 2·world pieces, to balance work."""
        pieces = _split(total, 2 * world)
        return cls(tuple((pieces[rank], pieces[-1 - rank]) for rank in range(world)))

    @classmethod
    def from_lengths(cls, lengths: Sequence[int]) -> Self:
        """Give each rank one piece of the given length, in order."""
        edges = itertools.accumulate(lengths, initial=0)
        return cls(tuple((piece,) for piece in itertools.pairwise(edges)))

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.pieces)

    @functools.cached_property
    def lengths(self) -> list[int]:
        """Number of positions of each rank."""
        return [sum(stop - start for start, stop in pieces) for pieces in self.pieces]

    def take(self, x: Tensor, rank: int, dim: int = 2) -> Tensor:
        """Return a rank's part of a whole sequence, as a view if the rank has one piece."""
        parts = [x.narrow(dim, start, stop - start) for start, stop in self.pieces[rank]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def _split(total: int, parts: int) -> list[Piece]:
    edges = [total * part // parts for part in range(parts + 1)]
    return list(itertools.pairwise(edges))


class Ranks:
    """All ranks of the process group. Before `init_process_group`, there is one rank.

    Args:
        timer: Object whose method `time_block(name)` returns a context that times one part, or None
            for no timer. Names begin with `comp_` for computation and `comm_` for communication.

    Attributes:
        rank: Rank of this process.
        world: Number of ranks.
    """

    def __init__(self, timer=None):
        self._timer, several = timer, dist.is_initialized()
        self.rank = dist.get_rank() if several else 0
        self.world = dist.get_world_size() if several else 1

    def time(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """Return a context that times a part, if there is a timer."""
        return contextlib.nullcontext() if self._timer is None else self._timer.time_block(name)

    def check(self, layout: Sharding, *shards: Tensor) -> None:
        """Check that a layout fits this rank's tensors, shape [batch, heads, local_len, head_dim].

        Raises:
            BadInput: The layout has a wrong number of ranks, or a wrong length on this rank.
        """
        here = layout.lengths[self.rank % layout.world]
        for x in shards:
            if layout.world != self.world or x.shape[2] != here:
                raise BadInput(
                    f"layout: has {layout.world} ranks, {here} positions on this rank; "
                    f"give {self.world} ranks, {x.shape[2]} positions"
                )

    def all_gather(self, x: Tensor) -> Tensor:
        """Gather x from all ranks, shape [world, *x.shape]."""
        if self.world == 1:
            return x[None]
        parts = x.new_empty(self.world, *x.shape)
        dist.all_gather_into_tensor(parts.view(-1), x.reshape(-1))
        return parts

    def all_reduce(self, x: Tensor, operation=dist.ReduceOp.SUM) -> Tensor:
        """Reduce x over all ranks, possibly in place."""
        # Collectives reduce elements in the order of memory, so all ranks need the same strides.
        x = x.contiguous()
        if self.world > 1:
            dist.all_reduce(x, op=operation)
        return x

    def all_to_all(self, x: Tensor, sizes: list[int], incoming: list[int]) -> Tensor:
        """Send `sizes` rows of x to each rank in turn, and receive `incoming` rows from each."""
        if self.world == 1:
            return x
        received = x.new_empty(sum(incoming), *x.shape[1:])
        dist.all_to_all_single(received, x.contiguous(), incoming, sizes)
        return received

    def hop(self, send: Sequence[Tensor], length: int) -> Callable[[], list[Tensor]]:
        """Start to send tensors to the next rank, and to receive the previous rank's tensors.

        Args:
            send: Tensors with positions in dimension 2.
            length: Number of received positions. All other dimensions are those of `send`.

        Returns:
            A function that waits, and returns the received tensors.
        """
        received = [x.new_empty(*x.shape[:2], length, *x.shape[3:]) for x in send]
        sent = [x.contiguous() for x in send]
        to, origin = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        operations = [dist.P2POp(dist.isend, x, to) for x in sent if x.numel()]
        operations += [dist.P2POp(dist.irecv, x, origin) for x in received if x.numel()]
        works = dist.batch_isend_irecv(operations) if operations else []

        def wait() -> list[Tensor]:
            for work in works:
                work.wait()
            sent.clear()  # The tensors must live until they are sent.
            return received

        return wait


@dataclass(frozen=True)
class Traffic:
    """The communication of one call.

    Attributes:
        rounds: Number of collectives and exchanges that run one after another.
        hops: Number of messages that each rank sends one after another. In a ring of W ranks, an
            all-reduce has 2(W − 1) messages and an all-gather has W − 1 messages.
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
) -> Traffic:
    """Compute the traffic of a forward pass across ranks.

    Args:
        algorithm: Name of the algorithm: one of `tree.ALGORITHMS` for decoding one token per
            sequence, or `ring`, `zigzag` or `ulysses` for a whole sequence.
        layout: Positions of the keys on each rank.
        batch: Number of sequences.
        heads: Number of query heads.
        kv_heads: Number of key heads.
        head_dim: Width of a head.
        itemsize: Bytes per element of q, k and v. Sums take 4 bytes per element.
    """
    world, others, rows = layout.world, layout.world - 1, batch * heads
    if not others:
        return Traffic(0, 0, (0.0,))
    if algorithm in ("ring", "zigzag"):
        return _ring_traffic(layout, 2 * batch * kv_heads * head_dim * itemsize)
    if algorithm == "ulysses":
        row = batch * (2 * heads + 2 * max(kv_heads, world)) * head_dim * itemsize
        # The formula gives all shards this rank's length. Lengths differ by at most one.
        sent = (others / world * length * row for length in layout.lengths)
        return Traffic(4, 4 * others, tuple(sent))
    if algorithm == "gather":
        return Traffic(1, others, (others * 4 * rows * (head_dim + 1),) * world)
    if algorithm == "pass_q":
        # Each rank sends queries with their partial results. Padding gives all outputs one size.
        shares, group = Sharding.contiguous(batch * kv_heads, world), heads // kv_heads
        hops = _ring_traffic(shares, 4 * group * (2 * head_dim + 1))
        gathered = others * 4 * max(shares.lengths) * group * head_dim
        return Traffic(world, 2 * others, tuple(part + gathered for part in hops.sent))
    # The first reduction finds the largest log-sum-exp. `fused` then sends both sums at once.
    reductions = 3 if algorithm == "three_allreduce" else 2
    sent = 2 * others / world * 4 * rows * (head_dim + 2)
    return Traffic(reductions, 2 * reductions * others, (sent,) * world)


def _ring_traffic(layout: Sharding, per_key: int) -> Traffic:
    """Compute the traffic of a ring. A rank sends every shard except the next rank's shard."""
    world = layout.world
    lengths = [layout.lengths[(rank + 1) % world] for rank in range(world)]
    sent = tuple(float(per_key * (sum(lengths) - length)) for length in lengths)
    return Traffic(world - 1, world - 1, sent)
