"""The lock of a device waits, names its owner, and survives a crash."""

import contextlib
import multiprocessing
import os
import signal
import time

import pytest

from nanolib.measurement import BadInput
from nanolib.meters import machine
from nanolib.run import process
from nanolib.run.process import device_lock, lock_path


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Return the path of the lock file of a device `d`, in a new temporary folder."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(process.tempfile, "tempdir", None)
    return tmp_path / "nanolib-d.lock"


def _hold(ready):
    with device_lock("d", "the other"):
        ready.set()
        time.sleep(600)


@pytest.fixture
def other(place):
    """Start a process with the lock."""
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    holder = context.Process(target=_hold, args=(ready,))
    holder.start()
    assert ready.wait(60)
    yield holder
    holder.kill()
    holder.join()


def _owner():
    """Return for whom a run waits, or an empty string."""
    said = []

    def stop(seconds):
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt), device_lock("d", "third", said.append, stop):
        pass
    return said[0].partition("in use by ")[2].partition(";")[0] if said else ""


def test_a_second_run_waits_and_says_for_whom_until_a_crash_releases_the_device(other, place):
    def crash(seconds):
        os.kill(other.pid, signal.SIGKILL)
        other.join(30)

    assert place.stat().st_mode & 0o777 == 0o666  # other users lock it too
    said, owner = [], f"process {other.pid} (the other)"
    assert _owner() == owner
    with device_lock("d", "me", said.append, pause=crash):
        assert _owner() == f"process {os.getpid()} (me)"
    assert said == [
        f"waiting for d: in use by {owner}; this run starts afterwards",
        "d is free; starting",
    ]
    assert _owner() == ""


def test_a_gpus_lock_is_the_same_under_whichever_number_it_has(monkeypatch):
    uuids = {"cuda:0": "GPU-a", "cuda:1": "GPU-b"}
    monkeypatch.setattr(machine, "gpu_uuid", lambda device: uuids[device])
    assert lock_path("cuda:1").name == "nanolib-GPU-b.lock" != lock_path("cuda:0").name
    uuids["cuda:0"] = "GPU-b"  # the other is hidden from this process
    assert lock_path("cuda:0").name == "nanolib-GPU-b.lock"


def test_what_is_no_lock_file_is_refused_in_one_line_and_left_as_it_is(place):
    precious = place.with_name("precious")
    precious.write_text("precious")
    place.symlink_to(precious)
    with pytest.raises(BadInput, match=f"lock: {place} is not nanolib's lock file") as error:
        device_lock("d", "").__enter__()
    assert len(error.value.lines) == 1 and precious.read_text() == "precious"


def test_the_name_of_the_owner_does_not_go_through_a_link_or_a_pipe_of_somebody_else(
    place, tmp_path
):
    victim, owner = tmp_path / "victim", place.with_suffix(".owner")
    victim.write_text("mine")
    owner.symlink_to(victim)
    with device_lock("d", "me"):
        assert victim.read_text() == "mine" and process._read(owner) == "another process"
    owner.unlink()
    os.mkfifo(owner)  # Nobody reads or writes it.
    with device_lock("d", "me"):
        assert process._read(owner) == "another process"
