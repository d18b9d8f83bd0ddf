"""Exchange tensors between the ranks that share a sequence, and time it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanolib.measurement import BadInput
from nanolib.models.attention.sharding import Sharding


class Ranks:
    """The ranks of a process group. Without a process group there is one rank, which sends nothing.

    Args:
        group: The process group. None means all ranks.
        timer: Its context `time_block(name)` times a part: `comp_…` computes, `comm_…` sends and
            receives.

    Attributes:
        rank: This process's rank.
        world: How many ranks there are.
    """

    def __init__(self, group: Any = None, timer: Any = None) -> None:
        self._group, self._timer = group, timer
        several = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if several else 0
        self.world = dist.get_world_size(group) if several else 1

    def time(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """Time the context's body if there is a timer."""
        return contextlib.nullcontext() if self._timer is None else self._timer.time_block(name)

    def layout(self, layout: Sharding | None, length: int, device: torch.device) -> Sharding:
        """Check a layout against this rank's length, or make one piece per rank, in order, from gathered lengths.

        Raises:
            BadInput: The layout has another number of ranks, or another length here.
        """
        if layout is None:  # one all-gather of 8 bytes
            return Sharding.from_lengths(
                self.all_gather(torch.tensor(length, device=device)).tolist()
            )
        here = layout.length(self.rank % layout.world)
        if layout.world != self.world or here != length:
            raise BadInput(
                f"layout: {layout.world} ranks, {here} positions here; there are {self.world} ranks and {length} positions here"
            )
        return layout

    def all_gather(self, x: Tensor) -> Tensor:
        """Gather every rank's x, all of one shape: [world, *x.shape]."""
        if self.world == 1:
            return x[None]
        parts = x.new_empty(self.world, *x.shape)
        dist.all_gather_into_tensor(parts.view(-1), x.reshape(-1), group=self._group)
        return parts

    def all_reduce(self, x: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduce all ranks' x to one. This may overwrite x."""
        # collectives add up storages: a kernel's strides are not those of an empty shard
        x = x.contiguous()
        if self.world > 1:
            dist.all_reduce(x, op=operation, group=self._group)
        return x

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Send a part to each rank, and receive parts of these shapes."""
        sizes, incoming = [part.numel() for part in parts], [math.prod(shape) for shape in shapes]
        sent = parts[0].new_empty(sum(sizes))
        for part, into in zip(parts, sent.split(sizes), strict=True):
            into.view(part.shape).copy_(part)
        received = sent.new_empty(sum(incoming))
        dist.all_to_all_single(received, sent, incoming, sizes, group=self._group)
        return [x.view(shape) for x, shape in zip(received.split(incoming), shapes, strict=True)]

    def hop(self, send: Sequence[Tensor], length: int, dim: int = 2) -> Hop:
        """Start to send tensors to the next rank, and to receive those of the previous rank.

        Args:
            send: Any shapes.
            length: Length of the received tensors in dimension `dim`. Their other dimensions are
                those of `send`.
            dim: By default the positions of [batch, heads, positions, head_dim].
        """
        shapes = [(*x.shape[:dim], length, *x.shape[dim + 1 :]) for x in send]
        peers = [(self.rank + step) % self.world for step in (1, -1)]
        if self._group is not None:
            peers = [dist.get_global_rank(self._group, peer) for peer in peers]
        return Hop(send, shapes, peers, self._group)


class Hop:
    """A step around the ring that has started. See `Ranks.hop`."""

    def __init__(
        self,
        send: Sequence[Tensor],
        shapes: Sequence[Sequence[int]],
        peers: Sequence[int],
        group: Any,
    ) -> None:
        self._received = [x.new_empty(shape) for x, shape in zip(send, shapes, strict=True)]
        self._sent = [x.contiguous() for x in send]  # which must live until they are sent
        to, origin = peers
        operations = [dist.P2POp(dist.isend, x, to, group) for x in self._sent if x.numel()]
        operations += [
            dist.P2POp(dist.irecv, x, origin, group) for x in self._received if x.numel()
        ]
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> list[Tensor]:
        """Wait, and return the received tensors."""
        for work in self._works:
            work.wait()
        return self._received
