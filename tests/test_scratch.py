import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanolib import scratch
from nanolib.scratch import Scratch, remove_left_behind

HOLD = "import sys; from nanolib.scratch import Scratch; s = Scratch('case', {beside}); print(s.path, flush=True); sys.stdin.read()"


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(scratch.tempfile, "tempdir", None)
    return tmp_path


def _holder(beside=None):
    code = HOLD.format(beside="None" if beside is None else f"__import__('pathlib').Path({str(beside)!r})")
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_folder_is_its_users_alone_and_goes_with_the_block(temporary):
    with pytest.raises(KeyError), Scratch("case") as made:
        (made.path / "file").write_text("x")
        assert made.path.parent == temporary and made.path.stat().st_mode & 0o777 == 0o700
        raise KeyError
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("beside", [False, True])
def test_what_a_killed_process_left_goes_and_a_living_ones_stays(temporary, beside):
    with _holder(temporary if beside else None) as killed, _holder(temporary if beside else None) as living:
        left, held = (Path(one.stdout.readline().strip()) for one in (killed, living))
        remove_left_behind(temporary)
        assert left.is_dir() and held.is_dir()
        killed.kill()
        killed.wait()
        with Scratch("run") as mine:
            assert not left.exists() and held.is_dir()
            remove_left_behind(temporary)
            assert mine.path.is_dir(), "its own"
        living.communicate("")
    assert not held.exists(), "at the end of a process it goes by itself"


def test_nothing_else_is_removed(temporary):
    (temporary / "nanolib-case-file").write_text("x")
    (temporary / "nanolib-tests-x").mkdir()
    (temporary / "kept").mkdir()
    (temporary / "kept" / "file").write_text("x")
    (temporary / "nanolib-case-link").symlink_to(temporary / "kept")
    (temporary / "nanolib-case-left").mkdir()
    (temporary / "nanolib-case-left").chmod(0o1700)
    (temporary / "nanolib-run-notes").mkdir()  # somebody's own
    remove_left_behind(temporary)
    assert {one.name for one in temporary.iterdir()} == {
        "nanolib-case-file",
        "nanolib-tests-x",
        "kept",
        "nanolib-case-link",
        "nanolib-run-notes",
    }
    assert (temporary / "kept" / "file").exists()


def test_another_users_folder_is_left_alone(temporary, monkeypatch):
    (temporary / "nanolib-case-theirs").mkdir()
    (temporary / "nanolib-case-theirs").chmod(0o1700)
    monkeypatch.setattr(scratch.os, "geteuid", lambda: os.getuid() + 1)
    remove_left_behind(temporary)
    assert (temporary / "nanolib-case-theirs").is_dir()


def test_one_that_was_taken_for_left_behind_before_it_was_claimed_is_made_again(monkeypatch):
    made = []

    def mkdtemp(really=scratch.tempfile.mkdtemp, **rest):
        made.append(really(**rest))
        if len(made) == 1:
            Path(made[0]).chmod(0o1700)
            remove_left_behind(rest["dir"])
        return made[-1]

    monkeypatch.setattr(scratch.tempfile, "mkdtemp", mkdtemp)
    with Scratch("case") as mine:
        assert mine.path.is_dir() and str(mine.path) == made[1]


def test_where_the_file_system_has_no_locks_a_folder_is_made_and_none_removed(temporary, monkeypatch):
    def flock(handle, how):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with Scratch("case") as mine:
        remove_left_behind(temporary)
        assert mine.path.is_dir()
    assert not mine.path.exists()


@pytest.mark.parametrize("purpose", scratch.PURPOSES)
def test_every_purpose_is_known_to_who_removes(temporary, purpose):
    (temporary / f"nanolib-{purpose}-left").mkdir()
    (temporary / f"nanolib-{purpose}-left").chmod(0o1700)
    remove_left_behind(temporary)
    assert not list(temporary.iterdir())


def test_a_purpose_that_nobody_would_remove_cannot_be_asked_for():
    with pytest.raises(ValueError):
        Scratch("something")


def test_a_folder_that_cannot_be_listed_is_no_obstacle(temporary, monkeypatch):
    def unlisted(path):
        raise PermissionError

    monkeypatch.setattr(Path, "iterdir", unlisted)
    with Scratch("case") as mine:
        assert mine.path.is_dir()
    remove_left_behind(temporary / "missing")
