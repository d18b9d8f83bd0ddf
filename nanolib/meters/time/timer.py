"""Named blocks timed by hand, on each rank: computing, waiting for others, communicating."""

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

    Where blocks nest, the time of the inner one is not counted into the outer one: all times add up to what passed.

    Where there are several ranks, a block whose name begins with `comm_` waits for all of them first: that time is `wait` and not
    the block's, since waiting for a straggler is no communication.

    Args:
        device: What must have finished before a reading; a CPU has nothing queued.
        use_cuda: In the place of a device, as other suites ask for it.

    Attributes:
        seconds: Per block, the time of each of its runs, that of blocks within it left out.

    Raises:
        BadInput: CUDA is wanted, and is not here.
    """

    def __init__(self, device: str | torch.device = "cpu", *, use_cuda: bool | None = None) -> None:
        if use_cuda is not None:
            device = "cuda" if use_cuda else "cpu"
        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise BadInput(
                f"Timer: device {str(device)!r} is not here; give use_cuda=torch.cuda.is_available()"
            )
        self.seconds: dict[str, list[float]] = {}
        self._synchronize = synchronizer(device)
        self._open = threading.local()  # what is timed in one thread lies in no block of another

    @contextmanager
    def time_block(self, name: str) -> Iterator[None]:
        """Add the wall time of the block to `name`, less that of blocks within it."""
        if name.startswith("comm_") and _ranks() > 1:
            with self._timed("wait"):
                dist.barrier()
        with self._timed(name):
            yield

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        self._synchronize()
        # of each open block, the seconds of those within it
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
        """Seconds in each block."""
        return {name: sum(times) for name, times in self.seconds.items()}

    def shares(self) -> dict[str, float]:
        """Seconds of compute, wait, communication and what has another name; their sum is that of all blocks."""
        found = dict.fromkeys((*KINDS.values(), "other"), 0.0)
        for name, seconds in self.totals().items():
            found[KINDS.get(name.split("_")[0], "other")] += seconds
        return {kind: seconds for kind, seconds in found.items() if seconds or kind != "other"}

    def print_stats(self, write: Callable[[str], object] = print) -> None:
        """Print calls, total, mean and standard deviation of each block of this rank, and how the total divides."""
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
        write("\n".join(lines))  # at once: ranks that print at the same time do not mix their lines


def _mean_and_sd_ms(seconds: list[float]) -> str:
    sd = statistics.stdev(seconds) if len(seconds) > 1 else 0.0
    return f"{1e3 * statistics.fmean(seconds):8.3f}  {1e3 * sd:8.3f}"


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
