"""Who used the CPUs: stand-ins for the system's counts, and two real processes, of ours and of others."""

import math
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from nanolib.measurement import Flag
from nanolib.meters import interference
from nanolib.meters.interference import CpuTimes, cpu_times, load_between, watch_cpus
from nanolib.run import process


def _load(ours=0.0, periods=None, **spent):
    before = CpuTimes(dict.fromkeys(spent, 100.0), 50.0, {name: (10, 5) for name in periods or {}})
    return load_between(
        before, CpuTimes({k: 100 + v for k, v in spent.items()}, 50.0 + ours, periods or {})
    )


@pytest.mark.parametrize(
    ("spent", "ours", "others", "stolen"),
    [
        ({"user": 7.0, "idle": 13.0}, 3.0, 0.2, 0.0),
        (
            {"user": 1.0, "system": 2.0, "nice": 1.0, "irq": 1.0, "softirq": 1.0, "idle": 4.0},
            1.0,
            0.5,
            0.0,
        ),
        ({"user": 2.0, "iowait": 4.0, "idle": 4.0}, 2.0, 0.0, 0.0),
        ({"user": 2.0, "steal": 3.0, "idle": 5.0}, 2.0, 0.0, 0.3),
        ({"user": 1.0, "idle": 9.0}, 5.0, 0.0, 0.0),  # of more than was counted nothing is left
    ],
)
def test_what_others_used_is_what_was_neither_idle_nor_ours(spent, ours, others, stolen):
    load = _load(ours, **spent)
    assert (load.others, load.stolen) == pytest.approx((others, stolen))
    assert load.taken == pytest.approx(others + stolen)


@pytest.mark.parametrize(("busy", "flags"), [(1.0, ()), (1.1, (Flag.BUSY_MACHINE,))])
def test_a_timing_suffers_from_more_than_a_tenth(busy, flags):
    load = _load(user=busy, idle=10 - busy)
    assert load.flags == flags and load.details() == {"others_share": pytest.approx(busy / 10)}


@pytest.mark.parametrize("spent", [{"user": 0.25, "idle": 0.25}, {"user": 0.0, "idle": 0.0}])
def test_over_a_short_span_or_where_nothing_is_counted_nobody_is_known_to_be_quiet(spent):
    load = _load(**spent)
    assert load.others is load.stolen is load.taken is None
    assert load.details() == {"others_share": None} and not load.flags


def test_what_ones_own_quota_held_back_is_no_use_by_others(monkeypatch):
    monkeypatch.setattr(interference, "cpu_quota", lambda: 0.5)
    load = _load(1.0, {"a": (30, 15), "b": (10, 5)}, user=1.0, idle=3.0)
    assert (load.throttled, load.flags) == (0.5, (Flag.THROTTLED,))
    assert load.details() == {"others_share": 0.0, "throttled_by": "a CPU quota of 0.5 cores"}
    assert not _load(1.0, {"a": (30, 7)}, user=1.0, idle=3.0).flags  # now and then


_WORK = "import time\nwhile time.process_time() < 0.8: pass\n"


def test_the_work_of_a_child_that_has_ended_is_ours():
    before = cpu_times()
    subprocess.run([sys.executable, "-c", _WORK], check=True)
    assert cpu_times().ours - before.ours > 0.7


def test_the_work_of_a_process_outside_the_tree_is_that_of_others(tmp_path):
    done = tmp_path / "done"
    detached = f"import os\nif os.fork(): os._exit(0)\nos.setsid()\n{_WORK}open({str(done)!r}, 'w').close()"
    before = cpu_times()
    with watch_cpus() as load:
        subprocess.run([sys.executable, "-c", detached], check=True)
        while not done.exists():
            time.sleep(0.05)
    assert load.others > 0 and cpu_times().ours - before.ours < 0.6


def test_what_nanolib_starts_belongs_to_the_command_that_started_it():
    """A kernel looks up: papermill and `nano`, and all that they started, are no others."""
    assert process.python("x")[2] in interference._STARTED
    code = "import os, time\nfrom nanolib.meters import interference\nprint(interference._family()[0].pid)"
    alone = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(alone.stdout) != os.getpid()  # somebody else's process
    ours = [sys.executable, "-c", code, process.python("x")[2]]
    started = subprocess.run(ours, check=True, capture_output=True, text=True)
    assert int(started.stdout) == os.getpid()


def test_a_timing_waits_for_the_processes_that_torch_compiles_with(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._inductor.async_compile", SimpleNamespace())
    monkeypatch.setattr(interference, "_last_look", (-math.inf, -math.inf))
    monkeypatch.setattr(interference, "_LOOK_S", 1.0)  # a busy machine may give it none of a tenth
    begins = "import time\nend = time.process_time() + 1.0\nwhile time.process_time() < end: pass\ntime.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", begins]) as child:
        try:
            process = psutil.Process(child.pid)
            while _seconds(process) < 0.2:  # it has begun
                time.sleep(0.02)
            interference.wait_for_compilers()
            assert _seconds(process) >= 1.0 and child.poll() is None
        finally:
            child.kill()


def _seconds(process):
    """CPU time of a process. Some virtual machines count all of it as the system's, so both are added."""
    times = process.cpu_times()
    return times.user + times.system
