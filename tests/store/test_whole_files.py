"""What is written for others is whole or not at all, whatever ends the writing."""

import json
import os
import resource
import signal
import sqlite3
import stat
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from nanolib.cli import comparing, main
from nanolib.measurement import BadInput, Measurement, Status, exact
from nanolib.report import export
from nanolib.store import Store
from nanolib.store.schema import Run
from nanolib.store.sharing import new_file
from tests.store.columns import ENDINGS
from tests.store.rows import MACHINE, make_run


def _private_store(path, words=200):
    message = f"/home/quilla/x {'long ' * words}"
    rows = [Measurement("case_time", 1.0, n=1, status=Status.ERROR, message=message)]
    rows += [exact("flops", n, scope=f"/home/quilla/{n}", samples=tuple(range(words))) for n in range(4)]
    with Store(path) as store:
        store.add(Run("attention", MACHINE, run_id="a", label="quilla@x", rows={"c": ({"name": "x"}, rows)}))
    return path


def _in_a_child(work):
    """What `work` returns, from a forked process; None if that was killed."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(write, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        said = answer.read()
    os.waitpid(pid, 0)
    return json.loads(said) if said else None


def _exported(database, target, kill_at=None):
    """Calls made since the file was begun; at one of them the process kills itself."""
    made = None

    def count(frame, event, arg):
        nonlocal made
        if made is None and arg is not os.open:
            return
        made = (made or 0) + 1
        if made == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    with Store(database) as store:
        sys.setprofile(count)
        export.write(store, ["a"], target)
        sys.setprofile(None)
    return made


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_full_disk_is_told_of_the_target_and_leaves_nothing(tmp_path, ending):
    _private_store(tmp_path / "out" / "results.sqlite", 12_000)
    (tmp_path / "shared").mkdir()
    target = tmp_path / "shared" / f"x{ending}"

    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
        ended = CliRunner().invoke(main, ["export", str(target), "--output", str(tmp_path / "out")])
        return [ended.exit_code, ended.output]

    code, output = _in_a_child(work)
    assert code == 2 and len(output.splitlines()) == 1 and "free space there" in output
    assert output.startswith(f"nano: export: {target} cannot be written")
    assert not list((tmp_path / "shared").iterdir())


def test_what_appeared_meanwhile_is_not_overwritten(tmp_path, monkeypatch):
    target = tmp_path / "x.json"

    def refuse(*_):
        raise OSError("no links here")

    for link in (os.link, refuse):
        monkeypatch.setattr("os.link", link)
        with pytest.raises(BadInput, match="exists; name a new file"), new_file(target) as file:
            file.write_text("mine")
            target.write_text("yours")
        assert target.read_text() == "yours" and len(list(tmp_path.iterdir())) == 1
        target.unlink()
        with new_file(target) as file:
            file.write_text("mine")
        assert target.read_text() == "mine" and not target.is_symlink()
        target.unlink()


def test_a_target_that_is_a_dangling_link_makes_nothing_elsewhere(tmp_path):
    (tmp_path / "x.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadInput, match="exists"), new_file(tmp_path / "x.json") as file:
        file.write_text("mine")
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit, ValueError])
def test_whatever_ends_the_writing_leaves_nothing(tmp_path, stop):
    with pytest.raises(stop), new_file(tmp_path / "x.sqlite") as file:
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700 and file.parent.parent == tmp_path
        for ending in ("-journal", "-wal", "-shm"):
            Path(f"{file}{ending}").touch()
        if stop is SystemExit:
            os.kill(os.getpid(), signal.SIGTERM)
        raise stop
    assert not list(tmp_path.iterdir()) and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_what_others_still_write_and_what_is_no_exports_stays(tmp_path):
    with new_file(tmp_path / "a.json") as first:
        (tmp_path / ".nanolib-export-x-y-z").touch()
        with new_file(tmp_path / "b.json"):
            pass
        assert first.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", "b.json", ".nanolib-export-x-y-z"}


def test_a_source_that_cannot_be_read_is_blamed_and_not_the_target(tmp_path):
    with Store(tmp_path / "r.sqlite") as store:
        store.add(make_run("a"))
        store.connection.execute("ALTER TABLE traces RENAME TO broken")
        with pytest.raises(BadInput, match=r"database: .*r\.sqlite cannot be read"):
            store.copy_to(tmp_path / "share.sqlite", ["a"])
        assert sqlite3.connect(store.path).execute("SELECT count(*) FROM runs").fetchone() == (1,)
    assert not list(tmp_path.glob("*share*"))


@pytest.mark.parametrize("there", ["link", "pipe"])
def test_findings_are_written_through_what_is_no_regular_file(tmp_path, there):
    """As /dev/stdout is: root would have replaced the device."""
    (tmp_path / "precious").write_text("old")
    target = tmp_path / "out.json"
    if there == "link":
        target.symlink_to(tmp_path / "precious")
        comparing.write_text("--json", str(target), "new")
        assert target.is_symlink() and (tmp_path / "precious").read_text() == "new"
        return
    os.mkfifo(target)
    reader = os.open(target, os.O_RDONLY | os.O_NONBLOCK)
    comparing.write_text("--json", str(target), "new")
    assert os.read(reader, 10) == b"new" and target.is_fifo()
    os.close(reader)
