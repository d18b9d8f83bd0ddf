"""Where the time of one call goes, operation by operation: torch's profiler, on demand and outside any timing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

# What the op table can be sorted by: the profiler's own columns.
SORTS = (
    "self_cpu_time_total",
    "cpu_time_total",
    "self_cuda_time_total",
    "cuda_time_total",
    "self_cpu_memory_usage",
    "count",
)
_CALLS = 3
_SILENT = "6"  # of the tracer's own levels; it announces each beginning and end


def torch_profiler(device: str | torch.device, **options: bool) -> profile:
    """Make torch's profiler for a device; its tracer announces nothing."""
    os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)
    activities = [ProfilerActivity.CPU]
    if torch.device(device).type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities, **options)


def write_trace(
    call: Callable[[], object],
    path: Path,
    *,
    sort: str = "self_cpu_time_total",
    top: int = 20,
    device: str | torch.device = "cpu",
) -> list[Path]:
    """Profile a few calls.

    Args:
        call: What to run; once before, so that nothing cold is traced.
        path: Where to, without a suffix; its folder exists.
        sort: A name in `SORTS`.
        top: Operations in the table.
        device: Where it computes.

    Returns:
        A Chrome trace (`.json`, for chrome://tracing or Perfetto) and the table of operations (`.txt`, times of all calls).
    """
    call()
    with torch_profiler(device, record_shapes=True, profile_memory=True) as found:
        for _ in range(_CALLS):
            call()
    trace, ops = path.with_name(path.name + ".json"), path.with_name(path.name + ".txt")
    found.export_chrome_trace(str(trace))
    told = json.loads(trace.read_text(encoding="utf-8"))
    for name in ("host_name", "traceName"):  # the machine's name, and the folder's
        told.pop(name, None)
    trace.write_text(json.dumps(told), encoding="utf-8")
    table = found.key_averages().table(sort_by=sort, row_limit=top, max_name_column_width=60)
    ops.write_text(f"{_CALLS} calls, by {sort}\n{table}\n", encoding="utf-8")
    return [trace, ops]
