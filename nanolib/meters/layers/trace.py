"""Where the time of one call goes, operation by operation: torch's profiler, on demand and outside any timing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

_CALLS = 3
_SILENT = "6"  # of the tracer's own levels; it announces each beginning and end


def torch_profiler(device: str | torch.device, **options: bool) -> profile:
    """Make torch's profiler for a device; its tracer announces nothing."""
    os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)
    activities = [ProfilerActivity.CPU]
    if torch.device(device).type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities, **options)


def write_trace(call: Callable[[], object], path: Path, device: str | torch.device = "cpu") -> None:
    """Write a Chrome trace of a few calls, for chrome://tracing or Perfetto.

    Args:
        call: What to run; once before, so that nothing cold is traced.
        path: The file, `.json`; its folder exists.
        device: Where it computes.
    """
    call()
    with torch_profiler(device, record_shapes=True, profile_memory=True) as found:
        for _ in range(_CALLS):
            call()
    found.export_chrome_trace(str(path))
    trace = json.loads(path.read_text(encoding="utf-8"))
    for name in ("host_name", "traceName"):  # the machine's name, and the folder's
        trace.pop(name, None)
    path.write_text(json.dumps(trace), encoding="utf-8")
