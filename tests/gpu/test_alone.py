"""A part in a process of its own: what it sends arrives as it comes, and what ends it is said."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch

from tests.gpu import alone
from tests.gpu.page import ROOT
from tests.gpu.parts import PARTS
from tests.processes import ended, said


def returns():
    sum(range(5_000_000))  # some hundredths of a second


def breaks():
    raise ValueError("no such kernel\nand more")


def dies():
    os.kill(os.getpid(), signal.SIGKILL)


def _of(target, limit_s=60.0):
    found = []
    try:
        found.extend(alone.messages(target, limit_s))
    except alone.PartFailed as failed:
        return found, str(failed)
    assert found.pop() > 0  # the CPU seconds that it took, its last word
    return found, ""


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (returns, ""),
        (breaks, "ValueError: no such kernel and more"),
        (dies, "its process ended with exit code -9"),
    ],
)
def test_what_is_sent_arrives_and_what_ends_it_is_said(end, reason):
    def target(send):
        send(1)
        send(2)
        end()

    assert _of(target) == ([1, 2], reason)


def test_what_hangs_is_stopped_at_its_limit_with_all_that_it_has_started(tmp_path, monkeypatch):
    monkeypatch.setattr(alone, "_GRACE_S", 0.2)

    def hangs(send):
        child = subprocess.Popen(["sleep", "600"])
        send([os.getpid(), child.pid])
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # what ignores that it is asked to end
        time.sleep(600)

    (pids,), reason = _of(hangs, limit_s=4.0)
    assert reason == "stopped after 4 s"
    assert not any(psutil.pid_exists(pid) and said(psutil.Process(pid)) for pid in pids)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="here is one")
def test_without_a_gpu_it_says_what_it_would_do():
    done = ended(sys.executable, "-m", "tests.gpu.first_minutes", cwd=ROOT)
    assert done.returncode == 2 and "torch sees no NVIDIA GPU here" in done.stderr
    assert all(f"  {name}: " in done.stderr for name in PARTS)
