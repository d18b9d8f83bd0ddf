"""Timing with a cold cache: what the last-level cache holds is overwritten before each call."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from nanolib.meters.time.clock import Call, Clock

_UNKNOWN = 64 * 2**20
_CPUS = Path("/sys/devices/system/cpu")


class ColdClock:
    """A clock whose calls find nothing in the cache; overwriting it is not counted.

    Args:
        clock: What times the calls.
        device: Where they compute.
    """

    def __init__(self, clock: Clock, device: str | torch.device) -> None:
        self.clock = clock
        self.method = f"{clock.method}, cold cache"
        self._other = torch.empty(2 * last_level_bytes(device), dtype=torch.uint8, device=device)

    def _overwrite(self) -> None:
        self._other.fill_(1)

    def time_block(self, phases: Sequence[Call], calls: int, inner: int) -> list[list[float]]:
        """See `Clock.time_block`; on a GPU a call is launched while the cache is overwritten."""
        between = [call for phase in phases for call in (self._overwrite, phase)]
        rows = np.asarray(self.clock.time_block(between, calls * inner, 1))[:, 1::2]
        return rows.reshape(calls, inner, -1).mean(axis=1).tolist()

    def warm_up(self, phases: Sequence[Call]) -> None:
        """That of the clock."""
        self.clock.warm_up(phases)

    def resolution_ms(self) -> float:
        """That of the clock."""
        return self.clock.resolution_ms()


def last_level_bytes(device: str | torch.device, cpus: Path = _CPUS) -> int:
    """Bytes of the caches farthest from the cores, all of them together; 64 MiB where nothing tells.

    Args:
        device: Whose.
        cpus: Where Linux describes its CPUs.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    if device.type != "cpu":
        return _UNKNOWN
    sizes: dict[tuple[int, str], int] = {}
    for cache in cpus.glob("cpu[0-9]*/cache/index[0-9]*"):
        level, size, shared = (
            (cache / name).read_text().strip() for name in ("level", "size", "shared_cpu_list")
        )
        sizes[int(level), shared] = int(size.removesuffix("K")) * 1024
    last = max((level for level, _ in sizes), default=0)
    return sum(size for (level, _), size in sizes.items() if level == last) or _UNKNOWN
