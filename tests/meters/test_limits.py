"""What a process may use, read from control groups of both versions as systems and containers show them."""

import math
import os
from types import SimpleNamespace

import pytest
import torch

from nanolib.meters import machine, memory
from nanolib.meters.machine import this_machine

GIB = 2**30
V2 = "0::{path}\n"
V1 = "4:memory:{path}\n2:cpu,cpuacct:{path}\n1:name=systemd:/elsewhere\n0::/\n"


@pytest.fixture
def grouped(monkeypatch, tmp_path):
    """Be in a control group of these files."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    free = SimpleNamespace(available=20 * GIB, total=32 * GIB)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: free)

    def be(version, path, files):
        proc, top = tmp_path / "proc", tmp_path / "sys"
        proc.mkdir()
        (proc / "cgroup").write_text(version.format(path=path))
        for name, text in files.items():
            (top / name).parent.mkdir(parents=True, exist_ok=True)
            (top / name).write_text(f"{text}\n")
        monkeypatch.setattr(machine, "_PROC", proc)
        monkeypatch.setattr(machine, "_MOUNTED", top)

    return be


@pytest.mark.parametrize(
    ("version", "path", "files", "quota"),
    [
        (V2, "/", {"cpu.max": "50000 100000"}, 0.5),  # a container that sees its own as the root
        (V2, "/a/b", {"a/cpu.max": "100000 100000", "a/b/cpu.max": "400000 100000"}, 1.0),
        (V2, "/a", {"a/cpu.max": "max 100000", "b/cpu.max": "100000 100000"}, math.inf),
        (
            V1,
            "/job",
            {"cpu/job/cpu.cfs_quota_us": 50_000, "cpu/job/cpu.cfs_period_us": 100_000},
            0.5,
        ),
        # a container of version 1 is shown its group as the root, and told its name outside
        (V1, "/docker/x", {"cpu/cpu.cfs_quota_us": 3, "cpu/cpu.cfs_period_us": 2}, 1.5),
    ],
)
def test_the_smallest_quota_of_the_own_group_and_its_parents_holds(
    grouped, version, path, files, quota
):
    grouped(version, path, files)
    assert machine.cpu_quota() == quota
    assert (
        machine.usable_cores()
        == this_machine().cores
        == (8 if math.isinf(quota) else max(1, int(quota)))
    )


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
    assert (machine.cpu_quota(), memory.free_bytes()) == (math.inf, 20 * GIB)
    monkeypatch.setattr(machine, "_PROC", tmp_path / "none")  # not Linux
    assert (machine.usable_cores(), machine.memory_limits(), machine.throttled_periods()) == (
        8,
        [],
        {},
    )


def test_torch_takes_no_more_threads_than_a_quota_pays_for(monkeypatch, grouped):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        grouped(V2, "/", {"cpu.max": "250000 100000"})
        with machine.limit_threads():
            assert torch.get_num_threads() == this_machine().threads == 2
        assert torch.get_num_threads() == 4
        monkeypatch.setenv("OMP_NUM_THREADS", "4")  # it was asked for
        with machine.limit_threads():
            assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
