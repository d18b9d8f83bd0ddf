"""Who used the CPUs and the GPU: stand-ins for the system's counts, and real processes."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from nanolib.measurement import Flag
from nanolib.meters import interference
from nanolib.meters.interference import (
    CpuTimes,
    cpu_interference,
    cpu_times,
    gpu_interference,
    interference_flags,
    load_between,
    watch_cpus,
)
from nanolib.meters.machine import Quota
from nanolib.paths import FIRST_VARIABLE


def _load(ours=0.0, quotas=(), idle=0.0, stolen=0.0, used=0.0):
    """`quotas` has the cores, the periods and the paused periods of each quota."""
    spent = (used + idle + stolen, idle, stolen, ours)
    before = (70.0, 9.0, 1.0, 50.0)
    old = [Quota(cores, 10, 5) for cores, *_ in quotas]
    new = [Quota(cores, 10 + periods, 5 + paused) for cores, periods, paused in quotas]
    after = map(sum, zip(before, spent, strict=True))
    return load_between(CpuTimes(*before, old), CpuTimes(*after, new))


@pytest.mark.parametrize(
    ("spent", "ours", "others", "stolen", "said"),
    [
        ({"used": 21, "idle": 79}, 10, 0.11, 0, ["other processes use 11% of the CPUs"]),
        (
            {"used": 2, "stolen": 3, "idle": 5},
            2,
            0,
            0.3,
            ["a hypervisor takes 30% of the CPU time (steal)"],
        ),
        (
            {"used": 1, "stolen": 3, "idle": 96},
            1,
            0,
            0.03,
            ["a hypervisor takes 3% of the CPU time (steal)"],
        ),
        ({"used": 2, "idle": 8}, 1, 0.1, 0, []),  # a tenth, and a fiftieth, do not disturb
        ({"used": 1, "stolen": 1, "idle": 48}, 1, 0, 0.02, []),
        ({"used": 1, "idle": 9}, 5, 0, 0, []),  # of more than was counted nothing is left
    ],
)
def test_what_others_used_is_what_was_neither_idle_nor_ours(spent, ours, others, stolen, said):
    load = _load(ours, **spent)
    assert (load.others, load.stolen) == pytest.approx((others, stolen))
    assert load.details() == {"others_share": pytest.approx(others + stolen)}
    assert cpu_interference(load) == said
    assert (Flag.BUSY_MACHINE in interference_flags(load.details())) == (others + stolen > 0.1)


@pytest.mark.parametrize("spent", [{"used": 0.25, "idle": 0.25}, {}])
def test_over_a_short_span_or_where_nothing_is_counted_nobody_is_known_to_be_quiet(spent):
    load = _load(**spent)
    assert load.others is load.stolen is None
    assert load.details() == {"others_share": None} and not interference_flags(load.details())
    assert "was not measured" in cpu_interference(load)[0]


@pytest.mark.parametrize(
    ("quotas", "by"),
    [
        ([(0.5, 20, 10)], "a CPU quota of 0.5 cores"),
        ([(0.5, 20, 2)], None),  # now and then
        ([(0.5, 0, 0)], None),
        # the group around it has more cores, and other processes use them
        ([(2.0, 20, 0), (4.0, 20, 10)], "a CPU quota of 4 cores"),
    ],
)
def test_what_ones_own_quotas_held_back_is_no_use_by_others(quotas, by):
    load = _load(1.0, quotas, used=1.0, idle=3.0)
    assert interference_flags(load.details()) == ((Flag.THROTTLED,) if by else ())
    assert load.details() == {"others_share": 0.0} | ({"throttled_by": by} if by else {})


_WORK = "import time\nwhile time.process_time() < 0.4: pass\n"


def test_the_work_of_a_child_that_has_ended_is_ours_and_that_outside_the_tree_is_of_others(
    tmp_path, monkeypatch
):
    monkeypatch.setenv(FIRST_VARIABLE, str(os.getpid()))
    done = tmp_path / "done"
    leave = "import os\nif os.fork(): os._exit(0)\nos.setsid()\n"
    start = cpu_times().ours
    subprocess.run([sys.executable, "-c", _WORK], check=True)
    before = cpu_times().ours
    with watch_cpus() as load:
        detached = f"{leave}{_WORK}open({str(done)!r}, 'w').close()"
        subprocess.run([sys.executable, "-c", detached], check=True)
        while not done.exists():
            time.sleep(0.05)
    assert before - start > 0.3 > cpu_times().ours - before
    assert load.others > 0


@pytest.mark.parametrize(("first", "place"), [(1, 1), (3, 0), (9, 0), (None, 0)])
def test_what_nanolib_starts_belongs_to_the_command_that_started_it(monkeypatch, first, place):
    """A shell starts nano, a kernel and a worker; a process that is no parent begins nothing."""
    shell, nano, kernel = (
        SimpleNamespace(pid=pid, children=lambda recursive: []) for pid in range(3)
    )
    parents = [kernel, nano, shell]
    worker = SimpleNamespace(pid=3, children=lambda recursive: [], parents=lambda: parents)
    monkeypatch.setattr(psutil, "Process", lambda: worker)
    monkeypatch.delenv(FIRST_VARIABLE, raising=False)
    if first is not None:
        monkeypatch.setenv(FIRST_VARIABLE, str(first))
    assert interference._family() == [[worker, nano][place]]
    assert os.environ[FIRST_VARIABLE] == str(first or 3)  # for the processes that the worker starts


@pytest.mark.parametrize(
    ("usable", "configured", "busy_s"),
    [({1}, 2, 15.0), ({1}, 3, 16.0), ((), 2, 16.0)],
)
def test_only_the_cpus_that_are_usable_count_unless_some_cpus_are_offline(
    monkeypatch, usable, configured, busy_s
):
    """Linux counts a guest's time in `user` too."""
    every = [SimpleNamespace(user=1.0, guest=1.0, idle=2.0, steal=3.0)]
    every.append(SimpleNamespace(user=10.0, softirq=5.0, iowait=4.0))
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: every)
    monkeypatch.setattr(interference, "usable_cpus", lambda: {*usable})
    monkeypatch.setattr(os, "sysconf", lambda _: configured)
    found = cpu_times()
    assert found.total - found.idle - found.stolen == busy_s


