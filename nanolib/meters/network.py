"""Bytes on the wire, as the loopback interface counts them: in a network of one's own there is no other traffic."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
from pathlib import Path

_COUNTERS = Path("/proc/net/dev")
_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
_SET_FLAGS, _UP_RUNNING = 0x8914, 0x41


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
