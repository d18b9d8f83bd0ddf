"""A part in a process of its own: what it sends arrives as it comes, and what ends it is said."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from nanolib import installed
from tests.gpu import alone, first_minutes
from tests.gpu.page import ROOT
from tests.gpu.parts import PARTS
from tests.processes import ended

pytestmark = pytest.mark.slow  # a process that imports torch


def two(send):
    send(1)
    send(2)


def breaks(send):
    send(1)
    raise ValueError("no such kernel\nand more")


def dies(send):
    send(1)
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(send, file):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(file).write_text(json.dumps([os.getpid(), child.pid]))
    send(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # what ignores that it is asked to end
    time.sleep(600)


def _of(target, *arguments, limit_s=300.0):
    found = []
    try:
        found.extend(alone.messages(target, arguments, limit_s))
    except alone.PartFailed as failed:
        return found, str(failed)
    assert found.pop() > 0  # the CPU seconds that it took, its last word
    return found, ""


@pytest.mark.parametrize(
    ("target", "sent", "said"),
    [
        (two, [1, 2], ""),
        (breaks, [1], "ValueError: no such kernel"),
        (dies, [1], "its process ended with exit code -9"),
    ],
)
def test_what_is_sent_arrives_and_what_ends_it_is_said(target, sent, said):
    assert _of(target) == (sent, said)


def test_what_hangs_is_stopped_at_its_limit_with_all_that_it_has_started(tmp_path, monkeypatch):
    monkeypatch.setattr(alone, "_GRACE_S", 0.2)
    _of(two)  # the server has imported torch by now
    file = tmp_path / "pids"
    assert _of(hangs, str(file), limit_s=20.0) == ([1], "stopped after 20 s")
    for pid in json.loads(file.read_text()):
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is one")
def test_without_a_gpu_it_says_what_it_would_do():
    done = ended(sys.executable, "-m", "tests.gpu.first_minutes", cwd=ROOT)
    assert done.returncode == 2 and "torch sees no NVIDIA GPU here" in done.stderr
    assert all(f"  {name}: " in done.stderr for name in PARTS)


def test_what_is_not_installed_is_said_first(monkeypatch, capsys):
    monkeypatch.setattr(installed, "missing", lambda: {installed.EVERYTHING: ["pydantic"]})
    assert first_minutes.main([]) == 2
    said = "make gpu: not installed: pydantic (needed for everything); nothing was run;"
    assert capsys.readouterr().err.startswith(said)
