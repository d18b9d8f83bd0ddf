"""Where power readings come from; `meters.energy.integration` makes energy of them.

A source is asked again and again by a sampler (`nanolib.meters.energy.meter`). It gives watts, or the joules of a counter that only
grows. What cannot be read is a gap, never zero; power of 0 W is none either, since whatever answers draws some.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil

from nanolib.measurement import Provenance
from nanolib.meters.energy.integration import counter_steps
from nanolib.meters.gpu_state import instant_watts

MIN_PERIODS = 10  # a window must hold so many updates of its sensor
_RAPL_ROOT = Path("/sys/class/powercap")
_KFD = Path("/dev/kfd")  # AMD's compute driver
# What an idle core and package draw, and how far a busy one goes, is not known without a sensor: these ends are honest, not tight.
_IDLE_W_PER_CORE, _IDLE_W = (0.1, 3.0), (1.0, 60.0)
_BUSY_W_PER_CORE = (1.0, 25.0)


@dataclass(frozen=True)
class Reading:
    """One answer of a source.

    Attributes:
        t_s: When, on the clock `time.monotonic`.
        watts: Power; NaN where it could not be read, or the source counts joules.
        joules: A counter's state; NaN where it could not be read, or the source gives power.
        low: Lower end of the power where it is an estimate, W.
        high: Upper end.
    """

    t_s: float
    watts: float = math.nan
    joules: float = math.nan
    low: float = math.nan
    high: float = math.nan


class Source(Protocol):
    """Something that tells power or counts energy.

    Attributes:
        name: The `method` of the rows: `nvml_counter`, `nvml_power`, `rapl (package + dram)`, `replay`, `utilisation`, ...
        of: What it covers: `gpu 0`, `package 0`, ...
        period_s: How often its reading changes.
        wrap_j: Where its counter starts again at zero, J; infinite where it does not.
        provenance: `measured`, `replayed` or `estimated`.
    """

    name: str
    of: str
    period_s: float
    wrap_j: float
    provenance: Provenance

    def read(self) -> Reading:
        """The reading now; NaN for what could not be read."""
        ...


# sources


class EstimateSource:
    """What the processor may draw, from how busy its cores are: a range, never a reading."""

    name, of, period_s, wrap_j, provenance = (
        "utilisation",
        "processor",
        0.1,
        math.inf,
        Provenance.ESTIMATED,
    )

    def __init__(self) -> None:
        self._cores = os.cpu_count() or 1
        psutil.cpu_percent()  # the first answer has nothing to compare with

    def read(self) -> Reading:
        """Idle power to that of all cores at work, by the share of the cores that is."""
        busy = psutil.cpu_percent() / 100 * self._cores
        ends = [
            base + idle * self._cores + extra * busy
            for base, idle, extra in zip(_IDLE_W, _IDLE_W_PER_CORE, _BUSY_W_PER_CORE, strict=True)
        ]
        return Reading(
            time.monotonic(), watts=math.sqrt(ends[0] * ends[1]), low=ends[0], high=ends[1]
        )


class _Sensor:
    """Asks in the first of several ways that answers; what it refuses later is a gap."""

    period_s, wrap_j, provenance = 0.1, math.inf, Provenance.MEASURED

    def _ask_by(
        self, *ways: tuple[str, str, Callable[[], float]], refusals: tuple[type[Exception], ...]
    ) -> None:
        """Choose one.

        Args:
            ways: The name that rows give it, whether it tells `joules` or `watts`, and what asks. One that answers 0, as drivers
                do for what they do not support, is passed over.
            refusals: Errors by which the sensor refuses; that of the last way is raised.
        """
        self._refusals = refusals
        for self.name, self._unit, self._ask in ways[:-1]:
            with contextlib.suppress(*refusals):
                if self._ask() > 0:
                    return
        self.name, self._unit, self._ask = ways[-1]
        self._ask()

    def read(self) -> Reading:
        """The counter in J, or the power in W."""
        now = time.monotonic()
        try:
            return Reading(now, **{self._unit: self._ask()})
        except self._refusals:
            return Reading(now)


class RaplSource(_Sensor):
    """A package by RAPL, through Linux's powercap, and its memory where that has a zone: the one is no part of the other.

    Args:
        package: Folder of its zone, such as /sys/class/powercap/intel-rapl:0.
        dram: Those of its memory's zones.

    Raises:
        OSError: A counter cannot be read.
        ValueError: It is no number.
    """

    period_s = 0.001

    def __init__(self, package: Path, dram: Sequence[Path] = ()) -> None:
        self.of = (package / "name").read_text().strip()
        self._zones = [_RaplZone(folder, self.period_s) for folder in (package, *dram)]
        name = "rapl (package + dram)" if dram else "rapl (package)"
        self._ask_by((name, "joules", self._joules), refusals=(OSError, ValueError))

    def _joules(self) -> float:
        return sum(zone.joules() for zone in self._zones)


class _RaplZone:
    """One counter of RAPL's, which goes on where the register starts again at zero: its zones do so at ranges of their own."""

    def __init__(self, folder: Path, period_s: float) -> None:
        self._counter, self._period_s = folder / "energy_uj", period_s
        self._range_j = int((folder / "max_energy_range_uj").read_text()) / 1e6 or math.inf
        self._t_s, self._read_j = time.monotonic(), self._now()
        self._joules = self._read_j

    def _now(self) -> float:
        return int(self._counter.read_text()) / 1e6

    def joules(self) -> float:
        """What it has counted; one that was reset goes backwards."""
        t_s, read_j = time.monotonic(), self._now()
        (step,) = counter_steps(
            np.array([self._t_s, t_s]),
            np.array([self._read_j, read_j]),
            self._range_j,
            self._period_s,
        )
        self._joules = read_j if math.isnan(step) else self._joules + float(step)
        self._t_s, self._read_j = t_s, read_j
        return self._joules


