"""The GPUs of this machine as places for runs: one run on each at a time, named by UUID, so that no renumbering mixes them up."""

from __future__ import annotations

from nanolib.meters.machine import gpu_uuid, resolve_device
from nanolib.run.suite.jobs import Job

VISIBLE = "CUDA_VISIBLE_DEVICES"


def gpu_places() -> list[dict[str, str]]:
    """For each GPU that this process may use, the environment of a process that sees it alone."""
    import torch  # looking for GPUs is all that it is for here

    return [{VISIBLE: gpu_uuid(f"cuda:{index}")} for index in range(torch.cuda.device_count())]


def on_any_gpu(job: Job) -> bool:
    """Whether the job measures on one GPU, and it may be any."""
    device = getattr(job.params, "device", "cpu")
    several = max(getattr(job.params, "world_sizes", [1])) > 1
    return device in ("auto", "cuda") and not several and resolve_device(device).startswith("cuda")
