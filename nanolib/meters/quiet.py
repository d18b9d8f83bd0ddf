"""Whether a machine is quiet before something is measured on it: other load, time stolen by a hypervisor, other GPU work, caps."""

from __future__ import annotations

import os
import time
from typing import Any

import psutil

from nanolib.meters.gpu_state import SLOWED_BY
from nanolib.meters.machine import gpu_uuid

WATCHED_S = 0.3
_BUSY, _STOLEN = 0.10, 0.02  # shares of all CPUs, above which a timing suffers
_GPU_BUSY_PERCENT = 10


def disturbances(device: str, *, watch_s: float = WATCHED_S, nvml: Any = None) -> list[str]:
    """What would disturb a measurement that began now, a line each; empty on a quiet machine.

    Args:
        device: As `resolve_device` names it.
        watch_s: How long to watch the CPUs, s.
        nvml: The module to ask about NVIDIA's GPUs; `pynvml` by default.
    """
    lines = _of_cpus(watch_s)
    if device.startswith("cuda"):
        lines += of_gpu(gpu_uuid(device), nvml)
    return lines


def _of_cpus(watch_s: float) -> list[str]:
    own, before = time.process_time(), psutil.cpu_times()
    time.sleep(watch_s)
    after = psutil.cpu_times()
    spent = {name: getattr(after, name) - getattr(before, name) for name in after._fields}
    return of_cpus(spent, time.process_time() - own)


def of_cpus(spent: dict[str, float], own: float) -> list[str]:
    """Of CPU seconds by kind, as the system counts them, and those of this process."""
    total = sum(
        spent[name] for name in ("user", "system", "idle", "nice", "iowait", "irq", "softirq", "steal") if name in spent
    )
    if total <= 0:
        return []
    idle, stolen = spent["idle"] + spent.get("iowait", 0.0), spent.get("steal", 0.0)
    others = (total - idle - stolen - own) / total
    lines = [f"other processes use {others:.0%} of the CPUs"] if others > _BUSY else []
    return lines + (
        [f"a hypervisor takes {stolen / total:.0%} of the CPU time (steal)"] if stolen / total > _STOLEN else []
    )


def of_gpu(uuid: str, nvml: Any = None) -> list[str]:
    """Other processes on a GPU, its use, a power cap, and what lowers its clock.

    Args:
        uuid: `GPU-…`.
        nvml: The module; `pynvml` by default.
    """
    if nvml is None:
        import pynvml as nvml  # most machines have no driver for it
    try:
        nvml.nvmlInit()
        gpu = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError as error:
        return [f"what else the GPU does is not known ({error})"]
    lines = []
    for look in (_other_processes, _use, _cap, _throttle):
        try:
            lines += look(nvml, gpu)
        except nvml.NVMLError:  # not every GPU tells everything: the next is asked
            continue
    return lines


def _other_processes(nvml: Any, gpu: Any) -> list[str]:
    others = [one.pid for one in nvml.nvmlDeviceGetComputeRunningProcesses(gpu) if one.pid != os.getpid()]
    return [f"{len(others)} other process(es) compute on the GPU"] if others else []


def _use(nvml: Any, gpu: Any) -> list[str]:
    percent = nvml.nvmlDeviceGetUtilizationRates(gpu).gpu
    return [f"the GPU is {percent} % in use"] if percent > _GPU_BUSY_PERCENT else []


def _cap(nvml: Any, gpu: Any) -> list[str]:
    limit, usual = nvml.nvmlDeviceGetEnforcedPowerLimit(gpu), nvml.nvmlDeviceGetPowerManagementDefaultLimit(gpu)
    return [f"the GPU's power is capped at {limit / 1e3:.0f} of {usual / 1e3:.0f} W"] if limit < usual else []


def _throttle(nvml: Any, gpu: Any) -> list[str]:
    reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
    named = [name for bit, name in SLOWED_BY.items() if reasons & bit]
    return [f"the GPU's clock is lowered by {', '.join(named)}"] if named else []
