"""Whether a machine is quiet before something is measured on it: other load, time stolen by a hypervisor, other GPU work, caps."""

from __future__ import annotations

import os
import time
from typing import Any

from nanolib.meters.cpu_load import BUSY_SHARE, LEAST_S, CpuLoad, watched_cpus
from nanolib.meters.gpu_state import SLOWED_BY
from nanolib.meters.limits import usable_cpus
from nanolib.meters.machine import gpu_uuid

WATCHED_S = 0.3
_STOLEN = 0.02  # of the CPUs' time, above which a timing suffers
_GPU_BUSY_PERCENT = 10


def disturbances(device: str, *, watch_s: float = WATCHED_S, nvml: Any = None) -> list[str]:
    """What would disturb a measurement that began now, a line each; empty on a quiet machine.

    Args:
        device: As `resolve_device` names it.
        watch_s: How long to watch the CPUs, s; longer where they are too few for their clock.
        nvml: The module to ask about NVIDIA's GPUs; `pynvml` by default.
    """
    lines = _of_cpus(watch_s)
    if device.startswith("cuda"):
        lines += of_gpu(gpu_uuid(device), nvml)
    return lines


def _of_cpus(watch_s: float) -> list[str]:
    with watched_cpus() as load:
        time.sleep(max(watch_s, 1.1 * LEAST_S / (len(usable_cpus()) or os.cpu_count() or 1)))
    return of_cpus(load)


def of_cpus(load: CpuLoad) -> list[str]:
    """What the CPUs did while nothing was measured yet."""
    if load.others is None or load.stolen is None:
        return ["what other processes do is not known: this system counts no CPU time"]
    lines = (
        [f"other processes use {load.others:.0%} of the CPUs"] if load.others > BUSY_SHARE else []
    )
    stolen = f"a hypervisor takes {load.stolen:.0%} of the CPU time (steal)"
    return [*lines, stolen] if load.stolen > _STOLEN else lines


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
    others = [
        one.pid for one in nvml.nvmlDeviceGetComputeRunningProcesses(gpu) if one.pid != os.getpid()
    ]
    return [f"{len(others)} other process(es) compute on the GPU"] if others else []


def _use(nvml: Any, gpu: Any) -> list[str]:
    percent = nvml.nvmlDeviceGetUtilizationRates(gpu).gpu
    return [f"the GPU is {percent} % in use"] if percent > _GPU_BUSY_PERCENT else []


def _cap(nvml: Any, gpu: Any) -> list[str]:
    limit, usual = (
        nvml.nvmlDeviceGetEnforcedPowerLimit(gpu),
        nvml.nvmlDeviceGetPowerManagementDefaultLimit(gpu),
    )
    return (
        [f"the GPU's power is capped at {limit / 1e3:.0f} of {usual / 1e3:.0f} W"]
        if limit < usual
        else []
    )


def _throttle(nvml: Any, gpu: Any) -> list[str]:
    reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
    named = [name for bit, name in SLOWED_BY.items() if reasons & bit]
    return [f"the GPU's clock is lowered by {', '.join(named)}"] if named else []
