"""What a GPU did while something was timed: its clock, power and temperature, and why it lowered its clock."""

from __future__ import annotations

import contextlib
import functools
import operator
import statistics
from collections import defaultdict
from typing import Any

from nanolib.meters.machine import gpu_uuid

# NVML's reasons for a lower clock that are no choice of the user's, by their bits.
SLOWED_BY = {
    0x08: "hardware slowdown",
    0x20: "heat",
    0x40: "heat, in hardware",
    0x80: "power brake",
}
_UNDER_LOAD = {0x04: "power cap", **SLOWED_BY}


def instant_watts(nvml: Any, gpu: Any) -> float:
    """The power of this moment, W.

    Raises:
        NVMLError: The driver tells none.
    """
    (field,) = nvml.nvmlDeviceGetFieldValues(gpu, [nvml.NVML_FI_DEV_POWER_INSTANT])
    if field.nvmlReturn:
        raise nvml.NVMLError(field.nvmlReturn)
    return field.value.uiVal / 1e3


def gpu_watts(nvml: Any, gpu: Any) -> float:
    """The power of this moment, W; where the driver tells none, or 0, its mean over a second (from Ampere on).

    Raises:
        NVMLError: It tells neither.
    """
    with contextlib.suppress(nvml.NVMLError):
        if (watts := instant_watts(nvml, gpu)) > 0:
            return watts
    return nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3


class GpuState:
    """Reads one GPU's sensors; where its driver tells nothing, it tells nothing either.

    Args:
        device: As torch names it.
        nvml: The module to ask; `pynvml` by default.
    """

    def __init__(self, device: str, nvml: Any = None) -> None:
        self._device = str(device)
        self._nvml = nvml
        self._seen: defaultdict[str, list[float]] = defaultdict(list)

    def read(self) -> None:
        """Read all sensors once; what one of them refuses is left out."""
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
        """Medians over the readings, the lowest clock, and by what it was lowered; empty where nothing was told."""
        seen = dict(self._seen)
        reasons = functools.reduce(operator.or_, seen.pop("reasons", []), 0)
        told: dict[str, Any] = {
            name: float(statistics.median(values)) for name, values in seen.items() if values
        }
        if clocks := seen.get("clock_mhz"):
            told["clock_least_mhz"] = float(min(clocks))
        if named := [name for bit, name in _UNDER_LOAD.items() if reasons & bit]:
            told["throttled_by"] = ", ".join(named)
        return told

    @functools.cached_property
    def _gpu(self) -> Any:
        """Its handle; None where the driver tells nothing of it."""
        if self._nvml is None:
            import pynvml  # most machines have no driver for it

            self._nvml = pynvml
        try:
            self._nvml.nvmlInit()
            return self._nvml.nvmlDeviceGetHandleByUUID(gpu_uuid(self._device))
        except self._nvml.NVMLError:
            return None
