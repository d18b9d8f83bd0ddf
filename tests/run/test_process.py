"""A process ends with its parent, and sends its values or the reason of its failure."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from nanolib.measurement import BadInput
from nanolib.run.process import call_in_process, describe_exit
from nanolib.run.timeout import answers_of

ROOT = Path(__file__).parents[2]
HANGING_S = 30

# The parent prints the process ID of its child and waits. The child waits for ever.
_PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {child!r}, str(__import__("os").getpid())])
print(child.pid, flush=True)
sys.stdin.read()
"""
_CHILD = """
import sys, time
{before}
from nanolib.run import process
process._WATCH_S = 0.01
process.exit_with_parent(int(sys.argv[1]))
print("alive", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    "before", ["", "sys.platform = 'darwin'"], ids=["told by the system", "looked for"]
)
def test_a_child_ends_when_its_parent_is_killed(before):
    code = _PARENT.format(child=_CHILD.format(before=before))
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    child = psutil.Process(int(parent.stdout.readline()))
    assert parent.stdout.readline() == "alive\n"
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs([child], timeout=HANGING_S)
    assert not alive


def test_a_child_whose_parent_was_gone_before_it_asked_ends_at_once():
    other = os.getppid()  # any process except the parent
    ended = subprocess.run(
        [sys.executable, "-c", _CHILD.format(before=""), str(other)], cwd=ROOT, timeout=HANGING_S
    )
    assert ended.returncode == -9


def _child(**options):
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], **options).pid


def _has_ended(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def greet(send, name):
    print("printed", flush=True)
    send((name, _child()))
    time.sleep(600)


def test_a_function_in_a_fresh_process_prints_to_standard_error_and_ends_with_all_that_it_started(
    capfd,
):
    sent = call_in_process(greet, "Ada", limit_s=HANGING_S)
    name, pid = next(sent)
    assert name == "Ada"
    sent.close()
    assert _has_ended(pid)
    said = capfd.readouterr()
    assert "printed" in said.err and "printed" not in said.out


@pytest.mark.parametrize(
    ("code", "errors", "said"),
    [
        (-9, "", "the process was killed by SIGKILL"),
        (-40, "", "the process was killed by signal 40"),
        (3, "one\ntwo\n", "the process ended with 3: two"),
        (3, "", "the process ended with 3"),
    ],
)
def test_how_a_process_ended_is_said_in_words(code, errors, said):
    assert describe_exit(code, errors) == said


def two_answers_and_noise():
    print("printed")
    yield 1
    os.write(2, b"written")
    yield {"b": 2}


def fails_after_one():
    yield 1
    raise RuntimeError("no\nmore")


def dies():
    yield 1
    os._exit(3)


def refuses():
    raise BadInput("model: none")
    yield


def hangs_with_a_child():
    yield _child(start_new_session=True)
    time.sleep(600)


@pytest.mark.parametrize(
    ("function", "answers", "reason"),
    [
        (two_answers_and_noise, [1, {"b": 2}], ""),
        (fails_after_one, [1], "RuntimeError: no more"),
        (dies, [1], "the process ended with 3"),
    ],
)
def test_answers_come_in_order_with_the_reason_why_there_are_no_more(
    capfd, function, answers, reason
):
    assert answers_of(function, limit_s=30) == (answers, reason)
    assert capfd.readouterr() == ("", "")


def test_bad_input_is_raised():
    with pytest.raises(BadInput, match="model: none"):
        answers_of(refuses, limit_s=30)


def test_at_the_time_limit_all_that_it_started_is_ended():
    (child,), reason = answers_of(hangs_with_a_child, limit_s=0.5)
    assert reason == "the call takes more than 0.5 s"
    assert _has_ended(child)
