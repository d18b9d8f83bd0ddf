"""Bytes on the wire, as the loopback interface counts them: in a network of one's own there is no other traffic."""

from __future__ import annotations

from pathlib import Path

_COUNTERS = Path("/proc/net/dev")


def loopback_bytes() -> int:
    """Bytes that the loopback interface has sent, headers included, over all processes of this network.

    Raises:
        OSError: This system does not tell.
    """
    return int(_interfaces()["lo"].split()[8])


def only_loopback() -> bool:
    """Whether this process is in a network of its own."""
    return _COUNTERS.is_file() and list(_interfaces()) == ["lo"]


def _interfaces() -> dict[str, str]:
    lines = (line.partition(":") for line in _COUNTERS.read_text().splitlines()[2:])
    return {name.strip(): counters for name, _, counters in lines}