def test_a_timing_waits_for_the_processes_that_torch_compiles_with(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._inductor.async_compile", SimpleNamespace())
    monkeypatch.setattr(interference, "_LOOK_S", 0.5)  # a busy machine may give it none of a tenth
    with subprocess.Popen([sys.executable, "-c", f"{_WORK}time.sleep(60)"]) as child:
        try:
            seconds = lambda: sum(psutil.Process(child.pid).cpu_times()[:2])  # noqa: E731
            while seconds() < 0.1:  # it has begun
                time.sleep(0.02)
            interference.wait_for_compilers()
            assert seconds() >= 0.35 and child.poll() is None
        finally:
            child.kill()


class _Nvml:
    """A GPU as NVML tells of it; what is not given is not supported."""

    NVMLError = LookupError

    def __init__(self, **answers):
        self.answers = answers

    def nvmlInit(self):
        pass

    def __getattr__(self, name):
        answer = self.answers[name.removeprefix("nvmlDeviceGet")]
        return lambda handle: answer


QUIET = {
    "UtilizationRates": SimpleNamespace(gpu=10),
    "EnforcedPowerLimit": 700_000,
    "PowerManagementDefaultLimit": 700_000,
    "CurrentClocksThrottleReasons": 0x1,  # idle
    "HandleByUUID": None,
}
BUSY = {
    "UtilizationRates": SimpleNamespace(gpu=11),
    "EnforcedPowerLimit": 300_700,
    "CurrentClocksThrottleReasons": 0xEE,
}


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (QUIET, []),
        ({"HandleByUUID": None}, []),
        ({}, ["other work on the GPU was not measured ('HandleByUUID')"]),
        (
            QUIET | BUSY,
            [
                "the GPU's utilization is 11 %",
                "the GPU's power is capped at 301 W of 700 W",
                "the GPU's clock is lowered by power cap, hardware slowdown, heat, "
                "heat (hardware limit), power brake",
            ],
        ),
    ],
)
def test_what_else_a_gpu_does_is_told(answers, said):
    assert gpu_interference("GPU-a", _Nvml(**answers)) == said
