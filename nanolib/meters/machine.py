"""Describe the machine: hardware, supported dtypes, and resources that this process may use.

nanolib supports control groups of cgroup v2 and v1. The limit of a group applies to all inner
groups, so nanolib reads the limits of the process's own group and of all visible outer groups.
"""

import contextlib
import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pynvml
import torch

from nanolib.measurement import BadInput, quote

FP8_COMPUTE_CAPABILITY = (8, 9)


@dataclass(frozen=True)
class Machine:
    """Hardware and software of a machine. `machine_id` does not depend on the version of torch.

    Attributes:
        cpu: Model of the CPU.
        cores: Number of cores that the process may use, according to CPU affinity and CPU quota.
        ram_gib: Memory of the host, rounded to GiB.
        gpus: A mapping for each GPU with `name`, `memory_gib`, `compute_capability`, and `fp8`,
            which is true if the GPU supports FP8.
        system: Operating system and architecture.
        driver: Version of the GPU driver, or an empty string without a GPU.
        torch: Version of torch.
        threads: Number of threads that torch uses inside an operation.
        governor: Frequency governor, or an empty string if the system does not report a governor.
        dtypes: Name of a dtype → hardware unit that computes products of this dtype, in the first
            GPU or, without a GPU, in the CPU. The units are `tensor_cores`, `amx`, `avx512`,
            `vector` and `emulated`.
    """

    cpu: str
    cores: int
    ram_gib: int
    gpus: list[dict[str, Any]]
    system: str
    driver: str
    torch: str
    threads: int
    governor: str
    dtypes: dict[str, str]

    @property
    def machine_id(self) -> str:
        """Fingerprint of the hardware and of the usable cores, twelve hexadecimal digits."""
        gpus = [gpu["name"] for gpu in self.gpus]
        hardware = [self.cpu, self.cores, self.ram_gib, self.system, gpus]
        return hashlib.sha256(json.dumps(hardware).encode()).hexdigest()[:12]

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as JSON types, without a user or host name."""
        return asdict(self) | {"machine_id": self.machine_id}


def this_machine() -> Machine:
    """Describe the machine that this process runs on."""
    gpus = [_gpu(index) for index in range(_gpu_count())]
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
    for accelerator, backend in (("mps", torch.backends.mps), ("xpu", torch.xpu)):
        if backend.is_available():
            available.append(accelerator)
    if name == "auto":
        return available[1] if len(available) > 1 else "cpu"
    wanted = "cuda:0" if name == "cuda" else name
    if wanted not in available:
        raise BadInput(
            f"device: {quote(name)} is not available; use auto or one of {', '.join(available)}"
        )
    return wanted


def gpu_uuid(device: str) -> str:
    """Return the UUID of a GPU. The UUID does not depend on the GPU's number in this process."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def _gpu_count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _cpu_info(field: str) -> str:
    """Return a field of the first CPU on Linux, or an empty string on other systems."""
    lines = _text_of("/proc/cpuinfo").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


def _text_of(path: str | Path) -> str:
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
    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError as error:
        return f"unknown ({error})"


def _dtypes(gpus: list[dict[str, Any]]) -> dict[str, str]:
    if gpus:
        capability = float(gpus[0]["compute_capability"])
        has = {"tf32": capability >= 8, "bfloat16": capability >= 8, "float16": capability >= 7}
        has["float8"] = gpus[0]["fp8"]
        units = {dtype: "tensor_cores" if is_fast else "emulated" for dtype, is_fast in has.items()}
        return {"float32": "vector"} | units
    flags = _cpu_info("flags").split() or _cpu_info("Features").split()  # `Features` on ARM

    def unit(kind: str, on_arm: str) -> str:
        found = (name for name in ("amx", "avx512") if f"{name}_{kind}" in flags)
        return next(found, "vector" if on_arm in flags else "emulated")

    return {
        "float32": "avx512" if "avx512f" in flags else "vector",
        "bfloat16": unit("bf16", on_arm="bf16"),
        "float16": unit("fp16", on_arm="asimdhp"),
        "float8": "emulated",
    }


