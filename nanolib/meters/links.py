"""What sending costs between the ranks of this machine: collectives of several sizes, and bytes as the interface counts them."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nanolib.meters.time.across_ranks import time_across_ranks

_COUNTERS = Path("/proc/net/dev")
_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
_SET_FLAGS, _UP_RUNNING = 0x8914, 0x41
PAYLOADS = (1 << 10, 1 << 16, 1 << 20, 1 << 22)  # bytes that a rank holds


def time_collectives(
    budget_s: float, *, seed: int, device: str | torch.device = "cpu"
) -> list[dict[str, Any]]:
    """How long collectives of several sizes take on this rank, all of them interleaved.

    Returns:
        Per collective and size: `collective`, `payload` (bytes that a rank holds), `messages` that follow one another, `sent`
        (bytes that each rank sends), `blocks` (ms).
    """
    world = dist.get_world_size()
    found, calls = [], {}
    for payload in PAYLOADS:
        x = torch.zeros(payload // 4, device=device)
        gathered = torch.empty(world * len(x), device=device)
        whole = torch.zeros(payload // 4 // world * world, device=device)
        received = torch.empty_like(whole)
        part = (world - 1) / world
        for name, call, messages, sent in (
            ("all_reduce", partial(dist.all_reduce, x), 2 * (world - 1), 2 * part * payload),
            (
                "all_gather",
                partial(dist.all_gather_into_tensor, gathered, x),
                world - 1,
                (world - 1) * payload,
            ),
            (
                "all_to_all",
                partial(dist.all_to_all_single, received, whole),
                world - 1,
                part * payload,
            ),
        ):
            calls[f"{name} {payload}"] = call
            found.append(
                {"collective": name, "payload": payload, "messages": messages, "sent": sent}
            )
    blocks = time_across_ranks(calls, budget_s, device=device, seed=seed).ms
    return [row | {"blocks": blocks[f"{row['collective']} {row['payload']}"]} for row in found]


def count_bytes(call: Callable[[], object], calls: int = 5) -> float | None:
    """Bytes that all ranks together send in one call, protocol and all; every rank makes the calls.

    Returns:
        None where the ranks have no network of their own, in which the interface would count their bytes alone, or send through
        no interface, as NCCL does on one machine.
    """
    if dist.get_backend() != "gloo" or not only_loopback():
        return None
    call()  # connections are made at the first
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
    """Bytes that the loopback interface has sent, headers included, over all processes of this network.

    Raises:
        OSError: This system does not tell.
    """
    return int(_interfaces()["lo"].split()[8])


def only_loopback() -> bool:
    """Whether this process is in a network of its own."""
    return _COUNTERS.is_file() and list(_interfaces()) == ["lo"]


def enter_private_network() -> None:
    """Give this process, and those that it starts, a network of which only the loopback interface exists.

    Raises:
        OSError: The system does not allow it; nothing has changed then.
    """
    if sys.platform != "linux":
        raise OSError("this system has no network namespaces")
    libc = ctypes.CDLL(None, use_errno=True)
    # Root needs no namespace of users around it, and keeps its rights over files without one.
    if libc.unshare(_NEW_NETWORK if os.geteuid() == 0 else _NEW_NETWORK | _NEW_USER):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with socket.socket() as control:
        fcntl.ioctl(control, _SET_FLAGS, struct.pack("16sh", b"lo", _UP_RUNNING))


def _interfaces() -> dict[str, str]:
    lines = (line.partition(":") for line in _COUNTERS.read_text().splitlines()[2:])
    return {name.strip(): counters for name, _, counters in lines}
