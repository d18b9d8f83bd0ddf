"""Read a GPU's clock, power and temperature during a timing, and find what disturbs it."""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import statistics
from collections import defaultdict
from typing import Any

from nanolib.meters.machine import gpu_uuid

# NVML's reasons for a lower clock that you did not choose, by their bits.
_SLOWED_BY = {
    0x08: "hardware slowdown",
    0x20: "heat",
    0x40: "heat, in hardware",
    0x80: "power brake",
}
_UNDER_LOAD = {0x04: "power cap", **_SLOWED_BY}
_BUSY_PERCENT = 10


def _pynvml() -> Any:
    import pynvml  # only NVIDIA GPUs need it

    return pynvml


def instant_watts(nvml: Any, gpu: Any) -> float:
    """Read the power now, W.

    Raises:
        NVMLError: The driver does not report it.
    """
    (field,) = nvml.nvmlDeviceGetFieldValues(gpu, [nvml.NVML_FI_DEV_POWER_INSTANT])
    if field.nvmlReturn:
        raise nvml.NVMLError(field.nvmlReturn)
    return field.value.uiVal / 1e3


def gpu_watts(nvml: Any, gpu: Any) -> float:
    """Read the power now, W; if it is not reported, or 0, its mean over a second (since Ampere).

    Raises:
        NVMLError: The driver reports neither.
    """
    with contextlib.suppress(nvml.NVMLError):
        if (watts := instant_watts(nvml, gpu)) > 0:
            return watts
    return nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3


class GpuState:
    """Read one GPU's sensors; without an answer of its driver there are no readings.

    Args:
        device: As torch names it.
        nvml: The module to ask; `pynvml` by default.
    """

    def __init__(self, device: str, nvml: Any = None) -> None:
        self._device, self._nvml = device, nvml or _pynvml()
        self._seen: defaultdict[str, list[float]] = defaultdict(list)

    def read(self) -> None:
        """Read each sensor once; a sensor that the driver refuses is left out."""
        gpu, nvml = self._gpu, self._nvml
        if gpu is None:
            return
        for name, look in {
            "clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
            "power_w": lambda: gpu_watts(nvml, gpu),
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
            "reasons": lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu),
        }.items():
            with contextlib.suppress(nvml.NVMLError):
                self._seen[name].append(look())

    def summary(self) -> dict[str, Any]:
        """Return the readings' medians, the lowest clock and what lowered it."""
        seen = dict(self._seen)
        reasons = functools.reduce(operator.or_, seen.pop("reasons", []), 0)
        found: dict[str, Any] = {
            name: float(statistics.median(values)) for name, values in seen.items() if values
        }
        if clocks := seen.get("clock_mhz"):
            found["clock_least_mhz"] = float(min(clocks))
        if named := [name for bit, name in _UNDER_LOAD.items() if reasons & bit]:
            found["throttled_by"] = ", ".join(named)
        return found

    @functools.cached_property
    def _gpu(self) -> Any:
        """The GPU's handle; None if the driver does not answer."""
        try:
            self._nvml.nvmlInit()
            return self._nvml.nvmlDeviceGetHandleByUUID(gpu_uuid(self._device))
        except self._nvml.NVMLError:
            return None


def gpu_interference(uuid: str, nvml: Any = None) -> list[str]:
    """Describe other processes on a GPU, its utilization, a power cap, and what lowers its clock.

    Args:
        uuid: `GPU-…`.
        nvml: The module to ask; `pynvml` by default.
    """
    nvml = nvml or _pynvml()
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

    processes = ask("ComputeRunningProcesses") or []
    if others := sum(one.pid != os.getpid() for one in processes):
        lines.append(f"{others} other process(es) compute on the GPU")
    use = ask("UtilizationRates")
    if use is not None and use.gpu > _BUSY_PERCENT:
        lines.append(f"the GPU's utilization is {use.gpu} %")
    limit, usual = ask("EnforcedPowerLimit"), ask("PowerManagementDefaultLimit")
    if limit and usual and limit < usual:
        lines.append(f"the GPU's power is capped at {limit / 1e3:.0f} of {usual / 1e3:.0f} W")
    reasons = ask("CurrentClocksThrottleReasons") or 0
    if named := [name for bit, name in _SLOWED_BY.items() if reasons & bit]:
        lines.append(f"the GPU's clock is lowered by {', '.join(named)}")
    return lines
