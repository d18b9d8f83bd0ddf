"""The machine: its name and parts, what computes a type there, and what a process may use."""

import hashlib
import json
import os
import platform
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nanolib.meters import machine, memory
from nanolib.meters.machine import resolve_device, this_machine


def test_a_machine_is_told_without_names_and_its_id_is_of_its_hardware_alone():
    here = this_machine()
    text = json.dumps(here.to_dict())
    assert platform.node() not in text and str(Path.home()) not in text
    hardware = {"cpu": "A CPU", "cores": 8, "ram_gib": 32, "system": "Linux x86_64"}
    one = replace(here, **hardware, gpus=[{"name": "G", "memory_gib": 80}])
    expected = hashlib.sha256(b'["A CPU", 8, 32, "Linux x86_64", ["G"]]').hexdigest()[:12]
    assert one.machine_id == expected == one.to_dict()["machine_id"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("", "vector vector vector emulated"),
        ("avx512f", "avx512 emulated emulated emulated"),
        ("avx512f avx512_bf16 avx512_fp16", "avx512 avx512 avx512 emulated"),
        ("avx512f avx512_bf16 amx_bf16 amx_fp16", "avx512 amx amx emulated"),
    ],
)
def test_what_computes_a_type_follows_the_cpus_flags(monkeypatch, flags, told):
    monkeypatch.setattr(machine, "_cpu_info", {"flags": flags, "Features": "bf16 asimdhp"}.get)
    found = machine._dtypes(())
    assert [*found] == ["float32", "bfloat16", "float16", "float8"]
    assert " ".join(found.values()) == told


@pytest.mark.parametrize(
    ("capability", "told"),
    [
        ((7, 0), "vector emulated emulated tensor_cores emulated"),
        ((8, 0), "vector tensor_cores tensor_cores tensor_cores emulated"),
        ((8, 9), "vector tensor_cores tensor_cores tensor_cores tensor_cores"),
        ((12, 0), "vector tensor_cores tensor_cores tensor_cores tensor_cores"),
    ],
)
def test_a_gpu_is_told_by_its_properties_and_what_computes_a_type_by_its_generation(
    monkeypatch, capability, told
):
    major, minor = capability
    properties = {"major": major, "minor": minor, "total_memory": 79.7 * 2**30}
    gpu = SimpleNamespace(name="G", **properties)
    nvml = SimpleNamespace(NVMLError=ZeroDivisionError, nvmlInit=lambda: None)
    nvml.nvmlSystemGetDriverVersion = lambda: "580.1"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(machine, "pynvml", nvml)
    found = this_machine()
    fp8 = capability >= (8, 9)
    own = {"name": "G", "memory_gib": 80, "compute_capability": f"{major}.{minor}", "fp8": fp8}
    assert (found.gpus, found.driver) == ([own], "580.1")
    assert [*found.dtypes] == ["float32", "tf32", "bfloat16", "float16", "float8"]
    assert " ".join(found.dtypes.values()) == told
    nvml.nvmlInit = lambda: 1 / 0
    assert this_machine().driver == "unknown (division by zero)"


def test_a_run_knows_what_computes_and_chooses_its_kernels(monkeypatch):
    """On a CPU without CUDA's libraries, and beside them where there is a GPU."""
    for name in machine._VARIABLES:
        monkeypatch.delenv(name, raising=False)
    usual = machine.versions()
    assert usual["torch"] == torch.__version__ and usual["torchao"] and "cuda" not in usual
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(machine, "_driver", lambda: "580.1")
    own = {"cuda": "13.0", "cudnn": "91900", "nccl": "2.28.9", "driver": "580.1"}
    assert machine.versions() == usual | own | {"OMP_NUM_THREADS": "2"}


def test_auto_is_the_first_accelerator_and_cuda_the_first_gpu(monkeypatch):
    assert resolve_device("auto") == resolve_device("cpu") == "cpu"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert resolve_device("auto") == resolve_device("mps") == "mps"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto") == resolve_device("cuda") == "cuda:0"
    assert resolve_device("cuda:1") == "cuda:1"


