"""The lock of a device waits, names its owner, survives a crash, and changes no other file."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from nanolib.measurement import BadInput
from nanolib.meters import machine
from nanolib.run import lock


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Return the path of the lock file of a device `d`, in a new temporary folder."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(lock.tempfile, "tempdir", None)
    return tmp_path / "nanolib-d.lock"


def _hold(ready, release):
    with lock.device_lock("d", "the other"):
        ready.set()
        release.wait(30)


@pytest.fixture
def other(place):
    """Start a process with the lock, and return the event that ends it."""
    context = multiprocessing.get_context("fork")
    ready, release = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(ready, release))
    process.start()
    assert ready.wait(60)
    yield process, release
    process.kill()
    process.join()


def test_a_second_run_waits_and_says_for_whom(other):
    process, release = other
    assert lock.lock_owner("d") == f"process {process.pid} (the other)"
    said = []

    def say(line):
        said.append(line)
        release.set()

    with lock.device_lock("d", "me", say):
        assert lock.lock_owner("d") == f"process {os.getpid()} (me)"
    assert said == [
        f"waiting for d: in use by process {process.pid} (the other); this run starts after the other",
        "d is free; starting",
    ]
    assert lock.lock_owner("d") == ""


def test_a_gpus_lock_is_the_same_under_whichever_number_it_has(monkeypatch):
    uuids = {"cuda:0": "GPU-a", "cuda:1": "GPU-b"}
    monkeypatch.setattr(machine, "gpu_uuid", lambda device: uuids[device])
    assert lock.lock_path("cuda:1").name == "nanolib-GPU-b.lock" != lock.lock_path("cuda:0").name
    uuids["cuda:0"] = "GPU-b"  # the other is hidden from this process
    assert lock.lock_path("cuda:0").name == "nanolib-GPU-b.lock"


def test_a_crash_releases_the_device(other):
    os.kill(other[0].pid, signal.SIGKILL)
    other[0].join(30)
    with lock.device_lock("d", "me", lambda line: None):
        assert lock.lock_owner("d") == f"process {os.getpid()} (me)"


def test_what_its_pause_raises_ends_the_wait(other):
    def stop(seconds):
        raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        lock.device_lock("d", "me", lambda line: None, pause=stop),
    ):
        raise AssertionError("it was held")


@pytest.fixture
def precious(place):
    """A file that no test may change."""
    file = place.with_name("precious")
    file.write_text("precious")
    yield file
    assert file.read_text() == "precious"


@pytest.mark.parametrize("what", ["link", "folder"])
def test_what_is_no_lock_file_is_refused_in_one_line_and_left_as_it_is(place, precious, what):
    if what == "link":
        place.symlink_to(precious)
    else:
        place.mkdir()
    with (
        pytest.raises(BadInput, match=f"lock: {place} is not nanolib's lock file") as error,
        lock.device_lock("d", ""),
    ):
        raise AssertionError("it was held")
    assert len(error.value.lines) == 1 and lock.lock_owner("d") == ""


def test_a_link_in_place_of_the_owners_name_is_not_followed(place, precious):
    place.with_suffix(".owner").symlink_to(precious)
    with lock.device_lock("d", "me"):
        assert lock.lock_owner("d") == "another process"


_OTHER = """
    import os, sys
    from nanolib.run import lock
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    lock.tempfile.tempdir = {folder!r}
    lock._POLL_S = 0.01
    with lock.device_lock("d", "theirs", lambda line: print(line, flush=True)):
        print("held", flush=True)
        sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
def test_another_user_waits_for_it_and_holds_it(place):
    place.parent.chmod(0o1777)
    for folder in place.parent.parents:
        if not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o011)
    code = textwrap.dedent(_OTHER.format(folder=str(place.parent)))
    with lock.device_lock("d", "me"):
        theirs = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert theirs.stdout.readline().startswith(
            f"waiting for d: in use by process {os.getpid()} (me)"
        )
    assert [theirs.stdout.readline() for _ in range(2)] == ["d is free; starting\n", "held\n"]
    assert lock.lock_owner("d") != ""
    theirs.communicate("")
    assert lock.lock_owner("d") == ""
