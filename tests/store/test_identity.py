"""Whether the process that writes a run is alive is known from its name."""

import os
import subprocess
import sys

import psutil
import pytest

from nanolib.store.connection import alive, host, process_name
from tests.waiting import until


@pytest.fixture
def killed():
    """Return the name of a killed process."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        name = process_name(process.pid)
        assert alive(name)
        process.kill()
        until(lambda: alive(name) is False)  # a zombie counts as ended
    return name


def test_a_process_is_known_by_its_machine_number_and_beginning(killed):
    _, pid, began = process_name().split(":")
    assert alive(process_name()) and int(pid) == os.getpid()
    assert alive(f"{host()}:{pid}:{float(began) + 1}")  # a boot time is rounded to a second
    assert alive(killed) is False
    earlier = f"{host()}:{pid}:{float(began) - 5}"  # an earlier process of the same number
    assert alive(earlier) is alive(f"{host()}:9999999:1") is False
    for elsewhere in (f"00000000:{pid}:{began}", ""):  # other machines are unknown
        assert alive(elsewhere) is None


def test_a_step_of_the_clock_ends_no_process(monkeypatch):
    name, boot, created = process_name(), psutil.boot_time(), psutil.Process().create_time()
    monkeypatch.setattr(psutil, "boot_time", lambda: boot + 3600)
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: created + 3600)
    assert alive(name)
