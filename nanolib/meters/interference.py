"""Find what would disturb a measurement: other load, steal time, other GPU work, power caps."""

from __future__ import annotations

import os
import time
from typing import Any

from nanolib.meters.cpu_load import BUSY_SHARE, LEAST_S, CpuLoad, watch_cpus
from nanolib.meters.gpu_state import SLOWED_BY
from nanolib.meters.limits import usable_cpus
from nanolib.meters.machine import gpu_uuid

_WATCHED_S = 0.3
_STOLEN = 0.02  # of the CPU time, above which a hypervisor disturbs a timing
_GPU_BUSY_PERCENT = 10


def find_interference(device: str) -> list[str]:
    """Describe what would disturb a measurement now, one per line; empty on a quiet machine.

    Args:
        device: As `resolve_device` names it.
    """
    cpus = len(usable_cpus()) or os.cpu_count() or 1
    with watch_cpus() as load:
        time.sleep(max(_WATCHED_S, 1.1 * LEAST_S / cpus))
    lines = cpu_interference(load)
    if device.startswith("cuda"):
        lines += gpu_interference(gpu_uuid(device))
    return lines


def cpu_interference(load: CpuLoad) -> list[str]:
    """Describe other use of the CPUs."""
    if load.others is None or load.stolen is None:
        return ["the load by other processes is not known: this system counts no CPU time"]
    lines = []
    if load.others > BUSY_SHARE:
        lines.append(f"other processes use {load.others:.0%} of the CPUs")
    if load.stolen > _STOLEN:
        lines.append(f"a hypervisor takes {load.stolen:.0%} of the CPU time (steal)")
    return lines


def gpu_interference(uuid: str, nvml: Any = None) -> list[str]:
    """Describe other processes on a GPU, its utilization, a power cap, and what lowers its clock.

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
        return [f"other work on the GPU is not known ({error})"]
    lines = []

    def ask(name: str) -> Any:
        """Return None if the driver refuses: not every GPU supports every question."""
        try:
            return getattr(nvml, f"nvmlDeviceGet{name}")(gpu)
        except nvml.NVMLError:
            return None

    processes = [one.pid for one in ask("ComputeRunningProcesses") or []]
    if others := sum(pid != os.getpid() for pid in processes):
        lines.append(f"{others} other process(es) compute on the GPU")
    use = ask("UtilizationRates")
    if use is not None and use.gpu > _GPU_BUSY_PERCENT:
        lines.append(f"the GPU's utilization is {use.gpu} %")
    limit, usual = ask("EnforcedPowerLimit"), ask("PowerManagementDefaultLimit")
    if limit and usual and limit < usual:
        lines.append(f"the GPU's power is capped at {limit / 1e3:.0f} of {usual / 1e3:.0f} W")
    reasons = ask("CurrentClocksThrottleReasons") or 0
    if named := [name for bit, name in SLOWED_BY.items() if reasons & bit]:
        lines.append(f"the GPU's clock is lowered by {', '.join(named)}")
    return lines
