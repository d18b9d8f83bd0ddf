"""A process ends with its parent, and sends its values or the reason of its failure."""

import multiprocessing
import os
import subprocess
import sys
import time
from multiprocessing.connection import Connection

import psutil
import pytest

from nanolib.measurement import BadInput
from nanolib.paths import checkout
from nanolib.run.process import Died, Late, call_in_process, describe_exit
from tests.processes import ended, said
from tests.waiting import until

HANGING_S = 30

# The parent prints the process ID of its child and waits. The child waits for ever.
_PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", *sys.argv[1:], str(os.getpid())])
print(child.pid, flush=True)
sys.stdin.read()
"""
_CHILD = """
import sys, time
from nanolib.run import process
_, sys.platform, parent = sys.argv
process._WATCH_S = 0.01
process.exit_with_parent(int(parent))
print("alive", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("platform", [sys.platform, "darwin"])
def test_a_child_ends_when_its_parent_is_killed(platform):
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, _CHILD, platform],
        cwd=checkout(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    child = psutil.Process(int(parent.stdout.readline()))
    assert parent.stdout.readline() == "alive\n"
    parent.kill()
    parent.wait()
    until(lambda: not said(child), HANGING_S)


def test_a_child_whose_parent_was_gone_before_it_asked_ends_at_once():
    other = os.getppid()  # any process except the parent
    command = sys.executable, "-c", _CHILD, sys.platform, str(other)
    assert ended(*command, cwd=checkout()).returncode == -9


def _child():
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    return subprocess.Popen(command, start_new_session=True).pid


def _has_ended(pid):
    return not psutil.pid_exists(pid) or not said(psutil.Process(pid))


def greet(send, name):
    print("printed", flush=True)
    send((name, _child()))
    time.sleep(600)


def say_bye(send):
    send("bye")


def test_values_that_arrive_between_a_look_and_the_end_of_the_process_are_read(monkeypatch):
    real, first = Connection.poll, iter([True])

    def poll(connection, timeout=0.0):
        if not next(first, False):
            return real(connection, timeout)
        for process in multiprocessing.active_children():
            process.join(HANGING_S)
        return False

    monkeypatch.setattr(Connection, "poll", poll)
    assert list(call_in_process(say_bye, limit_s=HANGING_S)) == ["bye"]


def test_a_function_in_a_fresh_process_prints_to_standard_error_and_ends_with_all_that_it_started(
    capfd,
):
    sent = call_in_process(greet, "Ada", limit_s=HANGING_S)
    name, pid = next(sent)
    assert name == "Ada"
    sent.close()
    until(lambda: _has_ended(pid), HANGING_S)
    printed = capfd.readouterr()
    assert "printed" in printed.err and "printed" not in printed.out


def test_how_a_process_ended_is_said_in_words():
    assert describe_exit(-9) == "the process was killed by SIGKILL"
    assert describe_exit(-40) == "the process was killed by signal 40"
    assert describe_exit(3, "one\ntwo\n") == "the process exited with code 3: two"


def fails_after_one(send):
    send(1)
    raise RuntimeError("no\nmore")


def dies(send):
    send(1)
    os._exit(0)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (fails_after_one, "RuntimeError: no more"),
        (dies, "the process exited with code 0"),
    ],
)
def test_values_come_before_the_reason_why_there_are_no_more(function, reason):
    sent = call_in_process(function, limit_s=HANGING_S)
    assert next(sent) == 1
    with pytest.raises(Died, match=f"^{reason}$"):
        next(sent)


def refuses(_):
    raise BadInput("model: none", "seed: 0")


def test_bad_input_is_raised_with_all_of_its_lines():
    with pytest.raises(BadInput) as error:
        list(call_in_process(refuses, limit_s=HANGING_S))
    assert error.value.lines == ("model: none", "seed: 0")


def test_at_the_time_limit_all_that_it_started_is_ended():
    sent = call_in_process(greet, "Ada", limit_s=0.5)
    _, child = next(sent)
    with pytest.raises(Late, match=r"^the call takes more than 0\.5 s$"):
        next(sent)
    until(lambda: _has_ended(child), HANGING_S)