# Packages that contain or compile kernels, and environment variables that choose kernels.
_PACKAGES = ("triton", "torchao", "transformers", "flash-attn", "flash-attn-4")
_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "MKL_ENABLE_INSTRUCTIONS",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "ONEDNN_MAX_CPU_ISA",
)


def versions() -> dict[str, str]:
    """Return the versions and environment variables that affect a measurement, for a run's row."""
    found = {
        "python": platform.python_version(),
        "platform": sys.platform,
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        found["cuda"] = torch.version.cuda or torch.version.hip
        found["cudnn"] = str(torch.backends.cudnn.version())
        found["driver"] = _driver()
        if torch.distributed.is_nccl_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found | {name: os.environ[name] for name in _VARIABLES if name in os.environ}


_PROC = Path("/proc/self")
_MOUNTED = Path("/sys/fs/cgroup")
# For cgroup v2 and for v1: the file with the memory limit, the file with the memory use, and the
# field with the inactive file cache. The kernel frees this cache when programs need memory.
_MEMORY = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


class Quota(NamedTuple):
    """A CPU quota of a control group.

    Attributes:
        cores: Number of cores that the group may use on average.
        periods: Number of periods in which the group used CPU time.
        throttled: Number of periods in which the kernel paused the group.
    """

    cores: float
    periods: int
    throttled: int


def usable_cores() -> int:
    """Return the number of cores that this process may use by affinity and quota, at least one."""
    cpus = len(usable_cpus()) or os.cpu_count()
    return max(1, int(min([cpus, *(quota.cores for quota in cpu_quotas())])))


def usable_cpus() -> set[int]:
    """Return the numbers of the CPUs that this process may use, or an empty set if unknown."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def cpu_quotas() -> list[Quota]:
    """Return the CPU quotas of the process's control group and of all outer groups."""
    found = []
    for group in _groups("cpu"):
        # cgroup v2 has one file for the quota, and v1 has two files. Without a quota, the first
        # word is "max" or "-1".
        files = [group / "cpu.max", group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us"]
        with contextlib.suppress(OSError):
            words = " ".join(map(_text_of, files)).split()
            if words and words[0] not in ("max", "-1"):
                counts = _fields(group / "cpu.stat")
                periods = (counts.get(name, 0) for name in ("nr_periods", "nr_throttled"))
                found.append(Quota(int(words[0]) / int(words[1]), *periods))
    return found


def memory_limits() -> list[tuple[int, int]]:
    """Return the memory limit and memory use of each control group with a limit, bytes.

    The memory use does not include the inactive file cache.
    """
    found = []
    for group in _groups("memory"):
        for limit, used, cached in _MEMORY:
            # The files of the other cgroup version do not exist, and "max" means no limit.
            with contextlib.suppress(OSError, ValueError):
                most, taken = (int((group / name).read_text()) for name in (limit, used))
                found.append((most, taken - _fields(group / "memory.stat").get(cached, 0)))
    return found


@contextlib.contextmanager
def limit_threads() -> Iterator[None]:
    """Limit torch's threads to the usable cores within the context, unless OMP_NUM_THREADS is set.

    torch ignores a CPU quota. With half a core, the system would often pause two threads.
    """
    before = torch.get_num_threads()
    if before > usable_cores() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(usable_cores())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _groups(controller: str) -> list[Path]:
    """List the folders of the process's control group and of its parents, innermost first."""
    lines = [line.split(":", 2) for line in _text_of(_PROC / "cgroup").splitlines()]
    paths = {name: path for _, names, path in lines for name in names.split(",")}
    # cgroup v1 has a folder for each controller.
    top = _MOUNTED / controller if controller in paths else _MOUNTED
    own = top / paths.get(controller, paths.get("", "/")).lstrip("/")
    if ".." in own.parts or not own.is_dir():  # A container sees its own group as the root.
        own = top
    return [own, *(parent for parent in own.parents if parent.is_relative_to(top))]


def _fields(file: Path) -> dict[str, int]:
    """Read a file of lines `name number`. The result is empty if there is no file."""
    lines = (line.split() for line in _text_of(file).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) == 2}