_AMPERE = 8  # compute capability


class NvmlSource(_Sensor):
    """One NVIDIA GPU: its energy counter where it has one, else its power at the moment, else that of the last second.

    Args:
        nvml: The module `pynvml`, initialised.
        index: Of the GPU, as NVML counts: torch may see fewer, in another order.

    Raises:
        NVMLError: It tells neither energy nor power.
    """

    def __init__(self, nvml: Any, index: int) -> None:
        self._nvml, self._handle, self.of = (
            nvml,
            nvml.nvmlDeviceGetHandleByIndex(index),
            f"gpu {index}",
        )
        counter = (
            "nvml_counter",
            "joules",
            lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3,
        )
        average = ("nvml_power", "watts", lambda: nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3)
        instant = ("nvml_power_instant", "watts", lambda: instant_watts(nvml, self._handle))
        self._ask_by(counter, instant, average, refusals=(nvml.NVMLError,))
        if self.name == "nvml_power":
            with contextlib.suppress(nvml.NVMLError):
                if nvml.nvmlDeviceGetCudaComputeCapability(self._handle)[0] >= _AMPERE:
                    self.period_s = 1.0  # from there on it is the mean over a second

    @property
    def uuid(self) -> str:
        """The driver's name of it."""
        return str(self._nvml.nvmlDeviceGetUUID(self._handle))


class AppleSource(_Sensor):
    """Apple's own counters of processor, GPU and neural engine, through IOReport; those that the chip lacks are left out.

    Args:
        module: `zeus_apple_silicon`.

    Raises:
        OSError: It has none of them.
    """

    of = "soc"
    _PARTS = (
        "cpu_total_mj",
        "gpu_mj",
        "ane_mj",
        "dram_mj",
    )  # parts of a whole, none within another

    def __init__(self, module: Any) -> None:
        self._monitor = module.AppleEnergyMonitor()
        self._ask_by(("ioreport", "joules", self._joules), refusals=(OSError, RuntimeError))

    def _joules(self) -> float:
        metrics = self._monitor.get_cumulative_energy()
        told = [
            value for name in self._PARTS if (value := getattr(metrics, name, None)) is not None
        ]
        if not told:
            raise OSError("none of its counters answers")
        return sum(told) / 1e3


class AmdSource(_Sensor):
    """One AMD GPU: its energy counter where it has one, else its power.

    Args:
        module: `amdsmi`, initialised.
        handle: Of the GPU.
        index: Of the GPU.
    """

    def __init__(self, module: Any, handle: Any, index: int) -> None:
        self._amdsmi, self._handle, self.of = module, handle, f"gpu {index}"
        ways = (("amdsmi_counter", "joules", self._joules), ("amdsmi_power", "watts", self._watts))
        self._ask_by(*ways, refusals=(module.AmdSmiException, StopIteration))

    def _joules(self) -> float:
        found = self._amdsmi.amdsmi_get_energy_count(self._handle)
        # older libraries call the counter `power`; it is in steps of `counter_resolution` µJ
        return (
            _told(found, "energy_accumulator", "power") * _told(found, "counter_resolution") / 1e6
        )

    def _watts(self) -> float:
        found = self._amdsmi.amdsmi_get_power_info(self._handle)
        return _told(found, "current_socket_power", "average_socket_power")


def _told(found: Mapping[str, Any], *names: str) -> float:
    """The first of these that is a number; amdsmi says "N/A", or 0, where it has none.

    Raises:
        StopIteration: None is.
    """
    return float(
        next(
            found[name]
            for name in names
            if isinstance(found.get(name), int | float) and found[name] > 0
        )
    )


