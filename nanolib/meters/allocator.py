"""What torch's allocator of a GPU remembers of each allocation: which lines of code held most at the peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any

import torch

_EVENTS = 1_000_000
_LARGEST = 12


@contextmanager
def allocated_lines(device: str) -> Iterator[list[list[Any]]]:
    """Record the allocator's history of the block.

    Args:
        device: A CUDA device.

    Yields:
        A list, filled when the block ends: file, line and function, and bytes, of what held most when most was allocated within it.
        Not yet seen on a GPU.
    """
    found: list[list[Any]] = []
    torch.cuda.memory._record_memory_history(max_entries=_EVENTS, stacks="python")
    try:
        yield found
        traces = torch.cuda.memory._snapshot(device)["device_traces"]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    index = torch.device(device).index or 0
    found += [[line, size] for line, size in lines_at_peak(traces[index]).most_common(_LARGEST)]


def lines_at_peak(events: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Which line held how much when most was allocated.

    Args:
        events: As `torch.cuda.memory._snapshot` gives them: `action`, `addr`, `size`, and `frames` from the innermost on.

    Returns:
        Line → bytes, of what was allocated since the first event.
    """
    alive: dict[int, tuple[str, int]] = {}
    current, most, at_peak = 0, 0, {}
    for event in events:
        if event["action"] == "alloc":
            alive[event["addr"]] = _line(event.get("frames", ())), event["size"]
            current += event["size"]
            if current > most:
                most, at_peak = current, dict(alive)
        elif event["action"] == "free_completed" and event["addr"] in alive:
            current -= alive.pop(event["addr"])[1]
    held: Counter[str] = Counter()
    for line, size in at_peak.values():
        held[line] += size
    return held


def _line(frames: Iterable[Mapping[str, Any]]) -> str:
    """The innermost line that is not torch's own; no folder is in it."""
    for frame in frames:
        path = PurePath(frame["filename"])
        if path.suffix == ".py" and "torch" not in path.parts:
            return f"{path.name}:{frame['line']} {frame['name']}"
    return "not known"
