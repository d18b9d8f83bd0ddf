"""Read power from sensors of NVIDIA, AMD, Apple and Linux (RAPL), or estimate the power.

A source has these attributes: `name` is the method of the rows, such as `nvml_counter`. `of` is the
device that the source covers, such as `gpu 0`. `period_s` is the time between changes of the
reading, s. `provenance` is `measured`, `replayed` or `estimated`. The method `read` returns a
`Reading` of watts, or of the joules of a counter that only grows. A failed reading is a gap, never
zero. A reading of 0 W is a gap too, because a running device always draws power.
"""

import importlib
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import psutil
import pynvml

from nanolib.measurement import Provenance, one_line
from nanolib.meters.interference import gpu_watts

_RAPL_PERIOD_S = 0.001
# AMD's compute driver creates this file.
_KFD = Path("/dev/kfd")
# These counters of an Apple chip measure parts that do not overlap.
_APPLE_PARTS = ("cpu_total_mj", "gpu_mj", "ane_mj", "dram_mj")
# Smallest and largest power, W. Without a sensor, the power of idle and busy cores is not known, so
# the ranges are wide.
_IDLE_W, _IDLE_W_PER_CORE = np.array([1.0, 60.0]), np.array([0.1, 3.0])
_BUSY_W_PER_CORE = np.array([1.0, 25.0])


class Reading(NamedTuple):
    """One reading of a source, with NaN for each value that the source could not read.

    Attributes:
        t_s: Time on the clock `time.monotonic`, s.
        watts: Power, W.
        joules: Value of the energy counter, J.
        low: Lower end of an estimated power, W.
        high: Upper end of an estimated power, W.
    """

    t_s: float
    watts: float = math.nan
    joules: float = math.nan
    low: float = math.nan
    high: float = math.nan


@dataclass
class Sensor:
    """A source of readings from a driver.

    Attributes:
        of: Device that the sensor covers.
        name: Method of the rows.
        unit: Field of `Reading` that the sensor sets, `joules` or `watts`.
        ask: Function that returns the counter in J, or the power in W.
        period_s: Time between changes of the reading, s.
    """

    of: str
    name: str
    unit: str
    ask: Callable[[], float]
    period_s: float = 0.1
    provenance: ClassVar = Provenance.MEASURED

    def read(self) -> Reading:
        """Read the sensor. If the driver refuses, the reading has no value."""
        now = time.monotonic()
        try:
            return Reading(now, **{self.unit: self.ask()})
        except Exception:  # Each driver has errors of its own. A failed reading is a gap.
            return Reading(now)


def _first_working(*sensors: Sensor) -> Sensor:
    """Return the first sensor that works.

    A driver may return 0 for an unsupported reading. Therefore, nanolib skips a sensor that reads 0
    if there is another sensor.

    Raises:
        OSError: No sensor works.
    """
    *others, last = sensors
    for sensor in others:
        if getattr(sensor.read(), sensor.unit) > 0:
            return sensor
    try:
        last.ask()
    except Exception as error:
        why = one_line(error)
        raise OSError(f"{last.of} reports neither energy nor power ({why})") from None
    return last


def _gpu_sensor(
    driver: str, index: int, joules: Callable[[], float], watts: Callable[[], float]
) -> Sensor:
    """Return the sensor of a GPU: the energy counter, or the power if there is no counter."""
    return _first_working(
        Sensor(f"gpu {index}", f"{driver}_counter", "joules", joules),
        Sensor(f"gpu {index}", f"{driver}_power", "watts", watts),
    )


def _nvidia(nvml, only: str) -> Iterator[Sensor]:
    def joules(gpu) -> float:
        return nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3

    nvml.nvmlInit()
    for index in range(nvml.nvmlDeviceGetCount()):
        gpu = nvml.nvmlDeviceGetHandleByIndex(index)
        if not only or str(nvml.nvmlDeviceGetUUID(gpu)) == only:
            watts = partial(gpu_watts, nvml, gpu)
            yield _gpu_sensor("nvml", index, partial(joules, gpu), watts)


def _import_extra(name: str, extra: str):
    try:
        return importlib.import_module(name)
    except Exception as error:  # Without its driver's library, amdsmi raises a KeyError.
        why = f"{name} cannot be imported ({type(error).__name__}: {error})"
        raise OSError(f"{why}; run pip install -e '.[{extra}]' in the checkout") from None


def _amd(amdsmi) -> Iterator[Sensor]:
    if amdsmi is None:
        if not _KFD.exists():
            raise OSError("no AMD GPU (no /dev/kfd)")
        amdsmi = _import_extra("amdsmi", "amd")

    def joules(gpu) -> float:
        found = amdsmi.amdsmi_get_energy_count(gpu)
        # Older libraries call the counter `power`. Each step is `counter_resolution` µJ.
        steps = _first_number(found, "energy_accumulator", "power")
        return steps * _first_number(found, "counter_resolution") / 1e6

    def watts(gpu) -> float:
        found = amdsmi.amdsmi_get_power_info(gpu)
        return _first_number(found, "current_socket_power", "average_socket_power")

    amdsmi.amdsmi_init()
    for index, gpu in enumerate(amdsmi.amdsmi_get_processor_handles()):
        yield _gpu_sensor("amdsmi", index, partial(joules, gpu), partial(watts, gpu))


