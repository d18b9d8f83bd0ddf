"""Find what disturbs a timing: load of the CPUs by others, quotas, and the state of a GPU.

with watch_cpus() as load:
    ...
load.others  # share of the CPUs that other processes used, such as 0.5
"""

import contextlib
import functools
import math
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import psutil
import pynvml

from nanolib.measurement import Flag
from nanolib.meters.machine import Quota, cpu_quotas, gpu_uuid, usable_cores, usable_cpus
from nanolib.paths import FIRST_VARIABLE

# Other processes disturb a timing if they use more than 10 % of the CPUs.
BUSY_SHARE = 0.10
# Linux includes the time of guest systems in `user`.
_COUNTED = ("user", "system", "idle", "nice", "iowait", "irq", "softirq", "steal")
_WATCHED_S = 0.3
# A hypervisor disturbs a timing if it takes more than 2 % of the CPU time.
_STOLEN = 0.02
# CPU time advances in steps of 10 ms, so a share of less than half a second is inaccurate.
_LEAST_S = 0.5


# NVML reports in these bits why a GPU's clock is lower than requested.
_SLOWED_BY = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "heat",
    0x40: "heat (hardware limit)",
    0x80: "power brake",
}


class CpuTimes(NamedTuple):
    """CPU time until a moment, summed over the CPUs that this process may use, s.

    Attributes:
        total: Time in all categories.
        idle: Time without work.
        stolen: Time that a hypervisor took.
        ours: CPU time of the process that began this command and of its descendants.
        quotas: CPU quotas of this process.
    """

    total: float
    idle: float
    stolen: float
    ours: float
    quotas: Sequence[Quota]


@dataclass
class CpuLoad:
    """Load of the CPUs during a span of time.

    Attributes:
        others: Share of the CPUs that other processes used, or None if the share is not known.
        stolen: Share of the CPUs that a hypervisor took, or None if the share is not known.
        throttled_by: CPU quota that disturbed timings, because the kernel paused this process in
            more than 10 % of the quota's periods. Without such a quota, the string is empty.
    """

    others: float | None = None
    stolen: float | None = None
    throttled_by: str = ""

    @property
    def is_busy(self) -> bool | None:
        """Whether others took enough CPU time to disturb a timing, or None if not known."""
        return None if self.others is None else self.others + self.stolen > BUSY_SHARE

    def details(self) -> dict[str, Any]:
        """Return the row details `others_share`, and `throttled_by` if a quota disturbs timings."""
        share = None if self.others is None else min(1.0, self.others + self.stolen)
        throttled = {"throttled_by": self.throttled_by} if self.throttled_by else {}
        return {"others_share": share} | throttled


def interference_flags(details: Mapping[str, Any]) -> tuple[Flag, ...]:
    """Return the flags of a timing with the details of `CpuLoad` or `GpuState`."""
    is_busy = (details.get("others_share") or 0.0) > BUSY_SHARE
    flags = {Flag.BUSY_MACHINE: is_busy, Flag.THROTTLED: "throttled_by" in details}
    return tuple(flag for flag, is_set in flags.items() if is_set)


def shortest_watch_s() -> float:
    """Return the shortest time in which the load of the CPUs can be measured, s."""
    return max(_WATCHED_S, 1.1 * _LEAST_S / usable_cores())


@contextlib.contextmanager
def watch_cpus() -> Iterator[CpuLoad]:
    """Measure the load of the CPUs within the context. The load is set when the context ends."""
    load, before = CpuLoad(), cpu_times()
    try:
        yield load
    finally:
        vars(load).update(vars(load_between(before, cpu_times())))


def cpu_times() -> CpuTimes:
    """Read the CPU time that processes have used until now."""
    children = os.times()
    ours = time.process_time() + children.children_user + children.children_system
    ours += _seconds_of(process for process in _family() if process.pid != os.getpid())
    every, mine = psutil.cpu_times(percpu=True), usable_cpus()
    # psutil's list leaves out offline CPUs, so a CPU's index may differ from its number.
    is_complete = mine and os.sysconf("SC_NPROCESSORS_CONF") == len(every)
    chosen = [every[number] for number in mine] if is_complete else every

    def spent(*names: str) -> float:
        return sum(getattr(cpu, name, 0.0) for cpu in chosen for name in names)

    return CpuTimes(spent(*_COUNTED), spent("idle", "iowait"), spent("steal"), ours, cpu_quotas())


def load_between(before: CpuTimes, after: CpuTimes) -> CpuLoad:
    """Compute the load of the CPUs between two moments."""
    total, idle, stolen, ours = np.subtract(after[:4], before[:4]).tolist()
    load = CpuLoad()
    if total > _LEAST_S:
        load.others = min(1.0, max(0.0, (total - idle - stolen - ours) / total))
        load.stolen = stolen / total
    for old, new in zip(before.quotas, after.quotas, strict=False):
        if new.throttled - old.throttled > BUSY_SHARE * (new.periods - old.periods):
            load.throttled_by = f"a CPU quota of {new.cores:g} cores"
    return load


_REST_S, _LOOK_S, _TICKS_S = 10.0, 0.1, 0.02


def wait_for_compilers() -> None:
    """Wait, at most 10 s, until torch's compile processes are idle.

    torch starts one process per core for the first compilation. A compile process may still be
    starting when the compilation is over, and would disturb a timing.
    """
    if "torch._inductor.async_compile" not in sys.modules:
        return
    end, before = time.monotonic() + _REST_S, -math.inf
    while time.monotonic() < end:
        used_s = _seconds_of(psutil.Process().children(recursive=True))
        if used_s - before <= _TICKS_S:
            return
        before = used_s
        time.sleep(_LOOK_S)


