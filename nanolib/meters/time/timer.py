"""Time named blocks of code on each rank: compute, wait and communication."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from nanolib.measurement import BadInput
from nanolib.meters.time.clock import synchronizer

KINDS = {"comp": "compute", "wait": "wait", "comm": "communication"}


class Timer:
    """Times named blocks and prints a table of them.

    A block's time excludes the blocks inside it, so all times add up to the elapsed time. With
    several ranks, a block whose name starts with `comm_` has a barrier first. Its time counts as
    `wait`, since waiting for a slow rank is not communication.

    Args:
        device: The device to synchronize before each reading.
        use_cuda: Use CUDA; an alternative to `device` for code of other suites.

    Attributes:
        seconds: Block → the time of each of its runs.

    Raises:
        BadInput: There is no CUDA device.
    """

    def __init__(self, device: str | torch.device = "cpu", *, use_cuda: bool | None = None) -> None:
        if use_cuda is not None:
            device = "cuda" if use_cuda else "cpu"
        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            remedy = "give use_cuda=torch.cuda.is_available()"
            raise BadInput(f"Timer: device {str(device)!r} is not available; {remedy}")
        self.seconds: dict[str, list[float]] = {}
        self._synchronize = synchronizer(device)
        self._open = threading.local()  # threads do not share open blocks

    @contextmanager
    def time_block(self, name: str) -> Iterator[None]:
        """Add the block's wall time to `name`, without blocks inside it."""
        if name.startswith("comm_") and _ranks() > 1:
            with self._timed("wait"):
                dist.barrier()
        with self._timed(name):
            yield

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        self._synchronize()
        # per open block, the seconds of the blocks inside it
        within: list[float] = self._open.__dict__.setdefault("within", [])
        within.append(0.0)
        start = time.perf_counter()
        try:
            yield
        finally:
            self._synchronize()
            took = time.perf_counter() - start
            self.seconds.setdefault(name, []).append(took - within.pop())
            if within:
                within[-1] += took

    def totals(self) -> dict[str, float]:
        """Return the seconds in each block."""
        return {name: sum(times) for name, times in self.seconds.items()}

    def shares(self) -> dict[str, float]:
        """Return the seconds of compute, wait, communication and other blocks."""
        found = dict.fromkeys((*KINDS.values(), "other"), 0.0)
        for name, seconds in self.totals().items():
            found[KINDS.get(name.split("_")[0], "other")] += seconds
        return {kind: seconds for kind, seconds in found.items() if seconds or kind != "other"}

    def print_stats(self, write: Callable[[str], object] = print) -> None:
        """Print calls, total, mean and standard deviation of each block, and shares by kind."""
        width = max([len(name) for name in self.seconds] + [13])
        rank = f"rank {dist.get_rank()} of {_ranks()}" if _ranks() > 1 else "name"
        lines = [f"{rank:<{width}}  calls   total s   mean ms     sd ms"]
        for name, times in self.seconds.items():
            lines.append(
                f"{name:<{width}}  {len(times):5d}  {sum(times):8.3f}  {_mean_and_sd_ms(times)}"
            )
        total = sum(self.totals().values())
        for kind, seconds in self.shares().items():
            share = seconds / total if total else 0.0
            lines.append(f"{kind:<{width}}         {seconds:8.3f}  {share:7.1%}")
        lines.append(f"{'total':<{width}}         {total:8.3f}")
        write("\n".join(lines))  # at once, so that lines of ranks do not mix


def _mean_and_sd_ms(seconds: list[float]) -> str:
    sd = statistics.stdev(seconds) if len(seconds) > 1 else 0.0
    return f"{1e3 * statistics.fmean(seconds):8.3f}  {1e3 * sd:8.3f}"


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
