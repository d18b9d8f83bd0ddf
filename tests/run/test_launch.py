"""What is launched ends with the process that launched it, whichever system tells of that end and however."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from nanolib.run.launch import command

ROOT = Path(__file__).parents[2]
HANGING_S = 30

# The parent tells its child's number and waits; the child waits for ever.
_PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {child!r}, str(__import__("os").getpid())])
print(child.pid, flush=True)
sys.stdin.read()
"""
_CHILD = """
import sys, time
{before}
from nanolib.run import launch
launch._WATCH_S = 0.01
launch.die_with_parent(int(sys.argv[1]))
print("alive", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("before", ["", "sys.platform = 'darwin'"], ids=["told by the system", "looked for"])
def test_a_child_ends_when_its_parent_is_killed(before):
    code = _PARENT.format(child=_CHILD.format(before=before))
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    child = psutil.Process(int(parent.stdout.readline()))
    assert parent.stdout.readline() == "alive\n"
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs([child], timeout=HANGING_S)
    assert not alive


def test_a_child_whose_parent_was_gone_before_it_asked_ends_at_once():
    other = os.getppid()  # anybody but the one that started it
    ended = subprocess.run(
        [sys.executable, "-c", _CHILD.format(before=""), str(other)], cwd=ROOT, timeout=HANGING_S, check=False
    )
    assert ended.returncode == -9


def test_a_launched_module_has_its_arguments_and_is_main():
    ended = subprocess.run(
        command("json.tool", "--compact"), input="[1,  2]", capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "[1,2]\n")


@pytest.mark.skipif(
    sys.platform != "linux" or subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True).returncode,
    reason="processes cannot be numbered anew here",
)
def test_process_1_may_be_the_parent_as_in_a_container():
    code = (
        "import os, subprocess; from nanolib.run.launch import command; assert os.getpid() == 1;"
        "raise SystemExit(subprocess.run(command('json.tool'), input=b'[]').returncode)"
    )
    namespace = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code]
    ended = subprocess.run(namespace, capture_output=True, cwd=ROOT, timeout=HANGING_S, check=False)
    assert (ended.returncode, ended.stdout) == (0, b"[]\n"), ended.stderr
