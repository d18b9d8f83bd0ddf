"""Find power sensors: NVML for NVIDIA, amdsmi for AMD, IOReport for Apple, RAPL for processors."""

import contextlib
import importlib
import math
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from nanolib.measurement import Provenance
from nanolib.meters.energy.source import Reading
from nanolib.meters.gpu import gpu_watts

_RAPL_ROOT = Path("/sys/class/powercap")
_RAPL_PERIOD_S = 0.001
# AMD's compute driver creates this file.
_KFD = Path("/dev/kfd")
# These counters of an Apple chip measure parts that do not overlap.
_APPLE_PARTS = ("cpu_total_mj", "gpu_mj", "ane_mj", "dram_mj")


@dataclass
class Sensor:
    """A source of readings from a driver. A reading that the driver refuses is a gap.

    Attributes:
        of: Device that the sensor covers.
        refusals: Types of the exceptions that the driver raises if it has no reading.
        name: Method of the rows.
        unit: Field of `Reading` that the sensor sets, `joules` or `watts`.
        ask: Function that returns the counter in J, or the power in W.
        period_s: Time between changes of the reading, s.
        provenance: Provenance of the rows.
    """

    of: str
    refusals: tuple[type[Exception], ...]
    name: str
    unit: str
    ask: Callable[[], float]
    period_s: float = 0.1
    provenance: Provenance = Provenance.MEASURED

    def read(self) -> Reading:
        """Read the sensor. If the driver refuses, the reading has no value."""
        now = time.monotonic()
        try:
            return Reading(now, **{self.unit: self.ask()})
        except self.refusals:
            return Reading(now)


def _first_working(*sensors: Sensor) -> Sensor:
    """Return the first sensor that works, or raise the error of the last sensor.

    A driver may return 0 for an unsupported reading. Therefore, nanolib skips a sensor that reads 0
    if there is another sensor.
    """
    *others, last = sensors
    for sensor in others:
        with contextlib.suppress(*sensor.refusals):
            if sensor.ask() > 0:
                return sensor
    last.ask()
    return last


class _Missing(Exception):
    """The sensors of an interface are missing. The message has the reason."""


