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