def _first_number(found: Mapping[str, Any], *names: str) -> float:
    """Return the first field above 0, because amdsmi gives "N/A" or 0 for a missing value."""
    for name in names:
        value = found.get(name)
        if isinstance(value, int | float) and value > 0:
            return float(value)
    raise ValueError(f"no value of {' or '.join(names)}")


def _apple(apple) -> Iterator[Sensor]:
    """Yield a sensor that adds up the counters of processor, GPU, neural engine and memory."""
    if apple is None:
        if (sys.platform, platform.machine()) != ("darwin", "arm64"):
            raise OSError("this machine is not a Mac with Apple silicon")
        apple = _import_extra("zeus_apple_silicon", "apple")
    monitor = apple.AppleEnergyMonitor()

    def joules() -> float:
        metrics = monitor.get_cumulative_energy()
        return sum(getattr(metrics, name, None) or 0 for name in _APPLE_PARTS) / 1e3

    yield _first_working(Sensor("soc", "ioreport", "joules", joules))


class _Zone:
    """A RAPL counter that continues when its register wraps to zero."""

    def __init__(self, folder: Path):
        self._counter = folder / "energy_uj"
        self._range_j = int((folder / "max_energy_range_uj").read_text()) / 1e6 or math.inf
        self._read_j = self._joules = 0.0

    def joules(self) -> float:
        """Return the counted energy, J. A reset of the counter is a jump that `count` refuses."""
        read_j = int(self._counter.read_text()) / 1e6
        self._joules += (read_j - self._read_j) % self._range_j
        self._read_j = read_j
        return self._joules


def _rapl(root: Path) -> Iterator[Sensor]:
    """Yield a sensor per CPU package. The sensor adds the energy of the package's DRAM.

    nanolib skips the counters of the cores, which are part of a package. nanolib also skips the
    counter `psys`, which includes the packages.
    """
    folders = [counter.parent for counter in sorted(root.glob("*-rapl:*/energy_uj"))]
    names = {folder: (folder / "name").read_text().strip() for folder in folders}
    packages = [folder for folder in folders if names[folder].startswith("package")]
    if not packages:
        raise OSError("Linux shows no power domain of a processor (common in VMs)")
    for package in packages:
        counter = package / "energy_uj"
        if not os.access(counter, os.R_OK):
            remedy = f"run sudo chmod a+r {root}/*-rapl:*/energy_uj (a risk: all users can read it)"
            raise OSError(f"only root can read {counter}; {remedy}")
        inside = package.parent.glob(f"{package.name}:*")
        dram = [folder for folder in inside if names.get(folder) == "dram"]
        zones = [_Zone(folder) for folder in (package, *dram)]
        name = "rapl (package + dram)" if dram else "rapl (package)"
        ask = lambda zones=zones: sum(zone.joules() for zone in zones)  # noqa: E731
        yield _first_working(Sensor(names[package], name, "joules", ask, _RAPL_PERIOD_S))


class Found(NamedTuple):
    """The power sensors of this machine.

    Attributes:
        sources: Sensors that work. No two sensors measure the same energy.
        missing: Sensor interface → why its sensors are missing and, if possible, what to do.
    """

    sources: list[Sensor]
    missing: dict[str, str]


def find_sources(
    rapl_root: Path = Path("/sys/class/powercap"),
    nvml=pynvml,
    amdsmi=None,
    apple=None,
    gpu: str = "",
) -> Found:
    """Find the power sensors of this machine.

    Args:
        rapl_root: Folder in which Linux shows its power domains.
        nvml: Module for NVIDIA GPUs.
        amdsmi: Module for AMD GPUs, `amdsmi` by default.
        apple: Module for Apple silicon, `zeus_apple_silicon` by default.
        gpu: UUID of the only NVIDIA GPU to read, or an empty string to read all of them. The driver
            and this process may number the GPUs differently.
    """
    found = Found([], {})
    for kind, sensors in {
        "NVIDIA (NVML)": _nvidia(nvml, gpu),
        "AMD (amdsmi)": _amd(amdsmi),
        "Apple (IOReport)": _apple(apple),
        "RAPL (powercap)": _rapl(rapl_root),
    }.items():
        try:
            for sensor in sensors:
                found.sources.append(sensor)
        except Exception as error:  # Each driver has errors of its own.
            found.missing[kind] = one_line(error)
    return found


class EstimateSource:
    """Estimate the processor's power from the utilization of its cores, as a range."""

    name, of, period_s, provenance = "utilisation", "processor", 0.1, Provenance.ESTIMATED

    def __init__(self):
        self._cores = os.cpu_count()
        self._share, self._before = math.nan, self._cpu_seconds()
        time.sleep(self.period_s)  # The first reading is a mean over one period too.
        self.read()

    def _cpu_seconds(self) -> np.ndarray:
        """Return the busy time and the whole time of all cores since the system started, s."""
        times = psutil.cpu_times()
        whole = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        return np.array([whole - times.idle - getattr(times, "iowait", 0.0), whole])

    def read(self) -> Reading:
        """Interpolate between the power of idle and busy cores, by the share of busy cores.

        The share is a mean over at least half a period.
        """
        now = self._cpu_seconds()
        busy_s, whole_s = now - self._before
        if whole_s >= self._cores * self.period_s / 2:
            self._share, self._before = busy_s / whole_s, now
        busy = _BUSY_W_PER_CORE * self._share * self._cores
        low, high = (_IDLE_W + _IDLE_W_PER_CORE * self._cores + busy).tolist()
        return Reading(time.monotonic(), watts=math.sqrt(low * high), low=low, high=high)