# what this machine has


@dataclass(frozen=True)
class Found:
    """What looking for sensors gave.

    Attributes:
        sources: Those that answer; none of them counts what another counts too.
        missing: Kind of source → why it is not there, and what would help.
    """

    sources: list[Source]
    missing: dict[str, str]


def find_sources(
    rapl_root: Path = _RAPL_ROOT,
    nvml: Any = None,
    amdsmi: Any = None,
    apple: Any = None,
    under_test: str = "",
) -> Found:
    """The sensors of this machine.

    Args:
        rapl_root: Where Linux shows its power domains.
        nvml: The module to ask for NVIDIA's; `pynvml` by default.
        amdsmi: The module to ask for AMD's; `amdsmi` by default.
        apple: The module to ask for Apple's; `zeus_apple_silicon` by default.
        under_test: UUID of the NVIDIA GPU that is measured: it is marked, since the driver numbers GPUs by itself.
    """
    found = Found([], {})
    for kind, look in (
        ("NVIDIA (NVML)", lambda: _nvml_sources(nvml, under_test)),
        ("AMD (amdsmi)", lambda: _amd_sources(amdsmi)),
        ("Apple (IOReport)", lambda: _apple_sources(apple)),
        ("RAPL (powercap)", lambda: _rapl_sources(rapl_root)),
    ):
        sources, reason = look()
        found.sources.extend(sources)
        if reason:
            found.missing[kind] = reason
    return found


def _nvml_sources(nvml: Any, under_test: str = "") -> tuple[list[Source], str]:
    if nvml is None:
        try:
            import pynvml as nvml
        except ModuleNotFoundError:
            return [], "nvidia-ml-py is not installed"
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        return [], f"no NVIDIA driver answers ({error})"
    sources, refused = [], []
    for index in range(count):
        try:
            source = NvmlSource(nvml, index)
            if under_test and source.uuid == under_test:
                source.of += " (under test)"
            sources.append(source)
        except (
            nvml.NVMLError
        ) as error:  # forbidden, or in parts that share one meter: the others still answer
            refused.append(f"gpu {index} tells neither energy nor power ({error})")
    return sources, "; ".join(refused)


def _amd_sources(amdsmi: Any) -> tuple[list[Source], str]:
    """The package is imported only where there is an AMD GPU: without its driver's library its import raises a KeyError."""
    if amdsmi is None:
        if not _KFD.exists():
            return [], "no AMD GPU here (no /dev/kfd)"
        try:
            import amdsmi
        except Exception as error:
            return (
                [],
                f"amdsmi cannot be imported ({type(error).__name__}: {error}); in the checkout: pip install -e '.[amd]'",
            )
    try:
        amdsmi.amdsmi_init()
        handles = amdsmi.amdsmi_get_processor_handles()
        return [AmdSource(amdsmi, handle, index) for index, handle in enumerate(handles)], ""
    except (amdsmi.AmdSmiException, StopIteration) as error:
        return (
            [],
            f"its driver does not answer ({str(error) or 'it tells neither energy nor power'})",
        )


def _apple_sources(apple: Any) -> tuple[list[Source], str]:
    if apple is None:
        if (sys.platform, platform.machine()) != ("darwin", "arm64"):
            return [], "this is no Mac with Apple silicon"
        try:
            import zeus_apple_silicon as apple
        except ModuleNotFoundError:
            return (
                [],
                'zeus-apple-silicon is not installed; in the checkout: pip install -e ".[apple]"',
            )
    try:
        return [AppleSource(apple)], ""
    except (OSError, RuntimeError) as error:
        return [], f"IOReport does not answer ({error})"


def _rapl_sources(root: Path) -> tuple[list[Source], str]:
    """Packages, each with its memory: cores are a part of a package, and psys is a whole of which it is one: these count twice."""
    domains = [
        folder for folder in sorted(root.glob("*-rapl:*")) if (folder / "energy_uj").exists()
    ]
    try:
        names = {folder: (folder / "name").read_text().strip() for folder in domains}
        packages = [folder for folder, name in names.items() if name.startswith("package")]
        if not packages:
            return (
                [],
                "Linux shows no power domain of the processor here (a virtual machine has none)",
            )
        dram = [folder for folder, name in names.items() if name == "dram"]
        of = {
            package: [one for one in dram if one.name.startswith(f"{package.name}:")]
            for package in packages
        }
        return [RaplSource(package, zones) for package, zones in of.items()], ""
    except PermissionError:
        counter = packages[0] / "energy_uj"
        return (
            [],
            f"{counter} may be read by root alone; as root: chmod a+r {root}/*-rapl:*/energy_uj",
        )
    except (OSError, ValueError) as error:
        return [], f"its counter cannot be read ({getattr(error, 'strerror', None) or error})"
