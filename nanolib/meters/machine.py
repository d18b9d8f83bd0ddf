"""Describe the machine: its hardware, what it can compute, and a fingerprint."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from nanolib.measurement import BadInput, shown
from nanolib.meters.limits import usable_cores

FP8_COMPUTE_CAPABILITY = (8, 9)


@dataclass(frozen=True)
class Machine:
    """One machine. `machine_id` depends on hardware only: with a new torch it is the same machine.

    Attributes:
        cpu: Model of the CPU.
        cores: Cores that this process may use, by affinity and by its container's quota.
        ram_gib: Memory, rounded to GiB.
        gpus: Per GPU: name, memory_gib, compute_capability, fp8.
        system: Operating system and architecture.
        driver: Version of the GPU driver; empty without one.
        torch: Version of torch.
        threads: Threads that torch uses inside an operation.
        governor: Frequency governor; empty if the system does not report it.
        dtypes: Dtype → what computes it on the first GPU or the CPU: `tensor_cores`, `amx`,
            `avx512`, `vector`, `emulated`.
    """

    cpu: str
    cores: int
    ram_gib: int
    gpus: tuple[dict[str, Any], ...]
    system: str
    driver: str
    torch: str
    threads: int
    governor: str
    dtypes: dict[str, str] = field(default_factory=dict)

    @property
    def machine_id(self) -> str:
        """Fingerprint of the hardware, twelve hexadecimal digits."""
        gpus = [gpu["name"] for gpu in self.gpus]
        hardware = [self.cpu, self.cores, self.ram_gib, self.system, gpus]
        return hashlib.sha256(json.dumps(hardware).encode()).hexdigest()[:12]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types, without user and host names."""
        return asdict(self) | {"machine_id": self.machine_id, "gpus": list(self.gpus)}


def this_machine() -> Machine:
    """Describe the machine that this process runs on."""
    gpus = tuple(_gpu(index) for index in range(_gpu_count()))
    return Machine(
        cpu=_cpu_info("model name") or platform.processor() or platform.machine(),
        cores=usable_cores(),
        ram_gib=round(psutil.virtual_memory().total / 2**30),
        gpus=gpus,
        system=f"{platform.system()} {platform.machine()}",
        driver=_driver() if gpus else "",
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        governor=_text_of("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        dtypes=_dtypes(gpus),
    )


def resolve_device(name: str) -> str:
    """Return the device that `auto`, `cpu`, `cuda`, `cuda:1`, `mps` or `xpu` names on this machine.

    Raises:
        BadInput: The name is unknown, or this machine has no such device.
    """
    available = ["cpu", *(f"cuda:{index}" for index in range(_gpu_count()))]
    available += ["mps"] if torch.backends.mps.is_available() else []
    available += ["xpu"] if torch.xpu.is_available() else []
    if name == "auto":
        return available[1] if len(available) > 1 else "cpu"
    wanted = {"cuda": "cuda:0"}.get(name, name)
    if wanted not in available:
        raise BadInput(
            f"device: {shown(name)} is not available; use auto or one of {', '.join(available)}"
        )
    return wanted


def gpu_uuid(device: str) -> str:
    """Return the driver's name of a GPU, which does not depend on its number in this process."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def _gpu_count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _cpu_info(field: str) -> str:
    """Read a field of the first CPU on Linux; empty on other systems."""
    lines = _text_of("/proc/cpuinfo").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


def _text_of(path: str) -> str:
    file = Path(path)
    return file.read_text().strip() if file.exists() else ""


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    return {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30),
        "compute_capability": f"{capability[0]}.{capability[1]}",
        "fp8": capability >= FP8_COMPUTE_CAPABILITY,
    }


def _driver() -> str:
    import pynvml  # most machines have no driver for it

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError as error:
        return f"unknown ({error})"


def _dtypes(gpus: tuple[dict[str, Any], ...]) -> dict[str, str]:
    if gpus:
        major, minor = (int(part) for part in gpus[0]["compute_capability"].split("."))
        return {
            "float32": "vector",
            "tf32": "tensor_cores" if major >= 8 else "emulated",
            "bfloat16": "tensor_cores" if major >= 8 else "emulated",
            "float16": "tensor_cores" if major >= 7 else "vector",
            "float8": "tensor_cores" if (major, minor) >= FP8_COMPUTE_CAPABILITY else "emulated",
        }
    flags = _cpu_info("flags").split()

    def unit(kind: str) -> str:
        return next((name for name in ("amx", "avx512") if f"{name}_{kind}" in flags), "emulated")

    return {
        "float32": "avx512" if "avx512f" in flags else "vector",
        "bfloat16": unit("bf16"),
        "float16": unit("fp16"),
        "float8": "emulated",
    }


def versions() -> dict[str, str]:
    """Return the versions that affect a measurement, for the run's row."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": sys.platform,
    }


def free_disk_gib(path: Path) -> float:
    """Return the free space on the disk of `path`, GiB."""
    return shutil.disk_usage(path).free / 2**30