def _seconds_of(processes: Iterable[psutil.Process]) -> float:
    """Return the CPU time of processes and of their ended children, s."""
    seconds = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):  # A parent's time includes that of ended children.
            # The first four times are user and system, and the same of ended children.
            seconds += sum(process.cpu_times()[:4])
    return seconds


def _family() -> list[psutil.Process]:
    """List the processes of this command, such as `nano`, papermill, kernel, worker and ranks."""
    first = own = psutil.Process()
    number = int(os.environ.setdefault(FIRST_VARIABLE, str(own.pid)))
    with contextlib.suppress(psutil.Error):
        first = next((each for each in own.parents() if each.pid == number), own)
    return [first, *first.children(recursive=True)]


def find_interference(device: str) -> list[str]:
    """Describe what would disturb a measurement on a device now, in one line per cause."""
    with watch_cpus() as load:
        time.sleep(shortest_watch_s())
    lines = cpu_interference(load)
    if device.startswith("cuda"):
        lines += gpu_interference(gpu_uuid(device))
    return lines


def cpu_interference(load: CpuLoad) -> list[str]:
    """Describe the load of other processes and of a hypervisor, in one line each."""
    if load.others is None:
        return ["the load of other processes was not measured: this system does not count CPU time"]
    lines = []
    if load.others > BUSY_SHARE:
        lines.append(f"other processes use {load.others:.0%} of the CPUs")
    if load.stolen > _STOLEN:
        lines.append(f"a hypervisor takes {load.stolen:.0%} of the CPU time (steal)")
    return lines


def _ask(nvml, name: str, *arguments):
    """Return a reading from the driver, or None if the GPU does not support the reading."""
    try:
        return getattr(nvml, f"nvmlDeviceGet{name}")(*arguments)
    except nvml.NVMLError:
        return None


def _name_reasons(reasons: int) -> str:
    return ", ".join(name for bit, name in _SLOWED_BY.items() if reasons & bit)


def gpu_watts(nvml, gpu) -> float:
    """Read the present power of a GPU, W.

    If the driver does not report the present power, nanolib reads the power usage, which newer GPUs
    average over a second.

    Raises:
        NVMLError: The driver does not report the power.
    """
    with contextlib.suppress(nvml.NVMLError):
        (field,) = nvml.nvmlDeviceGetFieldValues(gpu, [nvml.NVML_FI_DEV_POWER_INSTANT])
        if not field.nvmlReturn and field.value.uiVal > 0:
            return field.value.uiVal / 1e3
    return nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3


class GpuState:
    """Record the readings of one GPU's sensors. Without a driver, there are no readings.

    Args:
        device: Device string of the GPU in torch, such as `cuda:0`.
        nvml: NVML module.
    """

    def __init__(self, device: str, nvml):
        self._device, self._nvml = device, nvml
        self._seen = defaultdict(list)  # name of a sensor → its readings
        self._reasons = 0  # bits of all reasons for a low clock

    def read(self) -> None:
        """Read once each sensor that the driver supports."""
        gpu, nvml = self._gpu, self._nvml
        if gpu is None:
            return
        readings = {
            "clock_mhz": _ask(nvml, "ClockInfo", gpu, nvml.NVML_CLOCK_SM),
            "temperature_c": _ask(nvml, "Temperature", gpu, nvml.NVML_TEMPERATURE_GPU),
        }
        with contextlib.suppress(nvml.NVMLError):
            readings["power_w"] = gpu_watts(nvml, gpu)
        for name, reading in readings.items():
            if reading is not None:
                self._seen[name].append(reading)
        self._reasons |= _ask(nvml, "CurrentClocksThrottleReasons", gpu) or 0

    def summary(self) -> dict[str, Any]:
        """Return the medians of the readings, and the reasons for a low clock."""
        found = {name: float(statistics.median(seen)) for name, seen in self._seen.items()}
        if named := _name_reasons(self._reasons):
            found["throttled_by"] = named
        return found

    @functools.cached_property
    def _gpu(self):
        """Handle of the GPU, or None without a driver."""
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlInit()
            return self._nvml.nvmlDeviceGetHandleByUUID(gpu_uuid(self._device))
        return None


def gpu_interference(uuid: str, nvml=pynvml) -> list[str]:
    """Describe what disturbs the GPU `uuid`: others' work, a power cap or a lowered clock."""
    try:
        nvml.nvmlInit()
        gpu = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError as error:
        return [f"other work on the GPU was not measured ({error})"]
    lines, use = [], _ask(nvml, "UtilizationRates", gpu)
    if use is not None and use.gpu > 10:
        lines.append(f"the GPU's utilization is {use.gpu} %")
    limit = _ask(nvml, "EnforcedPowerLimit", gpu)
    usual = _ask(nvml, "PowerManagementDefaultLimit", gpu)
    if limit and usual and limit < usual:
        lines.append(f"the GPU's power is capped at {limit / 1e3:.0f} W of {usual / 1e3:.0f} W")
    if named := _name_reasons(_ask(nvml, "CurrentClocksThrottleReasons", gpu) or 0):
        lines.append(f"the GPU's clock is lowered by {named}")
    return lines
