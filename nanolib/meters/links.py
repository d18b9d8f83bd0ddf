"""Measure communication between ranks: the time of collectives by size, and bytes on the wire."""

import ctypes
import fcntl
import os
import socket
import struct
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import torch
import torch.distributed as dist

from nanolib.meters.time.ranks import time_across_ranks

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
_SET_FLAGS, _UP_RUNNING = 0x8914, 0x41
# Each payload is a number of bytes per rank.
PAYLOADS = (1 << 10, 1 << 16, 1 << 20, 1 << 22)


def time_collectives(
    budget_s: float, *, seed: int, device: str | torch.device = "cpu"
) -> list[dict[str, Any]]:
    """Measure the time of collectives of several sizes on this rank, in interleaved blocks.

    Returns:
        A mapping per collective and size. `collective` is the name, and `payload` is the number of
        bytes per rank. `messages` is the number of consecutive messages, and `sent` is the number
        of bytes that each rank sends. `blocks` contains the time of one call in each block, ms.
    """
    world = dist.get_world_size()
    rows, calls = {}, {}
    for payload in PAYLOADS:
        x = torch.zeros(payload // 4, device=device)
        gathered = torch.empty(world * len(x), device=device)
        whole = torch.zeros(payload // 4 // world * world, device=device)
        received = torch.empty_like(whole)
        part = (world - 1) / world
        reduce = partial(dist.all_reduce, x)
        gather = partial(dist.all_gather_into_tensor, gathered, x)
        to_all = partial(dist.all_to_all_single, received, whole)
        for name, call, messages, sent in (
            ("all_reduce", reduce, 2 * (world - 1), 2 * part * payload),
            ("all_gather", gather, world - 1, (world - 1) * payload),
            ("all_to_all", to_all, world - 1, part * payload),
        ):
            key = f"{name} {payload}"
            calls[key] = call
            rows[key] = {"collective": name, "payload": payload, "messages": messages, "sent": sent}
    blocks = time_across_ranks(calls, budget_s, device=device, seed=seed).ms
    return [row | {"blocks": blocks[key]} for key, row in rows.items()]


def count_bytes(call: Callable[[], object], calls: int = 5) -> float | None:
    """Count the bytes that all ranks send in one call, including the bytes of the protocol.

    All ranks must call this function at the same time.

    Returns:
        Number of bytes, or None if other processes share the network. The result is also None with
        backends other than gloo. For example, NCCL does not use the network on one machine.
    """
    if dist.get_backend() != "gloo" or not has_private_network():
        return None
    call()  # The first call opens connections.
    return (_counted(call, calls) - _counted(call, 0)) / calls


def _counted(call: Callable[[], object], calls: int) -> int:
    dist.barrier()
    before = loopback_bytes()
    dist.barrier()
    for _ in range(calls):
        call()
    dist.barrier()
    after = loopback_bytes()
    dist.barrier()
    return after - before


def loopback_bytes() -> int:
    """Return the bytes that the loopback interface has sent, with headers, for all processes.

    Raises:
        KeyError: The system has no counter of the loopback interface.
    """
    return psutil.net_io_counters(pernic=True, nowrap=False)["lo"].bytes_sent


def has_private_network() -> bool:
    """Return whether the network of this process has only the loopback interface."""
    return [*psutil.net_io_counters(pernic=True)] == ["lo"]


def enter_private_network() -> None:
    """Move this process and its future children to a network with only the loopback interface.

    Raises:
        OSError: The system does not allow a private network, and the process keeps its network.
    """
    if sys.platform != "linux":
        raise OSError("this system has no network namespaces")
    libc = ctypes.CDLL(None, use_errno=True)
    # Root needs no user namespace. In a user namespace, root would lose access to files.
    if libc.unshare(_NEW_NETWORK if os.geteuid() == 0 else _NEW_NETWORK | _NEW_USER):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with socket.socket() as control:
        fcntl.ioctl(control, _SET_FLAGS, struct.pack("16sh", b"lo", _UP_RUNNING))
