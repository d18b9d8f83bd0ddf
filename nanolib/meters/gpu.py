"""Read a GPU's clock, power and temperature during a timing, and find interference on the GPU."""

import contextlib
import functools
import os
import statistics
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pynvml

from nanolib.meters.machine import gpu_uuid

# NVML reports in these bits why a GPU's clock is lower than requested.
_SLOWED_BY = {
    0x08: "hardware slowdown",
    0x20: "heat",
    0x40: "heat (hardware limit)",
    0x80: "power brake",
}
_UNDER_LOAD = {0x04: "power cap", **_SLOWED_BY}


def _ask(nvml, name: str, *arguments):
    """Return a reading from the driver, or None if the GPU does not support the reading."""
    try:
        return getattr(nvml, f"nvmlDeviceGet{name}")(*arguments)
    except nvml.NVMLError:
        return None


def _name_reasons(reasons: int, names: Mapping[int, str]) -> str:
    return ", ".join(name for bit, name in names.items() if reasons & bit)


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
        if named := _name_reasons(self._reasons, _UNDER_LOAD):
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
    """Describe what disturbs a GPU: other processes, utilization, a power cap or a lowered clock.

    Args:
        uuid: UUID of the GPU, `GPU-…`.
        nvml: NVML module.
    """
    try:
        nvml.nvmlInit()
        gpu = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError as error:
        return [f"other work on the GPU was not measured ({error})"]
    lines = []
    processes = _ask(nvml, "ComputeRunningProcesses", gpu) or []
    if others := sum(process.pid != os.getpid() for process in processes):
        lines.append(f"{others} other process(es) compute on the GPU")
    use = _ask(nvml, "UtilizationRates", gpu)
    if use is not None and use.gpu > 10:
        lines.append(f"the GPU's utilization is {use.gpu} %")
    limit = _ask(nvml, "EnforcedPowerLimit", gpu)
    usual = _ask(nvml, "PowerManagementDefaultLimit", gpu)
    if limit and usual and limit < usual:
        lines.append(f"the GPU's power is capped at {limit / 1e3:.0f} W of {usual / 1e3:.0f} W")
    if named := _name_reasons(_ask(nvml, "CurrentClocksThrottleReasons", gpu) or 0, _SLOWED_BY):
        lines.append(f"the GPU's clock is lowered by {named}")
    return lines
