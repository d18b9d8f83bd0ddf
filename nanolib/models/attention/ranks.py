"""What attention across ranks needs of `torch.distributed`; without a process group there is one rank, and nothing is sent."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist


class BlockTimer(Protocol):
    """Times named blocks: `comp_…` computes, `comm_…` sends and receives."""

    def time_block(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """Times what runs inside."""
        ...


class NoTimer:
    """Times nothing."""

    def time_block(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """See `BlockTimer.time_block`."""
        return contextlib.nullcontext()


NO_TIMER = NoTimer()


def world_of(group: Any = None) -> tuple[int, int]:
    """This process's rank in the group, and how many there are."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def all_gather(x: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Every rank's x, of one shape: [world, *x.shape]."""
    _, world = world_of(group)
    if world == 1:
        return x[None]
    parts = x.new_empty(world, *x.shape)
    dist.all_gather_into_tensor(parts.view(-1), x.reshape(-1), group=group)
    return parts


def gather_lengths(length: int, device: torch.device, group: Any = None) -> list[int]:
    """Every rank's length, in order of rank: one all-gather of 8 bytes."""
    return all_gather(torch.tensor(length, device=device), group).tolist()


class Hop:
    """One step around the ring under way: to the next rank, from the one before.

    Args:
        send: What to send.
        shapes: Of what comes in, one for each; of the same dtype and device.
        group: The process group.
    """

    def __init__(
        self, send: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]], group: Any = None
    ) -> None:
        rank, world = world_of(group)
        there, back = ((rank + step) % world for step in (1, -1))
        to, origin = (
            peer if group is None else dist.get_global_rank(group, peer) for peer in (there, back)
        )
        self._received = [x.new_empty(shape) for x, shape in zip(send, shapes, strict=True)]
        self._sent = [x.contiguous() for x in send]  # alive until they have gone
        operations = [dist.P2POp(dist.isend, x, to, group) for x in self._sent if x.numel()]
        operations += [
            dist.P2POp(dist.irecv, x, origin, group) for x in self._received if x.numel()
        ]
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> list[torch.Tensor]:
        """What came in."""
        for work in self._works:
            work.wait()
        return self._received
