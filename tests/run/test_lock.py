"""The lock of a device: it waits, says for whom, survives a crash, and touches nothing but its own file."""

import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from nanolib.measurement import BadInput
from nanolib.run import lock

ROOT = Path(__file__).parents[2]


def _hold(device, ready, release):
    with lock.device_lock(device, "the other"):
        ready.set()
        release.wait(30)


def test_a_second_run_waits_and_says_for_whom():
    context = multiprocessing.get_context("spawn")
    ready, release = context.Event(), context.Event()
    other = context.Process(target=_hold, args=("test-wait", ready, release))
    other.start()
    assert ready.wait(60)
    assert lock.holder("test-wait") == f"process {other.pid} (the other)"
    said = []

    def say(line):
        said.append(line)
        release.set()

    with lock.device_lock("test-wait", "me", say):
        assert lock.holder("test-wait") == f"process {os.getpid()} (me)"
    other.join(30)
    assert said == [
        f"waiting for test-wait: in use by process {other.pid} (the other); this run starts when that ends",
        "test-wait is free; starting",
    ]
    assert lock.holder("test-wait") == ""


def test_a_crash_releases_the_device():
    context = multiprocessing.get_context("spawn")
    ready, release = context.Event(), context.Event()
    other = context.Process(target=_hold, args=("test-crash", ready, release))
    other.start()
    assert ready.wait(60)
    os.kill(other.pid, signal.SIGKILL)
    other.join(30)
    said = []
    with lock.device_lock("test-crash", "me", said.append):
        pass
    assert len(said) in (0, 2)  # it may have waited for the kernel to bury the other


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A shared folder of temporary files; the lock of `d` belongs at its `nanolib-d.lock`."""
    monkeypatch.setattr(lock.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path / "nanolib-d.lock"


def _plant(place, what):
    precious = place.with_name("precious")
    precious.write_text("precious")
    if what == "link":
        place.symlink_to(precious)
    elif what == "dangling link":
        place.symlink_to(place.with_name("missing"))
    elif what == "second name":
        place.hardlink_to(precious)
    elif what == "pipe":
        os.mkfifo(place)
    elif what == "folder":
        place.mkdir()
    elif what == "file of text":
        place.write_text("precious")
    elif what == "file of JSON":
        place.write_text("[1]")
    return precious


@pytest.mark.parametrize(
    "what", ["link", "dangling link", "second name", "pipe", "folder", "file of text", "file of JSON"]
)
def test_what_is_no_lock_file_is_refused_in_one_line_and_left_as_it_is(place, what):
    precious = _plant(place, what)
    before = place.lstat()
    with (
        pytest.raises(BadInput, match=f"lock: {place} is no lock file of nanolib's") as error,
        lock.device_lock("d", ""),
    ):
        raise AssertionError("it was held")
    assert len(error.value.lines) == 1
    assert lock.holder("d") == ""
    assert precious.read_text() == "precious" and not place.with_name("missing").exists()
    assert (before.st_ino, before.st_size, before.st_mode) == (
        place.lstat().st_ino,
        place.lstat().st_size,
        before.st_mode,
    )


def test_all_users_may_read_its_file_and_its_owner_alone_may_write(place):
    before = os.umask(0o077)
    try:
        with lock.device_lock("d", "me"):
            assert stat.S_IMODE(place.stat().st_mode) == 0o644
            assert lock.holder("d") == f"process {os.getpid()} (me)"
    finally:
        os.umask(before)
    assert place.read_text() == "" and lock.holder("d") == ""


def test_a_file_that_was_removed_meanwhile_is_not_what_others_wait_for(place, monkeypatch):
    tries = []

    def try_once(handle, really=lock._try):
        tries.append(handle)
        if len(tries) == 1:
            place.unlink()
        return really(handle)

    monkeypatch.setattr(lock, "_try", try_once)
    with lock.device_lock("d", "me"):
        assert len(tries) == 2 and lock.holder("d") == f"process {os.getpid()} (me)"


_OTHER = """
    import os, sys
    from nanolib.run import lock
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    lock.tempfile.gettempdir = lambda: {folder!r}
    lock._POLL_S = 0.01
    with lock.device_lock("d", "theirs", lambda line: print(line, flush=True)):
        print("held", flush=True)
        sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
def test_another_user_waits_for_it_and_holds_it_without_writing_there(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # whose parents are open to all
        Path(folder).chmod(0o1777)
        monkeypatch.setattr(lock.tempfile, "gettempdir", lambda: folder)
        with lock.device_lock("d", "me"):
            command = [sys.executable, "-c", textwrap.dedent(_OTHER.format(folder=folder))]
            other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
            assert other.stdout.readline().startswith(f"waiting for d: in use by process {os.getpid()} (me)")
        assert other.stdout.readline() == "d is free; starting\n" and other.stdout.readline() == "held\n"
        assert lock.lock_path("d").read_text() == "" and lock.holder("d") == "another process"
        other.communicate("")
        assert other.returncode == 0 and lock.holder("d") == ""


def test_whatever_a_holder_is_called_its_file_stays_a_lock_file(place):
    for _ in range(2):
        with lock.device_lock("d", "\U0001f600" * 5000):
            assert lock.holder("d").startswith(f"process {os.getpid()} (")


def test_a_holder_that_was_killed_is_not_named_for_the_next(place):
    place.write_text('{"process": "x:1:2", "what": "killed"}')
    assert lock.holder("d") == ""
    handle = os.open(place, os.O_RDONLY)
    assert lock._try(handle)
    assert lock.holder("d") == "another process"
    os.close(handle)
