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


def find_interference(device: str, *, watch_s: float = WATCHED_S, nvml: Any = None) -> list[str]:
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

    def ask(name: str) -> Any:
        """None if the driver refuses: not every GPU tells everything."""
        try:
            return getattr(nvml, f"nvmlDeviceGet{name}")(gpu)
        except nvml.NVMLError:
            return None

    processes = [one.pid for one in ask("ComputeRunningProcesses") or []]
    if others := sum(pid != os.getpid() for pid in processes):
        lines.append(f"{others} other process(es) compute on the GPU")
    use = ask("UtilizationRates")
    if use is not None and use.gpu > _GPU_BUSY_PERCENT:
        lines.append(f"the GPU is {use.gpu} % in use")
    limit, usual = ask("EnforcedPowerLimit"), ask("PowerManagementDefaultLimit")
    if limit and usual and limit < usual:
        lines.append(f"the GPU's power is capped at {limit / 1e3:.0f} of {usual / 1e3:.0f} W")
    reasons = ask("CurrentClocksThrottleReasons") or 0
    if named := [name for bit, name in SLOWED_BY.items() if reasons & bit]:
        lines.append(f"the GPU's clock is lowered by {', '.join(named)}")
    return lines
