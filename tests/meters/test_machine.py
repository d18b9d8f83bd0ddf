"""The machine: what it is called, what it has, and what computes a type there."""

import hashlib
import json
import os
import platform
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nanolib.measurement import BadInput
from nanolib.meters import machine
from nanolib.meters.machine import Machine, resolve_device, this_machine


def test_the_machine_is_told_without_names_and_its_id_is_of_the_hardware():
    here = this_machine()
    text = json.dumps(here.to_dict())
    assert platform.node() not in text and os.path.expanduser("~") not in text  # noqa: PTH111
    assert here.machine_id == this_machine().machine_id


MACHINE = Machine(
    cpu="A CPU",
    cores=8,
    ram_gib=32,
    gpus=(),
    system="Linux x86_64",
    driver="",
    torch="2.13",
    threads=4,
    governor="",
)


def test_a_machines_id_is_of_its_hardware_alone():
    one = MACHINE.machine_id
    assert one == hashlib.sha256(b'["A CPU", 8, 32, "Linux x86_64", []]').hexdigest()[:12]
    for rest in (
        {"torch": "9"},
        {"threads": 1},
        {"governor": "x"},
        {"driver": "5"},
        {"dtypes": {"a": "b"}},
    ):
        assert replace(MACHINE, **rest).machine_id == one
    gpu = {"name": "G", "memory_gib": 80}
    others = ({"cpu": "B"}, {"cores": 9}, {"ram_gib": 31}, {"system": "x"}, {"gpus": (gpu,)})
    assert len({replace(MACHINE, **rest).machine_id for rest in others} | {one}) == 6
    told = replace(MACHINE, gpus=(gpu,)).to_dict()
    assert told["gpus"] == [gpu] and told["cores"] == 8 and len(told["machine_id"]) == 12


def test_the_cores_are_those_that_this_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 8}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert this_machine().cores == 3
    monkeypatch.delattr(os, "sched_getaffinity")  # Linux alone has it
    assert this_machine().cores == 64
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert this_machine().cores == 1


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("fpu", ("vector", "emulated", "emulated")),
        ("avx512f", ("avx512", "emulated", "emulated")),
        ("avx512f avx512_bf16 avx512_fp16", ("avx512", "avx512", "avx512")),
        ("avx512f avx512_bf16 amx_bf16 amx_fp16", ("avx512", "amx", "amx")),
    ],
)
def test_what_computes_a_type_follows_the_cpus_flags(monkeypatch, flags, told):
    monkeypatch.setattr(machine, "_cpu_info", {"flags": flags}.get)
    names = ("float32", "bfloat16", "float16")
    assert machine._dtypes(()) == dict(zip(names, told, strict=True)) | {"float8": "emulated"}


@pytest.mark.parametrize(
    ("capability", "told"),
    [
        ("6.1", ("emulated", "emulated", "vector", "emulated")),
        ("7.0", ("emulated", "emulated", "tensor_cores", "emulated")),
        ("8.0", ("tensor_cores", "tensor_cores", "tensor_cores", "emulated")),
        ("8.9", ("tensor_cores",) * 4),
        ("12.0", ("tensor_cores",) * 4),
    ],
)
def test_what_computes_a_type_follows_the_gpus_generation(capability, told):
    names = ("tf32", "bfloat16", "float16", "float8")
    found = machine._dtypes(({"compute_capability": capability},))
    assert found == {"float32": "vector"} | dict(zip(names, told, strict=True))


def test_auto_is_the_first_accelerator_and_cuda_the_first_gpu(monkeypatch):
    assert resolve_device("auto") == resolve_device("cpu") == "cpu"
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert resolve_device("auto") == resolve_device("mps") == "mps"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert (
        resolve_device("auto") == resolve_device("cuda") == "cuda:0"
        and resolve_device("cuda:1") == "cuda:1"
    )
    with pytest.raises(
        BadInput,
        match="device: 'xpu' is not available; use auto or one of cpu, cuda:0, cuda:1, mps",
    ):
        resolve_device("xpu")


@pytest.mark.parametrize(("minor", "fp8"), [(8, False), (9, True)])
def test_a_gpu_is_told_by_its_properties(monkeypatch, minor, fp8):
    properties = SimpleNamespace(
        name="G", major=8, minor=minor, total_memory=79.7 * 2**30, uuid="abc"
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert machine._gpu(0) == {
        "name": "G",
        "memory_gib": 80,
        "compute_capability": f"8.{minor}",
        "fp8": fp8,
    }
    assert machine.gpu_uuid("cuda:0") == "GPU-abc"


def test_the_driver_is_what_nvml_says_or_why_it_does_not(monkeypatch):
    class Error(Exception):
        pass

    def lost():
        raise Error("Driver Not Loaded")

    nvml = SimpleNamespace(
        NVMLError=Error, nvmlInit=lambda: None, nvmlSystemGetDriverVersion=lambda: "580.1"
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert machine._driver() == "580.1"
    nvml.nvmlInit = lost
    assert machine._driver() == "unknown (Driver Not Loaded)"
