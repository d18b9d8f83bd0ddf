import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from nanolib.run import identity
from nanolib.run.identity import alive, host, pid_of, process_name


@pytest.fixture(params=["proc", "psutil"])
def system(request, monkeypatch):
    """With /proc, and without."""
    if request.param == "psutil":
        exists = Path.exists
        monkeypatch.setattr(Path, "exists", lambda path: path != Path("/proc/self/stat") and exists(path))
    return request.param


def test_a_process_is_known_by_its_machine_number_and_beginning(system):
    _, pid, began = process_name().split(":")
    assert alive(process_name()) and int(pid) == os.getpid() == pid_of(process_name())
    assert not alive(f"elsewhere:{pid}:{began}") and not alive(f"{host()}:{2**22 + 1}:{began}")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    name = process_name(ended.pid)
    while psutil.Process(ended.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert not alive(name)  # it has ended, and nobody has asked how
    ended.wait()
    assert not alive(name)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="this system has no /proc")
def test_a_step_of_the_clock_ends_no_process(monkeypatch):
    name = process_name()
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: time.time() + 3600)
    assert alive(name)
    pid, (ticks, boot) = name.split(":")[1], name.split(":")[2].split("@")
    assert not alive(f"{host()}:{pid}:{int(ticks) + 1}@{boot}"), "a later process of the same number"
    assert not alive(f"{host()}:{pid}:{ticks}@00000000"), "of the same number and moment after another boot"


def test_rows_of_before_tell_a_process_by_the_clock():
    pid, created = os.getpid(), psutil.Process().create_time()
    assert alive(f"{host()}:{pid}:{created + 0.5}") and not alive(f"{host()}:{pid}:{created + 1.5}")
    assert not alive(f"{host()}:{pid}:{created - 2}")


def test_a_process_that_proc_hides_is_alive_as_long_as_its_number_is_taken(monkeypatch):
    def gone(pid):
        raise FileNotFoundError

    monkeypatch.setattr(identity, "_began", gone)
    monkeypatch.setattr(os, "kill", lambda pid, number: None)
    assert alive(f"{host()}:77:1@b")
    for error, lives in ((PermissionError, True), (ProcessLookupError, False)):
        monkeypatch.setattr(os, "kill", lambda pid, number, error=error: (_ for _ in ()).throw(error))
        assert alive(f"{host()}:77:1@b") is lives


@pytest.mark.parametrize(
    "rest", ["", ":", "1", "x:y", "-1:1@b", "0:1@b", "99999999999999999999:1@b", "1:nan", "1:", "1:x:y"]
)
def test_what_names_no_process_is_dead(rest):
    assert not alive(f"{host()}:{rest}")