def _imported(name: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # Without its driver's library, amdsmi raises a KeyError.
        why = f"{name} cannot be imported ({type(error).__name__}: {error})"
        raise _Missing(f"{why}; run pip install -e '{package}' in the checkout") from None


def _nvidia(nvml: Any, only: str) -> Iterator[Sensor]:
    """Yield the sensor of each GPU: the energy counter, or the power if there is no counter."""
    nvml = nvml or _imported("pynvml", ".")
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        raise _Missing(f"no NVIDIA driver responds ({error})") from None
    for index in range(count):
        try:
            gpu = nvml.nvmlDeviceGetHandleByIndex(index)
            if not only or str(nvml.nvmlDeviceGetUUID(gpu)) == only:
                yield _nvidia_gpu(nvml, gpu, index)
        except nvml.NVMLError as error:
            why = f"gpu {index} reports neither energy nor power ({error})"
            raise _Missing(why) from None


def _nvidia_gpu(nvml: Any, gpu: Any, index: int) -> Sensor:
    def joules() -> float:
        return nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3

    of = partial(Sensor, f"gpu {index}", (nvml.NVMLError,))
    return _first_working(
        of("nvml_counter", "joules", joules),
        of("nvml_power", "watts", partial(gpu_watts, nvml, gpu)),
    )


def _amd(amdsmi: Any) -> Iterator[Sensor]:
    """Yield the sensor of each GPU: the energy counter, or the power if there is no counter."""
    if amdsmi is None:
        if not _KFD.exists():
            raise _Missing("no AMD GPU (no /dev/kfd)")
        amdsmi = _imported("amdsmi", ".[amd]")
    refusals = (amdsmi.AmdSmiException, StopIteration)
    try:
        amdsmi.amdsmi_init()
        sensors = [
            _amd_gpu(amdsmi, gpu, index, refusals)
            for index, gpu in enumerate(amdsmi.amdsmi_get_processor_handles())
        ]
    except refusals as error:
        why = str(error) or "a GPU reports neither energy nor power"
        raise _Missing(f"the AMD driver does not respond ({why})") from None
    yield from sensors


def _amd_gpu(amdsmi: Any, gpu: Any, index: int, refusals: tuple[type[Exception], ...]) -> Sensor:
    def joules() -> float:
        found = amdsmi.amdsmi_get_energy_count(gpu)
        # Older libraries call the counter `power`. Each step is `counter_resolution` µJ.
        steps = _first_number(found, "energy_accumulator", "power")
        return steps * _first_number(found, "counter_resolution") / 1e6

    def watts() -> float:
        found = amdsmi.amdsmi_get_power_info(gpu)
        return _first_number(found, "current_socket_power", "average_socket_power")

    of = partial(Sensor, f"gpu {index}", refusals)
    return _first_working(
        of("amdsmi_counter", "joules", joules), of("amdsmi_power", "watts", watts)
    )


def _first_number(found: Mapping[str, Any], *names: str) -> float:
    """Return the first field that is above 0, because amdsmi gives "N/A" or 0 for a missing value.

    Raises:
        StopIteration: No field is above 0.
    """
    values = (found.get(name) for name in names)
    return float(next(x for x in values if isinstance(x, int | float) and x > 0))


def _apple(apple: Any) -> Iterator[Sensor]:
    """Yield a sensor that adds up the counters of processor, GPU, neural engine and memory."""
    if apple is None:
        if (sys.platform, platform.machine()) != ("darwin", "arm64"):
            raise _Missing("this machine is not a Mac with Apple silicon")
        apple = _imported("zeus_apple_silicon", ".[apple]")

    def joules() -> float:
        metrics = monitor.get_cumulative_energy()
        parts = [getattr(metrics, name, None) for name in _APPLE_PARTS]
        if not any(part is not None for part in parts):
            raise OSError("none of the chip's counters has a value")
        return sum(part or 0 for part in parts) / 1e3

    refusals = OSError, RuntimeError
    try:
        monitor = apple.AppleEnergyMonitor()
        yield _first_working(Sensor("soc", refusals, "ioreport", "joules", joules))
    except refusals as error:
        raise _Missing(f"IOReport does not respond ({error})") from None


class _Zone:
    """A RAPL counter that continues when its register wraps to zero."""

    def __init__(self, folder: Path) -> None:
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
    folders = [path for path in sorted(root.glob("*-rapl:*")) if (path / "energy_uj").exists()]
    try:
        names = {folder: (folder / "name").read_text().strip() for folder in folders}
        packages = [folder for folder in folders if names[folder].startswith("package")]
        if not packages:
            raise _Missing("Linux shows no power domain of a processor (common in VMs)")
        for package in packages:
            inside = package.parent.glob(f"{package.name}:*")
            dram = [folder for folder in inside if names.get(folder) == "dram"]
            zones = [_Zone(folder) for folder in (package, *dram)]
            name = "rapl (package + dram)" if dram else "rapl (package)"
            ask = lambda zones=zones: sum(zone.joules() for zone in zones)  # noqa: E731
            of, refusals = names[package], (OSError, ValueError)
            yield _first_working(Sensor(of, refusals, name, "joules", ask, _RAPL_PERIOD_S))
    except PermissionError:
        counter = packages[0] / "energy_uj"
        remedy = f"run sudo chmod a+r {root}/*-rapl:*/energy_uj (a risk: all users can read it)"
        raise _Missing(f"only root can read {counter}; {remedy}") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise _Missing(f"the RAPL counter cannot be read ({why})") from None


class Found(NamedTuple):
    """The power sensors of this machine.

    Attributes:
        sources: Sensors that work. No two sensors measure the same energy.
        missing: Sensor interface → why its sensors are missing and, if possible, what to do.
    """

    sources: list[Sensor]
    missing: dict[str, str]


def find_sources(
    rapl_root: Path = _RAPL_ROOT,
    nvml: Any = None,
    amdsmi: Any = None,
    apple: Any = None,
    gpu: str = "",
) -> Found:
    """Find the power sensors of this machine.

    Args:
        rapl_root: Folder in which Linux shows its power domains.
        nvml: Module for NVIDIA GPUs, `pynvml` by default.
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
        except _Missing as why:
            found.missing[kind] = str(why)
    return found