GIB = 2**30
V2 = "0::{path}"
V1 = "4:memory:{path}\n2:cpu,cpuacct:{path}\n1:name=systemd:/elsewhere\n0::/"


@pytest.fixture
def grouped(monkeypatch, tmp_path):
    """Be in a control group of these files."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    free = SimpleNamespace(available=20 * GIB, total=32 * GIB)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: free)

    def be(version, path, files):
        for name, text in {"proc/cgroup": version.format(path=path), **files}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"{text}\n")
        monkeypatch.setattr(machine, "_PROC", tmp_path / "proc")
        monkeypatch.setattr(machine, "_MOUNTED", tmp_path)

    return be


OWN = {"a/b/cpu.max": "400000 100000", "a/b/cpu.stat": "nr_periods 9"}
PARENTS = {"a/cpu.max": "100000 100000", "a/cpu.stat": "nr_periods 30\nnr_throttled 7"}


@pytest.mark.parametrize(
    ("version", "path", "files", "quotas", "cores"),
    [
        # a container that sees its own as the root
        (V2, "/", {"cpu.max": "50000 100000"}, [(0.5, 0, 0)], 1),
        (V2, "/a/b", OWN | PARENTS, [(4.0, 9, 0), (1.0, 30, 7)], 1),
        (V2, "/a", {"a/cpu.max": "max 100000", "b/cpu.max": "100000 100000"}, [], 8),
        (V1, "/j", {"cpu/j/cpu.cfs_quota_us": 5, "cpu/j/cpu.cfs_period_us": 2}, [(2.5, 0, 0)], 2),
        # a container of version 1 is shown its group as the root, and told its name outside
        (
            V1,
            "/docker/x",
            {"cpu/cpu.cfs_quota_us": 3, "cpu/cpu.cfs_period_us": 2},
            [(1.5, 0, 0)],
            1,
        ),
    ],
)
def test_the_quotas_of_the_own_group_and_its_parents_hold(
    grouped, version, path, files, quotas, cores
):
    grouped(version, path, files)
    assert (machine.cpu_quotas(), machine.usable_cores()) == (quotas, cores)


@pytest.mark.parametrize(
    ("version", "path", "files"),
    [
        (
            V2,
            "/",
            {
                "memory.max": GIB,
                "memory.current": GIB // 2,
                "memory.stat": f"anon 5\ninactive_file {GIB // 4}",
            },
        ),
        (
            V1,
            "/job",
            {
                "memory/memory.limit_in_bytes": 9223372036854771712,
                "memory/memory.usage_in_bytes": GIB,
                "memory/job/memory.limit_in_bytes": GIB,
                "memory/job/memory.usage_in_bytes": GIB // 2,
                "memory/job/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB // 4}",
            },
        ),
        (
            V2,  # the parent has less left than the own group
            "/a/b",
            {
                "a/memory.max": GIB,
                "a/memory.current": GIB // 4,
                "a/b/memory.max": 2 * GIB,
                "a/b/memory.current": 1,
            },
        ),
    ],
)
def test_the_least_that_a_group_or_its_parents_have_left_is_free(grouped, version, path, files):
    grouped(version, path, files)
    assert memory.free_bytes() == 3 * GIB // 4


def test_without_control_groups_the_machine_alone_limits(monkeypatch, grouped, tmp_path):
    grouped(V2, "/", {})
    assert (machine.cpu_quotas(), memory.free_bytes()) == ([], 20 * GIB)
    assert (this_machine().ram_gib, this_machine().cores) == (32, 8)
    monkeypatch.setattr(machine, "_PROC", tmp_path / "none")  # not Linux, which alone has affinity
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert machine.usable_cores() == 64


@pytest.mark.parametrize(("asked", "within"), [(None, 2), ("4", 4)])
def test_torch_takes_no_more_threads_than_a_quota_pays_for(monkeypatch, grouped, asked, within):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        grouped(V2, "/", {"cpu.max": "250000 100000"})
        with machine.limit_threads():
            assert torch.get_num_threads() == within
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
