"""A helper process gives its answers or a reason, prints nothing, and leaves nothing behind."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from nanolib.measurement import BadInput
from nanolib.run.timeout import answers_of


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
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
    )
    yield child.pid
    time.sleep(600)


@pytest.mark.parametrize(
    ("function", "answers", "reason"),
    [
        (two_answers_and_noise, [1, {"b": 2}], ""),
        (fails_after_one, [1], "RuntimeError: no more"),
        (dies, [1], "its process ended with 3"),
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
    assert reason == "it takes over 0.5 s"
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
